-- Stands before every script of a kind: its keys, the time, and the moves that several scripts make.
--
-- Rule 1: the time is Redis's own, in milliseconds; no client's clock counts.
-- Rule 2: a task changes together with all that points at it, in one script; all keys of a kind are in one slot.
-- Rule 3: what a holder writes carries the token of its claim, which is compared in here.
-- Rule 4: changes are gathered, and made at the end: a script that fails has changed nothing, and a batch is a few
--         commands. What was gathered is what is read from then on.
-- Rule 5: a record that is damaged concerns its own task only: it reads as if it were not there, and the task is set
--         aside. What is in a record is looked at here, so nothing below meets a field that is missing.
-- Rule 6: scripts take one argument and give one answer, both msgpack.

local META, COUNTS, TASK, STATE, PROGRESS, RUNS, WORKING, LEASES = unpack(KEYS, 1, 8)
local LANES = {unpack(KEYS, 9, 13)} -- one for each priority: what waits, by when it is due
local ALL, ENDED, DEAD, DEDUPE, CLAIMS, CLAIMED, OUTBOX, WAITING, SEEN, HOLDERS = unpack(KEYS, 14, 23)
local GATED, AWAITED, ENDING = unpack(KEYS, 24, 26) -- what waits for other tasks, who waits for ours, what to tell them
local DAMAGED = KEYS[27] -- what was set aside, by when; why is in its state

local REAPED = 200 -- leases that are taken back at once: nobody else is served meanwhile
local KEPT_RUNS = 100 -- of one task, the latest
local NOTED = 1000 -- milliseconds by which a step is later than what is noted, before it is noted anew

local ARGUMENT = cmsgpack.unpack(ARGV[1])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local now_in_microseconds = time[1] * 1000000 + time[2]

local known = {} -- key → field → value: what was read; false: it is not there
local fields, members, outbox = {}, {}, {} -- key → field → value, key → member → score: what is to be; false: is not

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

local SHAPES = { -- key → what must be there, what may be
  [STATE] = {
    {status = function(value) return STATUSES[value] end, seq = is_number, fence = is_number, attempt = is_number,
     due = is_number},
    {priority = function(value) return is_number(value) and value >= 0 and value <= 4 end, failures = is_number,
     crashes = is_number, max_attempts = is_number, max_crashes = is_number, max_runtime = is_number,
     claim_ttl = is_number, beat_ttl = is_number, worker = is_text, token = is_text, reason = is_text,
     digest = is_text, dedupe = is_text, collection = is_text, after = list_of(is_text, 1), retry = is_policy,
     awaited = is_flag, progress_seq = is_number},
  },
  [WORKING] = {
    {token = is_text, worker = is_text, ttl = is_number},
    {max_runtime = is_number, longest = is_number, ends = is_number, started = is_flag, ordered = is_flag,
     progress_seq = is_number},
  },
  [RUNS] = {
    {fence = is_number, attempt = is_number, at = is_number, outcome = is_text},
    {worker = is_text, token = is_text, digest = is_text, result = is_text, error = is_text},
  },
  [CLAIMS] = {{waited = is_real, grants = list_of(is_text, 0)}, {}},
  [DEDUPE] = {{id = is_text}, {ends = is_number}},
}

local function unpacked(raw)
  local is_whole, value = pcall(cmsgpack.unpack, raw)
  return is_whole and type(value) == 'table' and value or nil
end

-- The record, or nothing and what is wrong with it.
local function checked(key, raw)
  local value = unpacked(raw)
  if not value then
    return nil, 'is no record'
  elseif value.damaged then
    return nil, value.damaged
  end
  for name, is in pairs(SHAPES[key][1]) do
    if not is(value[name]) then
      return nil, name .. (value[name] == nil and ' is missing' or ' makes no sense')
    end
  end
  for name, is in pairs(SHAPES[key][2]) do
    if value[name] ~= nil and not is(value[name]) then
      return nil, name .. ' makes no sense'
    end
  end
  return value
