-- Renew leases that are still held; the rest is gone, and says why. A lease that has ended is never revived, even where
-- nobody else got the task yet (PITFALLS 21), and none is renewed without its token (PITFALLS 23).
-- Takes {worker, beats: list of {id, token, started, progress?}}, gives for each its ttl in milliseconds; {ttl}, where
-- its holder is ordered to cancel; or the word why it is gone.

outrank_full_memory()
seen(ARGUMENT.worker)

local ids = {}
for i, beat in ipairs(ARGUMENT.beats) do
  ids[i] = beat[1]
end
preload(WORKING, ids)
local ends = redis.call('ZMSCORE', LEASES, unpack(ids))
local answers = {}

-- The body has begun: from now on its time runs.
local function start(id, lease)
  lease.started = true
  if lease.max_runtime then
    lease.ends = now + lease.max_runtime
  end
  put(WORKING, id, lease)
  local s = read(STATE, id)
  become(s, 'processing')
  put(STATE, id, s)
end

local function is_held(id, lease, token, ends_at)
  if not lease or lease.token ~= token or has_ended(id, lease, tonumber(ends_at)) then
    return false
  end
  return not (lease.ends and lease.ends <= now) -- what was granted is not taken back, but renewed no more
end

for i, beat in ipairs(ARGUMENT.beats) do
  local id, token, started, progress = unpack(beat, 1, 4)
  local lease = read(WORKING, id)
  if is_held(id, lease, token, ends[i]) then
    if started and not lease.started then
      start(id, lease)
    end
    if progress then
      put(PROGRESS, id, progress)
    end
    place(LEASES, id, now + lease.ttl)
    answers[i] = lease.ordered and {lease.ttl} or lease.ttl
  else
    answers[i] = why_gone(id, read(STATE, id), token)
  end
end
return answer(answers)
