-- Choose ended tasks, the longest ended first; `drop` removes them, and no redrive takes them from here on. Takes {age,
-- dry_run, status?, last_id?, last_at?, ids?}: the least time since their end in milliseconds, and the last task of the
-- page before, or the only tasks to look at. Gives {ids, statuses, unmet, last_id?, last_at?}: the tasks that match, how each has ended, those of them that
-- waited {id, after}, and where the next page begins; the latter is absent on the last page. Damaged tasks are left out.

if ARGUMENT.dry_run then
  refuse_at_replica()
else
  outrank_full_memory()
end

local LOOKED_AT = 100 -- tasks read by one script, because Redis serves no other client meanwhile

local first = 0
if ARGUMENT.last_id then
  local is_there = tonumber(redis.call('ZSCORE', ENDED, ARGUMENT.last_id)) == ARGUMENT.last_at
  -- If it was removed, the tasks that ended in its millisecond are looked at again.
  first = is_there and redis.call('ZRANK', ENDED, ARGUMENT.last_id) + 1
    or redis.call('ZCOUNT', ENDED, '-inf', '(' .. ARGUMENT.last_at)
end
local found = {}
if ARGUMENT.ids then
  for _, id in ipairs(ARGUMENT.ids) do
    local at = redis.call('ZSCORE', ENDED, id)
    if at and is_over(tonumber(at), ARGUMENT.age) then
      found[#found + 1], found[#found + 2] = id, at
    end
  end
else
  found = redis.call('ZRANGE', ENDED, first, first + LOOKED_AT - 1, 'WITHSCORES')
end
local ids, last = {}, nil
for i = 1, #found, 2 do
  if not is_over(tonumber(found[i + 1]), ARGUMENT.age) then
    break
  end
  last = i
  if found[i] ~= '' and not found[i]:find('[^ -.0-~]') then
    ids[#ids + 1] = found[i]
  end
end
preload(STATE, ids)
local matching, statuses, unmet = {}, {}, {}
for _, id in ipairs(ids) do
  local s = read(STATE, id)
  -- A task is kept until the tasks that wait for its end were told.
  if s and (not ARGUMENT.status or s.status == ARGUMENT.status) and not score(ENDING, id) then
    matching[#matching + 1], statuses[#statuses + 1] = id, s.status
    if s.after then
      unmet[#unmet + 1] = {id = id, after = s.after, age = 0}
    end
    if not ARGUMENT.dry_run then
      place(ENDED, id, CHOSEN)
    end
  end
end
local goes_on = last and last + 1 == 2 * LOOKED_AT and not ARGUMENT.ids
local reply = {
  ids = matching, statuses = statuses, unmet = unmet,
  last_id = goes_on and found[last] or nil, last_at = goes_on and tonumber(found[last + 1]) or nil,
}
return ARGUMENT.dry_run and cmsgpack.pack(reply) or answer(reply)
