"""The contract of an adapter, over a server at a port."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import anyio.to_thread
import pytest

from leasekit.backend import Backend
from leasekit.testing.clock import FakeClock
from leasekit.testing.contract import DeadLettersContract
from leasekit_http import HttpBackend, connect
from tests.server.http.conftest import Running, run


@pytest.fixture(scope="module")
def server_clock() -> FakeClock:
    return FakeClock(datetime.now(UTC).timestamp())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, server_clock: FakeClock) -> Iterator[Running]:
    with run(f"sqlite:///{tmp_path_factory.mktemp('server')}/tasks.db", clock=server_clock) as running:
        running.give_token()  # the contract holds for callers with one, too; the tests of tokens make more
        yield running


@asynccontextmanager
async def connected(port: int, worker: str, token: str | None = None) -> AsyncIterator[HttpBackend]:
    backend = connect(f"http://127.0.0.1:{port}", worker=worker, token=token)
    yield backend
    await backend.aclose()


class TestHttp(DeadLettersContract):
    """The server has a clock that the tests turn."""

    @pytest.fixture(autouse=True)
    def _turn(self, server: Running, server_clock: FakeClock) -> None:
        self._server, self._clock = server, server_clock

    @pytest.fixture
    async def backend(self, server: Running) -> AsyncIterator[Backend]:
        async with connected(server.port, "contract-a", server.token) as backend:
            yield backend

    @pytest.fixture
    async def other(self, server: Running) -> AsyncIterator[Backend]:
        async with connected(server.port, "contract-b", server.token) as backend:
            yield backend

    @pytest.fixture
    async def out_of_reach(self, closed_port: int) -> AsyncIterator[Backend]:
        async with connected(closed_port, "contract-c") as backend:
            yield backend

    async def sleep(self, seconds: float) -> None:
        self._clock.advance(seconds + 0.001)  # instants are rounded to microseconds
        await anyio.to_thread.run_sync(self._server.tick)

    def now(self) -> datetime:
        return datetime.fromtimestamp(self._clock(), UTC)
