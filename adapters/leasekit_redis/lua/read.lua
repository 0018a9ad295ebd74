-- All about one task. Takes {id, runs}: how many entries of its history, the latest; gives nothing where there is none
-- of that id, else {state, stored, progress, runs}.

local s = read(STATE, ARGUMENT.id)
if not s then
  return false
end
local runs = {}
for fence = math.max(1, s.fence - ARGUMENT.runs + 1), s.fence do
  runs[#runs + 1] = read(RUNS, ARGUMENT.id .. '/' .. fence) or nil
end
return cmsgpack.pack({
  id = ARGUMENT.id,
  state = s,
  stored = redis.call('HGET', TASK, ARGUMENT.id),
  progress = redis.call('HGET', PROGRESS, ARGUMENT.id) or nil,
  runs = runs,
})
