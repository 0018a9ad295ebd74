"""The contract of an adapter, over a server process."""

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from leasekit.backend import Backend
from leasekit.testing.contract import RedriverContract
from leasekit_http import HttpBackend, connect

SERVE = [sys.executable, "-c", "import typer; from leasekit.cli.serve import serve; typer.run(serve)"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    store: Path = tmp_path_factory.mktemp("server") / "tasks.db"
    with subprocess.Popen(
        [*SERVE, "--port", "0", "--store", f"sqlite:///{store}"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


@asynccontextmanager
async def connected(url: str, worker: str) -> AsyncIterator[HttpBackend]:
    backend = connect(url, worker=worker)
    yield backend
    await backend.aclose()


class TestHttp(RedriverContract):
    short_ttl = 4.0  # the clock is the real one: on a busy machine a beat may be a second late

    @pytest.fixture
    async def backend(self, server: str) -> AsyncIterator[Backend]:
        async with connected(server, "contract-a") as backend:
            yield backend

    @pytest.fixture
    async def other(self, server: str) -> AsyncIterator[Backend]:
        async with connected(server, "contract-b") as backend:
            yield backend

    @pytest.fixture
    async def out_of_reach(self, closed_port: int) -> AsyncIterator[Backend]:
        async with connected(f"http://127.0.0.1:{closed_port}", "contract-c") as backend:
            yield backend
