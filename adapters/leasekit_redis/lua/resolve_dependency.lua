-- Resolve dependencies of tasks of this kind: the awaited task has ended, or will never come. A task becomes ready when
-- it has no dependency left, and is dropped when the awaited task did not succeed. A repeat has no effect.
-- Takes a list of {id, name, reason?}: `name` is the id of the awaited task, `reason` says why task `id` can never run.
-- Gives the ids of the dropped tasks that other tasks wait for.

outrank_full_memory()

local ids = {}
for i, item in ipairs(ARGUMENT) do
  ids[i] = item[1]
end
preload(STATE, ids)

local function drop(id, s, reason)
  wait_no_longer(id, s)
  s.reason = reason
  become(s, 'dropped')
  has_come_to_its_end(id, s)
end

local function resolve(id, s, position)
  table.remove(s.after, position)
  if #s.after == 0 then
    wait_no_longer(id, s)
    s.after = nil
    wait_until(id, s, math.max(s.due, now))
  end
end

for _, item in ipairs(ARGUMENT) do
  local id, name, reason = unpack(item, 1, 3)
  local s = read(STATE, id)
  for position, awaited in ipairs(s and s.status == 'new' and s.after or {}) do
    if awaited == name then
      if reason then
        drop(id, s, reason)
      else
        resolve(id, s, position)
      end
      put(STATE, id, s)
      break
    end
  end
end
return answer(told_next)
