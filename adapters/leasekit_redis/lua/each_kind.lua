
-- Run `of_kind`, the script above, for each kind; one that fails changes nothing, and the others go on.
-- KEYS: the `meta` key of each kind, from which the names of its other keys are made: only where one server has all
-- keys; then the keys that all kinds share. ARGV: the argument of each kind. Gives the list of their answers, nil for
-- one that failed.

local answers = {string.char(220, math.floor(#ARGV / 256), #ARGV % 256)} -- the head of a msgpack array
for i, argument in ipairs(ARGV) do
  local keys = {}
  for n, name in ipairs(NAMES) do
    keys[n] = string.sub(KEYS[i], 1, -5) .. name
  end
  for n = #ARGV + 1, #KEYS do
    keys[#keys + 1] = KEYS[n]
  end
  local is_done, answer = pcall(of_kind, keys, {argument})
  answers[i + 1] = is_done and answer or string.char(192) -- nil
end
return table.concat(answers)
