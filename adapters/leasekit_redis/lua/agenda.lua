-- When a kind is to be visited next, as its visitor has found; unless somebody wants it sooner by now.
-- Key: the kinds; takes {kind, found, next?}: `found` is what the visitor had set when it came; without `next` there is
-- nothing of this kind any more. Gives nothing.

local kind, found, next_visit = unpack(cmsgpack.unpack(ARGV[1]))
redis.call('ZREM', KEYS[1], '') -- so that the next write is let through though memory is full
if tonumber(redis.call('ZSCORE', KEYS[1], kind)) == found then
  if next_visit then
    redis.call('ZADD', KEYS[1], next_visit, kind)
  else
    redis.call('ZREM', KEYS[1], kind)
  end
end
return false
