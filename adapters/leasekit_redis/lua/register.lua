-- Of which kind is the task of an id? The first to say counts, so that an id stands for one task whatever its kind.
-- Keys: parts of the register; takes a list of {part, id, kind?, instead_of?}, gives for each its kind, false where
-- there is none. `instead_of`: that kind was found not to have the task. A kind that was registered just now and that
-- others wait for (want.lua leaves an empty one) is given with a `/` before it.

local answers = {}
for i, one in ipairs(cmsgpack.unpack(ARGV[1])) do
  local part, id, kind, instead_of = unpack(one, 1, 4)
  local known = redis.call('HGET', KEYS[part], id)
  local is_wanted = known == ''
  if is_wanted then
    known = false
  end
  if kind and (not known or known == instead_of) then
    redis.call('HSET', KEYS[part], id, kind)
    known = is_wanted and '/' .. kind or kind
  end
  answers[i] = known
end
return cmsgpack.pack(answers)
