"""The clock by which leases are counted, and sleeping by that clock."""

import asyncio
import sys
import time
from typing import Protocol

if sys.platform == "win32":  # the first module of leasekit that needs what Windows lacks
    raise ImportError(
        "leasekit does not run on Windows, which lacks the clocks, the file locks and the signals that it needs: "
        "use Linux (WSL 2 has one) or macOS"
    )


class Clock(Protocol):
    """The time as the driver needs it, in seconds from an arbitrary origin."""

    def now(self) -> float:
        """Return the time, which never goes back and goes on while the machine is suspended."""
        ...

    async def wait(self, wake: asyncio.Event, until: float) -> None:
        """Return when `wake` is set or `until` is reached."""
        ...


# CLOCK_MONOTONIC stands still in suspend: a resumed laptop or VM would still trust leases that ended long ago.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

# The event loop's timers stand still in suspend too: compare with the clock at least this often.
_LONGEST_SLEEP = 1.0


class BootClock:
    """CLOCK_BOOTTIME, or CLOCK_MONOTONIC where the system has no boot clock."""

    def now(self) -> float:
        return time.clock_gettime(_CLOCK)

    async def wait(self, wake: asyncio.Event, until: float) -> None:
        await asyncio.sleep(0)  # even with nothing to wait for: other tasks of the loop get a turn
        while not wake.is_set() and (left := until - self.now()) > 0:
            try:
                async with asyncio.timeout(min(left, _LONGEST_SLEEP)):
                    await wake.wait()
            except TimeoutError:
                continue


BOOT_CLOCK = BootClock()
