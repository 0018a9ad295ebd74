"""The world: true time, what is to happen in it, and everything that did."""

import asyncio
import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from harness.history import Event, Log
from harness.simulation.loop import SteppedLoop
from harness.simulation.scenario import Scenario

__all__ = ["MemoryLog", "Process", "World"]

E = TypeVar("E", bound=Event)
_LATE = 1e-6  # seconds by which a timer is late, at least: so that no clock shows less than it was set to


class World:
    """One heap of what is to happen. Every source of chance is forked off from one seed, by name."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now = 0.0
        self.events: list[Event] = []
        self.fired: Counter[str] = Counter()  # faults that have had an effect
        self.errors: list[str] = []  # what the code under test said was wrong with itself
        # The dead too: what is left of their tasks ends when the world does, not when it pleases the garbage collector.
        self.processes: list[Process] = []
        self.are_faults_over = False
        self.is_over = False  # nothing that still ends from here on is part of the history
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()

    def chance(self, name: str) -> random.Random:
        """A source of chance of its own, the same in every run of this seed."""
        return random.Random(f"{self.scenario.seed}/{name}")

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Have it called then."""
        if when < math.inf:
            heapq.heappush(self._heap, (max(when, self.now), next(self._order), call, args))

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        """Have it called so many seconds from now."""
        self.at(self.now + seconds, call, *args)

    def run(self, until: float, *, unless: Callable[[], bool] = lambda: False) -> None:
        """Let time pass until then, or until `unless` is true."""
        heap = self._heap
        while heap and heap[0][0] <= until and not unless():
            self.now, _, call, args = heapq.heappop(heap)
            call(*args)
        if not unless():
            self.now = max(self.now, until)

    def log(self, event: type[E], who: str, **fields: Any) -> None:
        """Something happened."""
        if not self.is_over:
            self.events.append(event(at=self.now, who=who, **fields))


class MemoryLog(Log):
    """The log of one process: into the history of its world, as long as it lives."""

    def __init__(self, process: "Process") -> None:
        self.who = process.who
        self._process = process

    def add(self, event: type[E], **fields: Any) -> E:
        if "token" in fields:
            fields["token"] = fields["token"][:6]
        made = event(**{"at": self._process.world.now, "who": self.who, **fields})
        if self._process.is_alive and not self._process.world.is_over:
            self._process.world.events.append(made)
        return made

    def close(self) -> None:
        """There is no file."""


class Process:
    """A simulated process: a loop, a clock that is a little off, and ways to stand still and to die.

    Its clock shows boottime, that of its machine: it goes on from `boot` where there were processes before. It is
    paused where its clock goes on, frozen where its whole machine stands still.
    """

    def __init__(self, world: World, who: str, *, rate: float = 1.0, boot: float | None = None) -> None:
        self.world = world
        self.who = who
        self.is_alive = True
        self.loop = SteppedLoop(self.boot, lambda: self.is_alive)
        self.loop.set_exception_handler(self._note_error)
        self._rate = rate
        self._since = (world.now, 1000.0 + world.now if boot is None else boot)  # true time, and what the clock showed
        self._held: Counter[str] = Counter()  # why it does not run
        self._stands = False  # there is such a reason …
        self._is_frozen = False  # … and this is one
        self._wake_at = math.inf
        self._is_turning = False
        self._tasks: set[asyncio.Task[Any]] = set()  # the loop itself holds tasks only weakly
        world.processes.append(self)

    # Its clock ------------------------------------------------------------------------------------------------------

    def boot(self) -> float:
        """What its clock shows."""
        true, shown = self._since
        return shown if self._is_frozen else shown + (self.world.now - true) * self._rate

    def true(self, boot: float) -> float:
        """When its clock will show that; never, while it is frozen."""
        true, shown = self._since
        return math.inf if self._is_frozen or boot == math.inf else true + (boot - shown) / self._rate + _LATE

    # Its turns ------------------------------------------------------------------------------------------------------

    @property
    def runs(self) -> bool:
        """Its loop is stepped."""
        return self.is_alive and not self._stands

    def call(self, callback: Callable[..., object], *args: Any) -> None:
        """Have it called in its loop."""
        if self.is_alive:
            self.loop.call_soon(callback, *args)
            self._look()

    def start(self, work: Any) -> None:
        """Run a coroutine in its loop."""
        self.call(self._start, work)

    def _start(self, work: Any) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._note_error(self.loop, {"message": "it ended", "exception": error})

    def _look(self) -> None:
        """See to it that its loop is stepped when there is something to do."""
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
            said = f"{context.get('message')}: {context.get('exception')!r}"
            self.world.errors.append(f"{self.who} at {self.world.now:.3f}: {said}")

    # Standing still, and the end ------------------------------------------------------------------------------------

    def hold(self, why: str) -> None:
        """It runs no more, until it is let go of as often."""
        self._held[why] += 1
        self._note_reasons()

    def let_go(self, why: str) -> None:
        """It goes on."""
        self._held[why] -= 1
        self._note_reasons()
        self._wake_at = math.inf
        self._look()

    def _note_reasons(self) -> None:
        self._since = (self.world.now, self.boot())
        self._stands = any(self._held.values())
        self._is_frozen = self._held["frozen"] > 0

    def is_held(self, *why: str) -> bool:
        """It does not run for one of these reasons."""
        return any(self._held[one] > 0 for one in why)

    def die(self) -> None:
        """Nothing of it runs from here on."""
        self.is_alive = False
        for task in asyncio.all_tasks(self.loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
