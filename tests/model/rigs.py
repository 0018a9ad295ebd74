"""Services that a history is run against, each with a clock that is turned by hand: memory, sqlite, http, postgresql
with one node or several, redis.

A rig says what its service may do otherwise than the others: when it takes back leases, how a restart prolongs them.
"""

import asyncio
import math
import socket
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Protocol

import psycopg
import pytest

from harness.chaos import redis_clock
from leasekit._forwarding import ForwardingScheduler
from leasekit.backend import Scheduler
from leasekit.server.embedded import EmbeddedBackend
from leasekit.server.engine import Engine
from leasekit.server.http.app import Api
from leasekit.server.http.process import Server as HttpServer
from leasekit.server.store import Store
from leasekit.server.store.memory import MemoryStore
from leasekit.server.store.postgres.store import PostgresStore
from leasekit.server.store.urls import open_store
from leasekit.testing.memory import MemoryBackend, MemoryService
from leasekit_http import HttpBackend
from leasekit_redis import claiming, clocks, connect, maintenance, renewing
from tests.redis_server import Server

__all__ = ["EngineRig", "HttpRig", "Lease", "MemoryRig", "NodesRig", "PostgresRig", "RedisRig", "Rig", "SqliteRig"]

START = 1000.0


class Lease(Protocol):
    """What a rig needs to know of a lease."""

    number: int  # of its task, as tasks are sorted
    ttls: tuple[float, float]  # of the claim, and of a beat
    ends_at: float
    was_extended: bool  # by a restart, since its holder was heard last

    @property
    def is_leased(self) -> bool: ...


