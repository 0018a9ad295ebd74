-- Forget members of a chain, which were deleted or never made. KEYS[1] is the chain, as in chain_join.lua. Takes a list
-- of members. That a chain is cancelled is forgotten with its last member.

for _, member in ipairs(cmsgpack.unpack(ARGV[1])) do
  redis.call('ZREM', KEYS[1], member)
end
if redis.call('ZCARD', KEYS[1]) == 1 then
  redis.call('ZREM', KEYS[1], '/')
end
return cmsgpack.pack(true)
