-- End runs. The first result of a token counts, its repeat is told the same, anything else is gone. A lease
-- that has ended, but whose task nobody else got, may still be settled: finished work is not thrown away.
-- Takes {worker, latest?, jumped?, results: list of {id, token, outcome, digest, chance, result?, error?, retry_after?,
-- progress?, progress_seq?, successors?}}, gives {now, words}: for each 1 (accepted), 2 (so was the end of what others wait
-- for), 0 (was accepted before), or the word why it is gone.

outrank_full_memory()
notice_jump()
seen(ARGUMENT.worker)

-- The holder vanished, it was said, and now it reports after all: take that back.
local function revise(id, s)
  wait_no_longer(id, s)
  s.crashes = (s.crashes or 1) - 1
  local run = past_run(id, s.token)
  return run and run.worker
end

local function accept(one, s, lease)
  local worker
  if lease then
    worker = lease.worker
    let_go(one.id, lease)
  else
    worker = revise(one.id, s)
  end
  local run = {outcome = one.outcome, attempt = s.attempt, worker = worker, token = one.token, digest = one.digest}
  run.result, run.error = one.result, one.error
  record(one.id, s, run)
  keep_progress(one.id, lease or s, one.progress, one.progress_seq)
  -- Successors may be of kinds that are kept elsewhere: a mover brings them there, by their ids.
  for _, successor in ipairs(one.successors or {}) do
    outbox[#outbox + 1] = successor
  end
  local before = #told_next
  end_run(one.id, s, one.outcome, lease and lease.ordered, one)
  return #told_next > before and 2 or 1
end

local ids = {}
for i, one in ipairs(ARGUMENT.results) do
  ids[i] = one.id
end
preload(STATE, ids)
preload(WORKING, ids)

local answers = {}
for i, one in ipairs(ARGUMENT.results) do
  local s = read(STATE, one.id)
  local lease = s and read(WORKING, one.id)
  if s and (lease or s).token == one.token then
    answers[i] = accept(one, s, lease)
  else
    local run = s and past_run(one.id, one.token)
    answers[i] = run and run.digest == one.digest and 0 or why_gone(one.id, s, one.token)
  end
end
return answer({now = now, words = answers})
