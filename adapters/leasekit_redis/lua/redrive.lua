-- Begin a new life of tasks that are dead, failed for good or dropped, without their failures and crashes.
-- Takes {ids, redrive_id, worker, retention, dry_run}. Gives {words}: for each task "redriven" (in a dry run
-- "redrivable"), "gone" if it is unknown or about to be forgotten, or a sentence that says why it cannot be redriven. A
-- repeat has the same answer, and does nothing.

local REDRIVABLE = {dead = true, fatal_failure = true, dropped = true}
local GRACE = 5000 -- milliseconds until maintenance looks at what a task waits for: an awaited task is redriven by then

if ARGUMENT.dry_run then
  refuse_at_replica()
end

local live = {} -- tasks that this script redrives: in a dry run nothing else says so

-- The task that has the dedupe key now, if that is another one, and live.
local function rival(id, first)
  local s = first and first.id ~= id and (not first.ends or first.ends > now) and read(STATE, first.id)
  return s and (live[first.id] or not score(ENDED, first.id)) and s
end

local function why_not(id, s)
  if s.status == 'cancelled' then
    return 'it is cancelled: schedule it anew under another id'
  elseif not REDRIVABLE[s.status] then
    return 'it is ' .. s.status .. ': only a task that is dead, dropped, fatal_failure can be redriven'
  elseif redis.call('HEXISTS', TASK, id) == 0 then
    broken[id] = 'task: is missing'
    return
  end
  local first = s.dedupe and read(DEDUPE, s.dedupe)
  local other = rival(id, first)
  return other and "its dedupe key '" .. s.dedupe .. "' belongs to task '" .. first.id .. "' by now, which is "
    .. (live[first.id] and 'enqueued' or other.status)
end

-- Give a task its dedupe key back, as long as the key counts: a second task with this key is refused from here on.
local function take_key(id, s)
  live[id] = true
  local first = s.dedupe and read(DEDUPE, s.dedupe)
  if first and first.id ~= id and (not first.ends or first.ends > now) then
    put(DEDUPE, s.dedupe, {id = id, ends = first.ends})
  end
end

local function redrive(id, s)
  for _, key in ipairs({DEAD, ENDED, ENDING}) do
    place(key, id, false)
  end
  s.failures, s.crashes, s.reason, s.ended_at, s.worker = nil, nil, nil, nil, nil
  s.fence, s.redriven = s.fence + 1, ARGUMENT.redrive_id
  record(id, s, {outcome = 'redriven', attempt = s.attempt, worker = ARGUMENT.worker, token = ARGUMENT.redrive_id})
  if s.status == 'dropped' then
    become(s, 'new')
    place(GATED, id, now + GRACE)
  else
    become(s, 'enqueued')
    wait_until(id, s, now)
  end
  put(STATE, id, s)
end

local words = {}
preload(STATE, ARGUMENT.ids)
for i, id in ipairs(ARGUMENT.ids) do
  local s = read(STATE, id)
  if not s and score(ALL, id) then
    need(id)
  end
  -- A task that was kept long enough, or that a purge has chosen, may be deleted by another client at any moment.
  local is_kept = s and not is_over(score(ENDED, id) or now, ARGUMENT.retention)
  local why = is_kept and s.redriven ~= ARGUMENT.redrive_id and why_not(id, s)
  if broken[id] then
    words[i] = 'its record is damaged (' .. broken[id] .. '): it is set aside'
  elseif not is_kept then
    words[i] = 'gone'
  elseif why then
    words[i] = why
  elseif ARGUMENT.dry_run then
    take_key(id, s) -- nothing is written
    words[i] = 'redrivable'
  else
    if s.redriven ~= ARGUMENT.redrive_id then
      take_key(id, s)
      redrive(id, s)
    end
    words[i] = 'redriven'
  end
end
if ARGUMENT.dry_run then
  return cmsgpack.pack({words = words})
end
return answer({words = words})
