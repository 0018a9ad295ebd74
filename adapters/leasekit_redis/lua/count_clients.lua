-- Count the clients. Each client registers itself until an instant at which it will long have come again.
-- Key: the clients. Takes {name, pace}: `pace` is the milliseconds that a client waits if it is alone. Gives the
-- number.

local name, pace = unpack(cmsgpack.unpack(ARGV[1]))
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZADD', KEYS[1], now + pace, name)
local count = redis.call('ZCARD', KEYS[1])
redis.call('ZADD', KEYS[1], now + 2 * pace * count, name)
return cmsgpack.pack(count)
