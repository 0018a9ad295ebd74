-- Of which kind is the task of an id? The first to say counts, so that an id stands for one task whatever its kind.
-- Keys: parts of the register; takes a list of {part, id, kind?, instead_of?}, gives for each its kind, false where
-- there is none. `instead_of`: that kind was found not to have the task. A kind that was registered just now and that
-- others wait for (want.lua leaves an empty one) is given with a `/` before it.

local items = cmsgpack.unpack(ARGV[1])

-- A replica does not know what its primary was told since: that an id is of no kind must not come from there.
if not items[1][3] then
  local refused = redis.pcall('HDEL', KEYS[1], '')
  if type(refused) == 'table' and string.find(refused.err, 'READONLY') then
    return refused
  end
end

local answers = {}
for i, one in ipairs(items) do
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
