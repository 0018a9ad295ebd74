"""Periodic tasks on several nodes of one database: each firing is made once, whichever node dies when."""
# pyright: reportPrivateUsage=false

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import psycopg
import pytest

from leasekit.errors import Unavailable
from leasekit.periodic import Overlap, PeriodicInfo, PeriodicTaskItem
from leasekit.server import engine
from leasekit.server.engine import Engine
from leasekit.server.firings import firing_id
from leasekit.server.roles.periodic import Pause, Put, Trigger
from leasekit.server.store.postgres.session import Connection
from leasekit.server.store.postgres.store import PostgresStore
from leasekit.task import Scheduled, Status
from tests.postgres_server import PostgresServer
from tests.sampling import slow_after

pytestmark = pytest.mark.anyio

START = 1_795_500_000.0
STATEMENTS = 40
"""More statements than there are from the begin to the end of a transaction that makes a firing."""


class Hand:
    """A clock of all nodes, which a test moves."""

    def __init__(self) -> None:
        self.now = START - 1

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Hand:
    return Hand()


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.emptied()


@pytest.fixture
async def nodes(url: str, clock: Hand, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Engine]]:
    monkeypatch.setattr(engine, "_PERIOD", 3600.0)
    async with AsyncExitStack() as stack:
        stores = [PostgresStore(url) for _ in range(3)]
        yield [await stack.enter_async_context(Engine(store, clock=clock, boot=clock)) for store in stores]


async def put(node: Engine, *, every: int = 60, overlap: Overlap = "queue", name: str = "p") -> None:
    await node.operations.change_periodic(Put(name, PeriodicTaskItem(kind="k", every=every, overlap=overlap), None))


async def listed(node: Engine) -> list[str]:
    return sorted(task.id for task in (await node.queries.list_tasks(limit=1000)).tasks)


async def noted(node: Engine) -> list[str | None]:
    info = await node.queries.periodic("p")
    assert info is not None
    return [firing.id for firing in info.firings if firing.outcome == "scheduled"]


async def test_nodes_that_look_at_once_make_each_firing_once(nodes: list[Engine], clock: Hand) -> None:
    names = [f"p{number}" for number in range(20)]
    for name in names:
        await put(nodes[0], name=name)
    for _ in range(5):
        clock.now += 60
        await asyncio.gather(*(node.tick() for node in nodes * 2))
    firings = [firing_id(name, START + 60 * number) for name in names for number in range(5)]
    assert await listed(nodes[0]) == sorted(firings)
    infos = await nodes[1].queries.periodics()
    assert sorted(str(note.id) for info in infos for note in info.firings) == sorted(firings)


