"""The two clocks of a store, neither of which steps back.

Leases end by *instants*: CLOCK_BOOTTIME, which counts suspended time and has no steps, so that no correction of the
wall clock shortens a lease. Instants are seconds since the epoch, as the wall clock showed it when the process started.
After a start, the ends of leases that an earlier process wrote are set anew, and the ends of runs are shifted: each
transaction leaves an `Anchor`, by which the next process translates the instants of this one.

Tasks are due by *now*, which follows each forward step of the wall clock and no backward step. The two clocks differ
only by what the wall clock has gained since the start; this difference only grows.
"""

import math
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from leasekit.server.store import Anchor

_STALL = 5.0  # seconds between two readings; the consumer causes a reading each second
_STEP = 1.0  # seconds between two readings by which the clocks differ after a step; a slewed clock differs by less
_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # only Linux has CLOCK_BOOTTIME
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # a new id after each start of the machine
_OFFSETS = Path("/proc/self/timens_offsets")  # what the time namespace of this process adds to CLOCK_BOOTTIME


def boottime() -> float:
    """Return the seconds since the machine was started, suspended time included."""
    return time.clock_gettime(_BOOT)


def _boot_id() -> str:
    """Name what the boot clock counts from: a start of the machine, moved by the offsets of a time namespace."""
    try:
        boot_id = _BOOT_ID.read_text()
    except OSError:  # not Linux: each process then counts as a start of the machine
        return uuid.uuid4().hex
    offsets = _OFFSETS.read_text() if _OFFSETS.exists() else ""  # kernels before 5.6 have no time namespaces
    return " ".join((boot_id + offsets).split())


class Moment(NamedTuple):
    """A reading of both clocks of a store."""

    now: float  # the time by which tasks are due, in seconds since the epoch
    instant: float  # the same moment by the clock without steps, by which leases end
    after_gap: bool  # the process did not run for a while before this reading


class StoreClock:
    """The clocks of one store; only its writer calls `read`, any thread may call `peek` and `instant`.

    `clock` replaces the wall clock in tests, `boot` replaces CLOCK_BOOTTIME; without `boot`, `clock` replaces both.
    With a replaced CLOCK_BOOTTIME, no time between two readings is a gap unless `stall` gives the limit in seconds.
    `boot_id` names the start of the machine from which `boot` counts.
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
        self._ahead = 0.0  # of the wall clock, when it was read last
        self.steps = 0  # of the wall clock, in either direction
        self.stalls = 0  # gaps between two readings
        self._read_at = self.instant()

    @property
    def gained(self) -> float:
        """Seconds by which the clock of due times is ahead of the clock of leases. Any thread."""
        return self._gained

    def read(self) -> Moment:
        """Read both clocks, and note forward steps of the wall clock."""
        instant = self.instant()
        before, self._ahead = self._ahead, self._wall() - instant
        self._gained = max(self._gained, self._ahead)
        self.steps += abs(self._ahead - before) > _STEP
        stalled, self._read_at = instant - self._read_at, instant
        is_after_gap = stalled > self._stall
        self.stalls += is_after_gap
        return Moment(instant + self._gained, instant, is_after_gap)

    def not_before(self, at: float) -> Moment:
        """Read both clocks, moved forward to `at` where they are behind: all ends of leases must be set anew."""
        moved = max(at - self.peek(), 0.0)
        self._started_at += moved
        self._ahead -= moved
        self._read_at = self.instant()
        return self.read()

    def anchor(self, instant: float) -> Anchor:
        """Return the anchor by which a later process translates this instant, and all others of this process."""
        return Anchor(self._boot_id, instant - self._started_at, instant)

    def shift(self, anchor: Anchor | None, instant: float) -> float | None:
        """Return the seconds to add to instants of the process that left this anchor; None: unknown.

        The result is exact until the machine restarts or the server comes into another time namespace. After that,
        the time since the anchor does not count: only a wall clock could measure it.
        """
        if anchor is None:
            return None
        boot = instant - self._started_at
        passed = max(boot - anchor.boot, 0.0) if anchor.boot_id == self._boot_id else 0.0
        return instant - (anchor.instant + passed)

    def instant(self) -> float:
        """Return the time by which leases end. Any thread."""
        return self._boot() + self._started_at

    def peek(self) -> float:
        """Return the time by which tasks are due, as of the last step that the writer has noted. Any thread."""
        return self.instant() + self._gained
