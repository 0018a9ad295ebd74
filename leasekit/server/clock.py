"""The two clocks of a store, neither of which steps back: those of this process, or those of a shared database.

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
from typing import NamedTuple, Protocol, cast

from leasekit.config import DRIFT
from leasekit.server.store import Anchor, Reading, SharedTx, Tx

ALIVE = 10.0
"""Seconds after a sign of a node during which it is alive."""
_OUTAGE = 10.0  # seconds without a successful write after which leases are restarted: holders could not renew them
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
    after_gap: bool  # nothing was written for a while before this reading: holders could not renew their leases


class Clock(Protocol):
    """The clocks of one store; only its writer calls `read`, `begin`, `succeeded` and `failed`."""

    steps: int
    """The steps of the wall clock, in either direction."""
    stalls: int
    """The times in which this process did not run."""
    has_company: bool = False
    """Whether other nodes have the store open."""

    @property
    def gained(self) -> float:
        """Seconds by which the clock of due times is ahead of the clock of leases. Any thread."""
        ...

    def instant(self) -> float:
        """Return the time by which leases end. Any thread."""
        ...

    def peek(self) -> float:
        """Return the time by which tasks are due, as of the last step that the writer has noted. Any thread."""
        ...

    def read(self) -> Moment:
        """Read the clocks before a transaction."""
        ...

    def begin(self, tx: Tx, moment: Moment) -> tuple[Moment, float | None]:
        """Return the moment of a transaction that has begun, given what was read before.

        Also return what a gap has added to the instants in the store; None: unknown.
        """
        ...

    def succeeded(self) -> None:
        """Note that the transaction has ended well. Until then, a gap is noted in each transaction."""
        ...

    def failed(self, moment: Moment) -> None:
        """Note that the store failed in the transaction before which this moment was read."""
        ...


class StoreClock(Clock):
    """The clocks of this process, for a store that has one writer.

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
        self._is_after_gap = True
        self._failing_since = math.inf

    @property
    def gained(self) -> float:
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

    def begin(self, tx: Tx, moment: Moment) -> tuple[Moment, float | None]:
        # Kept until a transaction succeeds: one that fails is undone, and its restart of leases with it.
        self._is_after_gap |= moment.after_gap or moment.instant - self._failing_since > _OUTAGE
        shift: float | None = None
        # The wall clock may have stepped back unnoticed: due tasks must not wait until it has caught up.
        if self._is_after_gap:
            moment = self.not_before(tx.latest_time())
            shift = self.shift(tx.anchor(), moment.instant)
        tx.set_anchor(self.anchor(moment.instant))
        return Moment(moment.now, moment.instant, self._is_after_gap), shift

    def succeeded(self) -> None:
        self._is_after_gap, self._failing_since = False, math.inf

    def failed(self, moment: Moment) -> None:
        self._failing_since = min(self._failing_since, moment.instant)

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
        return self._boot() + self._started_at

    def peek(self) -> float:
        return self.instant() + self._gained


_NOISE = 0.1  # seconds; two readings of boot clocks by different processes say no more exactly what a clock gained
_BACK = 2.0  # seconds before the last sign of a node; a clock that shows them has stepped back
_SIGN_EVERY = 1.0  # seconds between two signs of this node
_FORGET_EVERY = 60.0
_FORGET_AFTER = 600.0  # seconds without a sign after which a node is forgotten


