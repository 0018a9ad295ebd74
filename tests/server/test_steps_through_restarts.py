"""What a step of the wall clock must not do, seen from outside: through a restart, and while the server is up."""

import asyncio
import contextlib
import sqlite3
from pathlib import Path

import pytest

from leasekit.server.engine import Engine
from leasekit.server.store import Store
from leasekit.server.store.memory import MemoryStore
from leasekit.server.store.sqlite.store import SqliteStore
from leasekit.task import Beat, Claimed, NewTask, Outcome, Settlement
from tests.sampling import combinations

HOUR, DAY = 3600.0, 86_400.0


class Clocks:
    """A wall clock that can be stepped, and one that cannot."""

    def __init__(self) -> None:
        self.step = 1_700_000_000.0
        self.boot = 1000.0
        self.boot_id = "first"

    def wall(self) -> float:
        return self.boot + self.step

    def instant(self) -> float:
        return self.boot

    def restart(self, down: float, *, is_rebooted: bool) -> None:
        """Let so much time pass, after which the machine has been started anew."""
        self.boot += down
        if is_rebooted:
            self.step += self.boot - 50.0
            self.boot, self.boot_id = 50.0, "second"

    def engine(self, store: Store) -> Engine:
        return Engine(store, clock=self.wall, boot=self.instant, boot_id=self.boot_id, period=HOUR)


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "tasks.db")


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


RUNTIME, TTL = 4 * HOUR, 600.0


async def begun(engine: Engine) -> str:
    """The token of a task whose body has begun, and may run for `RUNTIME`."""
    await engine.schedule([NewTask(kind="k", id="a", max_runtime=RUNTIME, claim_timeout=TTL, heartbeat_timeout=TTL)])
    (task,) = (await claimed(engine, "1")).tasks
    assert await beat(engine, task.token) == "renewed"
    return task.token


async def beat(engine: Engine, token: str) -> str:
    (verdict,) = await engine.heartbeat("w", [Beat(id="a", token=token, started=True)])
    return verdict.verdict


async def ran(engine: Engine, clocks: Clocks, token: str, seconds: float) -> list[str]:
    """What its beats are told while the body runs for so long."""
    verdicts: list[str] = []
    for _ in range(int(seconds / 60)):
        clocks.boot += 60
        verdicts.append(await beat(engine, token))
    return verdicts


STEPS = [(0.0, 0.0), (2 * HOUR, 0.0), (-2 * HOUR, 0.0), (0.0, 2 * DAY), (DAY, -2 * DAY)]


# Sample: one combination in two.
@pytest.mark.soak
@pytest.mark.parametrize(("steps", "down", "is_rebooted"), combinations(STEPS, [0.0, 300.0], [False, True], one_in=2))
def test_a_restart_after_a_step_ends_no_run_early_and_late_by_the_downtime_at_most(
    store: Store, steps: tuple[float, float], down: float, *, is_rebooted: bool
) -> None:
    async def play() -> None:
        clocks = Clocks()
        async with clocks.engine(store) as engine:
            token = await begun(engine)
            clocks.step += steps[0]
            assert set(await ran(engine, clocks, token, HOUR)) == {"renewed"}
        clocks.restart(down, is_rebooted=is_rebooted)
        clocks.step += steps[1]
        async with clocks.engine(store) as engine:
            left = RUNTIME - HOUR - (0.0 if is_rebooted else down)
            assert set(await ran(engine, clocks, token, left - 60)) == {"renewed"}
            assert (await ran(engine, clocks, token, 120))[-1] == "gone"

    asyncio.run(play())


def test_what_was_over_stays_over_through_a_restart(store: Store) -> None:
    async def play() -> None:
        clocks = Clocks()
        async with clocks.engine(store) as engine:
            token = await begun(engine)
            assert (await ran(engine, clocks, token, RUNTIME))[-1] == "gone"
        clocks.restart(0.0, is_rebooted=True)
        async with clocks.engine(store) as engine:
            assert await beat(engine, token) == "gone"

    asyncio.run(play())


@pytest.mark.parametrize("anchor", ["NULL", "'not json'", "5", "CAST(x'ff' AS TEXT)", "x'ff'"])
def test_where_nothing_is_known_of_the_clock_of_old_runs_count_anew(tmp_path: Path, anchor: str) -> None:
    async def play() -> None:
        clocks, path = Clocks(), tmp_path / "tasks.db"
        async with clocks.engine(SqliteStore(path)) as engine:
            token = await begun(engine)
            await ran(engine, clocks, token, HOUR)
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute(f"UPDATE store SET anchor = {anchor}")  # noqa: S608  NULL: as an earlier version left it
            connection.commit()
        async with clocks.engine(SqliteStore(path)) as engine:
            assert set(await ran(engine, clocks, token, RUNTIME)) == {"renewed"}
            assert (await ran(engine, clocks, token, 120))[-1] == "gone"

    asyncio.run(play())
