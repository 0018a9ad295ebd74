-- Read one task. Takes {id, runs}: `runs` is how many of the latest entries of its history to read. Gives nothing for
-- an unknown id, a text that says what is damaged, or the task as `shown`.

refuse_at_replica()
local s = read(STATE, ARGUMENT.id)
local stored = redis.call('HGET', TASK, ARGUMENT.id)
if s and not stored then
  broken[ARGUMENT.id] = 'task: is missing'
end
if broken[ARGUMENT.id] then
  return cmsgpack.pack(broken[ARGUMENT.id])
elseif not s then
  return false
end
local runs = {}
for fence = math.max(1, s.fence - ARGUMENT.runs + 1), s.fence do
  runs[#runs + 1] = read(RUNS, ARGUMENT.id .. '/' .. fence) or nil
end
return cmsgpack.pack(shown(ARGUMENT.id, s, stored, runs))
