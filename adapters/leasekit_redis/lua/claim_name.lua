-- Make the task of a name unless there is one, and claim it: what register, schedule and claim do, in one step, where
-- one server has all keys. KEYS[28] are the kinds, KEYS[29] is the id's part of the register. Takes what `schedule` and
-- `claim` take, and `soon`: the milliseconds until the kind is due for maintenance. Gives {what `schedule` gives, what
-- `claim` gives}, or nothing if the id belongs to another kind, or tasks wait for it that are yet to be told.

local KINDS, IDS = unpack(KEYS, 28, 29)
local owner = redis.call('HGET', IDS, ARGUMENT.kind)
if owner and owner ~= ARGUMENT.kind then
  return false
elseif not owner then
  put(IDS, ARGUMENT.kind, ARGUMENT.kind)
elseif read(STATE, ARGUMENT.kind) then
  outrank_full_memory() -- nothing new is made
end
local due = score(KINDS, ARGUMENT.kind)
if not due or due > now + ARGUMENT.soon then
  place(KINDS, ARGUMENT.kind, now + ARGUMENT.soon)
end
local scheduled = schedule()
if type(scheduled) ~= 'string' then -- it was refused
  return scheduled
end
return '\146' .. scheduled .. claim() -- the head of a msgpack array of two
