"""A worker as a simulated process: keeper and controller are real; handlers, timer and supervisor are simulated.

The steps of handlers are events of the world; their tasks' payloads plan them.
"""

import asyncio
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from harness.history import Began, Draining, Effect, Ended, Lost, Started, Stopped
from harness.recording import Recorded, digest_of
from harness.simulation.net import Net, Remote
from harness.simulation.queues import SimulatedQueues
from harness.simulation.world import MemoryLog, Process, World
from leasekit import hooks
from leasekit._driver.coding import CLEAR
from leasekit._driver.connection import Connection
from leasekit._driver.context import ClaimCall
from leasekit._driver.guarding.watchdog import Watchdog
from leasekit._driver.keeping.held_lease import HeldLease
from leasekit._driver.keeping.keeper import Keeper
from leasekit._driver.keeping.queue_claims import QueueClaims
from leasekit._driver.retrying import call_once
from leasekit._leased_run import LeasedRun
from leasekit._worker.buffer import Buffer
from leasekit._worker.claimed_task import ClaimedTask
from leasekit._worker.controller import Controller
from leasekit._worker.handlers import Handler
from leasekit.errors import BackendError, Fatal, LeaseError, NotYet
from leasekit.hooks import Hooks
from leasekit.lease import Lease
from leasekit.task import Settlement


class Plan(Struct, frozen=True, omit_defaults=True):
    """The plan of a handler, as its task's payload: the same in every attempt, except for `flaky` ends."""

    lasts: float  # seconds
    effect_every: float
    ends: str = "success"  # or retry, fatal, raise, release, flaky: two retries, then a success
    deaf: bool = False  # does not check its lease, and acts often
    poison: bool = False  # kills its process
    hangs: bool = False  # reports no progress, and ends only when told to
    then: int = 0
    polls: int = 0  # calls that end with `NotYet` …
    poll_after: float = 0.0  # … and for how many seconds the run waits after each
    may_replace: bool = False  # this payload may replace another, or be replaced


class SimulatedHandler:
    """A simulated run of a handler, as the payload of its task plans it; `begin` schedules the first step."""

    def __init__(self, worker: "Worker", work: ClaimedTask, run: LeasedRun) -> None:
        self._worker = worker
        self._world = worker.world
        self._work = work
        self._run = run
        self._lease = lease = Lease(run)
        self._plan = msgspec.convert(_decoded(lease.task.payload), Plan)
        self._fence = lease.fence
        self._until = self._world.now + self._plan.lasts
        self._version = 0
        self._skipped = False
        self.is_over = False

    def begin(self) -> None:
        world, lease = self._world, self._lease
        idle = self._work.handler.idle_timeout
        payload = digest_of(lease.task.payload) if self._plan.may_replace else ""
        world.log(Started, self._worker.who, task=lease.task.id, fence=lease.fence, idle_timeout=idle, payload=payload)
        self._next()

    def _next(self) -> None:
        plan = self._plan
        every = min(plan.effect_every, 5.0) if plan.deaf else plan.effect_every
        at = self._world.now + every * (0.5 + self._worker.chance.random())
        self._version += 1
        self._world.at(at if plan.hangs else min(at, self._until), self._step, self._version)

    def go_on(self) -> None:
        """Catch up on the step that was skipped while the process stood still."""
        if self._skipped and not self.is_over:
            self._skipped = False
            self._version += 1
            self._world.after(0.0005 * self._worker.chance.random(), self._step, self._version)

    def _step(self, version: int) -> None:
        worker = self._worker
        if self.is_over or version != self._version:
            return
        if not worker.handlers_run or worker.gil not in (None, self):
            self._skipped = True
            return
        if not self._plan.deaf and worker.gil is not self:
            try:
                self._lease.check()
            except LeaseError as loss:
                self._end(loss, how=type(loss).__name__)
                return
        self._moved()
        if self._world.now >= self._until and not self._plan.hangs:
            self._finish()
        else:
            self._act()
            self._next()

    def _moved(self) -> None:
        if self._lease.fence != self._fence:
            self._stopped("moved")
            self._fence = self._lease.fence
            self._world.log(Started, self._worker.who, task=self._lease.task.id, fence=self._fence)

    def _act(self) -> None:
        progress = not self._plan.hangs and self._worker.chance.random() < 0.7
        reported = round(self._world.now, 3) if progress else None
        if progress:
            try:
                self._lease.progress(reported)
            except LeaseError:  # the handler is deaf
                progress, reported = False, None
        task = self._lease.task.id
        self._world.log(Effect, self._worker.who, task=task, fence=self._fence, progress=progress, reported=reported)

    def _finish(self) -> None:
        lease, plan = self._lease, self._plan
        self._act()
        if lease.executions <= plan.polls and not self._world.are_faults_over:
            self._world.fired["poll"] += 1
            self._end(NotYet(after=plan.poll_after), how="not_yet")
            return
        if plan.poison:
            self._world.fired["poison"] += 1
            self._worker.die("a poison pill")
            return
        error: Exception | None = None
        ends = plan.ends
        if ends == "flaky":
            ends = "success" if lease.attempt > 2 else "retry"
        try:
            for number in range(plan.then):
                lease.then("short", {"lasts": 5.0, "effect_every": 5.0, "number": number})
        except LeaseError:  # lost at the last moment
            pass
        match ends:
            case "retry":
                error = RuntimeError("not this time")
            case "fatal":
                error = Fatal("never")
            case "release":
                lease.release(after=30.0) if lease.task.fence <= 2 else lease.complete("done")
            case _:
                lease.complete("done")
        self._end(error, how="finished")

    def _end(self, error: BaseException | None, *, how: str) -> None:
        if how == "IdleTimeout":
            self._world.fired["hang"] += 1
        self.is_over = True
        self._stopped(how)
        self._work.end(self._run, error)
        del self._worker.handlers[self._work]
        self._worker.fill()

    def _stopped(self, how: str) -> None:
        self._world.log(Stopped, self._worker.who, task=self._lease.task.id, fence=self._fence, how=how)


