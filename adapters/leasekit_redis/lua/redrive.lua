-- Make dead tasks ready again, and forget their failures and crashes.
-- Takes {ids?, limit}; without `ids` the tasks that have been dead for the longest are redriven. Gives the ids of the
-- tasks that were dead.

local ids = ARGUMENT.ids or redis.call('ZRANGE', DEAD, 0, ARGUMENT.limit - 1)
local redriven = {}
for _, id in ipairs(ids) do
  if score(DEAD, id) then
    place(DEAD, id, false)
    place(ENDED, id, false)
    local s = need(id)
    if s then
      s.failures, s.crashes, s.reason = nil, nil, nil
      become(s, 'enqueued')
      wait_until(id, s, now)
      put(STATE, id, s)
      redriven[#redriven + 1] = id
    end
  end
end
return answer({ids = redriven})
