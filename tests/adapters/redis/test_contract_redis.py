"""The contract of an adapter, on one Redis and on a cluster."""

from collections.abc import AsyncIterator

import pytest

from leasekit.backend import Backend
from leasekit.task import Task
from leasekit.testing.contract import DeadLettersContract
from leasekit_redis import connect
from tests.adapters.redis.conftest import Cluster
from tests.redis_server import Server


class OnRedis(DeadLettersContract):
    @pytest.fixture
    def where(self) -> Server | Cluster:
        """The Redis, or the cluster."""
        raise NotImplementedError

    @pytest.fixture
    async def backend(self, where: Server | Cluster) -> AsyncIterator[Backend]:
        self._where = where
        backend = connect(where.url, worker="w1")
        yield backend
        await backend.aclose()

    @pytest.fixture
    async def other(self, where: Server | Cluster) -> AsyncIterator[Backend]:
        backend = connect(where.url, worker="w2")
        yield backend
        await backend.aclose()

    @pytest.fixture
    async def out_of_reach(self, closed_port: int) -> AsyncIterator[Backend]:
        backend = connect(f"redis://127.0.0.1:{closed_port}", worker="w3")
        yield backend
        await backend.aclose()

    async def expire(self, *tasks: Task) -> None:
        """Leases are seen to run out by themselves in the tests of failures; here their ends are moved, for speed."""
        for task in tasks:
            key = f"leasekit:{{{task.kind}}}:leases"
            assert self._where.owner(key).ask("ZADD", key, "XX", "CH", 1, task.id) == 1

    async def interrupt(self, *tasks: Task) -> None:
        """As after a restart or a failover: it is another process that answers."""
        for task in tasks:
            key = f"leasekit:{{{task.kind}}}:meta"
            self._where.owner(key).ask("HSET", key, "run", "of another process")


class TestRedis(OnRedis):
    @pytest.fixture
    def where(self, server: Server) -> Server:
        return server


@pytest.mark.slow
class TestCluster(OnRedis):
    @pytest.fixture
    def where(self, cluster: Cluster) -> Cluster:
        return cluster
