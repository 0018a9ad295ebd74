"""The world: true time, the calls that are planned, all events so far; processes, and the loops that it steps."""

import asyncio
import heapq
import itertools
import math
import random
from asyncio import events
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

from harness.history import Event, Frozen, Log, Paused, Resumed, Thawed
from harness.simulation.scenario import Scenario


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


E = TypeVar("E", bound=Event)
_LATE = 1e-6  # seconds by which a timer is late: no clock shows less than the moment that it was set to


class World:
    """A heap of planned calls. Each random generator is derived from one seed by its name."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now = 0.0
        self.events: list[Event] = []
        self.fired: Counter[str] = Counter()  # effects of each fault
        self.errors: list[str] = []  # that the code under test logged
        # Dead ones too: the rest of their tasks ends with the world, not whenever the garbage collector runs.
        self.processes: list[Process] = []
        self.are_faults_over = False
        self.is_over = False  # later events are not part of the history
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()

    def chance(self, name: str) -> random.Random:
        """A random generator of its own, the same in every run of this seed."""
        return random.Random(f"{self.scenario.seed}/{name}")

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        if when < math.inf:
            heapq.heappush(self._heap, (max(when, self.now), next(self._order), call, args))

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, call, *args)

    def run(self, until: float) -> None:
        """Let time pass until this moment."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, call, args = heapq.heappop(heap)
            call(*args)
        self.now = max(self.now, until)

    def log(self, event: type[E], who: str, **fields: Any) -> None:
        if not self.is_over:
            self.events.append(event(at=self.now, who=who, **fields))


class MemoryLog(Log):
    """The log of one process, which writes to the world's history while the process lives."""

    def __init__(self, process: "Process") -> None:
        self.who = process.who
        self._process = process

    def add(self, event: type[E], **fields: Any) -> E:
        if "token" in fields:
            fields["token"] = fields["token"][:6]
        entry = event(**{"at": self._process.world.now, "who": self.who, **fields})
        if self._process.is_alive and not self._process.world.is_over:
            self._process.world.events.append(entry)
        return entry

    def close(self) -> None:
        """Do nothing: there is no file."""


_STANDING = {"paused": (Paused, Resumed), "suspended": (Paused, Resumed), "frozen": (Frozen, Thawed)}


class Process:
    """A simulated process: an event loop, a clock that drifts, and ways to stand still and to die.

    The clock shows its machine's boottime; it starts at `boot`, where an earlier process ended. A process is
    paused where its clock goes on, and frozen where its whole machine stands still.
    """

    def __init__(self, world: World, who: str, *, rate: float = 1.0, boot: float | None = None) -> None:
        self.world = world
        self.who = who
        self.is_alive = True
        self.loop = SteppedLoop(self.boot, lambda: self.is_alive)
        self.loop.set_exception_handler(self._note_error)
        self._rate = rate
        self._since = (world.now, 1000.0 + world.now if boot is None else boot)  # true time, and the clock's then
        self._held: Counter[str] = Counter()  # reasons to stand still
        self._stands = False  # for any reason
        self._is_frozen = False
        self._wake_at = math.inf
        self._is_turning = False
        self._tasks: set[asyncio.Task[Any]] = set()  # the loop itself holds tasks only weakly
        world.processes.append(self)

    def boot(self) -> float:
        true, shown = self._since
        return shown if self._is_frozen else shown + (self.world.now - true) * self._rate

    def true(self, boot: float) -> float:
        """The true time at which the clock will show `boot`; infinite while it is frozen."""
        true, shown = self._since
        return math.inf if self._is_frozen or boot == math.inf else true + (boot - shown) / self._rate + _LATE

    @property
    def runs(self) -> bool:
        return self.is_alive and not self._stands

    def call(self, callback: Callable[..., object], *args: Any) -> None:
        if self.is_alive:
            self.loop.call_soon(callback, *args)
            self._look()

    def start(self, work: Any) -> None:
        self.call(self._start, work)

    def _start(self, work: Any) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._note_error(self.loop, {"message": "a task ended", "exception": error})

    def _look(self) -> None:
        if self._is_turning or not self.runs:
            return
        at = self.loop.next_at()
        at = self.world.now if at == -math.inf else self.true(at)
        if at < self._wake_at:
            self._wake_at = at
            self.world.at(at, self._wake, at)

    def _wake(self, at: float) -> None:
        if at != self._wake_at:
            return
        self._wake_at = math.inf
        if self.runs:
            self._is_turning = True
            try:
                self.loop.turn()
            finally:
                self._is_turning = False
            self._look()

    def _note_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if self.is_alive and not self.world.is_over:
            error = f"{context.get('message')}: {context.get('exception')!r}"
            self.world.errors.append(f"{self.who} at {self.world.now:.3f}: {error}")

    def hold(self, why: str) -> None:
        """Stop the process until it was let go as often as held."""
        self._log_standing(why, begins=True)
        self._held[why] += 1
        self._note_reasons()

    def let_go(self, why: str) -> None:
        self._held[why] -= 1
        self._log_standing(why, begins=False)
        self._note_reasons()
        self._wake_at = math.inf
        self._look()

    def _log_standing(self, why: str, *, begins: bool) -> None:
        """Log that the process stands still or goes on, unless another hold has the same effect."""
        events = _STANDING.get(why)
        same = [reason for reason in _STANDING if _STANDING[reason] == events]
        if events is not None and self.is_alive and not self.is_held(*same):
            self.world.log(events[0 if begins else 1], self.who)

    def _note_reasons(self) -> None:
        self._since = (self.world.now, self.boot())
        self._stands = any(self._held.values())
        self._is_frozen = self._held["frozen"] > 0

    def is_held(self, *why: str) -> bool:
        return any(self._held[reason] > 0 for reason in why)

    def die(self) -> None:
        self.is_alive = False
        for task in asyncio.all_tasks(self.loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
