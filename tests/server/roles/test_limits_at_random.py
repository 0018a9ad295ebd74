"""Limits of kinds under random histories: deaths, late results, restarts, changed limits, and a second node."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import pytest

from leasekit.server.engine import Engine
from leasekit.task import KindSettings, NewTask, Outcome, Settlement, Status, Task
from tests.sampling import slow_after
from tests.server.conftest import Bench

pytestmark = pytest.mark.anyio

TTL = 10.0
TASKS = 60
OUTCOMES: tuple[Outcome, ...] = ("success", "fatal", "release", "retry", "crash")


class World:
    """An engine, or two of one database, and what is known of the tasks of kind `k`."""

    def __init__(self, bench: Bench, other: Engine | None, random: Random) -> None:
        self.bench = bench
        self.other = other
        self.random = random
        self.held: list[tuple[Task, float]] = []  # with when each was granted
        self.starts: list[float] = []
        self.concurrency = 3
        self.most = 0  # that may run: a limit that is lowered ends no run

    @property
    def node(self) -> Engine:
        return self.bench.engine if self.other is None or self.random.random() < 0.5 else self.other

    async def claim(self) -> None:
        number = self.random.random()
        limit = self.random.randint(1, 5)
        claimed = await self.node.claim(worker="w", kinds=["k", "x"], limit=limit, wait=0, claim_id=f"{number}")
        self.held += [(task, self.bench.clock.wall) for task in claimed.tasks]
        self.starts += [self.bench.clock.wall] * len(claimed.tasks)

    async def claim_twice_at_once(self) -> None:
        await asyncio.gather(self.claim(), self.claim())

    async def settle(self) -> None:
        """Report how a run ended; its lease may have expired, and another may hold its task."""
        if self.held:
            task, _ = self.held.pop(self.random.randrange(len(self.held)))
            outcome = self.random.choice(OUTCOMES)
            pause = 1.0 if outcome == "retry" else None
            end = Settlement(id=task.id, token=task.token, outcome=outcome, retry_after=pause)
            await self.node.results("w", [end])

    async def die(self) -> None:
        """A holder is killed: nothing is heard of its tasks again."""
        if self.held:
            self.held.pop(self.random.randrange(len(self.held)))

    async def wait(self) -> None:
        self.bench.clock.advance(self.random.choice([0.01, 0.3, 1.0, TTL]))

    async def look(self) -> None:
        await self.node.tick()

    async def restart(self) -> None:
        if self.other is None:
            await self.bench.restart()

    async def change(self) -> None:
        self.concurrency = self.random.randint(1, 4)
        await self.node.operations.set_kind("k", self.settings, by=None)

    @property
    def settings(self) -> KindSettings:
        return KindSettings(concurrency=self.concurrency, rate=2.0, burst=4)

    async def check(self) -> None:
        counts = (await self.bench.engine.queries.stats()).kinds.get("k", {})
        running = counts.get("claimed", 0) + counts.get("processing", 0)
        assert running <= max(self.concurrency, self.most)
        self.most = running
        for last, at in enumerate(self.starts):
            for first, since in enumerate(self.starts[: last + 1]):
                assert last - first + 1 <= 4 + 2.0 * (at - since) + 1e-6


@pytest.fixture
async def other(bench: Bench, request: pytest.FixtureRequest) -> AsyncIterator[Engine | None]:
    """A second node, if the store is a database."""
    async with AsyncExitStack() as stack:
        is_shared = bench.engine.neighbours is not None
        yield await stack.enter_async_context(bench._make()) if is_shared else None


@pytest.mark.parametrize("seed", slow_after(1, range(3)))
async def test_limits_hold_in_every_state_and_leave_no_task(bench: Bench, other: Engine | None, seed: int) -> None:
    random = Random(seed)
    world = World(bench, other, random)
    await bench.engine.operations.set_kind("k", world.settings, by=None)
    options: dict[str, Any] = {
        "claim_timeout": TTL,
        "heartbeat_timeout": TTL,
        "max_crashes": 1000,
        "max_attempts": None,
    }
    tasks = [NewTask(kind="k", id=f"{number}", priority=number % 3, **options) for number in range(TASKS)]
    await bench.engine.schedule(tasks)
    steps = [world.claim] * 4 + [world.claim_twice_at_once] * 2 + [world.settle] * 5 + [world.wait] * 4
    steps += [world.die, world.look, world.look, world.restart, world.change]
    for _ in range(250):
        await random.choice(steps)()
        await world.check()
    for _ in range(1000):  # whatever has happened, no place stays taken, and no task waits for ever
        if not await left(bench):
            break
        for task, _ in world.held:
            await bench.engine.results("w", [Settlement(id=task.id, token=task.token, outcome="success")])
        world.held.clear()
        bench.clock.advance(TTL + 1)
        await bench.engine.tick()
        await world.claim()
        await world.check()
    assert not await left(bench)


async def left(bench: Bench) -> int:
    counts = (await bench.engine.queries.stats()).kinds["k"]
    return sum(count for status, count in counts.items() if not Status(status).ended)
