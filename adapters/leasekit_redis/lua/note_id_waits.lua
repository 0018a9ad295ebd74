-- Note beside the register which tasks wait for an id that has no kind yet: the client that registers the id is told.
-- Keys: parts of the register, each followed by its notes. Takes a list of {key, id, waiting, is_over}: `waiting` names
-- the task that waits, `is_over` says that it no longer does. Gives for each the kind of the id, false where there is
-- none. A note is removed where the id has a kind, or the wait is over.

local answers = {}
for i, item in ipairs(cmsgpack.unpack(ARGV[1])) do
  local key, id, waiting, is_over = unpack(item, 1, 4)
  local register, notes = KEYS[key], KEYS[key + 1]
  local kind = redis.call('HGET', register, id)
  if kind == '' then
    kind = false
  end
  if not kind and not is_over then
    redis.call('HSET', register, id, '')
    redis.call('ZADD', notes, 0, id .. '/' .. waiting)
  elseif redis.call('ZREM', notes, id .. '/' .. waiting) == 1 and not kind then
    if redis.call('ZLEXCOUNT', notes, '[' .. id .. '/', '(' .. id .. '0') == 0 then
      redis.call('HDEL', register, id)
    end
  end
  answers[i] = kind
end
return cmsgpack.pack(answers)
