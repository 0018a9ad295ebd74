-- Who waits for tasks of this kind. One script looks whether a task has ended and leaves the name of who waits, so that
-- it cannot end in between unnoticed. A task that is not there is about to be: it is registered before it is made.
-- Takes a list of {id, who}, gives for each its status where it has ended, else false.

local answers = {}
for i, one in ipairs(ARGUMENT) do
  local id, who = unpack(one, 1, 2)
  local s = read(STATE, id)
  answers[i] = false
  if s and score(ENDED, id) then
    answers[i] = s.status
  else
    place(AWAITED, id .. '/' .. who, 0)
    if s and not s.awaited then
      s.awaited = true
      put(STATE, id, s)
    end
  end
end
return answer(answers)
