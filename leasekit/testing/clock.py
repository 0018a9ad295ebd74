"""A clock that is turned by hand, for tests of what happens in time without waiting for it."""

import asyncio
import math
import threading
from dataclasses import dataclass
from datetime import UTC, datetime

from leasekit.testing._notify import Notifier

__all__ = ["FakeClock"]


@dataclass(slots=True, kw_only=True, eq=False)
class _Sleeper:
    until: float
    wake: asyncio.Event
    waking: asyncio.Task[bool]  # of the sleeper's loop; cancelling it ends the sleep
    loop: asyncio.AbstractEventLoop


class FakeClock:
    """Time in seconds that moves only by `advance`, which may be called from any thread.

    It stands in wherever a clock is asked for: as a function (`clock()`), and as the keeper's clock (`now`, `wait`).
    A service in memory takes its seconds for Unix time; `later` says a moment of it as `NewTask.at` wants it.

    Asleep is who waits for the time or for an event, not yet woken by either. `advance` counts a sleeper whose time
    has come as awake at once, so that `clock.advance(5); await clock.asleep()` waits until it is done and sleeps again.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._sleepers: list[_Sleeper] = []
        self._lock = threading.Lock()
        self._bell = Notifier()

    def now(self) -> float:
        """What time it is, in seconds."""
        return self._now

    __call__ = now

    def later(self, seconds: float) -> datetime:
        """The moment that is `seconds` from now."""
        return datetime.fromtimestamp(self._now + seconds, UTC)

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass in one jump, and wake those whose time has come, the earliest first."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"a clock does not advance by {seconds!r} seconds: give zero or more")
        with self._lock:
            self._now += seconds
            due = sorted((s for s in self._sleepers if s.until <= self._now), key=lambda s: s.until)
            self._sleepers = [s for s in self._sleepers if s.until > self._now]
        for sleeper in due:
            # A closed loop took its sleepers with it: there is nobody to wake.
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
        """How many are asleep."""
        with self._lock:
            return sum(not s.wake.is_set() for s in self._sleepers)

    @property
    def next_wake(self) -> float:
        """When the first sleeper is due; infinity where nobody waits for a time."""
        with self._lock:
            return min((s.until for s in self._sleepers), default=math.inf)

    async def asleep(self, count: int = 1) -> None:
        """Return once at least `count` are asleep: then all that they had to do until now is done."""
        await self._bell.until(lambda: self.sleepers >= count)
