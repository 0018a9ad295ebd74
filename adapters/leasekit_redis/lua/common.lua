-- The part that every script of a kind begins with: the keys, the time, and the changes that several scripts make.
--
-- Rule 1: the time is that of Redis, in milliseconds; no client's clock counts.
-- Rule 2: a task changes together with everything that points at it, in one script; all keys of a kind are in one slot.
-- Rule 3: every write of a holder carries the token of its claim, which is compared in the script.
-- Rule 4: changes are gathered, and made at the end: a script that fails has changed nothing, and a batch is a few
--         commands. Reads see the gathered changes.
-- Rule 5: a damaged record affects its own task only: it reads as if it did not exist, and the task is set aside.
--         Records are checked here when they are read, so the code below never meets a missing field.
-- Rule 6: scripts take one argument and give one answer, both msgpack.

local META, COUNTS, TASK, STATE, PROGRESS, RUNS, WORKING, LEASES = unpack(KEYS, 1, 8)
local LANES = {unpack(KEYS, 9, 13)} -- one for each priority: waiting tasks, by when they are due
local ALL, ENDED, DEAD, DEDUPE, CLAIMS, CLAIMED, OUTBOX, WAITING, SEEN, HOLDERS = unpack(KEYS, 14, 23)
local GATED, AWAITED, ENDING = unpack(KEYS, 24, 26) -- waiting tasks; waits for tasks here; ended tasks to report
-- A task that stands for a name never ends: a cancel frees the name, and it can be granted again.
local IS_NAME = KEYS[1] ~= nil and string.find(KEYS[1], '{named:', 1, true) ~= nil
local DAMAGED = KEYS[27] -- tasks that were set aside, by when; the reason is in their state

local REAPED = 100 -- leases that one script expires, because Redis serves no other client meanwhile
local KEPT_RUNS = 100 -- the latest runs of one task
local NOTED = 1000 -- milliseconds by which a clock step must be later than the noted one to be noted anew

local ARGUMENT = cmsgpack.unpack(ARGV[1])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local now_in_microseconds = time[1] * 1000000 + time[2]

local known = {} -- key → field → value that was read; false: the field does not exist
local fields, members, outbox = {}, {}, {} -- changes to make; false: remove. key → field → value; key → member → score

-- What a record must have -----------------------------------------------------------------------------------------

local function is_number(value)
  return type(value) == 'number' and value % 1 == 0 and math.abs(value) < 2 ^ 53
end

local function is_text(value)
  return type(value) == 'string'
end

local function is_flag(value)
  return type(value) == 'boolean'
end

local function list_of(is, least)
  return function(value)
    if type(value) ~= 'table' or #value < least then
      return false
    end
    local count = 0
    for _, item in pairs(value) do
      count = count + 1
      if not is(item) then
        return false
      end
    end
    return count == #value
  end
end

local function is_real(value)
  return type(value) == 'number' and value >= 0 and value < math.huge
end

local STATUSES = {
  new = true, enqueued = true, claimed = true, processing = true, retriable_failure = true, success = true,
  fatal_failure = true, cancelled = true, dropped = true, dead = true,
}

local function is_policy(value)
  if type(value) ~= 'table' then
    return false
  elseif value.policy == 'list' then
    return list_of(is_real, 1)(value.waits)
  elseif value.policy == 'polynomial' then
    return true
  end
  return value.policy == 'exponential' and is_real(value.first) and is_real(value.factor) and is_real(value.max)
    and is_real(value.jitter)
end

local SHAPES = { -- key → required fields, optional fields
  [STATE] = {
    {status = function(value) return STATUSES[value] end, seq = is_number, fence = is_number, attempt = is_number,
     due = is_number},
    {priority = function(value) return is_number(value) and value >= 0 and value <= 4 end, failures = is_number,
     crashes = is_number, max_attempts = is_number, max_crashes = is_number, max_runtime = is_number, expiry = is_text,
     claim_ttl = is_number, beat_ttl = is_number, worker = is_text, token = is_text, reason = is_text,
     digest = is_text, dedupe = is_text, redriven = is_text, collection = is_text, parent = is_text, root = is_text,
     leads = is_flag, after = list_of(is_text, 1), retry = is_policy,
     awaited = is_flag, progress_seq = is_number, claimed_at = is_number, started_at = is_number,
     heartbeat_at = is_number, progress_at = is_number, ended_at = is_number},
  },
  [WORKING] = {
    {token = is_text, worker = is_text, ttl = is_number},
    {max_runtime = is_number, longest = is_number, ends = is_number, started = is_flag, cancel_requested = is_flag,
     progress_seq = is_number, progress_at = is_number, moved_from = is_number, moved_to = is_number},
  },
  [RUNS] = {
    {fence = is_number, attempt = is_number, at = is_number, outcome = is_text},
    {worker = is_text, token = is_text, digest = is_text, result = is_text, error = is_text, claimed_at = is_number,
     started_at = is_number, heartbeat_at = is_number},
  },
  [CLAIMS] = {{waited = is_real, grants = list_of(is_text, 0)}, {}},
  [DEDUPE] = {{id = is_text}, {ends = is_number}},
}

