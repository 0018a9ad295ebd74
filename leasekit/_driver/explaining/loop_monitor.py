"""Loop monitor: record whether the driver's event loop was held up, and by what.

An event loop alternates between work and waiting. Work that takes too long is the fault of a callback: a hook or an
adapter blocks. A wait that ends too late is not the loop's fault: the process was stopped, or other code of the process
held the interpreter. Which of the two shows in the processor time that the process used meanwhile.
"""

import selectors
import time
from collections.abc import Callable

from leasekit._driver.clock import BOOT_CLOCK, Clock
from leasekit._driver.explaining.recorder import HeldUp, Reading

_LONG = 0.25  # seconds
_LOOK = 1.0  # seconds of one wait at most: a selector whose descriptor was closed meanwhile is not woken
_SHARE = 0.2  # of a processor: a stopped process uses none, and a running one may have to share one


class DescriptorsClosed(BaseException):
    """Other code of this process has closed the loop's descriptors: the loop can neither wait nor be woken any more."""


class LoopMonitor(selectors.DefaultSelector):
    """The selector of the driver's loop, which records when that loop was held up."""

    def __init__(
        self, *, now: Callable[[], float] = BOOT_CLOCK.now, used: Callable[[], float] = time.process_time
    ) -> None:
        super().__init__()
        self._now = now
        self._used = used
        self._last: HeldUp | None = None
        self._works_since = now()
        self._wait: tuple[float, float] | None = None  # until when it waits, and the processor time used before

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait as `DefaultSelector.select` does, for `_LOOK` at most, and record work or waits that took too long.

        Raises `DescriptorsClosed`.
        """
        now = self._now()
        if now - self._works_since > _LONG:
            self._last = HeldUp("blocked", self._works_since, now)
        if timeout is None or timeout <= 0:
            ready = self._select(timeout)
            self._works_since = self._now()
            return ready
        self._wait = now + timeout, self._used()
        ready = self._select(timeout)
        self._works_since = now = self._now()
        self._last, self._wait = self.held_up(now), None
        return ready

    def _select(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        try:
            return super().select(_LOOK if timeout is None else min(timeout, _LOOK))
        except OSError as error:
            raise DescriptorsClosed from error

    def held_up(self, now: float) -> HeldUp | None:
        """Return when and why the loop was held up last, or still is at `now`. Any thread may call this."""
        if (wait := self._wait) is not None:
            until, used = wait
            if now - until > _LONG:
                is_starved = self._used() - used > _SHARE * (now - until)
                return HeldUp("starved" if is_starved else "stopped", until, now)
        elif now - self._works_since > _LONG:
            return HeldUp("blocked", self._works_since, now)
        return self._last

    @property
    def turn_age(self) -> float:
        """Seconds since the loop had its last turn; an idle loop has one in each `_LOOK`. Any thread."""
        return self._now() - self._works_since


def take_reading(clock: Clock, loop_monitor: LoopMonitor | None) -> Reading:
    """Read all clocks. A clock that a test sets knows neither suspended time nor steps of the wall clock."""
    now = clock.now()
    if clock is not BOOT_CLOCK:
        return Reading(now, now, now)
    return Reading(now, time.monotonic(), time.time(), None if loop_monitor is None else loop_monitor.held_up(now))
