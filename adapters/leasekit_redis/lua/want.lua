-- Who waits for an id that is of no kind yet is noted beside the register, so that whoever registers it is told.
-- Keys: parts of the register, each followed by its notes; takes a list of {key, id, who, is_over}, gives for each the
-- kind, false where there is none. What has a kind needs no note, nor does one who waits no more (`is_over`).

local answers = {}
for i, one in ipairs(cmsgpack.unpack(ARGV[1])) do
  local key, id, who, is_over = unpack(one, 1, 4)
  local register, notes = KEYS[key], KEYS[key + 1]
  local kind = redis.call('HGET', register, id)
  if kind == '' then
    kind = false
  end
  if not kind and not is_over then
    redis.call('HSET', register, id, '')
    redis.call('ZADD', notes, 0, id .. '/' .. who)
  elseif redis.call('ZREM', notes, id .. '/' .. who) == 1 and not kind then
    if redis.call('ZLEXCOUNT', notes, '[' .. id .. '/', '(' .. id .. '0') == 0 then
      redis.call('HDEL', register, id)
    end
  end
  answers[i] = kind
end
return cmsgpack.pack(answers)
