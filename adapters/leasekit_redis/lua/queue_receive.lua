-- Receive messages of several queues, the first queues first. They are invisible for a time, and then come again.
-- Keys: the queues. Takes {limit, hidden}: number of messages, milliseconds. Gives pairs: the number of a queue, a text.

local limit, hidden = unpack(cmsgpack.unpack(ARGV[1]))
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local received = {}
for number, key in ipairs(KEYS) do
  if #received >= limit then
    break
  end
  for _, message in ipairs(redis.call('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', 0, limit - #received)) do
    redis.call('ZADD', key, now + hidden, message)
    received[#received + 1] = {number, message}
  end
end
return cmsgpack.pack(received)