class DatabaseClock(Clock):
    """The clocks of a database that several nodes share: its wall clock, and what the nodes know of its steps.

    Leases end by the database's clock less a correction, which is kept in the database. A forward step would end
    leases early: a node that sees the database gain more than its own boot clock adds the step to the correction. It
    only proves a step beyond the time that a reading takes, so that a slow network hides small steps, but no sum of
    them. A backward step lets leases last longer; it is corrected once the clock is behind the signs of the nodes.

    Leases are restarted if no node has been alive for a while: not when one of several nodes starts, stalls or
    cannot reach the database. The time until then does not count, unless a boot clock has measured it.

    With a replaced boot clock, no time between two readings is a gap unless `stall` gives the limit in seconds.
    """

    def __init__(
        self, boot: Callable[[], float] = boottime, *, boot_id: str = "by hand", stall: float | None = None
    ) -> None:
        self._boot = boot
        self._boot_id = _boot_id() if boot is boottime else boot_id
        self._stall = (_OUTAGE if boot is boottime else math.inf) if stall is None else stall
        self._offset = time.time() - boot()  # from the boot clock to the clock of leases
        self._gained = 0.0
        self._bounds: tuple[float, float, float] | None = None  # of the offset, and when they were read
        self._has_begun = False
        self._signed_at = self._signing_at = -math.inf
        self._forgot_at = -math.inf
        self.steps = 0
        self.stalls = 0

    @property
    def gained(self) -> float:
        return self._gained

    def instant(self) -> float:
        return self._boot() + self._offset

    def peek(self) -> float:
        return self.instant() + self._gained

    def read(self) -> Moment:
        return Moment(self.peek(), self.instant(), after_gap=False)

    def begin(self, tx: Tx, moment: Moment) -> tuple[Moment, float | None]:
        shared = cast("SharedTx", tx)
        reading = shared.reading
        step, is_after_gap = self._judge(reading) if self._has_begun else self._judge_start(reading)
        gained = max(reading.gained, reading.correction + step)
        if step:
            shared.correct_clock(reading.correction + step, gained)
            self.steps += 1
        instant = reading.wall - reading.correction - step
        self._remember(reading, instant)
        self._gained = gained
        self.has_company = reading.others_seen is not None and instant - reading.others_seen < ALIVE
        # The earliest that this may have been read: a claim must not seem to have come before it did, because its
        # client would trust the lease by as much too long.
        self._offset = instant - reading.before
        if instant - self._signed_at >= _SIGN_EVERY or is_after_gap:
            self._sign_in(shared, instant)
        return Moment(instant + gained, instant, is_after_gap), 0.0

    def succeeded(self) -> None:
        self._has_begun = True
        self._signed_at = self._signing_at

    def failed(self, moment: Moment) -> None:
        """Do nothing: the signs of the nodes in the database show how long nobody could write."""

    def _sign_in(self, tx: SharedTx, instant: float) -> None:
        tx.sign_in(Anchor(self._boot_id, tx.reading.after, instant))
        self._signing_at = instant
        if instant - self._forgot_at > _FORGET_EVERY:
            tx.forget_nodes(instant - _FORGET_AFTER)
            self._forgot_at = instant

    def _judge(self, reading: Reading) -> tuple[float, bool]:
        """Return the step of the database's clock since the last reading, and whether no node was alive."""
        instant = reading.wall - reading.correction
        least, most, at = self._bounds or (-math.inf, math.inf, reading.after)
        gain = instant - reading.after - most
        step = gain if gain > DRIFT * (reading.after - at) else 0.0
        last = -math.inf if reading.last is None else reading.last.instant
        if instant < last - _BACK:
            step = instant - max(last, least + reading.before)
        return step, instant - step - last > self._stall

    def _judge_start(self, reading: Reading) -> tuple[float, bool]:
        """Return by what the database's clock differs from the last sign, and whether no other node is alive."""
        instant, last = reading.wall - reading.correction, reading.last
        others_seen = -math.inf if reading.others_seen is None else reading.others_seen
        if last is None:
            return 0.0, True
        if last.boot_id == self._boot_id:
            # A late answer proves no step: taken for one, it would end leases early by as much.
            least, most = (max(boot - last.boot, 0.0) for boot in (reading.before, reading.after))
            passed = instant - last.instant
            step = passed - min(max(passed, least), most)
            step = step if abs(step) > _NOISE else 0.0
            return step, instant - step - others_seen > _OUTAGE
        is_alone = instant - others_seen > _OUTAGE
        # Nodes that are alive sign more often: more than that may be a step that none of them has seen yet.
        is_step = is_alone or abs(instant - last.instant) > _BACK
        return (instant - last.instant if is_step else 0.0), is_alone

    def _remember(self, reading: Reading, instant: float) -> None:
        least, most = instant - reading.after, instant - reading.before
        if self._bounds is not None:
            slack = DRIFT * (reading.after - self._bounds[2])
            if self._bounds[0] - slack <= most and least <= self._bounds[1] + slack:  # no backward step
                least, most = max(least, self._bounds[0] - slack), min(most, self._bounds[1] + slack)
        self._bounds = least, most, reading.after
