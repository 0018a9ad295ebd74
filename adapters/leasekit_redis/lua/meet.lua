-- What tasks of this kind wait for has ended, or will never come: they are ready when nothing is left to wait for, and
-- dropped when it was no success. Whoever was told before hears it again to no effect.
-- Takes a list of {id, name, reason?}: `name` is what it waited for, `reason` why it can wait no more. Gives the ids of
-- those dropped that others wait for in turn.

outrank_full_memory()

local ids = {}
for i, one in ipairs(ARGUMENT) do
  ids[i] = one[1]
end
preload(STATE, ids)

local function drop(id, s, reason)
  wait_no_longer(id, s)
  s.reason = reason
  become(s, 'dropped')
  has_come_to_its_end(id, s)
end

local function meet(id, s, position)
  table.remove(s.after, position)
  if #s.after == 0 then
    wait_no_longer(id, s)
    s.after = nil
    wait_until(id, s, math.max(s.due, now))
  end
end

for _, one in ipairs(ARGUMENT) do
  local id, name, reason = unpack(one, 1, 3)
  local s = read(STATE, id)
  for position, awaited in ipairs(s and s.status == 'new' and s.after or {}) do
    if awaited == name then
      if reason then
        drop(id, s, reason)
      else
        meet(id, s, position)
      end
      put(STATE, id, s)
      break
    end
  end
end
return answer(told_next)
