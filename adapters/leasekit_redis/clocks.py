"""What time it should be for Redis, so that steps of its clock are noticed.

Leases end by Redis's wall clock, and a script sees nothing but that. So a client says with its requests what time it
can be there at the latest, by what it was told and by its own clock, which does not step. Where it is later, a
script gives every lease its whole ttl from then: none must end by a time that never passed.

What counts is not the last that was told but that by which it is earliest now: steps that are too small to be noticed
add up until they are.

A step ends leases of all kinds, and a script sees those of one. So a client remembers when it noticed a step, and says
with each request how long ago that was: a kind that it asks about for the first time has its leases prolonged as well.
All kinds of one Redis go by one clock; the nodes of a cluster have each their own, so there each kind has.
"""

import time

from leasekit_redis.recent import Recent

__all__ = ["Clocks"]

_RATE = 1.001  # by which two clocks may differ
_SLACK = 2000  # milliseconds by which the clock may gain, or a request be late, before it is said to have jumped
_GAIN = 1000  # milliseconds by which the clock has stepped for certain, however late the request was


class Clocks:
    """The clocks of the nodes that keep some kinds; `is_one`: one clock is for all kinds."""

    def __init__(self, *, is_one: bool) -> None:
        self._is_one = is_one
        self._told: Recent[tuple[int, float]] = Recent()
        self._jumped_at: float | None = None  # when a step was noticed last, by the client's own clock

    def known(self, kind: str) -> dict[str, int | None]:
        """What a script of a kind is to be told of the time, in milliseconds.

        `latest` is what time it can be there at the latest; None: the clock of that kind never told, or long ago.
        `jumped` is how long ago a step was noticed, of whichever clock; None: never.
        """
        at, clock = time.monotonic(), self._clock(kind)
        return {
            "latest": self._reckoned(clock, at) + _SLACK if clock in self._told else None,
            "jumped": None if self._jumped_at is None else int(1000 * (at - self._jumped_at) / _RATE),
        }

    def told(self, kind: str, now: int, *, asked_at: float) -> None:
        """It was `now` there, at some moment since the request left; a script has looked whether that is too late."""
        at, clock = time.monotonic(), self._clock(kind)
        if clock in self._told:
            has_jumped = now - self._reckoned(clock, at) > _GAIN
            if has_jumped:
                self._jumped_at = at
            elif now > self._reckoned(clock, asked_at):  # the clock has gained a little, or the request was late
                now, asked_at = self._told[clock]
        self._told[clock] = now, asked_at

    def _clock(self, kind: str) -> str:
        return "" if self._is_one else kind

    def _reckoned(self, clock: str, at: float) -> int:
        now, asked_at = self._told[clock]
        return now + round(1000 * (at - asked_at) * _RATE)