local function unpacked(raw)
  local is_whole, value = pcall(cmsgpack.unpack, raw)
  return is_whole and type(value) == 'table' and value or nil
end

-- The record, or nil and a text that says what is wrong with it.
local function checked(key, raw)
  local value = unpacked(raw)
  if not value then
    return nil, 'is not a record'
  elseif value.damaged then
    return nil, value.damaged
  end
  for name, is in pairs(SHAPES[key][1]) do
    if not is(value[name]) then
      return nil, name .. (value[name] == nil and ' is missing' or ' is invalid')
    end
  end
  for name, is in pairs(SHAPES[key][2]) do
    if value[name] ~= nil and not is(value[name]) then
      return nil, name .. ' is invalid'
    end
  end
  return value
end

-- Reading, and gathering ------------------------------------------------------------------------------------------

local broken = {} -- id → what is wrong with the task: `flush` sets these tasks aside

local function of(tables, key)
  local values = tables[key]
  if not values then
    values = {}
    tables[key] = values
  end
  return values
end

local function take(key, id, raw)
  local value, damage = false, nil
  if raw then
    value, damage = checked(key, raw)
  end
  if damage and (key == STATE or key == WORKING) then
    broken[id] = broken[id] or (key == STATE and 'state: ' or 'lease: ') .. damage
  end
  of(known, key)[id] = value or false
  return value or false
end

