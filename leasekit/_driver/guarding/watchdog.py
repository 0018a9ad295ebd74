"""Watchdog: no handler runs past the end of its lease, because the kernel kills the process if it is not told in time.

The keeper's thread cannot ensure this while C code holds the GIL or the process is stopped; code in the same
interpreter cannot even log then. So the kernel's timer is set ahead of time, and whenever it changes, to the moment at
which the first handler that may still run must have ended. A process whose handlers end in time never notices.

A timer does not kill child processes, cancel operations that were handed to the kernel, or fire in time where the
whole machine stood still. The fence protects against these.
"""

import logging
import math
import os
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from leasekit._core.term import Term
from leasekit._driver.clock import BOOT_CLOCK
from leasekit._driver.guarding.deadlines import DeadlineSet
from leasekit._driver.locks import taken
from leasekit._driver.reporting.ledger import Ledger
from leasekit.errors import ConfigError

if TYPE_CHECKING:
    from leasekit._driver.guarding.kill_timer import KillTimer

logger = logging.getLogger("leasekit")

Mode = Literal["off", "soft", "auto", "required"]

_FAR = 100 * 365 * 86400.0  # seconds, later than any uptime: for a trial of the timer, by any clock
_PRECISION = 0.001


def check_mode(mode: str) -> None:
    """Raise `ConfigError` if `mode` is not one of `Mode`: a misspelled mode would guard nothing, without a message."""
    if mode not in get_args(Mode):
        raise ConfigError(f"watchdog={mode!r} is not a mode: use {', '.join(map(repr, get_args(Mode)))}")


class Alarm(Protocol):
    """A timer that ends all code of a process at one moment: the kernel's, for this process or another."""

    def arm(self, at: float) -> None:
        """End the process at `at`, and at no moment that was set before."""
        ...

    def disarm(self) -> None:
        """Do not end the process."""
        ...

    def close(self) -> None:
        """Free the timer."""
        ...


class Watchdog:
    """The terms whose handlers run, and the kernel's timer, which is armed to the earliest end among them.

    `mode` "auto" guards where the system can, and logs a warning where it cannot; "required" raises `ConfigError`
    there. "off" and "soft" arm nothing ("soft" is done by the keeper). `now` is the clock by which terms are counted.
    `timer` replaces this process's own timer, whatever the mode: handlers run in another process, or a simulated one.

    Any thread may call these methods. In a forked child, which runs no handler of its parent, they do nothing.
    """

    def __init__(self, mode: Mode, *, now: Callable[[], float] = BOOT_CLOCK.now, timer: Alarm | None = None) -> None:
        self._timer = timer or _timer_for(mode, now)
        self.elsewhere = timer is not None  # the timer kills another process
        self._pid = os.getpid()
        # The GIL would do for one call into the kernel, but does not keep the timer in step with `_ends`: between
        # reading the earliest end and arming the timer, another thread may have begun a handler that ends before.
        self._lock = threading.Lock()
        self._ends: DeadlineSet[Term] = DeadlineSet()
        self._armed_at: float | None = None
        self._closed = False
        self._ledger: Ledger | None = None

    def note_in(self, ledger: Ledger) -> None:
        """Record in `ledger` when the timer would kill this process, from the next change on."""
        self._ledger = ledger

    @property
    def guards(self) -> bool:
        """Whether the kernel will kill this process if a handler outlives its lease."""
        return self._timer is not None and self._pid == os.getpid()

    def begins(self, term: Term) -> None:
        """Guard a handler until the trust in its lease ends. Call this before the handler's first line."""
        # The end is read under the lock: it includes a renewal that came before, and a later renewal moves it.
        self._change(lambda: self._ends.add(term, term.trusted_until))

    def renewed(self, terms: Iterable[Term], until: float) -> None:
        """Move the end of `terms` to `until`. Terms whose handler does not run, or whose lease was lost, are ignored.

        Call this without an await after their trust was extended; all other handlers stay guarded as before.
        """
        self._change(lambda: self._ends.move(terms, until))

    def lost(self, term: Term, until: float) -> None:
        """Fix the end of a lost term: the earlier of `until` and the end of its trust. Later renewals are ignored."""
        self._change(lambda: self._ends.fix(term, until))

    def ended(self, term: Term) -> None:
        """Stop guarding a handler that has ended. Call this where its end is seen: the keeper may not get a turn."""
        self._change(lambda: self._ends.remove(term))

    def close(self) -> None:
        """Have the timer freed as soon as no handler runs; running ones stay guarded. Does not wait."""
        self._change(self._mark_closed)

    def _mark_closed(self) -> None:
        self._closed = True

    def _change(self, change: Callable[[], object]) -> None:
        if self.guards:
            for _ in taken(self._lock):
                try:
                    change()
                    self._update_timer()
                finally:
                    self._lock.release()

    def _update_timer(self) -> None:
        assert self._timer is not None  # noqa: S101 - all callers have checked
        at = self._ends.earliest
        if at != self._armed_at:
            self._armed_at = math.nan  # a thread interrupted here leaves "unknown": the next call arms the timer again
            if at is None:
                self._timer.disarm()
            else:
                self._timer.arm(at)
            self._armed_at = at
            if self._ledger is not None:
                self._ledger.arm(at)
        if at is None and self._closed:
            self._timer.close()


def _timer_for(mode: Mode, now: Callable[[], float]) -> "KillTimer | None":
    if mode not in ("auto", "required"):
        return None
    try:
        return _tested_timer(now)
    except OSError as error:
        why = f"the kernel refuses the timer ({error.strerror})"
    except (_Unguarded, ImportError) as error:
        why = str(error)
    if mode == "required":
        raise ConfigError(f"watchdog='required', but this process cannot be guarded: {why}")
    logger.warning("this process is not guarded, a handler that outlives its lease is only told to stop: %s", why)
    return None


class _Unguarded(Exception):
    """The kernel will not kill this process in time; the message says why."""


def _tested_timer(now: Callable[[], float]) -> "KillTimer":
    """Return a timer that was armed once, to compare the kernel's clock with `now`."""
    from leasekit._driver.guarding.kill_timer import KillTimer, obstacle  # loads ctypes, which not every Python has

    if (why := obstacle()) is not None:
        raise _Unguarded(why)
    timer = KillTimer()
    asked_at = now()
    timer.arm(asked_at + _FAR)
    left = timer.remaining() or 0.0
    waited = now() - asked_at
    timer.disarm()
    if not _FAR - waited - _PRECISION <= left <= _FAR + _PRECISION:
        timer.close()
        raise _Unguarded("leases are not counted by the clock of the kernel (CLOCK_BOOTTIME), or not in its seconds")
    return timer


UNGUARDED = Watchdog("off")
