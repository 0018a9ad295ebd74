"""`sqlite://` keeps the contract also over a file that another client serves: its requests go over a socket."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime

import anyio.to_thread
import pytest

import leasekit
from leasekit.backend import Backend
from leasekit.server import shared
from leasekit.server.engine import Engine
from leasekit.server.store import Store
from leasekit.task import Task
from leasekit.testing.clock import FakeClock
from leasekit.testing.contract import DeadLettersContract

PATIENCE = 30.0


class Owner:
    """A client that serves a file, by a clock that the tests turn."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.clock = FakeClock(datetime.now(UTC).timestamp())
        self.engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def make(self, store: Store) -> Engine:
        """Make an engine: the first one is that which opens the file."""
        engine = Engine(store, clock=self.clock)
        if self.engine is None:
            self.engine, self._loop = engine, asyncio.get_running_loop()
        return engine

    def tick(self) -> None:
        """Have its consumer do its work now."""
        assert self.engine is not None
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self.engine.tick(), self._loop).result(PATIENCE)


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    owner = Owner(f"sqlite:///{tmp_path_factory.mktemp('shared')}/tasks.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "Engine", owner.make)
        with leasekit.connect(owner.url) as client:
            client.stats()
            yield owner


@pytest.mark.slow
class TestJoined(DeadLettersContract):
    @pytest.fixture
    async def backend(self, owner: Owner) -> AsyncIterator[Backend]:
        self._owner = owner
        backend = shared.connect(owner.url, worker="w1")
        yield backend
        await backend.aclose()

    @pytest.fixture
    async def other(self, owner: Owner) -> AsyncIterator[Backend]:
        backend = shared.connect(owner.url, worker="w2")
        yield backend
        await backend.aclose()

    async def sleep(self, seconds: float) -> None:
        self._owner.clock.advance(seconds + 0.001)  # instants are rounded to microseconds
        await anyio.to_thread.run_sync(self._owner.tick)

    def now(self) -> datetime:
        return datetime.fromtimestamp(self._owner.clock(), UTC)

    async def interrupt(self, *tasks: Task) -> None:
        """As after a time in which the owner of the store did not run."""
        assert self._owner.engine is not None
        self._owner.engine.clock._is_after_gap = True  # type: ignore[attr-defined]
