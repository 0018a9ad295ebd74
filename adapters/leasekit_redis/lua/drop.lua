-- Drop tasks that ended long enough ago, with their history.
-- Takes {retention, ids, is_damaged?}, gives how many there were; with `is_damaged` only what was set aside is dropped.

outrank_full_memory()

local dropped = 0
for _, id in ipairs(ARGUMENT.ids) do
  local since = score(DAMAGED, id) or not ARGUMENT.is_damaged and score(ENDED, id)
  if since and since <= now - ARGUMENT.retention then
    -- Of what is damaged goes as much as can be found.
    local s = read(STATE, id) or {fence = KEPT_RUNS, status = score(DAMAGED, id) and 'damaged' or nil}
    broken[id] = nil
    for _, key in ipairs({TASK, STATE, PROGRESS}) do
      put(key, id, false)
    end
    for _, key in ipairs({ALL, ENDED, DEAD, DAMAGED}) do
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