-- Read the records of many tasks in a few commands.
local function preload(key, ids)
  for first = 1, #ids, 4000 do
    local last = math.min(first + 3999, #ids)
    for i, raw in ipairs(redis.call('HMGET', key, unpack(ids, first, last))) do
      take(key, ids[first + i - 1], raw)
    end
  end
end

local function read(key, id)
  local value = of(fields, key)[id]
  if value == nil then
    value = of(known, key)[id]
  end
  if value == nil then
    value = take(key, id, redis.call('HGET', key, id))
  end
  return value
end

-- The state of a task that another key points at: if it is missing, the task is damaged.
local function need(id)
  local s = read(STATE, id)
  if not s and #id > 0 then
    broken[id] = broken[id] or 'state: is missing'
  end
  return s
end

-- Set a field: a table is stored as msgpack, a text as it is.
local function put(key, id, value)
  of(fields, key)[id] = value
end

local function score(key, member)
  local value = of(members, key)[member]
  if value == nil then
    value = redis.call('ZSCORE', key, member)
  end
  return value and tonumber(value)
end

local function place(key, member, value)
  of(members, key)[member] = value
end

-- Write many arguments with one command, in pieces because Lua's stack is bounded.
local function write(command, key, arguments)
  for first = 1, #arguments, 4000 do
    redis.call(command, key, unpack(arguments, first, math.min(first + 3999, #arguments)))
  end
end

-- Cut changes into what is added and what is removed: for each key a list of arguments.
local function sorted_out(changes, pair)
  local added, removed = {}, {}
  for key, values in pairs(changes) do
    for name, value in pairs(values) do
      local arguments = of(value and added or removed, key)
      local n = #arguments
      if value then
        arguments[n + 1], arguments[n + 2] = pair(name, value)
      else
        arguments[n + 1] = name
      end
    end
  end
  return added, removed
end

local function write_each(command, changes)
  for key, arguments in pairs(changes) do
    write(command, key, arguments)
  end
end

-- Let this script write even if memory is full. Redis then refuses a script's first write if that may need memory, and
-- lets through everything after a write that cannot. Scripts that end work call this first: heartbeats and results of
-- holders, claims, which empty the queue, and deletion of old tasks. Only new tasks are refused.
local function outrank_full_memory()
  redis.call('HDEL', META, 'nothing')
end

-- Fail on a replica, whose data may be old: the client then asks again at the server to which the address leads by
-- then.
local function refuse_at_replica()
  local refused = redis.pcall('HDEL', META, 'nothing')
  if type(refused) == 'table' and string.find(refused.err, 'READONLY') then
    error(refused.err)
  end
end

-- Fail before the first write if a key has a wrong type, because another program wrote it.
local function refuse_foreign_keys()
  for key in pairs(fields) do
    redis.call('HLEN', key)
  end
  for key in pairs(members) do
    redis.call('ZCARD', key)
  end
  redis.call('LLEN', OUTBOX)
end

-- Fail before the first write if the user may not run one of the commands: Redis undoes nothing. Each of these changes
-- nothing, and HSET is the first to change something. ZADD must be the first here: full memory refuses it, if anything.
local function refuse_missing_rights(scored, unscored, unset)
  if next(scored) then
    redis.call('ZADD', LEASES, 'XX', 'GT', '-inf', 'no/id')
  end
  if next(unscored) then
    redis.call('ZREM', LEASES, 'no/id')
  end
  if next(unset) then
    redis.call('HDEL', META, 'nothing')
  end
  if #outbox > 0 and redis.call('HLEN', STATE) > 0 then
    local refused = redis.pcall('RPUSH', STATE, '')
    if not string.find(refused.err, 'WRONGTYPE') then
      error(refused.err)
    end
  end
end

local set_aside

local function flush()
  for id, damage in pairs(broken) do
    set_aside(id, damage)
  end
  refuse_foreign_keys()
  local set, unset = sorted_out(fields, function(id, value)
    return id, type(value) == 'table' and cmsgpack.pack(value) or value
  end)
  local scored, unscored = sorted_out(members, function(member, value)
    return value, member
  end)
  refuse_missing_rights(scored, unscored, unset)
  write_each('HSET', set)
  write_each('HDEL', unset)
  write_each('ZADD', scored)
  write_each('ZREM', unscored)
  write('RPUSH', OUTBOX, outbox)
  known, fields, members, outbox, broken = {}, {}, {}, {}, {}
end

-- Counting ------------------------------------------------------------------------------------------------------

local counted, held, readied = {}, {}, 0

local function become(s, status)
  if s.status then
    counted[s.status] = (counted[s.status] or 0) - 1
  end
  if status then
    counted[status] = (counted[status] or 0) + 1
  end
  s.status = status
end

local function hold(worker, by)
  held[worker] = (held[worker] or 0) + by
end

local function count(key, name, by)
  local counter = redis.pcall('HINCRBY', key, name, by)
  if type(counter) == 'table' then -- an error: the field is not a number
    redis.pcall('HDEL', key, name)
  end
  return tonumber(counter) or 0
end

local function seen(worker)
  put(SEEN, worker, now)
end

-- Waiting -------------------------------------------------------------------------------------------------------

-- Tasks that are due at the same time are served in the order in which they came: a lane's members begin with a number.
local function numbered(id, s)
  return string.format('%016.0f', s.seq) .. id
end

local function lane(s)
  return LANES[(s.priority or 2) + 1]
end

-- Let a task wait until it is due: delayed, retried and ready tasks are in the same lanes.
local function wait_until(id, s, due)
  s.due = due
  place(lane(s), numbered(id, s), due)
  if due <= now then
    readied = readied + 1
  end
end

local function wait_no_longer(id, s)
  place(lane(s), numbered(id, s), false)
  if s.after then
    place(GATED, id, false)
  end
end

-- In ENDED, in place of the time of its end: a purge has chosen the task, and it cannot live again.
local CHOSEN = 0

-- Whether so many milliseconds have passed since then.
local function is_over(since, age)
  return since <= math.max(CHOSEN, now - age)
end

-- Since when a name has been free and not been asked for; nil or false if it is not free.
local function free_since(id)
  local s = read(STATE, id)
  local due = s and not s.awaited and score(lane(s), numbered(id, s))
  return due and math.max(due, tonumber(redis.call('HGET', META, 'asked')) or 0)
end

-- Return when one more task is set aside: later than all others, so that no report of maintenance passes it over.
local latest_aside
local function next_aside()
  if not latest_aside then
    local scores = redis.call('ZREVRANGE', DAMAGED, 0, 0, 'WITHSCORES')
    latest_aside = math.max(tonumber(scores[2]) or 0, tonumber(redis.call('HGET', META, 'told')) or 0)
  end
  latest_aside = math.max(now, latest_aside + 0.001)
  return latest_aside
end

-- Set a damaged task aside: remove everything that points at it, and keep its record for people to look at.
set_aside = function(id, damage)
  local raw, lease = redis.call('HGET', STATE, id), redis.call('HGET', WORKING, id)
  local s, number = raw and unpacked(raw) or {}, score(ALL, id)
  for _, key in ipairs({LEASES, GATED, ENDED, DEAD, ENDING, ALL}) do
    place(key, id, false)
  end
  for _, waiting_lane in ipairs(number and LANES or {}) do
    place(waiting_lane, numbered(id, {seq = number}), false)
  end
  put(WORKING, id, false)
  lease = lease and unpacked(lease)
  if lease and is_text(lease.worker) then
    hold(lease.worker, -1)
  end
  if s.damaged then
    put(STATE, id, raw)
    return
  end
  if STATUSES[s.status] then
    become({status = s.status})
  end
  become({}, 'damaged')
  put(STATE, id, {damaged = damage, record = raw or nil})
  place(DAMAGED, id, next_aside())
end

local function set_successor_aside(successor, damage)
  local id = 'successor-' .. redis.sha1hex(successor)
  redis.call('LREM', OUTBOX, 1, successor)
  become({}, 'damaged')
  put(STATE, id, {damaged = damage, record = successor})
  place(DAMAGED, id, next_aside())
end

-- Wake as many waiting claims as there are tasks, those first whose wait ends soonest. A message without a subscriber
-- does not count, and the next claim is woken too. (A node of a cluster knows its own subscribers only, so a few more
-- claims are woken there.)
local function wake(count)
  if count == 0 or redis.call('EXISTS', WAITING) == 0 then
    return
  end
  redis.call('ZREMRANGEBYSCORE', WAITING, '-inf', now)
  while count > 0 do
    local first = redis.call('ZRANGE', WAITING, 0, 0)[1]
    if not first then
      return
    end
    redis.call('ZREM', WAITING, first)
    local channel, claim = string.match(first, '^(.*)/(.*)$')
    count = count - math.min(1, redis.call('PUBLISH', channel, claim .. '/' .. META))
  end
end

local function wake_for_all_due()
  if redis.call('EXISTS', WAITING) == 1 then
    local due = 0
    for _, waiting_lane in ipairs(LANES) do
      due = due + redis.call('ZCOUNT', waiting_lane, '-inf', now)
    end
    wake(due)
  end
end

local steps_back -- how often the clock was seen to be set back; nil: this script does not look at the clock

-- Make the gathered changes and pack the answer: the end of every script that changes something.
local function answer(value)
  if steps_back then
    value.steps_back = steps_back
  end
  flush()
  -- The changes are made: an error in a counter, or in waking a claim, must not make the script fail.
  for status, by in pairs(counted) do
    if by ~= 0 then
      count(COUNTS, status, by)
    end
  end
  for worker, by in pairs(held) do
    if by ~= 0 and count(HOLDERS, worker, by) <= 0 then
      redis.pcall('HDEL', HOLDERS, worker)
    end
  end
  pcall(wake, readied)
  counted, held, readied = {}, {}, 0
  return cmsgpack.pack(value)
end

-- The end of a run ----------------------------------------------------------------------------------------------

local DEFAULT_POLICY = {policy = 'exponential', first = 1, factor = 2, max = 43200, jitter = 0.5}

-- Milliseconds until the next attempt: the rules of leasekit.task.RetryPolicy (also its polynomial). Scripts cannot
-- draw random numbers: `chance`, 0 to 1, comes from the client.
local function retry_wait(s, chance)
  local policy, n = s.retry or DEFAULT_POLICY, s.failures
  local seconds
  if policy.policy == 'polynomial' then
    seconds = math.min(n, 100) ^ 4 + 15 + chance * 30 * (n + 1)
  elseif policy.policy == 'list' then
    seconds = policy.waits[math.min(n, #policy.waits)]
  else
    local longest = policy.first * policy.factor ^ math.min(n - 1, 64)
    seconds = math.min(policy.max, longest) * (1 - policy.jitter * chance)
  end
  return math.floor(seconds * 1000)
end

local AFTER = {
  success = 'success', fatal = 'fatal_failure', cancelled = 'cancelled', retry = 'retriable_failure',
  release = 'enqueued', crash = 'enqueued', expired = 'enqueued',
}

-- The outcome as which the end of a run counts: a time-out is an attempt if the task says so, else a crash. A run has
-- timed out if its lease expired, or if its holder reports a crash and its `max_runtime` was over, as `why` says then.
local function counted_as(s, outcome, why)
  local is_time_out = outcome == 'expired' or outcome == 'crash' and why
  return s.expiry == 'retry' and is_time_out and 'retry' or outcome
end

local function last_run(why)
  return why and '; in the last run, ' .. why or ''
end

-- Count how a run ended; return the reason why the task may not run again, if there is one. `why`: what is known of a
-- run that has timed out.
local function counted_end(s, outcome, why)
  if outcome == 'release' then
    s.attempt = s.attempt - 1
  elseif outcome == 'retry' then
    s.failures = (s.failures or 0) + 1
    if s.max_attempts and s.failures >= s.max_attempts then
      return s.failures .. (s.failures == 1 and ' attempt' or ' attempts') .. ' ended in retry'
        .. (s.expiry == 'retry' and ' or timed out' or '') .. ': max_attempts is ' .. s.max_attempts .. last_run(why)
    end
  elseif outcome == 'crash' or outcome == 'expired' then
    s.crashes = (s.crashes or 0) + 1
    if s.crashes > (s.max_crashes or 5) then
      return s.crashes .. ' runs ended because their holder vanished: max_crashes is ' .. (s.max_crashes or 5)
        .. last_run(why)
    end
  end
end

local WOUND_DOWN = {retry = true, release = true, crash = true, expired = true}

-- The task has ended for good. Tasks that wait for it may be in other slots, where a client resolves their dependency:
-- ENDING keeps the task until that is done.
local told_next = {}
local function has_come_to_its_end(id, s)
  s.ended_at = now
  place(ENDED, id, now)
  if s.status == 'dead' then
    place(DEAD, id, now)
  end
  if s.awaited then
    place(ENDING, id, now)
    told_next[#told_next + 1] = id
  end
end

-- End a run: put the task back into its lane, or among the ended tasks, and save its state.
local function end_run(id, s, outcome, cancel_requested, options)
  local counted = counted_as(s, outcome, options.why)
  local reason = counted_end(s, counted, options.why)
  local status = AFTER[counted]
  s.token = nil
  if WOUND_DOWN[outcome] and cancel_requested and not IS_NAME then
    status, reason = 'cancelled', nil -- instead of running again
  elseif reason then
    status = 'dead'
  elseif outcome == 'expired' then
    s.token = options.token -- its holder may still report, as long as no other worker has got the task
  end
  s.reason = reason
  become(s, status)
  if status == 'enqueued' or status == 'retriable_failure' then
    local wait = (outcome == 'retry' or outcome == 'release') and options.retry_after
    wait_until(id, s, now + (wait or counted == 'retry' and retry_wait(s, options.chance) or 0))
  else
    has_come_to_its_end(id, s)
  end
  put(STATE, id, s)
end

-- Write an entry of a task's history. A later entry of the same claim replaces it: a late result revises an expiry.
local function record(id, s, run)
  run.fence, run.at = s.fence, now
  if run.outcome ~= 'redriven' then
    run.claimed_at, run.started_at, run.heartbeat_at = s.claimed_at, s.started_at, s.heartbeat_at
  end
  put(RUNS, id .. '/' .. s.fence, run)
  if s.fence > KEPT_RUNS then
    put(RUNS, id .. '/' .. (s.fence - KEPT_RUNS), false)
  end
end

-- Leases --------------------------------------------------------------------------------------------------------

-- When the client noticed a clock step, at any kind, by this clock: the client says how many milliseconds ago.
local function jumped_at()
  return ARGUMENT.jumped and now - ARGUMENT.jumped or 0
end

-- Identify the server and its time as a primary: a restart makes a new run_id, a promotion a new replication id. (A
-- primary that lost its last replica an hour ago makes a new one too: then leases last longer once, without need.)
local function tenure()
  local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
  local replication = string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
  return run or '', replication or ''
end

-- The instant from which every lease has its whole ttl. No heartbeat could arrive while Redis was away, and heartbeats
-- that were not replicated in time are lost, so this is when a restart or failover was noticed; or a jump of the clock.
-- Called where a lease seems to have ended, and by maintenance.
local restart
local function restarted_at()
  if not restart then
    local run, replication = tenure()
    local noted = redis.call('HMGET', META, 'run', 'replication', 'restarted_at')
    -- Earlier versions did not note a replication id.
    local is_same = noted[1] == run and (not noted[2] or noted[2] == replication)
    local since = math.max(is_same and tonumber(noted[3]) or noted[1] and now or 0, jumped_at())
    if not (since <= now) then -- in the future: the clock was set back, or the field is damaged
      since = now
    end
    put(META, 'run', run)
    put(META, 'replication', replication)
    put(META, 'restarted_at', since)
    restart = since
  end
  return restart
end

-- The time by which ends of leases are judged: earlier than `now` where the clock may have stepped.
local judged_at = now

-- Whether a lease has ended. After a restart or a clock step the end of the lease is moved to its new instant instead.
local function has_ended(id, lease, ends_at)
  if ends_at > judged_at then
    return false
  end
  local new_end = restarted_at() + (lease.longest or lease.ttl)
  if new_end <= judged_at then
    return true
  end
  local old_end = score(LEASES, id)
  if old_end ~= lease.moved_to then
    lease.moved_from = is_number(old_end) and old_end or nil
  end
  lease.moved_to = new_end
  put(WORKING, id, lease)
  place(LEASES, id, new_end)
  return false
end

-- Note in the state of a leased task when it was heard of last. A heartbeat moves the end of its lease to its own ttl
-- from then and writes nothing else, so the end tells when it came; but a shorter ttl than that of the claim tells
-- nothing at first, and a restart or a clock step has moved the end without a heartbeat.
local function note_times(id, s, lease)
  local ends_at = score(LEASES, id) or 0
  if ends_at == lease.moved_to then
    ends_at = lease.moved_from or 0
  end
  local is_moved = ends_at > (s.claimed_at or now) + (lease.longest or lease.ttl)
  s.heartbeat_at = is_moved and is_number(ends_at) and ends_at - lease.ttl or s.started_at
  s.progress_at = lease.progress_at or s.progress_at
end

-- A task as the scripts that read give it: {id, state, stored, progress, runs, lease_until, cancel_requested}.
local function shown(id, s, stored, runs)
  local lease = (s.status == 'claimed' or s.status == 'processing') and read(WORKING, id)
  if lease then
    note_times(id, s, lease)
  end
  local ends_at = lease and score(LEASES, id)
  return {
    id = id,
    state = s,
    stored = stored,
    progress = redis.call('HGET', PROGRESS, id) or nil,
    runs = runs,
    lease_until = is_number(ends_at) and ends_at or nil,
    cancel_requested = lease and lease.cancel_requested or nil,
  }
end

-- Keep a checkpoint, unless the kept one has a greater number: reports under one token may overtake each other. A
-- checkpoint without a number is always kept. `holding`: the lease, or the state of a task whose lease has ended.
local function keep_progress(id, holding, progress, number)
  if not progress or number and number < (holding.progress_seq or 0) then
    return
  end
  put(PROGRESS, id, progress)
  holding.progress_seq = number or holding.progress_seq
  holding.progress_at = now
end

-- Whether the `max_runtime` of the run was over before its lease ended.
local function is_overdue(id, lease)
  return lease.ends and lease.ends <= math.min(now, score(LEASES, id) or 0)
end

local function let_go(id, s, lease)
  note_times(id, s, lease)
  put(WORKING, id, false)
  place(LEASES, id, false)
  hold(lease.worker, -1)
end

local function expire(id, lease)
  local s = need(id)
  if not s then
    return
  end
  local run = {outcome = 'expired', attempt = s.attempt, worker = lease.worker, token = lease.token}
  local why = string.format("nothing was heard from worker '%s'", lease.worker)
  if is_overdue(id, lease) then
    why = string.format("no beat was accepted from worker '%s': its max_runtime of %g s was over", lease.worker,
      (lease.max_runtime or 0) / 1000)
    run.error = cjson.encode({type = 'LeaseExpired', message = why}) -- of expired runs, only these have an error
  end
  let_go(id, s, lease)
  s.progress_seq = lease.progress_seq -- its holder may still report
  record(id, s, run)
  local chance = s.expiry and tonumber(string.sub(redis.sha1hex(lease.token), 1, 8), 16) / 2 ^ 32 -- tokens are random
  end_run(id, s, 'expired', lease.cancel_requested, {token = lease.token, why = why, chance = chance})
end

-- Count steps back of the clock. A lease that is granted after one ends early if the clock steps ahead again, and a
-- client that was silent in between can notice neither. So clients hear the count with the time, and if a client knows
-- another count, every lease has its whole ttl from now.
local function notice_step_back()
  local noted = redis.call('HMGET', META, 'latest', 'steps_back', 'seq')
  local latest = math.max(tonumber(noted[1]) or 0, ARGUMENT.earliest or 0)
  steps_back = tonumber(noted[2]) or 0
  if noted[3] and latest > now + NOTED then
    steps_back = steps_back + 1
    put(META, 'steps_back', steps_back)
  end
  if noted[3] and math.abs(now - (tonumber(noted[1]) or 0)) > NOTED / 2 then
    put(META, 'latest', now)
  end
  if ARGUMENT.steps_back and ARGUMENT.steps_back ~= steps_back then
    ARGUMENT.jumped = 0
  end
end

-- Check for a jump of the clock. The client sends the latest time that it can be here when its request leaves. If it is
-- later than that, the clock has jumped or the request was slow. The client finds out which by the answer, and its next
-- request says how long ago it noticed a jump. Until then leases are judged by the earliest time that it can have been
-- when the request left. Every script that tells a client the time calls this, before it relies on any end of a lease.
-- What these scripts take as [clock] is latest?, earliest?, jumped?, steps_back? in milliseconds: see `Clocks.known`.
local function notice_jump()
  notice_step_back()
  if ARGUMENT.latest and now > ARGUMENT.latest then
    judged_at = math.min(now, ARGUMENT.earliest)
  end
  -- Note the jump for clients that have not noticed it; a kind without tasks has no such field.
  local noted = ARGUMENT.jumped and redis.call('HGET', META, 'restarted_at')
  if noted and (tonumber(noted) or 0) + NOTED < jumped_at() then
    restarted_at()
  end
end

-- Expire leases that have ended, the oldest first. Their ends are read in this script, so a heartbeat that came before
-- is never overruled.
local function reap()
  notice_jump()
  local ids = redis.call('ZRANGEBYSCORE', LEASES, '-inf', judged_at, 'LIMIT', 0, REAPED)
  for _, id in ipairs(ids) do
    local lease = read(WORKING, id)
    if not lease then
      broken[id] = broken[id] or 'lease: is missing'
    elseif has_ended(id, lease, 0) then
      expire(id, lease)
    end
  end
  if #ids > 0 then
    flush() -- tasks that are ready again are in their lanes from here on
  end
end

-- Forget old answers to claims. They are kept for twice the ttl of their leases: a client that repeats its claim later
-- has no lease left.
local function forget(limit)
  local forgotten = redis.call('ZRANGEBYSCORE', CLAIMED, '-inf', now, 'LIMIT', 0, limit)
  for _, name in ipairs(forgotten) do
    put(CLAIMS, name, false)
    place(CLAIMED, name, false)
  end
  return #forgotten
end

-- How the run of an earlier claim ended, found by its token, which contains the fence.
local function past_run(id, token)
  local fence = string.match(token, '^%x+%-(%d+)')
  local run = fence and read(RUNS, id .. '/' .. fence)
  return run and run.token == token and run or nil
end

-- The reason why this token may not write (any longer).
local function why_gone(id, s, token)
  if not s then
    return 'unknown'
  elseif s.status == 'cancelled' then
    return 'cancelled'
  end
  local lease, run = read(WORKING, id), past_run(id, token)
  local has_ended = score(ENDED, id)
  local is_dead_of_it = has_ended and run and not run.digest and run.fence == s.fence
  if s.token == token or is_dead_of_it then
    return run and run.error and 'overdue' or 'expired'
  elseif lease and lease.token == token then
    return lease.ends and lease.ends <= now and 'overdue' or 'expired'
  end
  local is_settled = run and run.digest or not run and has_ended
  return is_settled and 'settled' or 'taken'
end

