-- Set when a kind is due for maintenance next, unless a client has set another time since due_kinds.lua gave it out.
-- Key: the kinds. Takes {kind, found, next?}: `found` is the time that due_kinds.lua has set; without `next` nothing is
-- left of this kind, and it is removed. Gives nothing.

local kind, found, next_visit = unpack(cmsgpack.unpack(ARGV[1]))
redis.call('ZREM', KEYS[1], '') -- after this write Redis lets the next one through even if its memory is full
if tonumber(redis.call('ZSCORE', KEYS[1], kind)) == found then
  if next_visit then
    redis.call('ZADD', KEYS[1], next_visit, kind)
  else
    redis.call('ZREM', KEYS[1], kind)
  end
end
return false
