"""A client that schedules tasks, repeats schedules, cancels, and redrives."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial

import msgspec

from harness.history import Began
from harness.recording import Recorded
from harness.simulation.net import Net, Remote
from harness.simulation.worker import Plan
from harness.simulation.world import MemoryLog, Process, World
from leasekit._driver.retrying import call_once, call_until
from leasekit._driver.thread import spawn
from leasekit.errors import BackendError
from leasekit.task import Exponential, NewTask

_ENDS = ("success",) * 12 + ("flaky", "retry", "fatal", "raise", "release")


class Scheduler:
    """Schedule tasks until the moment `until`."""

    def __init__(self, world: World, net: Net, *, until: float) -> None:
        self.world = world
        self.process = Process(world, "scheduler")
        self._chance = world.chance("scheduler")
        self._wall: Callable[[], float] = lambda: world.now + net.server.wall
        remote, log = Remote(net, self.process, worker="scheduler"), MemoryLog(self.process)
        self._backend = Recorded(remote, log, now=lambda: world.now, wall=self._wall)
        self._until = until
        self._count = 0
        self._running: set[asyncio.Task[None]] = set()
        world.log(Began, self.process.who, role="scheduler")
        self.process.start(self._run())

    async def _run(self) -> None:
        scenario, chance = self.world.scenario, self._chance
        while self.world.now < self._until:
            await asyncio.sleep(chance.expovariate(scenario.tasks_per_hour / 3600))
            many = chance.choice((1, 1, 1, 2, 5))
            spawn(self._schedule([self._new() for _ in range(many)]), self._running)
            await asyncio.sleep((many - 1) * 3600 / scenario.tasks_per_hour)

    def _hits(self, fault: str) -> bool:
        if self._chance.random() * 100 >= self.world.scenario.rates.get(fault, 0.0):
            return False
        if self.world.are_faults_over:
            return False
        self.world.fired[fault] += 1
        return True

    def _plan(self) -> tuple[Plan, float]:
        """Return what a handler will do, and for how long it would work if it did not kill its process."""
        chance, scenario = self._chance, self.world.scenario
        hangs, poison, deaf = self._hits("hang"), self._hits("poison"), self._hits("deaf")
        ends = chance.choice(_ENDS)
        lasts = chance.uniform(1, 60) if chance.random() < 0.5 else chance.uniform(60, scenario.longest_handler)
        plan = Plan(
            lasts=chance.uniform(1, 60) if poison else lasts,
            effect_every=scenario.effect_every,
            ends=ends,
            deaf=deaf,
            poison=poison,
            hangs=hangs,
            then=chance.choice((0,) * 9 + (1, 2)),
        )
        return plan, lasts

    def _new(self) -> NewTask:
        chance, scenario = self._chance, self.world.scenario
        self._count += 1
        plan, lasts = self._plan()
        longest = chance.choice((None, None, 1200.0))
        kills = plan.poison or (plan.hangs and plan.deaf) or (longest is not None and lasts > longest / 2)
        # Only half of these: a task that waits after its lease is granted too late for two holders to be seen at once.
        counts_time_outs = kills and self._count % 2 == 0
        may_fail = plan.hangs or plan.ends in ("retry", "raise")
        default_attempts = 3 if counts_time_outs else None
        of_claims, of_beats = scenario.ttls_of_a_task(chance)
        wanted = chance.random()
        at = None if wanted > 0.1 else datetime.fromtimestamp(self._wall() + chance.uniform(0, 1800), UTC)
        return NewTask(
            id=f"task-{self._count}",
            kind="short" if plan.hangs else chance.choice(("long", "short")),
            priority=chance.randrange(5),
            payload=msgspec.to_builtins(plan),
            at=at,
            dedupe_key=f"key-{self._count // 6}" if self._hits("same_key") else None,
            dedupe_window=chance.choice((None, 600.0)),
            max_attempts=chance.choice((1, 2, 3)) if may_fail else default_attempts,
            max_crashes=chance.choice((0, 1, 2)) if kills else 20,
            max_runtime=longest,
            expiry="retry" if counts_time_outs else "crash",
            claim_timeout=of_claims,
            heartbeat_timeout=of_beats,
            retry=Exponential(max=300.0),
        )

    async def _schedule(self, tasks: list[NewTask]) -> None:
        await self._ask(tasks)
        for task in tasks:
            if self._hits("again"):
                await asyncio.sleep(self._chance.expovariate(0.01))
                if self._chance.random() < 0.2:
                    task = msgspec.structs.replace(task, priority=0, payload={**task.payload, "other": True})  # noqa: PLW2901
                await self._ask([task])
            if self._hits("cancel"):
                spawn(self._cancel(task.id or ""), self._running)
            if self._hits("redrive"):
                spawn(self._redrive(task.id or ""), self._running)

    async def _ask(self, tasks: list[NewTask]) -> None:
        ask = partial(call_once, partial(self._backend.schedule, tasks), within=10.0)
        with suppress(BackendError):
            await call_until(ask, for_at_most=600.0)

    async def _cancel(self, task_id: str) -> None:
        await asyncio.sleep(self._chance.expovariate(0.005))
        ask = partial(call_once, partial(self._backend.cancel, [task_id]), within=10.0)
        with suppress(BackendError):
            await call_until(ask, for_at_most=60.0)

    async def _redrive(self, task_id: str) -> None:
        """Ask for a new life of a task now and then: most of these requests come before its end, and are refused."""
        for number in range(4):
            await asyncio.sleep(self._chance.expovariate(0.002))
            if self.world.are_faults_over:
                return
            redrive = partial(self._backend.redrive, [task_id], redrive_id=f"{task_id}-{number}")
            with suppress(BackendError):
                await call_until(partial(call_once, redrive, within=10.0), for_at_most=60.0)
