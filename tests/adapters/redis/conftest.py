"""A real Redis, and a real cluster of three primaries with a replica each, for as long as a session runs."""

import socket
import uuid
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import redis

from tests.redis_server import Server, until

pytest.register_assert_rewrite("leasekit.testing.contract")


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


@pytest.fixture(scope="module")  # its nodes talk to each other all the time
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


@pytest.fixture
def unused_port() -> Iterator[int]:
    """A port on which nobody listens: bound, so that nobody else takes it meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
