-- Note which tasks wait for tasks of this kind. One script checks whether the awaited task has ended and leaves the
-- name of the waiting task, so that the end cannot come unnoticed in between. An awaited task that does not exist yet
-- is about to: its id is registered before the task is made.
-- Takes a list of {id, waiting}: the awaited task, and the name of the waiting one. Gives for each the status of the
-- awaited task if it has ended, else false.

local answers = {}
for i, item in ipairs(ARGUMENT) do
  local id, waiting = unpack(item, 1, 2)
  local s = read(STATE, id)
  answers[i] = false
  if s and score(ENDED, id) then
    answers[i] = s.status
  else
    place(AWAITED, id .. '/' .. waiting, 0)
    if s and not s.awaited then
      s.awaited = true
      put(STATE, id, s)
    end
  end
end
return answer(answers)
