"""What time it is for the store: a wall clock that never steps back, and whose steps forward are noticed.

Between two readings the time passes as CLOCK_BOOTTIME does, which counts suspended time and knows no steps. Where the
wall clock says more, it is followed; where it says less, it is not. So one offset that only grows says it all.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Moment", "StoreClock", "boottime"]

_STEP = 1.0  # seconds by which the wall clock may gain at once without being said to have jumped (RELIABILITY A1)


def boottime() -> float:
    """Seconds since the machine was started, suspended time included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Moment(NamedTuple):
    """One reading."""

    now: float  # the store's time, seconds since the epoch
    instant: float  # the same by the clock without steps
    jumped: bool  # the wall clock has stepped forward since the last reading: no lease may end by that


class StoreClock:
    """The time of one store; only its writer reads it, others may peek."""

    def __init__(self, clock: Callable[[], float] | None, boot: Callable[[], float] | None) -> None:
        self._wall = clock or time.time
        # A clock that was given alone is its own reference: it is turned by hand, and jumps on purpose.
        self.instant = boot or (clock if clock is not None else boottime)
        self._offset = self._wall() - self.instant()

    def read(self) -> Moment:
        """What time it is."""
        instant = self.instant()
        gained = self._wall() - instant - self._offset
        self._offset += max(gained, 0.0)
        return Moment(instant + self._offset, instant, gained > _STEP)

    def peek(self) -> float:
        """What time it is, from any thread: a step that the writer has not noticed is not told."""
        return self.instant() + self._offset
