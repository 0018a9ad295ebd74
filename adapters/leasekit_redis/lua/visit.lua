-- Kinds that are to be visited now. Until their visitor says when next (agenda.lua) they are its own for an interval.
-- Key: the kinds, by when to visit them; takes {interval, limit}: milliseconds; gives {own_until, kinds}.

local interval, limit = unpack(cmsgpack.unpack(ARGV[1]))
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREM', KEYS[1], '') -- so that the next write is let through though memory is full: visitors make room
local kinds = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, limit)
for _, kind in ipairs(kinds) do
  redis.call('ZADD', KEYS[1], now + interval, kind)
end
return cmsgpack.pack({own_until = now + interval, kinds = kinds})
