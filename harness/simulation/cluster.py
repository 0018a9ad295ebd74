"""Several servers over one PostgreSQL. The database is real; time, processes and faults are simulated.

A transaction that stands still between its beginning and its end is a greenlet: the others go on meanwhile, and meet
its locks. A wait for a lock would stop the whole world, so that it ends at once, as if `lock_timeout` had passed.
"""

import atexit
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import greenlet  # type: ignore[import-untyped]
import psycopg

from harness.chaos.database import Database
from harness.history import Fault
from harness.simulation.queues import Queues
from harness.simulation.server import Server
from harness.simulation.store import Committed, WatchedStore
from harness.simulation.world import Process, World
from leasekit.errors import Unavailable
from leasekit.server.store.postgres import store, tx

_IDLE = 5.0  # seconds after which the database ends a session that stands still in a transaction
_TELL = 0.02  # seconds until the other nodes hear a message


class Cluster:
    """Servers over one database. What is asked of a server goes to any of them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._chance = world.chance("cluster")
        self.committed = Committed()
        self.url = _emptied()
        self.queues = Queues(world) if world.scenario.has_queues else None
        self.wall = 1_700_000_000.0  # the database's clock minus true time
        self.is_away = False
        self.nodes = [Node(world, self, number) for number in range(world.scenario.nodes)]

    def start(self) -> None:
        for node in self.nodes:
            node.start()

    def for_request(self) -> Server:
        return self._chance.choice(self.nodes)

    def tell(self, sender: "Node", messages: Sequence[str]) -> None:
        for node in self.nodes:
            if node is not sender:
                self.world.after(_TELL, node.hear, messages)

    def mend(self) -> None:
        self.is_away = False
        for node in self.nodes:
            node.die_at = node.stands_in_commit_for = None
            node.store.go_on()
        self.start()

    @property
    def unfinished(self) -> int:
        return self.nodes[0].unfinished

    def finals(self) -> None:
        self.nodes[0].finals()

    def close(self) -> None:
        for node in self.nodes:
            node.store.crash()


class Node(Server):
    """A server over the database of the cluster."""

    store: "_SharedStore"

    def __init__(self, world: World, cluster: Cluster, number: int) -> None:
        self.cluster = cluster
        self.stands_in_commit_for: float | None = None  # seconds for which the next transaction stands still
        self.is_killed_in_commit = False  # in place of going on after that
        super().__init__(world, name=f"node-{number}")

    def _make_store(self) -> "_SharedStore":
        return _SharedStore(self, self.cluster.url)

    def _make_queues(self) -> Queues | None:
        return self.cluster.queues

    @property
    def wall(self) -> float:
        return self.cluster.wall

    @wall.setter
    def wall(self, to: float) -> None:
        if hasattr(self, "store"):  # else it is the default of a server
            self.cluster.wall = to

    def hear(self, messages: Sequence[str]) -> None:
        for message in messages:
            if self.process is not None and self.process.is_alive and self.store.heard is not None:
                self.process.call(self.store.heard, message)

    def write(self, write: Callable[[], None]) -> None:
        greenlet.greenlet(write).switch()


class _SharedStore(WatchedStore):
    """A PostgreSQL store whose transactions may stand still before they end."""

    def __init__(self, node: Node, url: str) -> None:
        super().__init__(store.PostgresStore(url), node.world, node.cluster.committed)
        self._node = node
        self.heard: Callable[[str], None] | None = None
        self._standing: tuple[Process, greenlet.greenlet, float] | None = None  # since when

    @property
    def wall(self) -> Any:
        return self._inner.wall  # type: ignore[attr-defined]

    @wall.setter
    def wall(self, clock: Any) -> None:
        self._inner.wall = clock  # type: ignore[attr-defined]

    @property
    def boot(self) -> Any:
        return self._inner.boot  # type: ignore[attr-defined]

    @boot.setter
    def boot(self, clock: Any) -> None:
        self._inner.boot = clock  # type: ignore[attr-defined]

    def lacks(self) -> list[int]:
        return []

    migrate = lacks

    @property
    def node(self) -> Any:
        return self._inner.node  # type: ignore[attr-defined]

    @node.setter
    def node(self, node: Any) -> None:
        self._inner.node = node  # type: ignore[attr-defined]

    @property
    def tables(self) -> Any:
        return self._inner.tables  # type: ignore[attr-defined]

    def company(self) -> Any:
        return self._inner.company()  # type: ignore[attr-defined]

    def workers(self, since: float) -> Any:
        return self._inner.workers(since)  # type: ignore[attr-defined]

    def announce(self, messages: Sequence[str]) -> None:
        self._node.cluster.tell(self._node, messages)

    def listen(self, heard: Callable[[str], None]) -> Callable[[], None]:
        self.heard = heard
        return lambda: None

    @contextmanager
    def transaction(self) -> Generator[Any]:
        self._must_answer()
        with super().transaction() as watched:
            yield watched

    @contextmanager
    def view(self) -> Generator[Any]:
        self._must_answer()
        with self._inner.view() as view:
            yield view

    def _must_answer(self) -> None:
        if self._node.cluster.is_away:
            self._world.fired["database_away"] += 1
            self._roll_back()
            raise Unavailable("the database is away")

    def crash(self) -> None:
        """Leave without a word: the other nodes are not told that this one has left."""
        self._standing = None
        self._roll_back()
        self._inner.close()

    def _roll_back(self) -> None:
        """Lose the connection; the database has undone its transaction before anything else happens."""
        inner: Any = self._inner
        if inner._writer is not None:
            with suppress(psycopg.Error):
                inner._writer.execute("ROLLBACK")
            inner._writer.close()
            inner._writer = None

    def _before_commit(self) -> None:
        node, process = self._node, self._node.process
        here = greenlet.getcurrent()
        seconds, node.stands_in_commit_for = node.stands_in_commit_for, None
        if seconds is None or process is None or here.parent is None:
            return
        name = "node_kill" if node.is_killed_in_commit else "node_stall"
        self._world.fired[name] += 1
        self._world.log(Fault, "world", name=name, lasts=seconds)
        if node.is_killed_in_commit:
            node.is_killed_in_commit = False
            node.kill(back_in=seconds)
            here.parent.switch()  # for ever
        process.hold("paused")
        self._standing = standing = process, here, self._world.now
        self._world.after(_IDLE, self._be_idle, standing)
        self._world.after(seconds, self._end_standing, standing)
        here.parent.switch()
        if self._world.now - standing[2] >= _IDLE:
            raise Unavailable("the database has ended an idle transaction")

    def _be_idle(self, standing: object) -> None:
        if self._standing is standing:
            self._roll_back()

    def _end_standing(self, standing: object) -> None:
        if self._standing is standing:
            self.go_on()

    def go_on(self) -> None:
        """Let a transaction that stands still go on."""
        standing, self._standing = self._standing, None
        if standing is not None:
            process, here, _ = standing
            here.switch()
            process.let_go("paused")


@cache
def _database() -> Database:
    """Start the PostgreSQL of this process, in which nothing happens by itself."""
    # Without sleeps and looks at other processes, a row that is locked stays locked for as long as the world stands.
    store._READ = store._READ.replace("'lock_timeout', '2s'", "'lock_timeout', '5ms'").replace("'5s'", "'0'")
    tx._LOCK_WAITS = (0.0, 0.0, 0.0)
    tx._BLOCK_FOR = float("inf")
    database = Database()
    process = subprocess.Popen(
        [sys.executable, *database.command, "-c", "autovacuum=off"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def end() -> None:
        process.send_signal(signal.SIGQUIT)
        process.wait()
        database.remove()

    atexit.register(end)
    while not database.answers():
        assert process.poll() is None
        time.sleep(0.02)
    database.create()
    return database


_TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = 'leasekit' AND tablename NOT IN ('store', 'version')"


def _emptied() -> str:
    """Return the URL of the database of this process, emptied for the next history."""
    database = _database()
    with database.connect() as connection:
        tables = connection.execute(_TABLES)
        connection.execute(f"TRUNCATE {', '.join(f'leasekit.{table}' for (table,) in tables)}".encode())
        connection.execute("ALTER SEQUENCE leasekit.task_seq RESTART")
        connection.execute(
            "UPDATE leasekit.store SET correction = 0, gained = 0, has_waits = false, has_routes = false"
        )
    return database.url
