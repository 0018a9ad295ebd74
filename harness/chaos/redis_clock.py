"""A clock of Redis that can be set: for processes that send the adapter's scripts through `install`.

No option of Redis moves its clock. So these processes send the same scripts, in which the time is TIME plus what one
key says, or what another says alone: leasekit sees no other clock of Redis. Without the keys the time is as it is.
"""

from hashlib import sha1

from leasekit_redis import scripts

__all__ = ["KEY", "STANDS", "install"]

KEY = "chaos:clock"
"""By how many microseconds the clock is off."""

STANDS = "chaos:clock:stands"
"""What the clock shows, in microseconds, until somebody sets it again."""

_TIME = "redis.call('TIME')"
_SHIFTED = f"""(function()
  local real = {_TIME}
  local us = redis.call('GET', '{STANDS}') or real[1] * 1000000 + real[2] + (redis.call('GET', '{KEY}') or 0)
  return {{math.floor(us / 1000000), tonumber(us) % 1000000}}
end)()"""


def install() -> None:
    """Have the scripts of this process see that clock."""
    for script in vars(scripts).values():
        if isinstance(script, scripts.Script) and _TIME in script.text and KEY not in script.text:
            text = script.text.replace(_TIME, _SHIFTED)
            object.__setattr__(script, "text", text)
            object.__setattr__(script, "sha", sha1(text.encode(), usedforsecurity=False).hexdigest())
