-- Forget a name that has ended, or been free and not asked for, for `retention` milliseconds: its task with all that is
-- kept of it, its id and its kind, in one step, where one server has all keys. KEYS[28] are the kinds; the parts of the
-- register follow. Takes {name, retention, part}, gives whether the name is forgotten; if not, `maintain` has to look.

outrank_full_memory()
redis.call('ZREMRANGEBYSCORE', WAITING, '-inf', now)
local name, s = ARGUMENT.name, read(STATE, ARGUMENT.name)
local since = score(ENDED, name) or free_since(name)
local is_old = s and not s.after and since and is_over(since, ARGUMENT.retention)
local is_alone = redis.call('ZCARD', ALL) == 1 and redis.call('ZCOUNT', CLAIMED, now, '+inf') == 0
local rest = redis.call('EXISTS', LEASES, DEDUPE, OUTBOX, WAITING, GATED, AWAITED, ENDING, DAMAGED)
if not is_old or not is_alone or rest > 0 then
  return cmsgpack.pack(false)
end
local ids = KEYS[28 + ARGUMENT.part]
if redis.call('HGET', ids, name) == name then
  redis.call('HDEL', ids, name)
end
redis.call('ZREM', KEYS[28], name)
redis.call('DEL', unpack(KEYS, 1, 27))
return cmsgpack.pack(true)
