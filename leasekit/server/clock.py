"""What time it is for the store, by two clocks that never step back.

Leases end by *instants*: CLOCK_BOOTTIME, which counts suspended time and knows no steps, so that no correction of the
wall clock shortens a lease. Instants are seconds since the epoch, as the wall clock had it when the process started.
After a start, ends of leases that an earlier process wrote are re-based, and ends of runs are shifted: each transaction
leaves an `Anchor`, which tells the next process what the instants of this one mean.

Tasks are due by *now*, which follows every step forward of the wall clock and no step back. So all that the two differ
by is what the wall clock has gained since the start, which only grows.
"""

import math
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from leasekit.server.store import Anchor

__all__ = ["Moment", "StoreClock", "boottime"]

_STALL = 5.0  # seconds between two readings; the consumer has the clock read each second
_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # only Linux has the first
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # another one after each start of the machine


def boottime() -> float:
    """Seconds since the machine was started, suspended time included."""
    return time.clock_gettime(_BOOT)


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # not Linux: each process then counts as a start of the machine
        return uuid.uuid4().hex


class Moment(NamedTuple):
    """One reading."""

    now: float  # the store's time, seconds since the epoch
    instant: float  # the same by the clock without steps, that of leases
    after_gap: bool  # this process did not run for a while


class StoreClock:
    """The time of one store; only its writer reads it, others may peek.

    A clock that is given is turned by hand: without `boot` it is its own reference, and a long time between two
    readings is no stall, unless `stall` says how long is. `boot_id` names the start of the machine since which `boot`
    counts.
    """

    def __init__(
        self,
        clock: Callable[[], float] | None,
        boot: Callable[[], float] | None,
        *,
        boot_id: str = "by hand",
        stall: float | None = None,
    ) -> None:
        self._wall = clock or time.time
        self._boot = boot or clock or boottime
        self._boot_id = _boot_id() if self._boot is boottime else boot_id
        self._stall = (_STALL if self._boot is boottime else math.inf) if stall is None else stall
        self._started_at = self._wall() - self._boot()  # when the clock without steps showed zero
        self._gained = 0.0  # by the wall clock, since then
        self._read_at = self.instant()

    def read(self) -> Moment:
        """What time it is."""
        instant = self.instant()
        self._gained = max(self._gained, self._wall() - instant)
        stalled, self._read_at = instant - self._read_at, instant
        return Moment(instant + self._gained, instant, stalled > self._stall)

    def not_before(self, at: float) -> Moment:
        """What time it is, `at` or later: so late it was when this store was last written to, by whatever clock.

        This is for a time in which no end of a lease is relied on: instants are moved too.
        """
        self._started_at += max(at - self.peek(), 0.0)
        self._read_at = self.instant()
        return self.read()

    def anchor(self, instant: float) -> Anchor:
        """What a later process needs to understand this instant, and others of this process."""
        return Anchor(self._boot_id, instant - self._started_at, instant)

    def shift(self, anchor: Anchor | None, instant: float) -> float | None:
        """Seconds to add to instants of the process that left this anchor; None: unknown.

        Exact as long as the machine has not been started anew. After that, the time since the anchor does not count:
        only a wall clock could tell it.
        """
        if anchor is None:
            return None
        boot = instant - self._started_at
        passed = max(boot - anchor.boot, 0.0) if anchor.boot_id == self._boot_id else 0.0
        return instant - (anchor.instant + passed)

    def instant(self) -> float:
        """The time by which leases end, from any thread."""
        return self._boot() + self._started_at

    def peek(self) -> float:
        """What time it is, from any thread: a step that the writer has not noticed is not told."""
        return self.instant() + self._gained
