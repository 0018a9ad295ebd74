-- Send messages to a queue; one that the queue has already stays as it is.
-- Key: the queue. Takes {messages, keep}: texts, and the milliseconds for which a queue that gets no more is kept.

local messages, keep = unpack(cmsgpack.unpack(ARGV[1]))
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, message in ipairs(messages) do
  redis.call('ZADD', KEYS[1], 'NX', now, message)
end
redis.call('PEXPIRE', KEYS[1], keep)
return cmsgpack.pack(true)
