"""What clients see at one of several nodes is what they see at any: nodes, workers, cancels, events, long polls."""

import asyncio
import contextlib
import functools
import json
import os
import random
import re
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

from leasekit.errors import ConfigError
from leasekit.server import clock, end_waits, engine, neighbours
from leasekit.server.access import KindPatterns
from leasekit.server.engine import Engine
from leasekit.server.fair_bound import CALLER
from leasekit.server.http.metrics import Metrics
from leasekit.server.neighbours import Awaited, Cancel, Due, Happened, Hint, Neighbours, NewTokens, packed
from leasekit.server.roles import directory
from leasekit.server.roles.directory import Directory
from leasekit.server.roles.tokens import Create
from leasekit.server.store import MESSAGE, Anchor, Company, Contended, DrainRow, Holding, Store
from leasekit.server.store.memory import MemoryStore
from leasekit.server.store.postgres import schema
from leasekit.server.store.postgres.store import PostgresStore
from leasekit.server.store.postgres.tx import PostgresTx
from leasekit.server.store.sqlite.store import SqliteStore
from leasekit.server.unit_of_work import NewlyDue, TaskEvent
from leasekit.task import Beat, NewTask, Settlement, Status, Task, TaskInfo, WorkerInfo
from leasekit.wire import TokenRequest
from tests.postgres_server import PostgresServer
from tests.waiting import until

pytestmark = pytest.mark.anyio

NODES = 3


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.emptied()


@pytest.fixture
async def nodes(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Engine]]:
    """Nodes that look at each other, and sign, more often than once a second."""
    monkeypatch.setattr(engine, "_PERIOD", 0.1)
    monkeypatch.setattr(clock, "_SIGN_EVERY", 0.05)
    async with AsyncExitStack() as stack:
        started = [await stack.enter_async_context(Engine(PostgresStore(url))) for _ in range(NODES)]

        async def have_met() -> bool:
            for node in started:
                await node.tick()
            return all(len(others_of(node).alive) == NODES and node.clock.has_company for node in started)

        await becomes(have_met)
        with psycopg.connect(url, autocommit=True) as connection:
            await until(lambda: len(listeners(connection)) == NODES)
        yield started


def listeners(connection: psycopg.Connection) -> set[int]:
    """Return the sessions in which nodes hear each other."""
    found = connection.execute("SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND state = 'idle'")
    return {pid for (pid,) in found}


def others_of(node: Engine) -> Neighbours:
    assert node.neighbours is not None
    return node.neighbours


async def becomes(fact: Callable[[], Awaitable[bool]]) -> None:
    """Wait until this is true."""
    async with asyncio.timeout(60):
        while not await fact():  # noqa: ASYNC110 - a fact of the database has no event
            await asyncio.sleep(0.01)


async def taken(
    node: Engine, *, kind: str = "k", worker: str = "w", wait: float = 0, claim_id: str = "c"
) -> list[Task]:
    claimed = await node.claim(worker=worker, kinds=[kind], limit=1, wait=wait, claim_id=claim_id)
    return list(claimed.tasks)


# The nodes --------------------------------------------------------------------------------------------------------


async def test_each_node_lists_all_with_moments_of_the_wall_clock(url: str) -> None:
    with psycopg.connect(url) as connection:  # the clock of leases is an hour behind
        connection.execute("UPDATE leasekit.store SET correction = 3600, gained = 3600")
    before = time.time() - 1
    async with Engine(PostgresStore(url), address="http://127.0.0.1:1"), Engine(PostgresStore(url)) as two:
        listed = {node.id: node for node in await two.fleet.nodes()}
        assert {(node.role, node.address) for node in listed.values()} == {
            ("server", "http://127.0.0.1:1"),  # by its first sign, however early it dies
            ("process", None),
        }
        assert {node.name.rpartition(":")[2] for node in listed.values()} == {str(os.getpid())}
        for node in listed.values():
            assert before < node.started_at.timestamp() <= node.last_seen.timestamp() < time.time() + 1
            assert not node.has_left


