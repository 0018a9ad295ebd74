"""`http://` keeps the contract, against a server in a process of its own."""

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from leasekit.backend import Backend
from leasekit.testing.contract import SchedulerContract
from leasekit_http import connect

SERVE = "import sys; from leasekit.server.app import serve; serve('127.0.0.1', 0, sys.argv[1])"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server over a store of its own."""
    store: Path = tmp_path_factory.mktemp("server") / "tasks.db"
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, f"sqlite:///{store}"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        yield said.rpartition(" ")[2].strip()
        process.terminate()
        assert process.wait(timeout=60) == 0


class TestHttp(SchedulerContract):
    @pytest.fixture
    async def backend(self, server: str) -> AsyncIterator[Backend]:
        backend = connect(server, worker="w1")
        yield backend
        await backend.aclose()

    @pytest.fixture
    async def other(self, server: str) -> AsyncIterator[Backend]:
        other = connect(server, worker="w2")
        yield other
        await other.aclose()
