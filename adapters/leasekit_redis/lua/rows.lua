-- Read tasks of a chain that match all given fields. Takes {root, ids, status?, collection?, worker?}, gives {tasks,
-- strange, looked}: the tasks that match, as `shown`; the ids of those that are not of this chain, or do not exist; and
-- how many of the ids were looked at. Damaged tasks are left out.

refuse_at_replica()

local SIZE = 4 * 1024 * 1024 -- bytes of values in an answer, roughly

local function matches(s)
  for _, name in ipairs({'status', 'collection', 'worker'}) do
    if ARGUMENT[name] and s[name] ~= ARGUMENT[name] then
      return false
    end
  end
  return true
end

preload(STATE, ARGUMENT.ids)
local tasks, strange, size, looked = {}, {}, 0, 0
for i, id in ipairs(ARGUMENT.ids) do
  if size > SIZE then
    break
  end
  looked = i
  local s = read(STATE, id)
  local stored = s and redis.call('HGET', TASK, id)
  if id ~= ARGUMENT.root and not broken[id] and (not s or s.root ~= ARGUMENT.root) then
    strange[#strange + 1] = id
  elseif stored and matches(s) then
    local run = read(RUNS, id .. '/' .. s.fence) or read(RUNS, id .. '/' .. (s.fence - 1)) -- the last ended run
    local row = shown(id, s, stored, {run or nil})
    tasks[#tasks + 1] = row
    size = size + #stored + (row.progress and #row.progress or 0) + (run and run.result and #run.result or 0)
  end
end
return cmsgpack.pack({tasks = tasks, strange = strange, looked = looked})
