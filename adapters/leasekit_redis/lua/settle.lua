-- Settle runs. The first result of a token counts, its repeat gets the same answer, any other result is answered
-- "gone". A lease that has ended may still be settled while no other worker has got its task: finished work is not
-- thrown away.
-- KEYS[28] are the kinds, if the kind is a name and one server has all keys.
-- Takes {worker, [clock], name?, retention?, results: list of {id, token, outcome, digest, chance, result?, error?,
-- retry_after?, progress?, progress_seq?, successors?}}, gives {now, words}: for each 1 (accepted), 2 (accepted, and
-- other tasks wait for the end of this one), 0 (was accepted before), or the word why the lease is gone.

outrank_full_memory()
notice_jump()
seen(ARGUMENT.worker)

-- Take back an expiry whose holder reports after all. Returns the worker of that run, and what says that it was overdue.
local function revise(id, s)
  wait_no_longer(id, s)
  local counter = s.status == 'retriable_failure' and 'failures' or 'crashes'
  s[counter] = (s[counter] or 1) - 1
  local run = past_run(id, s.token)
  return run and run.worker, run and run.error
end

local function accept(item, s, lease)
  keep_progress(item.id, lease or s, item.progress, item.progress_seq)
  local worker, overdue
  if lease then
    worker, overdue = lease.worker, item.outcome == 'crash' and is_overdue(item.id, lease)
    let_go(item.id, s, lease)
  else
    worker, overdue = revise(item.id, s)
  end
  item.why = item.outcome == 'crash' and overdue and 'its max_runtime was over' or nil
  local run = {outcome = item.outcome, attempt = s.attempt, worker = worker, token = item.token, digest = item.digest}
  run.result, run.error = item.result, item.error
  record(item.id, s, run)
  -- Successors may be of kinds in other slots: clients schedule them there from the outbox.
  for _, successor in ipairs(item.successors or {}) do
    outbox[#outbox + 1] = successor
  end
  local before = #told_next
  end_run(item.id, s, item.outcome, lease and lease.cancel_requested, item)
  return #told_next > before and 2 or 1
end

local ids = {}
for i, item in ipairs(ARGUMENT.results) do
  ids[i] = item.id
end
preload(STATE, ids)
preload(WORKING, ids)

local answers = {}
for i, item in ipairs(ARGUMENT.results) do
  local s = read(STATE, item.id)
  local lease = s and read(WORKING, item.id)
  if s and (lease or s).token == item.token then
    answers[i] = accept(item, s, lease)
  else
    local run = s and past_run(item.id, item.token)
    answers[i] = run and run.digest == item.digest and 0 or why_gone(item.id, s, item.token)
  end
end

-- A name that has ended and left nothing to do is due for maintenance when it was kept long enough, and not before.
local ended_at = KEYS[28] and score(ENDED, ARGUMENT.name)
if ended_at and #outbox + #told_next == 0 and not next(broken) and redis.call('ZCARD', ALL) == 1
  and redis.call('EXISTS', OUTBOX, ENDING, DAMAGED) == 0 then
  place(KEYS[28], ARGUMENT.name, ended_at + ARGUMENT.retention)
end
return answer({now = now, words = answers})
