-- What has to be done for a kind now and then, by whichever client comes by (SYSTEMS D3).
-- Takes {retention, seen_for, latest?} in milliseconds, gives {now, outbox, ending, gated, old, unmet, is_done, next?}:
-- successors to be brought to their kinds, ids of tasks whose end others wait for, tasks that wait for others as
-- {id, after, age}, ids of tasks that were kept long enough, what of these still waited as {id, after}, and when there
-- may be something again.

local MOST, ASKED = 500, 100
local SOONEST, LATEST = 15000, 600000 -- until it is asked again what a task waits for: as long as it has waited

outrank_full_memory()
reap()

local forgotten = forget(MOST)

local workers = redis.call('HGETALL', SEEN)
for i = 1, #workers, 2 do
  if tonumber(workers[i + 1]) < now - ARGUMENT.seen_for and redis.call('HEXISTS', HOLDERS, workers[i]) == 0 then
    put(SEEN, workers[i], false)
  end
end

readied = 0
flush()
wake_for_all_due()
local outbox_head = redis.call('LRANGE', OUTBOX, 0, 9)
local ending = redis.call('ZRANGE', ENDING, 0, ASKED - 1)
local old = {}
if #ending == 0 then -- what is to be told is not forgotten
  old = redis.call('ZRANGEBYSCORE', ENDED, '-inf', now - ARGUMENT.retention, 'LIMIT', 0, MOST)
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

local is_done = #outbox_head + #ending + #old == 0 and forgotten < MOST and #to_ask < ASKED

-- What waits or runs may need somebody at any time; what has ended and was answered, only when it was kept long enough.
local next_visit
local function visit(key, wait)
  local at = tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2])
  if at and at + wait < (next_visit or math.huge) then
    next_visit = at + wait
  end
end

visit(ENDED, ARGUMENT.retention)
visit(CLAIMED, 0)
for _, key in ipairs({LEASES, GATED, ENDING, unpack(LANES)}) do
  if redis.call('EXISTS', key) == 1 then
    next_visit = now
  end
end

local tended = answer({
  now = now, outbox = outbox_head, ending = ending, gated = gated, old = old, unmet = unmet,
  is_done = is_done, next = next_visit,
})
if not next_visit and #outbox_head == 0 then
  redis.call('DEL', META, COUNTS, SEEN, HOLDERS) -- there is nothing of this kind any more
end
return tended
