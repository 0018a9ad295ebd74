-- Cancel tasks: a waiting task at once, a running task by a request that its holder gets with its next heartbeat.
-- Takes {ids, channels, [clock]} (`channels` begins the names of the channels on which holders hear of it), gives {words, ending}: for each task the verdict (cancelled, cancel_requested,
-- or why it is gone); and the ids of the cancelled tasks that other tasks wait for. `chain`: the root of the chain that is
-- cancelled; its tasks that have ended are gone, and the root notes that it leads a cancelled chain.

outrank_full_memory()
notice_jump()

local function cancel(id)
  local s = read(STATE, id)
  if not s then
    return 'unknown'
  end
  if id == ARGUMENT.chain then
    s.leads = true
    put(STATE, id, s)
  end
  local lease = read(WORKING, id)
  local ends_at = score(LEASES, id)
  if lease and not ends_at then
    broken[id] = 'lease: its end is missing'
    return 'unknown'
  elseif lease and has_ended(id, lease, ends_at) then
    expire(id, lease) -- there is no holder that could be asked
    s, lease = read(STATE, id), nil
  end
  if lease then
    if not lease.cancel_requested then
      lease.cancel_requested = true
      put(WORKING, id, lease)
    end
    redis.call('PUBLISH', ARGUMENT.channels .. lease.worker, id)
    return 'cancel_requested'
  end
  if s.status == 'cancelled' then
    return ARGUMENT.chain and 'settled' or 'cancelled' -- a repeat gets the same answer as the first request
  elseif score(ENDED, id) then
    return 'settled'
  elseif IS_NAME then
    return 'cancelled' -- the name is free, and stays
  end
  wait_no_longer(id, s)
  end_run(id, s, 'cancelled', false, {})
  return 'cancelled'
end

local answers = {}
for i, id in ipairs(ARGUMENT.ids) do
  answers[i] = cancel(id)
end
return answer({words = answers, ending = told_next})
