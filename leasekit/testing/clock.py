"""A clock that is turned by hand, for tests that depend on time but do not wait."""

import asyncio
import math
import threading
from dataclasses import dataclass
from datetime import UTC, datetime

from leasekit.config import check_number
from leasekit.testing._notify import Notifier

__all__ = ["FakeClock"]


@dataclass(slots=True, kw_only=True, eq=False)
class _Sleeper:
    until: float
    wake: asyncio.Event
    waking: asyncio.Task[bool]  # of the sleeper's loop; cancelling it ends the sleep
    loop: asyncio.AbstractEventLoop


class FakeClock:
    """A clock whose time, in seconds, moves only by `advance`, which any thread may call.

    The clock can be used as a function (`clock()`) and as the keeper's clock (`now`, `wait`). A service in memory takes
    its seconds for Unix time; `later` makes an instant for `NewTask.at`.

    A sleeper is a call that waits for an instant or an event, and was woken by neither. `advance` counts sleepers whose
    instant has come as awake at once: `clock.advance(5); await clock.asleep()` waits until their code sleeps again.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._sleepers: list[_Sleeper] = []
        self._lock = threading.Lock()
        self._bell = Notifier()

    def now(self) -> float:
        """Return the time, in seconds."""
        return self._now

    __call__ = now

    def later(self, seconds: float) -> datetime:
        """Return the instant that is `seconds` from now."""
        return datetime.fromtimestamp(self._now + seconds, UTC)

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass in one jump, and wake the sleepers whose instant has come, the earliest first."""
        check_number("seconds", seconds)
        with self._lock:
            self._now += seconds
            due = sorted((s for s in self._sleepers if s.until <= self._now), key=lambda s: s.until)
            self._sleepers = [s for s in self._sleepers if s.until > self._now]
        for sleeper in due:
            # A closed loop has no sleeper left to wake.
            if not sleeper.loop.is_closed():
                sleeper.loop.call_soon_threadsafe(sleeper.waking.cancel)

    async def wait(self, wake: asyncio.Event, until: float) -> None:
        """Return when `wake` is set or the time reaches `until`, whichever is first."""
        waking = asyncio.ensure_future(wake.wait())
        sleeper = _Sleeper(until=until, wake=wake, waking=waking, loop=asyncio.get_running_loop())
        try:
            with self._lock:
                if until > self._now:
                    self._sleepers.append(sleeper)
                else:
                    waking.cancel()
            self._bell.ring()
            await asyncio.wait([waking])
        finally:
            waking.cancel()
            with self._lock:
                self._sleepers = [s for s in self._sleepers if s is not sleeper]

    async def sleep(self, seconds: float) -> None:
        """Return once `seconds` have passed on this clock."""
        await self.wait(asyncio.Event(), self._now + seconds)

    @property
    def sleepers(self) -> int:
        """The number of sleepers."""
        with self._lock:
            return sum(not s.wake.is_set() for s in self._sleepers)

    @property
    def next_wake(self) -> float:
        """The earliest instant that a sleeper waits for; infinity if there is none."""
        with self._lock:
            return min((s.until for s in self._sleepers), default=math.inf)

    async def asleep(self, count: int = 1) -> None:
        """Return once there are at least `count` sleepers: their code has then done its work up to now."""
        await self._bell.until(lambda: self.sleepers >= count)