class Rig:
    """One service, and its clocks: tasks are due by `now`, leases end by `instant`."""

    service: Scheduler
    looks_always = False  # each request takes back all leases that have ended; else claims do, and `look`
    restarts = True
    steps = True  # its wall clock may be stepped
    has_gates = True
    reschedules = True
    refuses_circles = True  # of tasks after others; else they are dropped later
    gathers = False  # claims that are made together are served in order
    remembers = math.inf  # ttls of its claim for which a claim may be repeated

    def __init__(self) -> None:
        self.now = self.instant = START

    async def open(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        await self.service.aclose()  # type: ignore[attr-defined]

    async def look(self) -> None:
        """Have leases that have ended taken back."""

    async def tell_ends(self) -> None:
        """Have all ends told to the tasks that wait for them, where a request does not do that."""

    async def restart(self, leases: list[Lease]) -> None:
        """Stop the service and start it again; these leases are prolonged."""
        raise NotImplementedError

    async def number(self, task_id: str, *, already: int) -> int:
        """Return the number by which a new task is sorted, after `already` others."""
        return already + 1

    async def advance(self, seconds: float) -> None:
        self.now += seconds
        self.instant += seconds

    async def step(self, seconds: float) -> None:
        """Set the wall clock ahead."""
        self.now += seconds

    def has_ended(self, lease: Lease) -> bool:
        """Whether who looks at it now finds that the lease has ended."""
        return lease.ends_at <= self.instant


class MemoryRig(Rig):
    looks_always = True
    restarts = steps = False

    async def open(self) -> None:
        self.service = MemoryBackend(MemoryService(now=lambda: self.now, random=Random(5)), worker="w")


class SqliteRig(Rig):
    gathers = True

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._random = Random(5)  # one for all starts: what makes tokens never begins again

    async def open(self) -> None:
        self.engine = self._make()
        self.service = EmbeddedBackend(lambda: self.engine, worker="w")

    def _make(self) -> Engine:
        return Engine(
            self._store(),
            clock=lambda: self.now,
            boot=lambda: self.instant,
            random=self._random,
            period=3600.0,
        )

    def _store(self) -> Store:
        return open_store(f"sqlite:///{self._folder}/tasks.db")

    async def look(self) -> None:
        await self.service.stats()  # an engine is opened by the first call
        await self.engine.tick()

    async def restart(self, leases: list[Lease]) -> None:
        await self.close()
        await self.open()
        await self.service.stats()
        self._extend(leases)

    def _extend(self, leases: list[Lease]) -> None:
        for lease in leases:
            if lease.is_leased and not lease.was_extended:
                lease.ends_at = self.instant + max(lease.ttls) * (1 + (lease.number % 100) / 1000)
                lease.was_extended = True


class EngineRig(SqliteRig):
    """An engine over a store in memory, which outlives it."""

    def __init__(self) -> None:
        super().__init__(Path())
        self._kept = MemoryStore()

    def _store(self) -> Store:
        return self._kept


class HttpRig(SqliteRig):
    """The server on a port, in this loop."""

    gathers = False

    async def open(self) -> None:
        await self._serve(0)
        self.service = HttpBackend(f"http://127.0.0.1:{self._port}", worker="w")

    async def _serve(self, port: int) -> None:
        listener = socket.create_server(("127.0.0.1", port))
        self._port: int = listener.getsockname()[1]
        self.engine = self._make()
        await self.engine.__aenter__()
        self._server = HttpServer(Api(self.engine))
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def _stop(self) -> None:
        self._server.should_exit = True
        await self._serving
        await self.engine.__aexit__(None, None, None)

    async def close(self) -> None:
        await super().close()
        await self._stop()

    async def restart(self, leases: list[Lease]) -> None:
        service = self.service
        await self._stop()
        await self._serve(self._port)
        self.service = service
        self._extend(leases)


class PostgresRig(SqliteRig):
    """One node over a real PostgreSQL, whose clock is that of the rig."""

    def __init__(self, url: str) -> None:
        super().__init__(Path())
        self._url = url

    def _store(self) -> Store:
        return PostgresStore(self._url)

    async def number(self, task_id: str, *, already: int) -> int:
        with psycopg.connect(self._url) as connection:
            row = connection.execute("SELECT seq FROM leasekit.task WHERE id = %s", (task_id,)).fetchone()
        assert row is not None, "S5: nothing is lost"
        return int(row[0])


class NodesRig(PostgresRig):
    """Several nodes over one database; each request goes to any of them."""

    gathers = False

    async def open(self) -> None:
        self._dice = Random(5)
        self.nodes = [await self._join() for _ in range(2)]
        self.service = _AnyOf(self.nodes, self._dice)

    async def _join(self) -> "_Node":
        node = _Node(self._make())
        await node.stats()
        return node

    async def close(self) -> None:
        for node in self.nodes:
            await node.aclose()

    async def look(self) -> None:
        await self._dice.choice(self.nodes).engine.tick()

    async def step(self, seconds: float) -> None:
        """Set the database's clock ahead; a node that looks at it before and after sees that it was set."""
        await super().step(seconds)
        await self._dice.choice(self.nodes).engine.ready()

    async def advance(self, seconds: float) -> None:
        await super().advance(seconds)
        for node in self.nodes:  # as each does once in a period
            assert await node.engine.ready() is None

    async def restart(self, leases: list[Lease]) -> None:
        """Replace one node, or all: leases go on while one node is there."""
        if self._dice.random() < 0.5:
            which = self._dice.randrange(len(self.nodes))
            await self.nodes[which].aclose()
            self.nodes[which] = await self._join()
            return
        await self.close()
        self.nodes[:] = [await self._join() for _ in self.nodes]
        self._extend(leases)


class _Node(EmbeddedBackend):
    def __init__(self, engine: Engine) -> None:
        super().__init__(lambda: engine, worker="w")
        self.engine = engine


class _AnyOf(ForwardingScheduler):
    """Nodes, one of which gets each request."""

    capabilities = EmbeddedBackend.capabilities

    def __init__(self, nodes: list[_Node], dice: Random) -> None:
        self._nodes = nodes
        self._dice = dice

    async def _call(self, name: str, /, *args: Any, **options: Any) -> Any:
        return await getattr(self._dice.choice(self._nodes), name)(*args, **options)

    async def reschedule(self, task_id: str, **wanted: Any) -> Any:
        return await self._call("reschedule", task_id, **wanted)

    async def cancel_matching(self, **wanted: Any) -> Any:
        return await self._call("cancel_matching", **wanted)

    async def reschedule_matching(self, **wanted: Any) -> Any:
        return await self._call("reschedule_matching", **wanted)

    async def set_periodic(self, name: str, task: Any) -> Any:
        return await self._call("set_periodic", name, task)

    async def delete_periodic(self, name: str) -> None:
        await self._call("delete_periodic", name)

    async def set_gate(self, **wanted: Any) -> Any:
        return await self._call("set_gate", **wanted)

    async def open_gate(self, **wanted: Any) -> None:
        await self._call("open_gate", **wanted)


class RedisRig(Rig):
    """A real Redis whose scripts see a clock that stands; the client's own clock is turned with it."""

    has_gates = False
    reschedules = False
    refuses_circles = False
    remembers = 2.0

    def __init__(self, server: Server, prefix: str, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._server = server
        self._prefix = prefix
        self._clock = START  # the client's, which does not step
        self._counts_from = 0.0  # since when leases count anew
        self._stepped_at: float | None = None  # by the client's clock
        own = SimpleNamespace(monotonic=lambda: self._clock, time=lambda: self.now)
        for module in (claiming, clocks, maintenance, renewing):
            patch.setattr(module, "time", own)

    async def open(self) -> None:
        self._set()
        self.service = backend = connect(f"{self._server.url}?prefix={self._prefix}", worker="w")
        backend._ensure_maintenance = lambda: None  # type: ignore[method-assign] # maintenance comes by when told

    def _set(self) -> None:
        self._server.ask("SET", redis_clock.STANDS, round(1e6 * self.now))

    async def look(self) -> None:
        backend: Any = self.service
        await backend._maintenance.maintain("k")

    async def tell_ends(self) -> None:
        """Run maintenance at a time when it looks at all that waits: also at what was dropped and lives again."""
        gated = f"{self._prefix}:{{k}}:gated"
        for task_id in self._server.ask("ZRANGE", gated, 0, -1):
            self._server.ask("ZADD", gated, "XX", 1, task_id)
        await self.look()

    async def restart(self, leases: list[Lease]) -> None:
        """Have another process answer, as after a restart; maintenance notices at once, and leases count anew."""
        if self._server.ask("EXISTS", f"{self._prefix}:{{k}}:leases"):
            self._server.ask("HSET", f"{self._prefix}:{{k}}:meta", "run", "of another process")
            self._counts_from = self.instant
            await self.look()

    async def advance(self, seconds: float) -> None:
        await super().advance(seconds)
        self._clock += seconds
        self._set()

    async def step(self, seconds: float) -> None:
        """Leases end by the wall clock: they count anew from when the step is noticed."""
        await self.look()  # so that the client knows what time it was
        await super().advance(seconds)
        self._set()
        await self.look()
        self._counts_from, self._stepped_at = self.instant, self._clock

    def has_ended(self, lease: Lease) -> bool:
        if lease.ends_at > self.instant:
            return False
        since = self._counts_from
        if self._stepped_at is not None:  # the client says how long ago, by a clock that may be faster
            since = max(since, self.instant - int(1000 * (self._clock - self._stepped_at) / 1.001) / 1000)
        prolonged = round(since + max(lease.ttls), 3)
        if prolonged <= self.instant:
            return True
        lease.ends_at = prolonged
        return False
