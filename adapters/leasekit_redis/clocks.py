"""What time it should be for Redis, so that a jump of its clock is noticed (RELIABILITY A1).

Leases end by Redis's wall clock, and a script sees nothing but that. So a client says with its requests what time it
can be there at the latest, by what it was last told and by its own clock, which does not jump. Where it is later, a
script gives every lease its whole ttl from then: none is to end by a time that never passed.
"""

import time

from leasekit_redis.recent import Recent

__all__ = ["Clocks"]

_RATE = 1.001  # by which two clocks may differ
_SLACK = 2.0  # seconds by which the clock may gain, or a request be late, before it is said to have jumped


class Clocks:
    """The clocks of the nodes that keep some kinds."""

    def __init__(self) -> None:
        self._told: Recent[tuple[int, float]] = Recent()

    def latest(self, kind: str) -> int | None:
        """What time it can be for a kind at the latest, in milliseconds; None: it never told, or long ago."""
        if kind not in self._told:
            return None
        now, asked_at = self._told[kind]
        return now + round(1000 * ((time.monotonic() - asked_at) * _RATE + _SLACK))

    def told(self, kind: str, now: int, *, asked_at: float) -> None:
        """It was `now` there, at some moment after the request left."""
        self._told[kind] = (now, asked_at)
