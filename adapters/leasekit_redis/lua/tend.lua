-- What has to be done for a kind now and then, by whichever client comes by.
-- Takes {retention, seen_for, latest?, jumped?} in milliseconds, gives {now, outbox, ending, gated, old, unmet,
-- damaged, is_done, next?}: successors to be brought to their kinds, ids of tasks whose end others wait for, tasks that wait for others as
-- {id, after, age}, ids of tasks that were kept long enough, what of these still waited as {id, after}, what was
-- set aside since somebody was last told so as {id, damage}, and when there may be something again.

local MOST, ASKED = 500, 100
local SOONEST, LATEST = 15000, 600000 -- until it is asked again what a task waits for: as long as it has waited

outrank_full_memory()
reap()

local forgotten = forget(MOST)

local workers = redis.call('HGETALL', SEEN)
for i = 1, #workers, 2 do
  if (tonumber(workers[i + 1]) or 0) < now - ARGUMENT.seen_for and redis.call('HEXISTS', HOLDERS, workers[i]) == 0 then
    put(SEEN, workers[i], false)
  end
end

readied = 0
flush()
wake_for_all_due()
-- Whether a client can read it, roughly: for the rest it says so itself.
local function is_json(text)
  local rest = text:gsub('\237[\160-\191]', '\255'):gsub('[\194-\223][\128-\191]', ' ')
  rest = rest:gsub('[\224-\239][\128-\191][\128-\191]', ' '):gsub('[\240-\244][\128-\191][\128-\191][\128-\191]', ' ')
  return not rest:find('[\128-\255]') and pcall(cjson.decode, text)
end

local outbox_head = {}
for _, successor in ipairs(redis.call('LRANGE', OUTBOX, 0, 9)) do
  if is_json(successor) then
    outbox_head[#outbox_head + 1] = successor
  else
    set_successor_aside(successor, 'successor: is no JSON')
  end
end
-- Those that can be ids of tasks. What else stands there no client could read, nor anything that came with it.
local function names(key, members)
  local found = {}
  for _, id in ipairs(members) do
    if id == '' or id:find('[^ -.0-~]') then
      place(key, id, false)
      if key == DAMAGED then
        put(STATE, id, false)
      end
    else
      found[#found + 1] = id
    end
  end
  return found
end

local ending = names(ENDING, redis.call('ZRANGE', ENDING, 0, ASKED - 1))
local old = {}
local ended = redis.call('ZRANGEBYSCORE', ENDED, '-inf', now - ARGUMENT.retention, 'LIMIT', 0, MOST)
for _, id in ipairs(names(ENDED, ended)) do
  if not score(ENDING, id) then -- what is to be told is not forgotten
    old[#old + 1] = id
  end
end
local aside = redis.call('ZRANGEBYSCORE', DAMAGED, '-inf', now - ARGUMENT.retention, 'LIMIT', 0, MOST)
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
    place(GATED, id, false) -- no script leaves that behind; where it was found, the others are to be asked for yet
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

flush() -- what is damaged in these is set aside
local damaged = {}
local told = redis.call('HGET', META, 'told')
for _, id in ipairs(redis.call('ZRANGEBYSCORE', DAMAGED, '(' .. (tonumber(told) or 0), now, 'LIMIT', 0, MOST)) do
  local s = redis.call('HGET', STATE, id)
  s = s and unpacked(s) or {}
  damaged[#damaged + 1] = {id = (id:gsub('[^ -~]', '?')), damage = is_text(s.damaged) and s.damaged or 'unknown'}
  put(META, 'told', score(DAMAGED, id))
end

local is_done = #outbox_head + #ending + #old == 0 and forgotten < MOST and #to_ask < ASKED

-- What waits or runs may need somebody at any time; what has ended and was answered, only when it was kept long enough.
local next_visit
local function visit(key, wait)
  local at = tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2])
  if is_number(at) and at + wait < (next_visit or math.huge) then
    next_visit = at + wait
  end
end

visit(ENDED, ARGUMENT.retention)
visit(DAMAGED, ARGUMENT.retention)
visit(CLAIMED, 0)
for _, key in ipairs({LEASES, GATED, ENDING, unpack(LANES)}) do
  if redis.call('EXISTS', key) == 1 then
    next_visit = now
  end
end

local tended = answer({
  now = now, outbox = outbox_head, ending = ending, gated = gated, old = old, unmet = unmet,
  damaged = damaged, is_done = is_done, next = next_visit,
})
if not next_visit and #outbox_head == 0 then
  redis.call('DEL', META, COUNTS, SEEN, HOLDERS) -- there is nothing of this kind any more
end
return tended