class Death:
    """The end of a node's connection at one of its statements: before the database has run it, or after."""

    def __init__(self, node: Engine, *, at: int, is_run: bool) -> None:
        self.left, self.is_run, self.has_come = at, is_run, False
        store = node._store
        assert isinstance(store, PostgresStore)
        self.connection = store._connection()
        self.execute = self.connection.execute

    def __enter__(self) -> "Death":
        self.connection.execute = self._execute  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.execute = self.execute  # type: ignore[method-assign]

    def _execute(self, *args: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left:
            return self.execute(*args, **options)
        self.has_come = True
        if self.is_run:
            with suppress(psycopg.Error):
                self.execute(*args, **options)
        Connection.close(self.connection)
        raise psycopg.OperationalError("the node has died")


# Each way to overlap, and each side of a statement: the other combinations run in `make slow`.
DEATHS = [(False, "queue"), (True, "skip"), (False, "replace"), (True, "queue"), (False, "skip"), (True, "replace")]


@pytest.mark.parametrize(("is_run", "overlap"), slow_after(2, DEATHS))
async def test_whichever_statement_a_node_dies_at_another_makes_the_firing_once(
    nodes: list[Engine], clock: Hand, overlap: Overlap, is_run: bool
) -> None:
    await put(nodes[0], overlap=overlap)
    deaths = 0
    for number in range(STATEMENTS):
        clock.now = START + 60 * number
        with Death(nodes[0], at=number + 1, is_run=is_run) as death, suppress(Unavailable):
            await nodes[0].tick()
        deaths += death.has_come
        while (
            await nodes[1].queries.get(firing_id("p", clock.now)) is None
        ):  # the database has not heard of the death yet
            await nodes[1].tick()
        await nodes[2].tick()
        if overlap == "skip":
            (ended,) = await nodes[0].cancel([firing_id("p", clock.now)])
            assert ended.verdict == "cancelled"
    assert deaths > 15
    assert await listed(nodes[0]) == sorted(firing_id("p", START + 60 * number) for number in range(STATEMENTS))
    last = [firing_id("p", START + 60 * number) for number in range(STATEMENTS - 20, STATEMENTS)]
    assert await noted(nodes[0]) == last[::-1]
    alive = [task.id for task in (await nodes[0].queries.list_tasks(limit=1000)).tasks if task.status is Status.NEW]
    assert sorted(alive) == {"queue": await listed(nodes[0]), "skip": [], "replace": last[-1:]}[overlap]


async def test_a_pause_holds_on_all_nodes_from_its_answer_on(nodes: list[Engine], clock: Hand) -> None:
    await put(nodes[0], every=1)
    stopped = asyncio.Event()

    async def look(node: Engine) -> None:
        while not stopped.is_set():
            clock.now += 1
            await node.tick()

    looks = [asyncio.create_task(look(node)) for node in nodes[:2]]
    while not await listed(nodes[2]):
        pass
    await nodes[2].operations.change_periodic(Pause("p", True, None))  # noqa: FBT003
    paused = await listed(nodes[2])
    clock.now += 100
    stopped.set()
    await asyncio.gather(*looks)
    await asyncio.gather(*(node.tick() for node in nodes))
    assert await listed(nodes[2]) == paused


async def test_a_change_waits_for_a_firing_that_is_being_made_and_loses_none(nodes: list[Engine], clock: Hand) -> None:
    await put(nodes[0])
    for number in range(10):
        clock.now = START + 60 * number
        change = Put("p", PeriodicTaskItem(kind="k", every=60, overlap="queue", priority=number % 5), None)
        answer, *_ = await asyncio.gather(
            nodes[2].operations.change_periodic(change), *(node.tick() for node in nodes[:2])
        )
        assert isinstance(answer, PeriodicInfo)
        assert answer.task.priority == number % 5
    assert await listed(nodes[0]) == [firing_id("p", START + 60 * number) for number in range(10)]


async def test_a_trigger_that_is_repeated_at_every_node_makes_one_task(nodes: list[Engine]) -> None:
    await put(nodes[0])
    answers = await asyncio.gather(*(node.operations.change_periodic(Trigger("p", START, None)) for node in nodes * 3))
    assert [answer.created for answer in answers if isinstance(answer, Scheduled)].count(True) == 1
    assert len(answers) == 9
    assert await listed(nodes[0]) == [firing_id("p", START)]


async def test_while_another_writer_has_the_last_task_nothing_is_judged_and_then_it_is(
    nodes: list[Engine], url: str, clock: Hand
) -> None:
    await put(nodes[0], overlap="replace")
    clock.now = START
    await nodes[0].tick()
    clock.now += 60
    first, second = firing_id("p", START), firing_id("p", START + 60)
    with psycopg.connect(url) as other:
        other.execute("SELECT 1 FROM leasekit.trigger FOR UPDATE")
        await nodes[0].tick()
        assert await listed(nodes[0]) == [first]
    await nodes[0].tick()
    assert await listed(nodes[0]) == [first, second]
    info = await nodes[0].queries.get(first)
    assert info is not None
    assert info.status is Status.CANCELLED
