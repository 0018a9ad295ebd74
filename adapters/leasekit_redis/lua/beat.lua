-- Renew leases that are still held; for the others, say why they are gone. A lease that has ended is never revived,
-- even if no other worker has got the task yet, and no lease is renewed without its token.
-- Takes {worker, [clock], beats: list of {id, token, started, progress?, progress_seq?}}, gives
-- {now, words}: for each lease its ttl in milliseconds; {ttl, 1 if cancel is requested else 0, left?} where that, or the
-- milliseconds that are left of its `max_runtime`, must be told; or the word why the lease is gone.

outrank_full_memory()
notice_jump()
seen(ARGUMENT.worker)

local ids = {}
for i, beat in ipairs(ARGUMENT.beats) do
  ids[i] = beat[1]
end
preload(WORKING, ids)
local ends = redis.call('ZMSCORE', LEASES, unpack(ids))
local answers = {}

-- Record that the handler has started: `max_runtime` is counted from here.
local function start(id, lease, s)
  lease.started = true
  if lease.max_runtime then
    lease.ends = now + lease.max_runtime
  end
  put(WORKING, id, lease)
  s.started_at = now
  become(s, 'processing')
  put(STATE, id, s)
end

-- The end of a lease, including changes that this batch has made.
local function end_of(i, id)
  return of(members, LEASES)[id] or tonumber(ends[i])
end

-- Whether the lease is still held. A verdict "gone" must stay true: a restart of Redis gives all leases more time, and
-- its clock may be set back, so an ended lease is expired at once.
local function is_held(i, id, lease, token)
  if not lease or lease.token ~= token then
    return false
  elseif has_ended(id, lease, end_of(i, id)) then
    expire(id, lease)
    return false
  elseif lease.ends and lease.ends <= now then -- `max_runtime` is over: the lease is kept to its end, but not renewed
    lease.ends = 0
    put(WORKING, id, lease)
    return false
  end
  return true
end

for i, beat in ipairs(ARGUMENT.beats) do
  local id, token, started, progress, number = unpack(beat, 1, 5)
  local lease = read(WORKING, id)
  if lease and not ends[i] then
    broken[id] = 'lease: its end is missing'
  end
  local begins = lease and started and not lease.started
  local s = begins and need(id)
  if ends[i] and (s or not begins) and is_held(i, id, lease, token) then
    if s then
      start(id, lease, s)
    end
    if progress then
      keep_progress(id, lease, progress, number)
      put(WORKING, id, lease)
    end
    -- Never earlier than before: a holder that misses this answer relies on the end that it was granted before.
    place(LEASES, id, math.max(end_of(i, id), now + lease.ttl))
    answers[i] = lease.ttl
    if lease.cancel_requested or lease.ends then
      answers[i] = {lease.ttl, lease.cancel_requested and 1 or 0, lease.ends and lease.ends - now}
    end
  else
    answers[i] = why_gone(id, read(STATE, id), token)
  end
end
return answer({now = now, words = answers})
