-- How many clients there are: each says until when it is to be counted.
-- Key: the clients; takes {name, pace}: milliseconds that it waits if it is alone; gives their number.

local name, pace = unpack(cmsgpack.unpack(ARGV[1]))
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZADD', KEYS[1], now + pace, name)
local count = redis.call('ZCARD', KEYS[1])
redis.call('ZADD', KEYS[1], now + 2 * pace * count, name)
return cmsgpack.pack(count)
