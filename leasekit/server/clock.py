"""What time it is for the store: a wall clock that never steps back, and whose steps forward are noticed.

Between two readings the time passes as CLOCK_BOOTTIME does, which counts suspended time and knows no steps. Where the
wall clock says more, it is followed; where it says less, it is not. So one offset that only grows says it all.
"""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Moment", "StoreClock", "boottime"]

_STEP = 1.0  # seconds by which the wall clock may gain at once without being said to have jumped (RELIABILITY A1)
_STALL = 5.0  # seconds between two readings; the consumer has the clock read each second
_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # only Linux has the first


def boottime() -> float:
    """Seconds since the machine was started, suspended time included."""
    return time.clock_gettime(_BOOT)


class Moment(NamedTuple):
    """One reading."""

    now: float  # the store's time, seconds since the epoch
    instant: float  # the same by the clock without steps
    after_gap: bool  # the wall clock has jumped ahead since the last reading, or this process did not run


class StoreClock:
    """The time of one store; only its writer reads it, others may peek.

    A clock that is given is turned by hand: without `boot` it is its own reference, and a long time between two
    readings is no stall, unless `stall` says how long is.
    """

    def __init__(
        self, clock: Callable[[], float] | None, boot: Callable[[], float] | None, *, stall: float | None = None
    ) -> None:
        self._wall = clock or time.time
        self.instant = boot or clock or boottime
        self._stall = (_STALL if self.instant is boottime else math.inf) if stall is None else stall
        self._offset = self._wall() - self.instant()
        self._read_at = self.instant()

    def read(self) -> Moment:
        """What time it is."""
        instant = self.instant()
        gained = self._wall() - instant - self._offset
        stalled = instant - self._read_at
        self._offset += max(gained, 0.0)
        self._read_at = instant
        return Moment(instant + self._offset, instant, gained > _STEP or stalled > self._stall)

    def not_before(self, at: float) -> float:
        """What time it is, `at` or later: so late it was when this store was last written to, by whatever clock."""
        self._offset += max(at - self.peek(), 0.0)
        return self.peek()

    def peek(self) -> float:
        """What time it is, from any thread: a step that the writer has not noticed is not told."""
        return self.instant() + self._offset