end

-- Reading, and gathering ------------------------------------------------------------------------------------------

local broken = {} -- id → what is wrong: these are set aside

local function of(tables, key)
  local found = tables[key]
  if not found then
    found = {}
    tables[key] = found
  end
  return found
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

-- Have all of these read at once.
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

-- The state of a task that something points at.
local function need(id)
  local s = read(STATE, id)
  if not s and #id > 0 then
    broken[id] = broken[id] or 'state: is missing'
  end
  return s
end

-- A table, kept as msgpack, or a text, kept as it is.
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

-- Many arguments are one command; in pieces, for Lua's stack is bounded.
local function write(command, key, arguments)
  for first = 1, #arguments, 4000 do
    redis.call(command, key, unpack(arguments, first, math.min(first + 3999, #arguments)))
  end
end

local function write_all(changes, add, remove, pair)
  for key, values in pairs(changes) do
    local added, removed = {}, {}
    for name, value in pairs(values) do
      if value then
        local n = #added
        added[n + 1], added[n + 2] = pair(name, value)
      else
        removed[#removed + 1] = name
      end
    end
    write(add, key, added)
    write(remove, key, removed)
  end
end

-- When memory is full Redis refuses a script's first write if it may need more, and lets through what follows a write
-- that cannot. Whatever ends something begins with such a write: beats and results of holders, claims, which empty the
-- queue, and what drops old tasks. Only what is new is refused.
local function outrank_full_memory()
  redis.call('HDEL', META, 'nothing')
end

-- What a replica has may be old. Whoever only reads is told so too, and asks again where the address leads by then.
local function refuse_at_replica()
  local refused = redis.pcall('HDEL', META, 'nothing')
  if type(refused) == 'table' and string.find(refused.err, 'READONLY') then
    error(refused.err)
  end
end

-- A write that cannot be made is found out before any is. (A key of a wrong type is none of ours.)
local function refuse_foreign_keys()
  for key in pairs(fields) do
    redis.call('HLEN', key)
  end
  for key in pairs(members) do
    redis.call('ZCARD', key)
  end
  redis.call('LLEN', OUTBOX)
end

local set_aside

local function flush()
  for id, damage in pairs(broken) do
    set_aside(id, damage)
  end
  refuse_foreign_keys()
  write_all(fields, 'HSET', 'HDEL', function(id, value)
    return id, type(value) == 'table' and cmsgpack.pack(value) or value
  end)
  write_all(members, 'ZADD', 'ZREM', function(member, value)
    return value, member
  end)
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
  if type(counter) == 'table' then -- what is there is no number
    redis.pcall('HDEL', key, name)
  end
  return tonumber(counter) or 0
end

local function seen(worker)
  put(SEEN, worker, now)
end

-- Waiting -------------------------------------------------------------------------------------------------------

-- Equals are served in the order in which they came: a lane's members begin with their number.
local function numbered(id, s)
  return string.format('%016.0f', s.seq) .. id
end

local function lane(s)
  return LANES[(s.priority or 2) + 1]
end

-- A task is ready from the moment when it is due: delayed, retried and ready ones are one structure.
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

-- Nothing points at it any more, and what is left of it is kept, for people.
set_aside = function(id, damage)
  local raw, lease = redis.call('HGET', STATE, id), redis.call('HGET', WORKING, id)
  local s, number = raw and unpacked(raw) or {}, score(ALL, id)
  for _, key in ipairs({LEASES, GATED, ENDED, DEAD, ENDING, ALL}) do
    place(key, id, false)
  end
  for _, one in ipairs(number and LANES or {}) do
    place(one, numbered(id, {seq = number}), false)
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
  place(DAMAGED, id, now)
end

local function set_successor_aside(successor, damage)
  local id = 'successor-' .. redis.sha1hex(successor)
  redis.call('LREM', OUTBOX, 1, successor)
  become({}, 'damaged')
  put(STATE, id, {damaged = damage, record = successor})
  place(DAMAGED, id, now)
end

-- As many claims as there are tasks, those first that can wait least. One whose client nobody hears was told in vain:
-- the next is told too. (In a cluster a node knows its own subscribers only; then a few more are told.)
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
    for _, one in ipairs(LANES) do
      due = due + redis.call('ZCOUNT', one, '-inf', now)
    end
    wake(due)
  end
end

-- What every script that changes something ends with.
local function answer(value)
  flush()
  -- It is done: no count, and nobody who waits, makes a failure of it.
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
  return cmsgpack.pack(value)
end

-- The end of a run ----------------------------------------------------------------------------------------------

local DEFAULT_POLICY = {policy = 'exponential', first = 1, factor = 2, max = 3600, jitter = 0.5}

-- Milliseconds until the next attempt: the rules of leasekit.task.RetryPolicy (also its polynomial). Scripts have no
-- chance of their own: `chance` comes from the client, 0 to 1.
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

-- Where a task stands after its run: what is counted, and why it may not run again.
local function counted_end(s, outcome)
  if outcome == 'release' then
    s.attempt = s.attempt - 1
  elseif outcome == 'retry' then
    s.failures = (s.failures or 0) + 1
    if s.max_attempts and s.failures >= s.max_attempts then
      return s.failures .. ' attempts ended in retry: max_attempts is ' .. s.max_attempts
    end
  elseif outcome == 'crash' or outcome == 'expired' then
    s.crashes = (s.crashes or 0) + 1
    if s.crashes > (s.max_crashes or 5) then
      return s.crashes .. ' runs ended because their holder vanished: max_crashes is ' .. (s.max_crashes or 5)
    end
  end
end

local WOUND_DOWN = {retry = true, release = true, crash = true, expired = true}

-- Nothing follows. Who waits for it may be in another slot, and is told by a client: `ending` says so until it was.
local told_next = {}
local function has_come_to_its_end(id, s)
  place(ENDED, id, now)
  if s.status == 'dead' then
    place(DEAD, id, now)
  end
  if s.awaited then
    place(ENDING, id, now)
    told_next[#told_next + 1] = id
  end
end

-- A task's run has ended so: into its lane again, or among those that have ended. Saves it.
local function end_run(id, s, outcome, ordered, options)
  local reason = counted_end(s, outcome)
  local status = AFTER[outcome]
  s.token = nil
  if WOUND_DOWN[outcome] and ordered then
    status, reason = 'cancelled', nil -- instead of running again
  elseif reason then
    status = 'dead'
  elseif outcome == 'expired' then
    s.token = options.token -- its holder may yet report, as long as nobody else got the task
  end
  s.reason = reason
  become(s, status)
  if status == 'enqueued' or status == 'retriable_failure' then
    local wait = options.retry_after or (outcome == 'retry' and retry_wait(s, options.chance)) or 0
    wait_until(id, s, now + wait)
  else
    has_come_to_its_end(id, s)
  end
  put(STATE, id, s)
end

-- One entry of a task's history. A later one of the same claim takes its place: a late result revises an expiry.
local function record(id, s, run)
  run.fence, run.at = s.fence, now
  put(RUNS, id .. '/' .. s.fence, run)
  if s.fence > KEPT_RUNS then
    put(RUNS, id .. '/' .. (s.fence - KEPT_RUNS), false)
  end
end

-- Leases --------------------------------------------------------------------------------------------------------

-- When the client noticed a step, of the clock of whichever kind: it says how many milliseconds ago.
local function jumped_at()
  return ARGUMENT.jumped and now - ARGUMENT.jumped or 0
end

-- Since when leases count anew: nobody could beat while Redis was away, so after a restart or a failover (another
-- process answers) each has its whole ttl from when that was noticed; the same after the clock has jumped. Asked only
-- where a lease seems to have ended.
local restart
local function restarted_at()
  if not restart then
    local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
    local noted, at = unpack(redis.call('HMGET', META, 'run', 'restarted_at'))
    restart = math.max(noted == run and tonumber(at) or noted and now or 0, jumped_at())
    if not (restart <= now) then -- what is yet to come has not been
      restart = now
    end
    put(META, 'run', run)
    put(META, 'restarted_at', restart)
  end
  return restart
end

-- Whether a lease has ended; one that has only because nobody could beat is moved to where it ends now.
local function has_ended(id, lease, ends_at)
  if ends_at > now then
    return false
  end
  local new_end = restarted_at() + (lease.longest or lease.ttl)
  if new_end <= now then
    return true
  end
  place(LEASES, id, new_end)
  return false
end

-- Keep a checkpoint, unless what is kept was reported later under the same token, and only came first. One without a
-- number is taken as it comes. `holding`: the lease, or the state of a task whose lease has ended.
local function keep_progress(id, holding, progress, number)
  if not progress or number and number < (holding.progress_seq or 0) then
    return
  end
  put(PROGRESS, id, progress)
  holding.progress_seq = number or holding.progress_seq
end

local function let_go(id, lease)
  put(WORKING, id, false)
  place(LEASES, id, false)
  hold(lease.worker, -1)
end

local function expire(id, lease)
  local s = need(id)
  if not s then
    return
  end
  let_go(id, lease)
  s.progress_seq = lease.progress_seq -- its holder may yet report
  record(id, s, {outcome = 'expired', attempt = s.attempt, worker = lease.worker, token = lease.token})
  end_run(id, s, 'expired', lease.ordered, {token = lease.token})
end

-- The client says what time it can be at the latest; by what is later the clock has jumped. To be called before any end
-- of a lease is relied on, by every script that tells a client what time it is.
local function notice_jump()
  if ARGUMENT.latest and now > ARGUMENT.latest then
    restart = now
    put(META, 'restarted_at', now)
    return
  end
  -- Other clients, that have noticed nothing, are to know it too; a kind that has no tasks has no such field.
  local noted = ARGUMENT.jumped and redis.call('HGET', META, 'restarted_at')
  if noted and (tonumber(noted) or 0) + NOTED < jumped_at() then
    restarted_at()
  end
end

-- Take back leases that have ended, the oldest first; whether they have is read in here, so a beat that came before is
-- never overruled.
local function reap()
  notice_jump()
  local ids = redis.call('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, REAPED)
  for _, id in ipairs(ids) do
    local lease = read(WORKING, id)
    if not lease then
      broken[id] = broken[id] or 'lease: is missing'
    elseif has_ended(id, lease, 0) then
      expire(id, lease)
    end
  end
  if #ids > 0 then
    flush() -- what is ready again is found from now on
  end
end

-- What claims were answered is kept for twice their leases' ttl: who has had no answer by then has no lease left.
local function forget(limit)
  local forgotten = redis.call('ZRANGEBYSCORE', CLAIMED, '-inf', now, 'LIMIT', 0, limit)
  for _, name in ipairs(forgotten) do
    put(CLAIMS, name, false)
    place(CLAIMED, name, false)
  end
  return #forgotten
end

-- How an earlier claim of a task ended, by its token, which has the fence in it.
local function past_run(id, token)
  local fence = string.match(token, '^%x+%-(%d+)')
  local run = fence and read(RUNS, id .. '/' .. fence)
  return run and run.token == token and run or nil
end

-- Why this token may not write (any more).
local function why_gone(id, s, token)
  if not s then
    return 'unknown'
  elseif s.status == 'cancelled' then
    return 'cancelled'
  elseif score(ENDED, id) then
    return 'settled'
  elseif s.token == token then
    return 'expired'
  end
  local lease, run = read(WORKING, id), past_run(id, token)
  if lease and lease.token == token then
    return 'expired'
  end
  return run and run.digest and 'settled' or 'taken'
end

