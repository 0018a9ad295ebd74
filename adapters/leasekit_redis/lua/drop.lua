-- Delete tasks that ended at least `retention` milliseconds ago, with their history.
-- Takes {retention, ids, is_damaged?, is_name?}. With `is_damaged` only tasks that were set aside are deleted, with
-- `is_name` also a name that has been free for `retention`. Gives {statuses, kept}: how each deleted task had ended,
-- the ids of the tasks that are still there, and what leaves a chain {id, root}.

outrank_full_memory()

local statuses, kept, left = {}, {}, {}
for _, id in ipairs(ARGUMENT.ids) do
  local since = score(DAMAGED, id) or not ARGUMENT.is_damaged and score(ENDED, id)
    or ARGUMENT.is_name and free_since(id)
  if since and is_over(since, ARGUMENT.retention) then
    -- Of a damaged task everything that can be found is deleted.
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
    if ARGUMENT.is_name and s.seq then
      wait_no_longer(id, s)
    end
    if s.root or s.leads then
      left[#left + 1] = {id, s.root or id}
    end
    statuses[#statuses + 1] = s.status or 'damaged'
    become(s, nil)
  elseif read(STATE, id) then
    kept[#kept + 1] = id
  end
end
return answer({statuses = statuses, kept = kept, left = left})
