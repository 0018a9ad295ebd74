-- Of which kind is the task of an id? The first to say counts, so that an id stands for one task whatever its kind.
-- Keys: parts of the register; takes a list of {part, id, kind?, instead_of?}, gives for each its kind, false where
-- there is none. `instead_of`: that kind was found not to have the task.

local answers = {}
for i, one in ipairs(cmsgpack.unpack(ARGV[1])) do
  local part, id, kind, instead_of = unpack(one, 1, 4)
  local known = redis.call('HGET', KEYS[part], id)
  if kind and (not known or known == instead_of) then
    redis.call('HSET', KEYS[part], id, kind)
    known = kind
  end
  answers[i] = known
end
return cmsgpack.pack(answers)
