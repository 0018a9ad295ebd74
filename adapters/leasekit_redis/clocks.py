"""Bounds of the time in Redis, kept by each client, so that steps of its clock are noticed.

Leases end by the wall clock of Redis, and a script can read no other clock. So a client sends with each request the
latest time that it can be in Redis when the request leaves, computed from an earlier answer and from the client's own
clock, which does not step. If the time in Redis is later, its clock has stepped or the request was slow: a script
cannot tell which. The script then judges leases by the earliest time that it can have been when the request left
(`earliest`), so no lease ends by a time that never passed. It changes nothing else, because a client with slow requests
must not prolong the leases of all clients.

The client can tell once it has the answer: however slow the request was, Redis read its clock before the answer
arrived. If that time is later than it can be at the arrival, the clock has stepped, and every lease gets its whole ttl
from then.

The client keeps not the last answer but the answer that gives the lowest bound, so that steps which are too small to be
noticed add up until they are noticed.

A step ends leases of all kinds, but a script sees the leases of one kind. So a client remembers when it noticed a step,
and says in each request how long ago that was: a kind that it asks about for the first time then has its leases
prolonged too. All kinds of one Redis share one clock; in a cluster each node has its own, so each kind is tracked
apart.

A step back and a step ahead, both while a client was silent, can leave the time within its bounds, yet a lease that was
granted in between seems to have ended. So each kind counts the steps back that its scripts have seen, and a client
sends the count that it heard last: a script that knows another count gives every lease its whole ttl.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from leasekit_redis.lru import LRU

_RATE = 1.001  # factor by which the rates of two clocks may differ
_SLACK = 2000  # milliseconds that the clock may gain, or a request be late, before leases are judged by `earliest`
_GAIN = 1000  # milliseconds beyond the latest possible time from which a step is certain


class Told(NamedTuple):
    """An answer of Redis: its time was `now` at some instant between `asked_at` and `answered_at` of the client."""

    now: int
    asked_at: float
    answered_at: float

    def latest(self, at: float) -> int:
        """Return the latest time that it can be in Redis at a later instant of the client."""
        return self.now + round(1000 * (at - self.asked_at) * _RATE)

    def earliest(self, at: float) -> int:
        """Return the earliest time that it can be in Redis at a later instant of the client."""
        return self.now + round(1000 * (at - self.answered_at) / _RATE)


class Clocks:
    """The clocks of the nodes that hold the kinds; `is_one`: all kinds share one clock.

    `stepped(kind)` is called when an answer shows that the clock of a kind has stepped: its leases must be prolonged.
    """

    def __init__(self, *, is_one: bool, stepped: Callable[[str], None] = lambda kind: None) -> None:
        self._is_one = is_one
        self._stepped = stepped
        self._told: LRU[Told] = LRU()
        self._steps_back: LRU[int] = LRU()  # kind → the number that was heard last
        self._jumped_at: float | None = None  # when a step was noticed last, by the client's own clock

    def known(self, kind: str) -> dict[str, int | None]:
        """Return what a script of a kind must know about the time, in milliseconds.

        `latest` is the latest time that it can be in Redis when the request leaves, plus some slack; `earliest` is the
        earliest. Both are None if no answer of that clock is remembered. `jumped` is how long ago a step of any clock
        was noticed; None: never. `steps_back` is the number of steps back that the kind told last; None: not yet.
        """
        at, told = time.monotonic(), self._told.get(self._clock_name(kind))
        return {
            "latest": None if told is None else told.latest(at) + _SLACK,
            "earliest": None if told is None else told.earliest(at),
            "jumped": None if self._jumped_at is None else int(1000 * (at - self._jumped_at) / _RATE),
            "steps_back": self._steps_back.get(kind),
        }

    def told(self, kind: str, now: int, *, asked_at: float, steps_back: int | None = None) -> None:
        """Record that it was `now` in Redis at some instant since the request left."""
        at, clock = time.monotonic(), self._clock_name(kind)
        known = self._told.get(clock)
        has_stepped = known is not None and now - known.latest(at) > _GAIN
        if steps_back is not None:
            has_stepped |= self._steps_back.get(kind, steps_back) != steps_back
            self._steps_back[kind] = steps_back
        if known is not None and known.latest(asked_at) < now and not has_stepped:
            self._told[clock] = known  # the clock has gained a little, or the request was late
            return
        self._told[clock] = Told(now, asked_at, at)
        if has_stepped:
            self._jumped_at = at
            self._stepped(kind)

    def _clock_name(self, kind: str) -> str:
        return "" if self._is_one else kind
