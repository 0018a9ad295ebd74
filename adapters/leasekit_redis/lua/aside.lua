-- Set aside records that a client could not read. Takes {tasks: list of {id, token, damage}, successors: list of {text,
-- damage}}. A task is set aside only if `token` is that of its lease, which was granted to this client. Gives nothing.

outrank_full_memory()
for _, item in ipairs(ARGUMENT.tasks) do
  local id, token, damage = unpack(item, 1, 3)
  local lease = read(WORKING, id)
  if lease and lease.token == token then
    broken[id] = damage
  end
end
for _, item in ipairs(ARGUMENT.successors) do
  set_successor_aside(item[1], item[2])
end
return answer(false)
