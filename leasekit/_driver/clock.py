"""The clock of leases, and sleeping by it."""

import asyncio
import time
from typing import Protocol

__all__ = ["BOOT_CLOCK", "BootClock", "Clock"]


class Clock(Protocol):
    """What the driver needs of time. Seconds, from an arbitrary origin."""

    def now(self) -> float:
        """The time, never going back, and going on while the machine is suspended."""
        ...

    async def wait(self, wake: asyncio.Event, until: float) -> None:
        """Return when `wake` is set or `until` is reached."""
        ...


# CLOCK_MONOTONIC stands still in suspend: a laptop or VM would wake up believing in leases long gone.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

# The event loop's timers stand still in suspend too: look again at least this often.
_LONGEST_SLEEP = 1.0


class BootClock:
    """CLOCK_BOOTTIME."""

    def now(self) -> float:
        return time.clock_gettime(_CLOCK)

    async def wait(self, wake: asyncio.Event, until: float) -> None:
        await asyncio.sleep(0)  # also where there is nothing to wait for: whoever shares the loop gets a turn
        while not wake.is_set() and (left := until - self.now()) > 0:
            try:
                async with asyncio.timeout(min(left, _LONGEST_SLEEP)):
                    await wake.wait()
            except TimeoutError:
                continue


BOOT_CLOCK = BootClock()
