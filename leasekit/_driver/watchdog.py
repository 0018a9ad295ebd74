"""No body runs past the end of its lease: if it is not told so in time, the kernel kills the process.

The keeper's thread cannot see to that while C code holds the GIL or the process is stopped; and what sits in the same
interpreter cannot even log. So the kernel is told, ahead of time and whenever it changes, when the first
of all bodies that may still run must have ended. Whoever ends in time never notices.

What a timer cannot do: it kills no child process, calls back nothing that was handed to the kernel, and is late where
the machine stood still as a whole. For that there is the fence.
"""

import logging
import math
import os
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from leasekit._core.term import Term
from leasekit._driver.clock import BOOT_CLOCK
from leasekit._driver.deadlines import DeadlineSet
from leasekit.errors import ConfigError

if TYPE_CHECKING:
    from leasekit._driver.kill_timer import KillTimer

__all__ = ["UNGUARDED", "Mode", "Watchdog", "check_mode"]

logger = logging.getLogger("leasekit")

Mode = Literal["off", "soft", "auto", "required"]

_FAR = 100 * 365 * 86400.0  # later than any uptime: to try a timer with, by whatever clock
_PRECISION = 0.001


def check_mode(mode: str) -> None:
    """Raise `ConfigError` where `mode` is none of `Mode`: it would guard nothing, without a word."""
    if mode not in get_args(Mode):
        raise ConfigError(f"watchdog={mode!r} is no mode of it: use {', '.join(map(repr, get_args(Mode)))}")


class Alarm(Protocol):
    """What ends all code of a process at one moment: the kernel's timer, of this process or of another."""

    def arm(self, at: float) -> None:
        """At this moment, and at no other that was said before."""
        ...

    def disarm(self) -> None:
        """At no moment."""
        ...

    def close(self) -> None:
        """It is not needed any more."""
        ...


class Watchdog:
    """The terms whose bodies run, and the kernel's timer that is armed to the earliest end among them.

    `mode` "auto" guards where it can, and says in the log where it cannot; "required" raises `ConfigError` there. "off"
    and "soft" arm nothing: what is soft is the keeper's business. `now` is the clock that terms are counted by. `timer`
    takes the place of this process's own, whatever the mode: bodies run in another process, or in a simulated one.

    From any thread, and not in a forked child, which runs no body of its parent: there all methods do nothing.
    """

    def __init__(self, mode: Mode, *, now: Callable[[], float] = BOOT_CLOCK.now, timer: Alarm | None = None) -> None:
        self._timer = timer or _timer(mode, now)
        self.elsewhere = timer is not None  # not this process is killed
        self._pid = os.getpid()
        # The GIL would do for one call into the kernel, but not to keep it in step with `_ends`: between a look at the
        # earliest end and arming to it another thread may have begun a body that ends before.
        self._lock = threading.Lock()
        self._ends: DeadlineSet[Term] = DeadlineSet()
        self._armed_at: float | None = None
        self._closed = False

    @property
    def guards(self) -> bool:
        """True where the kernel will kill this process if need be."""
        return self._timer is not None and self._pid == os.getpid()

    def begins(self, term: Term) -> None:
        """Its body is about to run, and must have ended when its trust ends. To be called before its first line."""
        if self.guards:
            with self._lock:
                # Looked up in here: a renewal that comes before is in it, one that comes after moves it.
                self._ends.add(term, term.trusted_until)
                self._arm()

    def renewed(self, terms: Iterable[Term], until: float) -> None:
        """These are trusted until then, all of them. Those whose bodies do not run, or were lost, are left as they are.

        In the same breath in which their new trust is accepted; the bodies of all others are guarded as before.
        """
        if self.guards:
            with self._lock:
                self._ends.move(terms, until)
                self._arm()

    def lost(self, term: Term, until: float) -> None:
        """Its body must have ended by then, or when its trust ends if that is earlier; nothing renews it any more."""
        if self.guards:
            with self._lock:
                self._ends.fix(term, until)
                self._arm()

    def ended(self, term: Term) -> None:
        """Nothing of its body can run any more. To be called by whoever saw it end: the keeper may not get a turn."""
        if self.guards:
            with self._lock:
                self._ends.remove(term)
                self._arm()

    def close(self) -> None:
        """Give back the timer, once no body runs any more."""
        if self.guards:
            with self._lock:
                self._closed = True
                self._arm()

    def _arm(self) -> None:
        assert self._timer is not None  # noqa: S101 - all callers have looked
        at = self._ends.earliest
        if at != self._armed_at:
            self._armed_at = math.nan  # whoever is interrupted here does not know: the next one arms again
            if at is None:
                self._timer.disarm()
            else:
                self._timer.arm(at)
            self._armed_at = at
        if at is None and self._closed:
            self._timer.close()


def _timer(mode: Mode, now: Callable[[], float]) -> "KillTimer | None":
    if mode not in ("auto", "required"):
        return None
    try:
        return _tried(now)
    except OSError as error:
        why = f"the kernel refuses the timer ({error.strerror})"
    except (_Unguarded, ImportError) as error:
        why = str(error)
    if mode == "required":
        raise ConfigError(f"watchdog='required', but this process cannot be guarded: {why}")
    logger.warning("this process is not guarded, a body that outlives its lease is only told to stop: %s", why)
    return None


class _Unguarded(Exception):
    """Why the kernel will not kill this process in time."""


def _tried(now: Callable[[], float]) -> "KillTimer":
    """A timer that has been armed, and then showed what the kernel makes of our clock."""
    from leasekit._driver.kill_timer import KillTimer, obstacle  # loads ctypes, which not every Python has

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
        raise _Unguarded("leases are not counted by the clock of the kernel (CLOCK_BOOTTIME), or not by its seconds")
    return timer


UNGUARDED = Watchdog("off")
