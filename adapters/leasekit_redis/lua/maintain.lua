-- Do the regular work for one kind, and give the client what has to be done outside of this slot. Any client runs it.
-- Takes {retention, seen_for, name?, [clock]} in milliseconds; `name`: the name that the kind is
-- of, if any. Gives {now, outbox, ending, gated, old, unmet, damaged, is_free, is_done, next?}:
--   outbox   successors to schedule             ending   ids of ended tasks that other tasks wait for
--   gated    waiting tasks {id, after, age}     old      ids of tasks that were kept long enough
--   unmet    old tasks that wait {id, after}    damaged  tasks that were set aside since the last report {id, damage}
--   is_free  the name was free for long enough  is_done  nothing is left to do now
--   next     when there may be work again; absent if nothing is left of the kind

local MOST, ASKED, OLD = 500, 100, 100
local RARELY = 24 * 3600 * 1000 -- at most, until a kind is due again in which tasks wait and nothing happens
local SOONEST, LATEST = 15000, 600000 -- bounds of the wait until dependencies are looked at again: the age of the task

outrank_full_memory()
if redis.call('EXISTS', LEASES) == 1 then
  restarted_at() -- notice a failover soon, and not only when the first lease seems to have ended
end
reap()

local forgotten = forget(MOST)

local workers = redis.call('HGETALL', SEEN)
local heard = tonumber(redis.call('HGET', META, 'asked')) or 0
for i = 1, #workers, 2 do
  heard = math.max(heard, tonumber(workers[i + 1]) or 0)
  if (tonumber(workers[i + 1]) or 0) < now - ARGUMENT.seen_for and redis.call('HEXISTS', HOLDERS, workers[i]) == 0 then
    put(SEEN, workers[i], false)
  end
end

readied = 0
flush()
redis.call('ZREMRANGEBYSCORE', WAITING, '-inf', now)
wake_for_all_due()

-- Whether a client can read `text`, roughly: clients report what this check lets through.
local function is_json(text)
  local rest = text:gsub('\237[\160-\191]', '\255'):gsub('[\194-\223][\128-\191]', ' ')
  rest = rest:gsub('[\224-\239][\128-\191][\128-\191]', ' '):gsub('[\240-\244][\128-\191][\128-\191][\128-\191]', ' ')
  return not rest:find('[\128-\255]') and pcall(cjson.decode, text)
end

-- Successors given to a client go to the tail of the outbox: one that cannot be scheduled holds up no other.
local outbox_head = {}
for _, successor in ipairs(redis.call('LRANGE', OUTBOX, 0, 9)) do
  if is_json(successor) then
    outbox_head[#outbox_head + 1] = successor
    redis.call('LMOVE', OUTBOX, OUTBOX, 'LEFT', 'RIGHT')
  else
    set_successor_aside(successor, 'successor: is not JSON')
  end
end

-- The members that can be ids of tasks; the others are removed, because a client could not decode an answer with them.
local function names(key, members)
  local ids = {}
  for _, id in ipairs(members) do
    if id == '' or id:find('[^ -.0-~]') then
      place(key, id, false)
      if key == DAMAGED then
        put(STATE, id, false)
      end
    else
      ids[#ids + 1] = id
    end
  end
  return ids
end

local ending = names(ENDING, redis.call('ZRANGE', ENDING, 0, ASKED - 1))
for _, id in ipairs(ending) do
  place(ENDING, id, now)
end
local old = {}
local ended = redis.call('ZRANGEBYSCORE', ENDED, '-inf', math.max(CHOSEN, now - ARGUMENT.retention), 'LIMIT', 0, OLD)
for _, id in ipairs(names(ENDED, ended)) do
  if not score(ENDING, id) then -- a task is kept until the tasks that wait for its end were told
    old[#old + 1] = id
  end
end
local aside = redis.call('ZRANGEBYSCORE', DAMAGED, '-inf', now - ARGUMENT.retention, 'LIMIT', 0, OLD)
for _, id in ipairs(names(DAMAGED, aside)) do
  old[#old + 1] = id
end

local gated = {}
local to_ask = redis.call('ZRANGEBYSCORE', GATED, '-inf', now, 'LIMIT', 0, ASKED)
for _, id in ipairs(to_ask) do
  local s = read(STATE, id)
  if s and s.after and s.status == 'new' then
    local age = math.max(0, now - math.floor(s.seq / 1000))
    gated[#gated + 1] = {id = id, after = s.after, age = age}
    place(GATED, id, now + math.min(math.max(age, SOONEST), LATEST))
  else
    place(GATED, id, false) -- not left by any script: remove it, and go on with the others
  end
end

local unmet = {}
preload(STATE, old)
for _, id in ipairs(old) do
  local s = read(STATE, id)
  if s and s.after then
    unmet[#unmet + 1] = {id = id, after = s.after, age = 0}
  end
end

flush() -- sets aside what was found to be damaged
local damaged = {}
local told = redis.call('HGET', META, 'told')
for _, id in ipairs(redis.call('ZRANGEBYSCORE', DAMAGED, '(' .. (tonumber(told) and told or 0), '+inf', 'LIMIT', 0, MOST)) do
  local s = redis.call('HGET', STATE, id)
  s = s and unpacked(s) or {}
  damaged[#damaged + 1] = {id = (id:gsub('[^ -~]', '?')), damage = is_text(s.damaged) and s.damaged or 'unknown'}
  put(META, 'told', redis.call('ZSCORE', DAMAGED, id))
end

local free_from = ARGUMENT.name and free_since(ARGUMENT.name)
local is_free = free_from and free_from <= now - ARGUMENT.retention or false
local is_done = #outbox_head + #ending + #old == 0 and forgotten < MOST and #to_ask < ASKED and not is_free

-- When this kind is due next. Running tasks may need maintenance at any time. Waiting tasks need none, because claims
-- find them: a kind with waiting tasks only is due the more rarely the longer no worker was heard of (a client that is
-- granted a task notes the kind again). Ended tasks need maintenance only when they were kept long enough.
local due_at
local function due_after(key, wait)
  local at = tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2])
  if is_number(at) and at + wait < (due_at or math.huge) then
    due_at = at + wait
  end
end

due_after(ENDED, ARGUMENT.retention)
due_after(DAMAGED, ARGUMENT.retention)
due_after(CLAIMED, 0)
local quiet = math.min(math.max(0, now - heard), RARELY, free_from and free_from + ARGUMENT.retention - now or RARELY)
for _, waiting_lane in ipairs(LANES) do
  if redis.call('EXISTS', waiting_lane) == 1 then
    due_at = math.min(due_at or math.huge, now + quiet)
  end
end
for _, key in ipairs({LEASES, GATED, ENDING}) do
  if redis.call('EXISTS', key) == 1 then
    due_at = now
  end
end

local reply = answer({
  now = now, outbox = outbox_head, ending = ending, gated = gated, old = old, unmet = unmet,
  damaged = damaged, is_free = is_free, is_done = is_done, next = due_at,
})
if not due_at and #outbox_head == 0 then
  redis.call('DEL', META, COUNTS, SEEN, HOLDERS) -- nothing is left of this kind
end
return reply