async def test_a_node_that_has_left_is_told_from_one_that_fell_silent(nodes: list[Engine], url: str) -> None:
    leaving = PostgresStore(url)
    async with Engine(leaving):
        left = leaving.node.id
    killed = PostgresStore(url)
    killed.open()
    with killed.transaction() as tx:
        tx.sign_in(Anchor("another machine", 0.0, tx.reading.wall - 60))
    found = {node.id: node for node in await nodes[0].fleet.nodes()}
    assert found[left].has_left
    silent = [node for node in found.values() if (datetime.now(UTC) - node.last_seen).total_seconds() > 50]
    assert [node.has_left for node in silent] == [False]

    async def sees_those_alive() -> bool:
        await nodes[0].tick()
        return len(others_of(nodes[0]).alive) == NODES

    await becomes(sees_those_alive)
    killed.close()


@pytest.mark.parametrize("kind_of_store", [MemoryStore, SqliteStore])
async def test_another_store_has_one_node_the_process_itself(kind_of_store: type, tmp_path: Path) -> None:
    store: Store = kind_of_store() if kind_of_store is MemoryStore else kind_of_store(tmp_path / "tasks.db")
    async with Engine(store) as engine:
        (first,), (again,) = await engine.fleet.nodes(), await engine.fleet.nodes()
    assert (first.id, first.started_at, first.has_left) == (again.id, again.started_at, False)
    assert abs(first.last_seen.timestamp() - time.time()) < 10


