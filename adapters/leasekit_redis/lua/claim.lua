-- Claim tasks that are due: the most urgent first, then the longest due, then in the order in which they came.
-- Takes {kind, worker, claim_id, limit, seed, waited, waiter?, wait, recall, [clock]}, gives {now,
-- waited, tasks, next?, is_repeat?}: `next` is the milliseconds until there may be a task. The limit 0 ends the claim:
-- later requests with its `claim_id` are granted nothing. The answer to limit 0 has no values of users, because its
-- tasks are released.

local ANSWER = 8 * 1024 * 1024 -- bytes of users' values in one answer, roughly: at least one task fits
local OVER = 24 * 3600 * 1000 -- milliseconds for which an ended claim is kept: no request is under way for so long

local name = ARGUMENT.worker .. '/' .. ARGUMENT.claim_id
local tasks, room = {}, ANSWER

-- Add a task to the answer, and subtract the length of its values from the room that is left.
local function show(id, s, token)
  local stored, progress = '{"payload":null}', nil
  if ARGUMENT.limit > 0 then
    stored, progress = redis.call('HGET', TASK, id), redis.call('HGET', PROGRESS, id)
  end
  room = room - #stored - (progress and #progress or 0)
  local ttl = s.claim_ttl or 300000
  tasks[#tasks + 1] = {id, token, ttl, s.fence, s.attempt, s.priority or 2, stored, progress or 'null', s.max_runtime}
end

-- Answer a claim that was answered before: the leases of it that are still live, with the same tokens. A lease that a
-- heartbeat would renew counts as live too, since no holder could send one while Redis was away, or its clock jumped.
local function again(memory)
  for i = 1, #memory.grants, 2 do
    local id, token = memory.grants[i], memory.grants[i + 1]
    local s, lease = read(STATE, id), read(WORKING, id)
    local ends_at = score(LEASES, id)
    local is_whole = s and lease and ends_at and redis.call('HEXISTS', TASK, id) == 1
    if is_whole and lease.token == token and not has_ended(id, lease, ends_at) then
      show(id, s, token)
    end
  end
  return answer({now = now, waited = memory.waited, tasks = tasks, is_repeat = true})
end

local memory = read(CLAIMS, name)
if ARGUMENT.limit == 0 then
  memory = memory or {waited = 0, grants = {}}
  put(CLAIMS, name, memory)
  place(CLAIMED, name, now + OVER)
end
if memory then
  outrank_full_memory()
  notice_jump()
  return again(memory)
elseif ARGUMENT.recall then
  return cmsgpack.pack({now = now, waited = 0, tasks = tasks})
end

outrank_full_memory()
reap()
seen(ARGUMENT.worker)
forget(10) -- more than one script adds, so that old claims do not pile up

local grants, longest = {}, 0

-- The kind is part of the token, so that clients find the task's keys without a look-up; a long kind does not fit, and
-- is looked up.
local function new_token(id, fence)
  local chance = string.sub(redis.sha1hex(ARGUMENT.seed .. '/' .. id .. '/' .. fence), 1, 32)
  local token = chance .. '-' .. fence .. '.' .. ARGUMENT.kind
  return #token <= 128 and token or chance .. '-' .. fence
end

local function grant(id, s)
  s.fence, s.attempt = s.fence + 1, s.attempt + 1
  s.worker, s.token, s.progress_seq = ARGUMENT.worker, nil, nil
  s.claimed_at, s.started_at, s.heartbeat_at = now, nil, nil
  become(s, 'claimed')
  local token = new_token(id, s.fence)
  local claim_ttl, ttl = s.claim_ttl or 300000, s.beat_ttl or 300000
  local lease = {token = token, worker = s.worker, ttl = ttl, max_runtime = s.max_runtime}
  lease.longest = claim_ttl > ttl and claim_ttl or nil -- the longest ttl that the holder may rely on
  put(STATE, id, s)
  put(WORKING, id, lease)
  place(LEASES, id, now + claim_ttl)
  longest = math.max(longest, claim_ttl)
  grants[#grants + 1], grants[#grants + 2] = id, token
  show(id, s, token)
end

for _, waiting_lane in ipairs(LANES) do
  local left = ARGUMENT.limit - #tasks
  local due = left > 0 and redis.call('ZRANGEBYSCORE', waiting_lane, '-inf', now, 'LIMIT', 0, left) or {}
  local ids = {}
  for i, member in ipairs(due) do
    ids[i] = string.sub(member, 17)
  end
  preload(STATE, ids)
  for i, id in ipairs(ids) do
    if room > 0 then
      local s = need(id)
      if s and redis.call('HEXISTS', TASK, id) == 1 then
        grant(id, s)
      elseif s then
        broken[id] = 'task: is missing'
      end
      place(waiting_lane, due[i], false)
    end
  end
end

local me = ARGUMENT.waiter
if #tasks > 0 then
  put(CLAIMS, name, {waited = ARGUMENT.waited, grants = grants})
  place(CLAIMED, name, now + 2 * longest)
  hold(ARGUMENT.worker, #tasks)
  flush()
  if me then
    redis.call('ZREM', WAITING, me)
  end
  readied = 0
  wake_for_all_due()
  return answer({now = now, waited = ARGUMENT.waited, tasks = tasks})
end

-- Registered in the same script that has found nothing, so that a task that comes from now on finds this claim waiting.
if me then
  if ARGUMENT.wait > 0 then
    redis.call('ZADD', WAITING, now + ARGUMENT.wait, me)
  else
    redis.call('ZREM', WAITING, me)
  end
end

local soonest
for _, key in ipairs({LEASES, unpack(LANES)}) do
  local at = tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2])
  if is_number(at) and (not soonest or at < soonest) then
    soonest = at
  end
end
return answer({now = now, waited = 0, tasks = tasks, next = soonest and math.max(0, soonest - now)})
