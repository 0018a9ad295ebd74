"""A client that schedules tasks, repeats schedules, cancels, reschedules and redrives."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec

from harness.history import Began, PeriodicSet, RescheduleAnswered, RescheduleAsked
from harness.recording import Recorded
from harness.simulation.net import Net, Remote
from harness.simulation.scenario import CHANGES
from harness.simulation.worker import COLLECTIONS, EU, GPU, KEYS, Plan
from harness.simulation.world import MemoryLog, Process, World
from leasekit._driver.retrying import call_once, call_until
from leasekit._driver.thread import spawn
from leasekit.errors import BackendError
from leasekit.periodic import PeriodicTaskItem
from leasekit.server.roles.periodic import Put, Remove
from leasekit.task import Exponential, NewTask
from leasekit.wire import RescheduleRequest

_PERIODIC = "tick"
_ENDS = ("success",) * 12 + ("flaky", "retry", "fatal", "raise", "release")


class Scheduler:
    """Schedule tasks until the moment `until`."""

    def __init__(self, world: World, net: Net, *, until: float) -> None:
        self.world = world
        self.process = Process(world, "scheduler")
        self._chance = world.chance("scheduler")
        self._polls = world.chance("polls") if world.scenario.rates.get("poll") else None
        self._collections = world.chance("collections") if world.scenario.rates.get("gate") else None
        self._keys = world.chance("keys") if world.scenario.rates.get("key_limit") else None
        self._requires = world.chance("requires") if world.scenario.rates.get("require") else None
        self._prefers = world.chance("prefers") if world.scenario.rates.get("prefer") else None
        self._wall: Callable[[], float] = lambda: world.now + net.server.wall
        remote, log = Remote(net, self.process, worker="scheduler"), MemoryLog(self.process)
        self._backend = Recorded(remote, log, now=lambda: world.now, wall=self._wall)
        self._until = until
        self._count = 0
        rates = world.scenario.rates
        self._changes = world.chance("changes") if any(rates.get(name) for name in CHANGES) else None
        self._remote = remote
        self._known: list[str] = []  # accepted tasks without a dedupe key, after which others may run
        self._running: set[asyncio.Task[None]] = set()
        world.log(Began, self.process.who, role="scheduler")
        self.process.start(self._run())

    async def _run(self) -> None:
        scenario, chance = self.world.scenario, self._chance
        if every := int(scenario.rates.get("periodic", 0.0)):
            await self._set_periodic(every)
        while self.world.now < self._until:
            await asyncio.sleep(chance.expovariate(scenario.tasks_per_hour / 3600))
            many = chance.choice((1, 1, 1, 2, 5))
            spawn(self._schedule(self._changed([self._new() for _ in range(many)])), self._running)
            await asyncio.sleep((many - 1) * 3600 / scenario.tasks_per_hour)
        if every:
            await self._set_periodic(0)

    async def _set_periodic(self, every: int) -> None:
        """Set a periodic task; 0: remove it."""
        plan = Plan(lasts=20.0, effect_every=30.0, ends="success", deaf=False, poison=False, hangs=False, then=0)
        payload = msgspec.Raw(msgspec.json.encode(msgspec.to_builtins(plan)))
        task = PeriodicTaskItem(kind="short", payload=payload, every=every or 1, overlap="queue", catch_up=100)
        change = Put(_PERIODIC, task, "scheduler", is_declared=False) if every else Remove(_PERIODIC, "scheduler")
        ask = partial(call_once, partial(self._remote._call, "change_periodic", change), within=10.0)
        with suppress(BackendError):
            await call_until(ask, for_at_most=7200.0)
            self.world.log(PeriodicSet, self.process.who, name=_PERIODIC, every=every)
            self.world.fired["periodic"] += every > 0

    def _changed(self, batch: list[NewTask]) -> list[NewTask]:
        """Have some of these tasks run after others, which may come later in the batch, or be late at some time.

        Some replace others, or have a key until they end.
        """
        if (chance := self._changes) is None:
            return batch
        rates = self.world.scenario.rates
        batch = [self._debounced(task) if self._is_hit("debounce", rates) else task for task in batch]
        free = [task.id or "" for task in batch if task.dedupe_key is None]
        changed: list[NewTask] = []
        for number, task in enumerate(batch):
            later = [name for name in free if name not in {other.id for other in batch[: number + 1]}]
            names = [*self._known[-20:], *later]
            if names and task.debounce is None and self._is_hit("after", rates):
                after = chance.sample(names, min(len(names), chance.choice((1, 1, 2, 3))))
                task = msgspec.structs.replace(task, after=after)  # noqa: PLW2901
            if self._is_hit("late", rates):
                task = msgspec.structs.replace(task, start_deadline=chance.choice((30.0, 600.0)))  # noqa: PLW2901
            changed.append(task)
        return changed

    def _debounced(self, task: NewTask) -> NewTask:
        """Return the task as one that others replace; one with a key that may come again has its key until its end.

        All have the same limits, as the payload of one runs under those of another.
        """
        chance = self._changes or self._chance
        if task.dedupe_key is not None:
            return msgspec.structs.replace(task, dedupe_scope="live", dedupe_window=None)
        if task.payload.get("poison") or task.payload.get("hangs"):
            return task
        changes: dict[str, Any] = {
            "at": None,
            "delay": chance.uniform(0, 120),
            "debounce": chance.choice((60.0, 600.0)),
        }
        changes |= {"dedupe_key": f"burst-{self._count // 8}", "dedupe_window": None}
        changes |= {"max_attempts": 3, "max_crashes": 20, "max_runtime": None, "expiry": "crash"}
        return msgspec.structs.replace(task, payload={**task.payload, "may_replace": True}, **changes)

    def _is_hit(self, name: str, rates: Mapping[str, float]) -> bool:
        is_hit = self._changes is not None and self._changes.random() * 100 < rates.get(name, 0.0)
        self.world.fired[name] += is_hit
        return is_hit

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
        return self._polling(plan), lasts

    def _polling(self, plan: Plan) -> Plan:
        """Have some handlers end their first calls with `NotYet`: most wait in the worker, others with the service."""
        chance = self._polls
        if chance is None or plan.hangs or chance.random() * 100 >= self.world.scenario.rates["poll"]:
            return plan
        polls, after = chance.choice((1, 3, 20)), chance.choice((1.0, 10.0, 29.0, 120.0))
        return msgspec.structs.replace(plan, lasts=min(plan.lasts, 60.0), polls=polls, poll_after=after)

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
        key = self._keys.choice((None, *KEYS)) if self._keys else None
        requires = self._required()
        return NewTask(
            id=f"task-{self._count}",
            kind="short" if plan.hangs else chance.choice(("long", "short")),
            priority=chance.randrange(5),
            payload=msgspec.to_builtins(plan),
            at=at,
            dedupe_key=f"key-{self._count // 6}" if self._hits("same_key") else None,
            dedupe_window=chance.choice((None, 600.0)),
            collection=self._collections.choice((None, *COLLECTIONS)) if self._collections else None,
            key=key,
            requires=requires,
            **(self._preferred(requires) if key is None else {}),
            max_attempts=chance.choice((1, 2, 3)) if may_fail else default_attempts,
            max_crashes=chance.choice((0, 1, 2)) if kills else 20,
            max_runtime=longest,
            expiry="retry" if counts_time_outs else "crash",
            claim_timeout=of_claims,
            heartbeat_timeout=of_beats,
            retry=Exponential(max=300.0),
        )

    def _required(self) -> dict[str, str]:
        chance = self._requires
        if chance is None or chance.random() * 100 >= self.world.scenario.rates["require"]:
            return {}
        self.world.fired["require"] += 1
        return dict(chance.choice((GPU, EU, GPU | EU)))

    def _preferred(self, requires: Mapping[str, str]) -> dict[str, Any]:
        chance = self._prefers
        if chance is None or chance.random() * 100 >= self.world.scenario.rates["prefer"]:
            return {}
        wanted = chance.choice((GPU, EU, GPU | EU, {"gpu": "h100"}))  # which no worker has
        prefers = {name: value for name, value in wanted.items() if name not in requires}
        self.world.fired["prefer"] += bool(prefers)
        return {"prefers": prefers, "prefer_for": chance.choice((60.0, 300.0, 900.0))} if prefers else {}

    async def _schedule(self, tasks: list[NewTask]) -> None:
        is_known = await self._ask(tasks)
        if is_known:
            self._known += [task.id or "" for task in tasks if task.dedupe_key is None]
        for task in tasks:
            if self._is_hit("reschedule", self.world.scenario.rates):
                spawn(self._reschedule(task.id or ""), self._running)
            # Without its batch, a task might wait for one that was never accepted, and that is for ever.
            if self._hits("again") and (is_known or not task.after):
                await asyncio.sleep(self._chance.expovariate(0.01))
                if self._chance.random() < 0.2:
                    task = msgspec.structs.replace(task, priority=0, payload={**task.payload, "other": True})  # noqa: PLW2901
                await self._ask([task])
            if self._hits("cancel"):
                spawn(self._cancel(task.id or ""), self._running)
            if self._hits("redrive"):
                spawn(self._redrive(task.id or ""), self._running)

    async def _ask(self, tasks: list[NewTask]) -> bool:
        """Schedule tasks; return whether that was answered."""
        ask = partial(call_once, partial(self._backend.schedule, tasks), within=10.0)
        with suppress(BackendError):
            await call_until(ask, for_at_most=600.0)
            return True
        return False

    async def _reschedule(self, task_id: str) -> None:
        """Put a task off, or bring it forward; a task that runs or has ended is left alone."""
        chance = self._changes or self._chance
        for number in range(2):
            await asyncio.sleep(chance.expovariate(0.02))
            if self.world.are_faults_over:
                return
            due_at = self._wall() + chance.uniform(-600, 1800)
            request = f"{task_id}-reschedule-{number}"
            wanted = RescheduleRequest(at=datetime.fromtimestamp(max(due_at, 0.0), UTC), request_id=request)
            asked_at = self.world.now
            self.world.log(RescheduleAsked, self.process.who, task=task_id, request=request, due_by_store=due_at)
            change = partial(self._remote._call, "reschedule", (task_id, wanted))
            with suppress(BackendError):
                if await call_until(partial(call_once, change, within=10.0), for_at_most=60.0) is not None:
                    self.world.log(RescheduleAnswered, self.process.who, task=task_id, asked_at=asked_at)

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
