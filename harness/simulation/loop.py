"""An event loop that goes by the clock of its simulated process, and that the world steps."""

import asyncio
import heapq
import math
from asyncio import events
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any


class SteppedLoop(asyncio.BaseEventLoop):
    """asyncio's own tasks, futures and timers; `turn` runs what is due, `next_at` says when more will be.

    `goes_on` is asked before each callback: a process may be killed in the middle of a turn.
    """

    _ready: "Any"
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, now: Callable[[], float], goes_on: Callable[[], bool]) -> None:
        super().__init__()
        self._now = now
        self._goes_on = goes_on

    def __del__(self) -> None:
        """Do not warn: the loop of a killed process is never closed."""

    def time(self) -> float:
        return self._now()

    def turn(self) -> None:
        """Run all callbacks that are due, and those that these add."""
        events._set_running_loop(self)
        try:
            while True:
                self._take_due()
                if not self._ready:
                    return
                for _ in range(len(self._ready)):
                    handle = self._ready.popleft()
                    if not handle.cancelled():
                        handle._run()
                    if not self._goes_on():
                        return
        finally:
            events._set_running_loop(None)

    def next_at(self) -> float:
        """When a turn has something to do, by the clock of this loop."""
        if self._ready:
            return -math.inf
        timers = self._scheduled
        while timers and timers[0].cancelled():
            heapq.heappop(timers)._scheduled = False  # type: ignore[attr-defined]
        return timers[0].when() if timers else math.inf

    def _take_due(self) -> None:
        now, timers = self._now(), self._scheduled
        while timers and (timers[0].cancelled() or timers[0].when() <= now):
            timer = heapq.heappop(timers)
            timer._scheduled = False  # type: ignore[attr-defined]
            if not timer.cancelled():
                self._ready.append(timer)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        """Call the function at once: with a second thread the order of events would not be reproducible."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it is raised in the code that awaits
            future.set_exception(error)
        return future
