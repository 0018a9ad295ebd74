"""A settable clock of Redis, for processes that have called `install`.

Redis has no option for its clock. These processes send the adapter's scripts with another time: TIME plus the shift in
one key, or the time in another key. leasekit sees no other clock of Redis; without the keys the time is true.
"""

from hashlib import sha1

from leasekit_redis import scripts

KEY = "chaos:clock"  # the key of the shift, in microseconds

STANDS = "chaos:clock:stands"  # the key of a fixed time, in microseconds

_TIME = "redis.call('TIME')"
_SHIFTED = f"""(function()
  local real = {_TIME}
  local us = redis.call('GET', '{STANDS}') or real[1] * 1000000 + real[2] + (redis.call('GET', '{KEY}') or 0)
  return {{math.floor(us / 1000000), tonumber(us) % 1000000}}
end)()"""


def install() -> None:
    for script in vars(scripts).values():
        if isinstance(script, scripts.Script) and _TIME in script.text and KEY not in script.text:
            text = script.text.replace(_TIME, _SHIFTED)
            object.__setattr__(script, "text", text)
            object.__setattr__(script, "sha", sha1(text.encode(), usedforsecurity=False).hexdigest())
