-- Set when a kind is due for maintenance next, unless a client has set another time since due_kinds.lua gave it out.
-- Key: the kinds. Takes {kind, own_until, due_at?}: `own_until` is the time that due_kinds.lua has set; without `due_at`
-- nothing is left of this kind, and it is removed. Gives nothing.

local kind, own_until, due_at = unpack(cmsgpack.unpack(ARGV[1]))
redis.call('ZREM', KEYS[1], '') -- after this write Redis lets the next one through even if its memory is full
if tonumber(redis.call('ZSCORE', KEYS[1], kind)) == own_until then
  if due_at then
    redis.call('ZADD', KEYS[1], due_at, kind)
  else
    redis.call('ZREM', KEYS[1], kind)
  end
end
return false
