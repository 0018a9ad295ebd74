"""What a step of the wall clock must not do, seen from outside: through a restart, and while the server is up."""

import asyncio
from pathlib import Path

import pytest

from leasekit.server.engine import Engine
from leasekit.server.store import Store
from leasekit.server.store.memory import MemoryStore
from leasekit.server.store.sql import SqlStore
from leasekit.task import Claimed, NewTask, Outcome, Settlement

HOUR, DAY = 3600.0, 86_400.0


class Clocks:
    """A wall clock that can be stepped, and one that cannot."""

    def __init__(self) -> None:
        self.step = 1_700_000_000.0
        self.boot = 1000.0

    def wall(self) -> float:
        return self.boot + self.step

    def instant(self) -> float:
        return self.boot

    def engine(self, store: Store) -> Engine:
        return Engine(store, clock=self.wall, boot=self.instant, period=HOUR)


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else SqlStore(tmp_path / "tasks.db")


async def claimed(engine: Engine, claim_id: str) -> Claimed:
    return await engine.claim(worker="w", kinds=["k"], limit=1, wait=0, claim_id=claim_id)


@pytest.mark.parametrize("outcome", ["release", "retry", "crash", None])
def test_what_was_put_back_is_due_after_a_restart_with_an_earlier_wall_clock(
    store: Store, outcome: Outcome | None
) -> None:
    async def play() -> None:
        clocks = Clocks()
        async with clocks.engine(store) as engine:
            await engine.schedule([NewTask(kind="k", id="a", claim_timeout=60, heartbeat_timeout=60)])
            (task,) = (await claimed(engine, "1")).tasks
            clocks.boot += 5 * HOUR  # so long its body runs, and nothing else happens
            if outcome is not None:
                retry_after = 0.0 if outcome == "retry" else None
                end = Settlement(id="a", token=task.token, outcome=outcome, retry_after=retry_after)
                await engine.results("w", [end])
            await engine.tick()
        clocks.step -= 2 * HOUR
        async with clocks.engine(store) as engine:
            assert [task.id for task in (await claimed(engine, "2")).tasks] == ["a"]

    asyncio.run(play())


def test_a_claim_is_remembered_though_the_wall_clock_is_stepped_forward(store: Store) -> None:
    async def play() -> None:
        clocks = Clocks()
        async with clocks.engine(store) as engine:
            await engine.schedule([NewTask(kind="k"), NewTask(kind="k")])
            first = await claimed(engine, "1")
            clocks.step += 2 * DAY
            await engine.tick()  # notices the step
            await engine.tick()
            again = await claimed(engine, "1")
            assert [task.token for task in again.tasks] == [task.token for task in first.tasks]

    asyncio.run(play())
