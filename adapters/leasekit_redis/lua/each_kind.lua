
-- Run `of_kind`, the script above, for each kind; one that fails changes nothing, and the others go on.
-- KEYS: the `meta` key of each kind, from which the names of its other keys are made: only where one server has all
-- keys. ARGV: the argument of each kind. Gives the list of their answers, nil for one that failed.

local answers = {string.char(220, math.floor(#KEYS / 256), #KEYS % 256)} -- the head of a msgpack array
for i, meta in ipairs(KEYS) do
  local keys = {}
  for n, name in ipairs(NAMES) do
    keys[n] = string.sub(meta, 1, -5) .. name
  end
  local is_done, answer = pcall(of_kind, keys, {ARGV[i]})
  answers[i + 1] = is_done and answer or string.char(192) -- nil
end
return table.concat(answers)
