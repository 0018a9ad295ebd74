-- Drop tasks that ended long enough ago, with their history (SYSTEMS D2: kept 180 days).
-- Takes {retention, ids}, gives how many there were.

outrank_full_memory()

local dropped = 0
for _, id in ipairs(ARGUMENT.ids) do
  if (score(ENDED, id) or math.huge) <= now - ARGUMENT.retention then
    local s = read(STATE, id)
    for _, key in ipairs({TASK, STATE, PROGRESS}) do
      put(key, id, false)
    end
    for _, key in ipairs({ALL, ENDED, DEAD}) do
      place(key, id, false)
    end
    for fence = math.max(1, s.fence - KEPT_RUNS + 1), s.fence do
      put(RUNS, id .. '/' .. fence, false)
    end
    local first = s.dedupe and read(DEDUPE, s.dedupe)
    if first and first.id == id then
      put(DEDUPE, s.dedupe, false)
    end
    become(s, nil)
    dropped = dropped + 1
  end
end
return answer(dropped)
