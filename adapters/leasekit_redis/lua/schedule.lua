-- Accept tasks, each once: the same id, or a live dedupe key, makes no second task.
-- Takes {tasks, peek}, gives for each {id, created, status, conflict}; with `peek` nothing is added, and a task that
-- would be added is answered with false.

local last = tonumber(redis.call('HGET', META, 'seq') or 0) or 0
if not is_number(last) or last < 0 or last >= 2 ^ 52 then -- no script wrote that: such tasks could not be read
  last = 0
end
local is_first = last == 0
local is_any_awaited = redis.call('EXISTS', AWAITED) == 1
local GRACE = 5000 -- milliseconds until maintenance looks at what a new task waits for: its scheduler does so at once

-- Numbers grow with every task and follow the clock: pages of several kinds are merged by these numbers.
local function next_number()
  last = math.max(last + 1, now_in_microseconds)
  return last
end

local function add(new)
  local id, stored, window, is_name = new.id, new.stored, new.window, new.is_name
  local due = new.due or now + (new.delay or 0)
  local s = new
  local is_over = new.is_over
  s.id, s.stored, s.window, s.is_name, s.delay, s.is_over = nil, nil, nil, nil, nil, nil
  -- A name that was free for long is forgotten, and its fences must not go back, so they begin with the time: no name
  -- is leased a thousand times a second for as long as it exists.
  s.seq, s.fence, s.attempt = next_number(), is_name and now or 0, 0
  put(TASK, id, stored)
  place(ALL, id, s.seq)
  become(s, 'new')
  if is_any_awaited and redis.call('ZLEXCOUNT', AWAITED, '[' .. id .. '/', '(' .. id .. '0') > 0 then
    s.awaited = true
  end
  if is_over then
    s.due, s.after = due, nil
    end_run(id, s, 'cancelled', false, {})
    s.reason = 'the chain of "' .. s.root .. '" was cancelled'
  elseif s.after then
    s.due = due
    place(GATED, id, now + GRACE) -- in no lane, so that no claim finds the task
  else
    wait_until(id, s, due)
  end
  put(STATE, id, s)
  if s.dedupe then
    put(DEDUPE, s.dedupe, {id = id, ends = window and now + window})
  end
  return {id, true, s.status, false}
end

local function was_here(new)
  local s = read(STATE, new.id)
  if not s and score(ALL, new.id) then
    need(new.id)
  end
  if s then
    return {new.id, false, s.status, s.digest ~= new.digest}
  elseif broken[new.id] then
    return {new.id, false, 'dropped', true} -- its record is unreadable: the id stays taken until the task is discarded
  end
  local first = new.dedupe and read(DEDUPE, new.dedupe)
  if first and (not first.ends or first.ends > now) then
    local of_first = read(STATE, first.id)
    return of_first and {first.id, false, of_first.status, false}
  end
  return false
end

local ids = {}
for i, new in ipairs(ARGUMENT.tasks) do
  ids[i] = new.id
end
preload(STATE, ids)

local answers = {}
for i, new in ipairs(ARGUMENT.tasks) do
  answers[i] = was_here(new) or (not ARGUMENT.peek and add(new))
end
if ARGUMENT.peek then
  return cmsgpack.pack(answers)
end
put(META, 'seq', string.format('%.0f', last))
put(META, 'asked', now)
if is_first then
  local memory = redis.call('INFO', 'memory')
  if string.match(memory, 'maxmemory_policy:allkeys') and not string.match(memory, 'maxmemory:0%s') then
    return redis.error_reply('EVICTS what it likes')
  end
  restarted_at() -- note the run of Redis, so that the first restart is noticed
end
return answer(answers)