async def test_reads_that_hang_do_not_keep_leases_from_their_end(
    nodes: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, is_over = threading.Event(), threading.Event()

    def hanging(self: PostgresStore) -> Company:
        hangs.set()
        is_over.wait()
        return company(self)

    company = PostgresStore.company
    monkeypatch.setattr(engine, "_LOOK", 0.01)
    monkeypatch.setattr(PostgresStore, "company", hanging)
    try:
        await until(hangs.is_set)
        for node in nodes:
            await node.tick()
    finally:
        is_over.set()


# Workers ----------------------------------------------------------------------------------------------------------


async def test_the_workers_of_all_nodes_are_listed_at_each(nodes: list[Engine]) -> None:
    await nodes[0].schedule([NewTask(kind="k", id=f"t{n}") for n in range(2)])
    for number in (0, 1):
        assert await taken(nodes[number], worker="both", claim_id=f"c{number}")
    await taken(nodes[1], worker="both", kind="also", claim_id="c2")
    await taken(nodes[0], worker="idle", kind="other")

    async def are_listed() -> bool:
        found = {worker.name: worker for worker in await nodes[2].fleet.workers()}
        return (
            found.keys() == {"both", "idle"}
            and found["both"].kinds == ["also", "k"]
            and found["idle"].kinds == ["other"]
        )

    await becomes(are_listed)
    for worker in await nodes[2].fleet.workers():
        assert worker.last_seen is not None
        assert worker.running == {"both": 2, "idle": 0}[worker.name]


async def test_a_node_that_has_left_tells_of_no_workers(nodes: list[Engine], url: str) -> None:
    async with Engine(PostgresStore(url)) as leaving:
        await taken(leaving, worker="gone")

        async def is_listed() -> bool:
            return [worker.name for worker in await nodes[0].fleet.workers()] == ["gone"]

        await becomes(is_listed)
    assert await nodes[0].fleet.workers() == []


async def test_a_name_is_that_of_all_tokens_that_have_used_it_at_any_node(nodes: list[Engine], url: str) -> None:
    for token, kind in (("1" * 32, "own"), ("2" * 32, "foreign")):
        order = TokenRequest(id=token, name=token, digest=token * 2, scopes=["work"], kinds=[kind])
        await nodes[0].operations.change_token(Create(order))
    await until(lambda: nodes[1].tokens.kinds_of("2" * 32).patterns)
    CALLER.set("2" * 32)
    await nodes[0].heartbeat("theirs", [Beat(id="gone", token="t")])
    CALLER.set("1" * 32)
    await nodes[1].claim(worker="mine", kinds=["own"], limit=1, wait=0, claim_id="c", since=2.0)

    async def are_known() -> bool:
        return [worker.name for worker in await nodes[1].fleet.workers()] == ["mine", "theirs"]

    await becomes(are_known)
    await nodes[1].claim(worker="theirs", kinds=["own"], limit=1, wait=0, claim_id="c", since=2.0)
    own = await nodes[1].fleet.workers(KindPatterns(["own"]))
    assert [(worker.name, worker.kinds) for worker in own] == [("mine", ["own"])]
    mine, theirs = DrainRow("mine", 1.0, None), DrainRow("theirs", 1.0, None)
    restarted = functools.partial(nodes[1].fleet.restarted, [mine, theirs])
    assert await restarted(is_early=False) == [mine]
    assert await restarted(is_early=True) == []
    async with Engine(PostgresStore(url), address="http://127.0.0.1:1"):
        pass

    async def has_seen_it() -> bool:
        return any(node.address is not None and node.has_left for node in others_of(nodes[1]).company.nodes)

    await becomes(has_seen_it)
    assert await restarted(is_early=False) == []  # what the server that has left had heard is lost


def test_what_a_node_writes_of_its_workers_is_bounded_and_has_those_that_were_heard_last() -> None:
    here = Directory()
    for number in range(20_000):
        here.hear(f"worker-{number}", float(number))
        here.claims(f"worker-{number}", [f"kind-{number}"])
    written = here.written(0.0)
    assert written is not None
    assert directory._BYTES - 100 < len(written) <= directory._BYTES
    roster = Directory().roster({}, [written])
    assert not roster.is_whole  # it says that it does not tell of all
    names = [worker.name for worker in roster.page()[0]]
    assert sorted(f"worker-{19_999 - n}" for n in range(len(names))) == names
    assert here.written(len(written) / directory._RATE - 0.1) is None
    assert here.written(len(written) / directory._RATE + 0.1) is not None


def test_a_worker_is_the_sum_of_what_nodes_have_heard() -> None:
    nodes = [Directory() for _ in range(3)]
    for at, (node, kinds) in enumerate(zip(nodes, (["a"], ["b"], None), strict=True)):
        node.hear("w", float(at))
        if kinds is not None:
            node.claims("w", kinds)
    here, *others = nodes
    roster = here.roster({"w": Holding(2, 60.0)}, [node.written(0.0) or b"" for node in others])
    assert roster.page() == (
        [WorkerInfo(name="w", last_seen=datetime.fromtimestamp(2, UTC), running=2, kinds=["a", "b"], ttl=60.0)],
        False,
    )


def test_workers_that_are_as_before_are_not_written_again(url: str) -> None:
    store = PostgresStore(url)
    chunks = "SELECT DISTINCT chunk_id FROM pg_toast.pg_toast_%s"

    def sign(workers: bytes) -> list[tuple[int]]:
        store.node = store.node._replace(workers=workers)
        with store.transaction() as tx:
            tx.sign_in(Anchor("b", 0.0, tx.reading.wall))
        with psycopg.connect(url) as connection:
            (oid,) = connection.execute("SELECT 'leasekit.node'::regclass::oid::bigint").fetchone() or (0,)
            return connection.execute((chunks % oid).encode()).fetchall()

    store.open()
    first, second = random.Random(1).randbytes(50_000), random.Random(2).randbytes(50_000)
    once = sign(first)
    assert len(once) == 1
    assert sign(first) == once
    assert not set(once) & set(sign(second))
    store.close()


# Cancels ----------------------------------------------------------------------------------------------------------


async def test_a_cancel_at_one_node_reaches_a_holder_that_waits_at_another(nodes: list[Engine]) -> None:
    await nodes[0].schedule([NewTask(kind="k", id="t")])
    (task,) = await taken(nodes[0])
    waiting = asyncio.create_task(nodes[1].cancels(worker="w", wait=3600))
    await asyncio.sleep(0)
    assert [verdict.verdict for verdict in await nodes[2].cancel(["t"])] == ["cancel_requested"]
    await until(waiting.done)
    assert await waiting == ["t"]
    (beat,) = await nodes[1].heartbeat("w", [Beat(id="t", token=task.token)])  # without a hint too
    assert beat.cancel_requested


async def test_a_listener_that_lost_its_connection_hears_again(nodes: list[Engine], url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        before = listeners(connection)
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'")
        await until(lambda: len(listeners(connection) - before) == NODES)
    waiting = asyncio.create_task(nodes[1].cancels(worker="w", wait=60))
    await nodes[0].schedule([NewTask(kind="k", id="t")])
    await taken(nodes[0])
    await nodes[2].cancel(["t"])
    assert await waiting == ["t"]


async def test_messages_that_are_not_from_leasekit_are_ignored(nodes: list[Engine], url: str) -> None:
    waiting = asyncio.create_task(nodes[1].cancels(worker="w", wait=60))
    await nodes[0].schedule([NewTask(kind="k", id="t")])
    await taken(nodes[0])
    with psycopg.connect(url, autocommit=True) as connection:
        odd = ('node [["a hint of tomorrow",1]]', 'node [["due"]]', 'node [["due","k",-1,null]]')
        for payload in ("", "hello", "x", "node [1]", *odd, "node {", f"node {'[' * 3900}{']' * 3900}"):
            connection.execute("SELECT pg_notify('leasekit', %s)", (payload,))
    await nodes[2].cancel(["t"])
    assert await waiting == ["t"]


# Long polls -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(NODES))
async def test_a_claim_that_is_repeated_at_another_node_is_granted_once(nodes: list[Engine], number: int) -> None:
    first = asyncio.create_task(taken(nodes[0], wait=30))
    await until(lambda: nodes[0].claims_waiting)
    again = asyncio.create_task(taken(nodes[1], wait=30))
    await until(lambda: nodes[1].claims_waiting)
    await nodes[number].schedule([NewTask(kind="k", id=f"t{n}") for n in range(2)])
    (task,), (same,) = await asyncio.gather(first, again)
    assert (task.id, task.token) == (same.id, same.token)
    assert (await nodes[2].queries.stats()).kinds == {"k": {"claimed": 1, "new": 1}}


# Ends of tasks ----------------------------------------------------------------------------------------------------


async def awaited(node: Engine, others: list[Engine]) -> "asyncio.Task[TaskInfo | None]":
    """A request that waits for the end of `t`, and that the others know of."""
    request = asyncio.create_task(node.queries.get("t", wait=3600))
    await until(lambda: all("t" in others_of(other)._awaited_elsewhere for other in others))
    return request


async def test_a_request_hears_of_an_end_at_another_node(nodes: list[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_waits, "_PERIOD", 3600.0)
    await nodes[0].schedule([NewTask(kind="k", id="t")])
    requests = [await awaited(nodes[0], nodes[1:]), await awaited(nodes[1], [nodes[0], nodes[2]])]
    await nodes[2].cancel(["t"])
    for request in requests:
        await until(request.done, within=30)  # less than the 60 s after which a request is answered anyway
        info = await request
        assert info is not None
        assert info.status is Status.CANCELLED


async def test_a_node_tells_of_no_end_that_nobody_waits_for(
    nodes: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(end_waits, "_PERIOD", 3600.0)
    sent: list[str] = []
    others = others_of(nodes[1])
    monkeypatch.setattr(others._store, "announce", sent.extend)
    await nodes[0].schedule([NewTask(kind="k", id=task_id) for task_id in ("other", "t")])
    request = await awaited(nodes[0], nodes[1:])
    await nodes[1].cancel(["other"])
    await nodes[1].cancel(["t"])
    await until(lambda: sent)
    assert sent == ['[["ended","t"]]']
    nodes[0].end_waits()
    await request


async def test_an_end_at_another_node_is_found_without_news(
    nodes: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(others_of(nodes[1]), "tell", lambda **_: None)
    await nodes[0].schedule([NewTask(kind="k", id="t")])
    request = await awaited(nodes[0], [])
    await nodes[1].cancel(["t"])
    await until(request.done)  # long before the time of the request is over
    info = await request
    assert info is not None
    assert info.status is Status.CANCELLED


async def test_hints_of_all_requests_are_sent_in_the_turn_of_none_of_their_callers(
    nodes: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    callers: list[str] = []

    run = others_of(nodes[0])._run

    async def noting(call: Callable[[], Any]) -> Any:
        callers.append(CALLER.get())
        return await run(call)

    monkeypatch.setattr(others_of(nodes[0]), "_run", noting)
    CALLER.set("first")
    others_of(nodes[0]).tell(drained=["w"])
    sending = others_of(nodes[0])._sending
    assert sending is not None
    await sending
    assert callers
    assert "first" not in callers


def alone(
    *,
    rung: Callable[[Collection[str]], None] = lambda _: None,
    ring_inbox: Callable[[], None] = lambda: None,
    on_new_tokens: Callable[[], None] = lambda: None,
    now: Callable[[], float] = lambda: 0.0,
) -> Neighbours:
    """The neighbours of an engine that has none."""
    node = Engine(MemoryStore())
    return Neighbours(
        *(PostgresStore("postgresql://localhost/none"), clock.StoreClock(now, None)),
        polls=node._long_polls,
        waits=node._end_waits,
        cancels=node._cancel_hints,
        feed=node.feed,
        directory=Directory(),
        ring=rung,
        ring_inbox=ring_inbox,
        run=node._readers.run,
        on_new_tokens=on_new_tokens,
    )


def test_a_hint_of_due_tasks_has_them_moved_to_queues() -> None:
    rung = list[str]()
    alone(rung=rung.extend)._hear([Due("a", 1, None), Due("b", 0, 5.0)])
    assert rung == ["a"]


def test_tasks_that_others_wait_for_are_forgotten_in_time_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_AWAITED", 3)
    time = [0.0]
    some = alone(now=lambda: time[0])
    some._hear([Awaited(f"t{n}") for n in range(5)])
    assert list(some._awaited_elsewhere) == ["t2", "t3", "t4"]
    time[0] = end_waits.TOLD_FOR + 1
    some._hear([Awaited("x" * 129), Awaited("new")])
    assert list(some._awaited_elsewhere) == ["new"]


# Events -----------------------------------------------------------------------------------------------------------


async def events(stream: AsyncGenerator[bytes], count: int) -> list[dict[str, str]]:
    """The next events of tasks."""
    found: list[dict[str, str]] = []
    async for chunk in stream:
        lines = [line.removeprefix(b"data: ") for line in chunk.splitlines() if line.startswith(b"data: ")]
        found += [event for line in lines if "id" in (event := json.loads(line))]
        if len(found) >= count:
            break
    return found


@contextlib.asynccontextmanager
async def reader(node: Engine, others: list[Engine]) -> AsyncIterator[AsyncGenerator[bytes]]:
    stream = node.feed.follow()
    assert await anext(stream) == b"retry: 1000\n\n"
    await until(lambda: all(other.feed.wanted_elsewhere for other in others))
    yield stream
    await stream.aclose()


async def test_a_reader_at_one_node_sees_the_events_of_all(nodes: list[Engine]) -> None:
    async with reader(nodes[0], nodes[1:]) as stream:
        await nodes[1].schedule([NewTask(kind="k", id="t")])
        assert [event["event"] for event in await events(stream, 1)] == ["scheduled"]
        (task,) = await taken(nodes[2])
        assert [event["event"] for event in await events(stream, 1)] == ["claimed"]
        await nodes[1].results("w", [Settlement(id="t", token=task.token, outcome="success")])
        (settled,) = await events(stream, 1)
        assert (settled["id"], settled["worker"], settled["outcome"]) == ("t", "w", "success")
        await nodes[0].schedule([NewTask(kind="k", id="own")])
        assert [event["id"] for event in await events(stream, 1)] == ["own"]


async def test_events_are_sent_only_while_another_node_wants_them(
    nodes: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    announce = PostgresStore.announce

    def noted(self: PostgresStore, messages: list[str]) -> None:
        sent.extend(messages)
        announce(self, messages)

    monkeypatch.setattr(PostgresStore, "announce", noted)
    await nodes[1].schedule([NewTask(kind="k", id="unheard")])
    await until(lambda: sent)
    async with reader(nodes[0], nodes[1:]) as stream:
        await nodes[1].schedule([NewTask(kind="k", id="heard")])
        assert [event["id"] for event in await events(stream, 1)] == ["heard"]
    nodes[0].feed.wanted_here = False  # minutes after the last reader has left
    await until(lambda: not nodes[1].feed.wanted_elsewhere)
    count = len(sent)
    await nodes[1].schedule([NewTask(kind="k", id="late")])
    await until(lambda: len(sent) > count)
    told = [hint for message in sent for hint in json.loads(message) if hint[0] == "event"]
    assert {hint[1].get("id") for hint in told} == {"heard"}


async def test_more_events_than_fit_are_left_out_and_other_hints_arrive(nodes: list[Engine]) -> None:
    async with reader(nodes[0], nodes[1:]) as stream:
        waiting = asyncio.create_task(taken(nodes[0], wait=30))
        await until(lambda: nodes[0].claims_waiting)
        happened = TaskEvent(event="scheduled", at=datetime.now(UTC), id="x" * 120, kind="y" * 120)
        nodes[1].feed.publish([happened] * 100_000)
        assert len(others_of(nodes[1])._happened) == neighbours._WAITING
        await nodes[1].schedule([NewTask(kind="k", id="t")])
        assert [task.id for task in await waiting] == ["t"]
        assert await events(stream, 1)


# Messages ---------------------------------------------------------------------------------------------------------


def test_hints_are_packed_into_messages_of_bounded_size_and_none_is_lost() -> None:
    rng, at = random.Random(3), datetime.now(UTC)
    hints: list[Hint] = []
    for number in range(700):
        name = "n" * rng.randint(1, 128)
        hints += [
            Due(name, number, rng.choice([None, 1.5])),
            Cancel(name, name),
            Happened(TaskEvent(event="settled", at=at, id=name, worker="é" * 128)),
        ]
    messages = list(packed(hints))
    assert max(len(message.encode()) for message in messages) <= MESSAGE
    assert sum(len(message.encode()) for message in messages) / len(messages) > MESSAGE * 0.9
    assert [hint for message in messages for hint in msgspec.json.decode(message, type=list[Hint])] == hints


def test_a_hint_that_fits_into_no_message_is_left_out() -> None:
    assert list(packed([Cancel("w", "x" * MESSAGE), Cancel("w", "t")])) == ['[["cancel","w","t"]]']
    assert list(packed([])) == []


def listening(some: Neighbours, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Start to listen; return what takes the messages of others."""
    found = list[Callable[[str], None]]()

    def listen(heard: Callable[[str], None]) -> Callable[[], None]:
        found.append(heard)
        return lambda: None

    monkeypatch.setattr(some._store, "listen", listen)
    some.start()
    return found[0]


async def test_a_flood_of_messages_has_a_bounded_place_and_the_event_loop_has_turns_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    some, turns = alone(), list[list[str]]()
    monkeypatch.setattr(some._waits, "over", turns.append)
    hear = listening(some, monkeypatch)
    for number in range(1000):
        hear(json.dumps([["ended", f"{number}-{n}"] for n in range(100)]))
    assert turns == []
    await asyncio.sleep(0)
    assert [len(ids) for ids in turns] == [neighbours._TURN]
    await until(lambda: not some._heard._is_known)
    assert {len(ids) for ids in turns} == {neighbours._TURN}
    heard = [task_id for ids in turns for task_id in ids]
    assert heard == [f"{number}-{n}" for number in range(neighbours._HEARD // 100) for n in range(100)]
    hear('[["ended","later"]]')
    await asyncio.sleep(0)
    assert turns[-1] == ["later"]


async def test_new_tokens_and_the_inbox_are_heard_of_in_a_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()
    some = alone(ring_inbox=lambda: calls.append("inbox"), on_new_tokens=lambda: calls.append("tokens"))
    hear = listening(some, monkeypatch)
    for number in range(1000):
        hear(json.dumps([["ended", f"{number}-{n}"] for n in range(100)]))
    for _ in range(1000):  # as nodes and applications write them
        hear(next(packed([Due("k", 1, None), NewTokens()])))
        hear('[["inbox"]]')
    await asyncio.sleep(0)
    assert sorted(calls) == ["inbox", "tokens"]
    await until(lambda: not some._heard._is_known)
    assert len(calls) == 2


async def test_what_was_heard_in_a_flood_is_dropped_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    some, turns = alone(), list[list[str]]()
    monkeypatch.setattr(some._waits, "over", turns.append)
    monkeypatch.setattr(neighbours, "_GATHER", 3600.0)
    hear = listening(some, monkeypatch)
    hear(json.dumps([["ended", str(n)] for n in range(1000)]))
    await asyncio.sleep(0)
    await some.stop()
    assert some._heard.take() == ([], False)
    assert [len(ids) for ids in turns] == [neighbours._TURN]


def test_due_tasks_of_a_kind_are_told_once_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    rung, readied = list[Collection[str]](), list[dict[str, NewlyDue]]()
    some = alone(rung=rung.append)
    monkeypatch.setattr(some._polls, "ready", readied.append)
    some._hear([Due("a", 1, 9.0), Due("b", 0, None), Due("a", 2, 5.0, 1), Due("a", 0, None, 3)])
    assert readied == [{"a": NewlyDue(3, 5.0, 4), "b": NewlyDue(0, None)}]
    assert rung == [["a"]]


# Readiness and metrics --------------------------------------------------------------------------------------------


async def test_a_node_is_not_ready_with_tables_that_it_cannot_use(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    PostgresStore(url).migrate()
    async with Engine(PostgresStore(url)) as engine:
        await engine.tick()
        assert (await engine.ready(), others_of(engine).tables) == (None, (schema.HEAD, schema.HEAD))
        with psycopg.connect(url) as connection:
            connection.execute("INSERT INTO leasekit.version VALUES (%s, now())", (schema.HEAD + 1,))
        await engine.tick()
        assert (await engine.ready(), others_of(engine).tables) == (None, (schema.HEAD + 1, schema.HEAD))
        with psycopg.connect(url) as connection:
            connection.execute("INSERT INTO leasekit.version VALUES (%s, now())", (schema.HEAD + 2,))
        await engine.tick()
        assert "they need a newer leasekit" in (await engine.ready() or "")
    with pytest.raises(ConfigError, match="they need a newer leasekit"):
        PostgresStore(url).lacks()


async def test_the_metrics_count_nodes_repeated_transactions_and_corrections(
    nodes: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, failures = PostgresTx.finish, [Contended("another node was faster")] * 2

    def disturbed(self: PostgresTx) -> None:
        if failures and threading.current_thread() is nodes[0].commit._thread:  # not while another node writes
            raise failures.pop()
        finish(self)

    before = nodes[0].commit.retries
    monkeypatch.setattr(PostgresTx, "finish", disturbed)
    await nodes[0].schedule([NewTask(kind="k")])
    text = (await Metrics(nodes[0]).exposition()).decode()
    assert "\nleasekit_nodes 3.0\n" in text
    counted = re.search(r"\nleasekit_contention_retries_total (\d+)\.0\n", text)
    assert counted is not None
    # Not only those two: each node looks for expired leases meanwhile, and they may meet.
    assert before + 2 <= int(counted[1]) <= nodes[0].commit.retries
    assert "\nleasekit_clock_steps_total 0.0\n" in text
