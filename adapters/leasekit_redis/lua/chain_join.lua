-- Note which tasks come from the root of a chain, before they are made. KEYS[1] is the chain: a sorted set of `id/kind`
-- by when it was noted, and `/` if the chain is cancelled. Takes a list of members, gives whether it is cancelled.

local time = redis.call('TIME')
local latest = tonumber(redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]) or 0
local place = math.max(time[1] * 1000000 + time[2], latest + 1) -- no two members have the same
for i, member in ipairs(cmsgpack.unpack(ARGV[1])) do
  redis.call('ZADD', KEYS[1], 'NX', string.format('%.0f', place + i), member)
end
return cmsgpack.pack(redis.call('ZSCORE', KEYS[1], '/') ~= false)
