"""The driver's loop, watched: whether it was held up, and by what.

A loop works, and waits for what comes next. Work that does not end is a callback's fault: a hook or an adapter blocks.
A wait that ends too late is not the loop's: the process was stopped, or something else in it held the interpreter,
which shows in the processor's time that it has used meanwhile.
"""

import selectors
import time
from collections.abc import Callable

from leasekit._driver.clock import BOOT_CLOCK, Clock
from leasekit._driver.recorder import HeldUp, Reading

__all__ = ["LoopMonitor", "take_reading"]

_LONG = 0.25  # seconds
_SHARE = 0.2  # of a processor: who is stopped uses none of it, and who is not may have to share one


class LoopMonitor(selectors.DefaultSelector):
    """What the driver's loop waits with. It notes when that loop was held up."""

    def __init__(
        self, *, now: Callable[[], float] = BOOT_CLOCK.now, used: Callable[[], float] = time.process_time
    ) -> None:
        super().__init__()
        self._now = now
        self._used = used
        self._last: HeldUp | None = None
        self._works_since = now()
        self._wait: tuple[float, float] | None = None  # until when, and how much of the processor was used before

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As the selector's own."""
        now = self._now()
        if now - self._works_since > _LONG:
            self._last = HeldUp("blocked", self._works_since, now)
        if timeout is None or timeout <= 0:
            ready = super().select(timeout)
            self._works_since = self._now()
            return ready
        self._wait = now + timeout, self._used()
        ready = super().select(timeout)
        self._works_since = now = self._now()
        self._last, self._wait = self.held_up(now), None
        return ready

    def held_up(self, now: float) -> HeldUp | None:
        """When it last was, or is: from any thread."""
        if (wait := self._wait) is not None:
            until, used = wait
            if now - until > _LONG:
                is_starved = self._used() - used > _SHARE * (now - until)
                return HeldUp("starved" if is_starved else "stopped", until, now)
        elif now - self._works_since > _LONG:
            return HeldUp("blocked", self._works_since, now)
        return self._last


def take_reading(clock: Clock, loop_monitor: LoopMonitor | None) -> Reading:
    """What all clocks show. One that is turned by hand knows neither suspended time nor steps."""
    now = clock.now()
    if clock is not BOOT_CLOCK:
        return Reading(now, now, now)
    return Reading(now, time.monotonic(), time.time(), None if loop_monitor is None else loop_monitor.held_up(now))
