-- Set aside what a client could not read. Takes {tasks: list of {id, token, damage}, successors: list of {text, damage}}:
-- a task if the token is that of its lease, which its holder never heard of. Gives nothing.

outrank_full_memory()
for _, one in ipairs(ARGUMENT.tasks) do
  local id, token, damage = unpack(one, 1, 3)
  local lease = read(WORKING, id)
  if lease and lease.token == token then
    broken[id] = damage
  end
end
for _, one in ipairs(ARGUMENT.successors) do
  set_successor_aside(one[1], one[2])
end
return answer(false)
