-- List tasks that match all given fields, oldest first, or `newest`. Takes {after, limit, newest, status?, collection?,
-- worker?}: `after` is the first bound of ZRANGEBYSCORE, or of ZREVRANGEBYSCORE. Gives {tasks, after?}: `after` is where
-- the next page begins, absent on the last page. Damaged tasks are left out: the next script that writes sets them aside.

refuse_at_replica()

local LOOKED_AT = 200 -- tasks read by one script, because Redis serves no other client meanwhile
local SIZE = 4 * 1024 * 1024 -- bytes of values in a page, roughly

local function matches(s)
  if not s then
    return false
  end
  for _, name in ipairs({'status', 'collection', 'worker'}) do
    if ARGUMENT[name] and s[name] ~= ARGUMENT[name] then
      return false
    end
  end
  return true
end

local tasks, size, after = {}, 0, nil
local range, last = 'ZRANGEBYSCORE', '+inf'
if ARGUMENT.newest then
  range, last = 'ZREVRANGEBYSCORE', '-inf'
end
local found = redis.call(range, ALL, ARGUMENT.after, last, 'WITHSCORES', 'LIMIT', 0, LOOKED_AT)
for i = 1, #found, 2 do
  local id = found[i]
  local s = read(STATE, id)
  local stored = matches(s) and redis.call('HGET', TASK, id)
  if stored then
    if #tasks == ARGUMENT.limit or size > SIZE then
      break
    end
    local run = read(RUNS, id .. '/' .. s.fence) or read(RUNS, id .. '/' .. (s.fence - 1)) -- the last ended run
    local row = shown(id, s, stored, {run or nil})
    tasks[#tasks + 1] = row
    size = size + #stored + (row.progress and #row.progress or 0) + (run and run.result and #run.result or 0)
  end
  after = string.format('%.0f', tonumber(found[i + 1]))
end
local is_last = #found < 2 * LOOKED_AT and (#found == 0 or after == string.format('%.0f', tonumber(found[#found])))
return cmsgpack.pack({tasks = tasks, after = not is_last and after or nil})