def _decoded(payload: Any) -> Any:
    return msgspec.json.decode(payload) if isinstance(payload, msgspec.Raw) else payload


KINDS = ("long", "short")
COLLECTIONS = ("alpha", "beta")
KEYS = ("ada", "bob", "eve")
GPU, EU = {"gpu": "a100"}, {"zone": "eu"}
_LABELS: tuple[dict[str, str], ...] = (GPU | EU, EU, {}, GPU | {"zone": "us"})
"""The labels of the workers, by their numbers, where tasks require some."""


def _labels_of(name: str) -> dict[str, str]:
    return _LABELS[int(name.rpartition("-")[2]) % len(_LABELS)]


class Clock:
    """The keeper's clock: that of a simulated process."""

    def __init__(self, process: Process) -> None:
        self.now = process.boot

    async def wait(self, wake: asyncio.Event, until: float) -> None:
        if wake.is_set() or until <= self.now():
            await asyncio.sleep(0)
            return
        try:
            async with asyncio.timeout_at(None if until == math.inf else until):
                await wake.wait()
        except TimeoutError:
            pass


class KernelTimer:
    """The kernel's timer, which kills a process even if it stands still, but not while its machine is frozen."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        self.at: float | None = None
        self._version = 0

    def arm(self, at: float) -> None:
        self.at = at
        self.look()

    def disarm(self) -> None:
        self.at = None

    close = disarm

    def remaining(self) -> float | None:
        return None if self.at is None else self.at - self._worker.process.boot()

    def look(self) -> None:
        """Plan the kill, after the timer was armed or the machine went on."""
        if self.at is not None:
            self._version += 1
            process = self._worker.process
            process.world.at(process.true(self.at), self._fire, self._version)

    def _fire(self, version: int) -> None:
        process = self._worker.process
        if version != self._version or self.at is None or process.is_held("frozen", "suspended"):
            return
        self._worker.die("the kernel's timer")


class Connected(Connection):
    """A connection that is driven by the loop of a simulated process."""

    def __init__(self, worker: "Worker") -> None:
        self.pid = os.getpid()
        self.closed = False
        self.backend = worker.backend
        self._is_scheduler = True
        self.clock = worker.clock
        self.hooks = worker.hooks
        self.coding = CLEAR
        self.keeper = worker.keeper
        self.driver = worker  # type: ignore[assignment]


class Worker:
    """An incarnation of a worker, until it ends or is killed; its controller takes it for driver and executor too."""

    def __init__(self, world: World, net: Net, name: str, number: int, *, on_end: Callable[["Worker"], None]) -> None:
        scenario = world.scenario
        self.world = world
        self.name = name
        self.chance = world.chance(f"{name}#{number}")
        rate = 1 + self.chance.uniform(-1, 1) * scenario.drift
        self.process = process = Process(world, f"{name}#{number}", rate=rate)
        self.who = process.who
        self._on_end = on_end
        self._net = net
        self.timer = KernelTimer(self)
        self.handlers: dict[ClaimedTask, SimulatedHandler] = {}
        self.gil: SimulatedHandler | None = None  # the handler that keeps all others and the keeper from running
        self.clock = Clock(process)
        self.backend = Recorded(Remote(net, process, worker=self.who), MemoryLog(process), now=lambda: world.now)
        self.hooks = Hooks([self._heard])
        self.keeper = Keeper(
            self.backend,
            scenario.heartbeats,
            claim=self._queue_claim(net),
            clock=self.clock,
            hooks=self.hooks,
            chance=self.chance,
            last_resort=lambda: self.die("its last resort"),
            watchdog=Watchdog("off", now=process.boot, timer=self.timer),
        )
        self.keeper.call_soon = self.call_soon
        self.connection = Connected(self)
        self.slots = scenario.slots
        self.buffer = Buffer()
        self._peers: list[Controller] = []
        self.labels = _labels_of(name) if scenario.rates.get("require") or scenario.rates.get("prefer") else {}
        self.controller = Controller(
            self.connection,
            {kind: _HANDLERS[kind] for kind in KINDS},
            self,
            ahead=5.0,
            peers=self._peers,
            labels=self.labels,
            chance=self.chance,
            look=scenario.look,
            poll=scenario.poll,
            on_drain=self._be_drained,
        )
        self._peers.append(self.controller)
        self.is_stopping = False
        world.log(Began, self.who, role="worker", slots=self.slots, kinds=KINDS, labels=self.labels)
        process.start(self.keeper.run())
        process.start(self._work())

    def _queue_claim(self, net: Net) -> ClaimCall | None:
        if (queues := net.server.queues) is None:
            return None
        return QueueClaims(self.backend, SimulatedQueues(queues, self.process), now=self.process.boot).claim

    def call_soon(self, call: Callable[..., object], *args: Any) -> None:
        self.process.call(call, *args)

    def put(self, works: Sequence[ClaimedTask]) -> None:
        self.buffer.put(works)
        self.world.after(0.001, self.fill)

    @property
    def handlers_run(self) -> bool:
        return self.process.is_alive and not self.process.is_held("paused", "frozen", "suspended")

    def fill(self) -> None:
        if not self.handlers_run or self.gil is not None:
            return
        while len(self.handlers) < self.slots and (work := self.buffer.take()) is not None:
            if (run := work.begin()) is not None:
                self.handlers[work] = handler = SimulatedHandler(self, work, run)
                handler.begin()

    async def _work(self) -> None:
        await self.controller.run()
        await self.keeper.outbox.empty()
        await self.keeper.aclose()
        self._end("exited")

    def stop(self) -> None:
        """Ask the worker to end: handlers run to their ends, tasks that have not begun are released."""
        if self.process.runs and not self.is_stopping:
            self.is_stopping = True
            self.world.log(Draining, self.who)
            self.process.call(self.controller.stop)

    def _be_drained(self) -> None:
        """Stop because an operator drains this worker."""
        self.world.fired["drained"] += 1
        self.stop()

    def die(self, why: str) -> None:
        """Kill the worker; its supervisor may hand its tasks back."""
        if not self.process.is_alive:
            return
        reported = list(self.keeper._leases.values())
        self._end("killed")
        if reported and self.chance.random() * 100 < self.world.scenario.rates.get("hand_back", 0.0):
            self.world.fired["hand_back"] += 1
            Supervisor(self.world, self._net, self.who, self.backend, reported)

    def _end(self, how: str) -> None:
        self.process.die()
        self.world.log(Ended, self.who, how=how)
        for handler in list(self.handlers.values()):
            handler.is_over = True
        self._on_end(self)

    def resume(self, why: str) -> None:
        self.process.let_go(why)
        if not self.process.is_held("frozen", "suspended"):
            self.timer.look()
        if self.handlers_run:
            for handler in list(self.handlers.values()):
                handler.go_on()
            self.fill()

    def _heard(self, event: hooks.Event) -> None:
        if isinstance(event, hooks.Lost):
            held = next((lease for lease in self.keeper._leases.values() if lease.task.token == event.token), None)
            fence = held.task.fence if held is not None else self.backend._fences.get(event.token, 0)
            self.world.log(Lost, self.who, task=event.task_id, fence=fence, reason=event.reason)


class Supervisor:
    """The supervisor of a killed worker: settle its leases as crashed."""

    def __init__(self, world: World, net: Net, worker: str, backend: Recorded, reported: Sequence[HeldLease]) -> None:
        self.process = Process(world, f"{worker}/supervisor")
        log = MemoryLog(self.process)
        self._backend = Recorded(Remote(net, self.process, worker=worker), log, now=lambda: world.now)
        self._backend._fences.update(backend._fences)
        self._left = [
            Settlement(id=held.task.id, token=held.task.token, outcome="crash")
            for held in reported
            if not held.settling and held.reason is None
        ]
        if self._left:
            self.process.start(self._report())

    async def _report(self) -> None:
        for _ in range(5):
            try:
                await call_once(lambda: self._backend.settle(self._left), within=10.0)
                return
            except BackendError:
                await asyncio.sleep(2.0)


def _unused(payload: Any) -> None:
    """Do nothing: handlers are simulated by `SimulatedHandler`."""


_HANDLERS = {
    "long": Handler(kind="long", function=_unused, run="thread"),
    "short": Handler(kind="short", function=_unused, run="thread", idle_timeout=240.0),
}
