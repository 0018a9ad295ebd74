-- Register the kind of an id, or look it up. The first registration counts: an id stands for one task of one kind.
-- Keys: parts of the register. Takes a list of {part, id, kind?, instead_of?}: without `kind` the id is only looked up;
-- `instead_of` is a kind that was found not to have the task, and loses the id (without `kind`, the id is free then).
-- Gives for each the kind that the id has, or had before it was free; false where there is none. A `/` stands before
-- the kind if the id was registered just now, `//` if other tasks wait for it too (note_id_waits.lua has left an empty
-- kind).

local items = cmsgpack.unpack(ARGV[1])

-- A replica may lag behind its primary, so a replica must not answer that an id has no kind.
if not items[1][3] then
  local refused = redis.pcall('HDEL', KEYS[1], '')
  if type(refused) == 'table' and string.find(refused.err, 'READONLY') then
    return refused
  end
end

local answers = {}
for i, item in ipairs(items) do
  local part, id, kind, instead_of = unpack(item, 1, 4)
  local known = redis.call('HGET', KEYS[part], id)
  local is_wanted = known == ''
  if is_wanted then
    known = false
  end
  if kind and (not known or known == instead_of) then
    redis.call('HSET', KEYS[part], id, kind)
    known = (is_wanted and '//' or '/') .. kind
  elseif not kind and known == instead_of then
    redis.call('HDEL', KEYS[part], id)
  end
  answers[i] = known
end
return cmsgpack.pack(answers)
