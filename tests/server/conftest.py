"""An engine on a bench: over each store, with a clock that is turned by hand."""

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from leasekit.server import engine
from leasekit.server.engine import Engine
from leasekit.server.store import Store
from leasekit.server.store.memory import MemoryStore
from leasekit.server.store.postgres.store import PostgresStore
from leasekit.server.store.sqlite.store import SqliteStore
from leasekit.task import Beat, Claimed, NewTask, Outcome, Scheduled, Settlement, Task, TaskInfo, Verdict
from tests.postgres_server import PostgresServer


class Hand:
    """A clock that moves when it is told to. Two hands: the wall's may step, the other never does."""

    def __init__(self) -> None:
        self.wall = 1_000_000.0
        self.boot = 50.0

    def advance(self, seconds: float) -> None:
        self.wall += seconds
        self.boot += seconds

    def step(self, seconds: float) -> None:
        """Someone sets the wall clock."""
        self.wall += seconds


class Bench:
    """An engine, and short words for what is asked of it. Tasks are of kind `k` unless said otherwise."""

    def __init__(self, make_store: Callable[[], Store]) -> None:
        self.clock = Hand()
        self._make_store = make_store
        self._claim_ids = (f"claim-{n}" for n in itertools.count())
        self._random = Random(7)  # one for all restarts: tokens do not repeat
        self.engine = self._make()

    def _make(self) -> Engine:
        return Engine(
            self._make_store(), clock=lambda: self.clock.wall, boot=lambda: self.clock.boot, random=self._random
        )

    async def restart(self) -> None:
        """Stop the engine and start another on the same store."""
        await self.engine.__aexit__(None, None, None)
        self.engine = self._make()
        await self.engine.__aenter__()

    async def later(self, seconds: float) -> None:
        """Let time pass, and have the consumer look."""
        self.clock.advance(seconds)
        await self.engine.tick()

    async def put(self, *ids: str, **options: Any) -> list[Scheduled]:
        options = {"kind": "k"} | options
        return await self.engine.schedule([NewTask(id=task_id, **options) for task_id in ids])

    async def claim(
        self, *, limit: int = 100, kinds: tuple[str, ...] = ("k",), wait: float = 0, **more: Any
    ) -> Claimed:
        wanted = {"worker": "w", "claim_id": next(self._claim_ids)} | more
        return await self.engine.claim(kinds=kinds, limit=limit, wait=wait, **wanted)

    async def take(self, **options: Any) -> Task:
        (task,) = (await self.claim(limit=1, **options)).tasks
        return task

    async def taken(self, task_id: str, **options: Any) -> Task:
        """A task put and claimed."""
        await self.put(task_id, **options)
        return await self.take(kinds=(options.get("kind", "k"),))

    async def ids(self, **options: Any) -> list[str]:
        return [task.id for task in (await self.claim(**options)).tasks]

    async def beat(self, task: Task, **options: Any) -> Verdict:
        (verdict,) = await self.engine.heartbeat("w", [Beat(id=task.id, token=task.token, **options)])
        return verdict

    async def settle(self, task: Task, outcome: Outcome = "success", **options: Any) -> Verdict:
        settlement = Settlement(id=task.id, token=task.token, outcome=outcome, **options)
        (verdict,) = await self.engine.results("w", [settlement])
        return verdict

    async def cancel(self, task_id: str) -> Verdict:
        (verdict,) = await self.engine.cancel([task_id])
        return verdict

    async def info(self, task_id: str) -> TaskInfo:
        info = await self.engine.queries.get(task_id)
        assert info is not None
        return info

    async def status(self, task_id: str) -> str:
        return (await self.info(task_id)).status.value


def plain(value: Any) -> Any:
    """A user's value, decoded."""
    return msgspec.json.decode(value)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def postgres_stores(postgres: PostgresServer) -> Iterator[Callable[[], Store]]:
    url, stores = postgres.emptied(), list[PostgresStore]()

    def make() -> Store:
        stores.append(PostgresStore(url))
        return stores[-1]

    yield make
    for store in stores:
        store.close()  # also those of writers that have failed


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    """Opens the same tasks again each time."""
    if request.param == "sqlite":
        return lambda: SqliteStore(tmp_path / "tasks.db")
    if request.param == "postgres":
        return request.getfixturevalue("postgres_stores")  # type: ignore[no-any-return]
    store = MemoryStore()
    return lambda: store


@pytest.fixture
async def bench(make_store: Callable[[], Store], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    # The consumer looks when `later` says so, and not by itself.
    monkeypatch.setattr(engine, "_PERIOD", 3600.0)
    one = Bench(make_store)
    await one.engine.__aenter__()
    yield one
    await one.engine.__aexit__(None, None, None)
