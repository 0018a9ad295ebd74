-- Give out the kinds that are due for maintenance. No other client gets them for `interval`, or until the client that
-- has got them sets when they are due next (reschedule_kind.lua).
-- Key: the kinds, by when they are due. Takes {interval, limit}: milliseconds, number of kinds. Gives {own_until,
-- kinds}.

local interval, limit = unpack(cmsgpack.unpack(ARGV[1]))
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREM', KEYS[1], '') -- after it, Redis lets the next write through even if memory is full
local kinds = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, limit)
for _, kind in ipairs(kinds) do
  redis.call('ZADD', KEYS[1], now + interval, kind)
end
return cmsgpack.pack({own_until = now + interval, kinds = kinds})
