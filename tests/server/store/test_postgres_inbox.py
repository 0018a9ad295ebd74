"""Tasks that are scheduled in transactions of an application: each exists if, and only if, its transaction commits."""
# pyright: reportPrivateUsage=false

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any, Literal
from unittest.mock import Mock

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import leasekit.postgres
from leasekit import NewTask, _lineage
from leasekit.errors import Refused
from leasekit.server import engine
from leasekit.server.commit import RequestClass
from leasekit.server.engine import Engine
from leasekit.server.inbox import TAKE_IN
from leasekit.server.roles import inbox
from leasekit.server.store.postgres.store import PostgresStore
from leasekit.task import Status, TaskInfo
from tests.postgres_server import PostgresServer
from tests.waiting import until

pytestmark = pytest.mark.anyio

LISTENING = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle'"
    " AND query LIKE 'LISTEN%'"
)
"""The nodes that hear messages: each has a connection for that."""
Ending = Literal["commit", "rollback"]
Put = Callable[[str, NewTask, Ending], None]
"""Schedules a task in a transaction, and ends that."""


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.emptied()


@pytest.fixture
async def nodes(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Engine]]:
    """Nodes that look only when they are asked to, or when a message says so."""
    monkeypatch.setattr(engine, "_PERIOD", 3600.0)
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(Engine(PostgresStore(url))) for _ in range(2)]
        with psycopg.connect(url, autocommit=True) as connection:
            await until(lambda: connection.execute(LISTENING).fetchone() == (2,))
        yield nodes


@pytest.fixture
def connection(url: str) -> Any:
    with psycopg.connect(url) as connection:
        yield connection
        connection.rollback()


async def found(node: Engine) -> list[str]:
    return sorted(task.id for task in (await node.queries.list_tasks(limit=1000)).tasks)


async def ticked(node: Engine) -> None:
    """Have a node look, and wait until it has taken in what it has found."""
    await node.tick()
    await node._inbox.idle()


async def appeared(node: Engine, task_id: str) -> TaskInfo:
    async with asyncio.timeout(60):
        while (info := await node.queries.get(task_id)) is None:  # noqa: ASYNC110 - another task has no event
            await asyncio.sleep(0.01)
    return info


def rows(url: str, what: str = "refused") -> list[Any]:
    with psycopg.connect(url) as connection:
        return [row[0] for row in connection.execute(f"SELECT {what} FROM leasekit.inbox ORDER BY number".encode())]  # noqa: S608


def with_psycopg(url: str, task: NewTask, ending: Ending) -> None:
    with psycopg.connect(url) as connection:
        leasekit.postgres.schedule(connection, task)
        getattr(connection, ending)()


def with_other_cursors_of_psycopg(url: str, task: NewTask, ending: Ending) -> None:
    with psycopg.connect(url, cursor_factory=psycopg.RawCursor) as connection:
        leasekit.postgres.schedule(connection, task)
        getattr(connection, ending)()


def with_a_connection_of_sqlalchemy(url: str, task: NewTask, ending: Ending) -> None:
    with sa.create_engine(of_sqlalchemy(url), poolclass=sa.NullPool).connect() as connection:
        leasekit.postgres.schedule(connection, task)
        getattr(connection, ending)()


def with_a_session(url: str, task: NewTask, ending: Ending) -> None:
    with Session(sa.create_engine(of_sqlalchemy(url), poolclass=sa.NullPool)) as session:
        leasekit.postgres.schedule(session, task)
        getattr(session, ending)()


def with_a_scoped_session(url: str, task: NewTask, ending: Ending) -> None:
    session = scoped_session(sessionmaker(sa.create_engine(of_sqlalchemy(url), poolclass=sa.NullPool)))
    leasekit.postgres.schedule(session, task)
    getattr(session, ending)()
    session.remove()


def with_psycopg_in_a_loop(url: str, task: NewTask, ending: Ending) -> None:
    async def put() -> None:
        async with await psycopg.AsyncConnection.connect(url) as connection:
            await leasekit.postgres.aschedule(connection, task)
            await getattr(connection, ending)()

    asyncio.run(put())


def with_a_session_in_a_loop(url: str, task: NewTask, ending: Ending) -> None:
    async def put() -> None:
        database = create_async_engine(of_sqlalchemy(url), poolclass=sa.NullPool)
        async with AsyncSession(database) as session:
            await leasekit.postgres.aschedule(session, task)
            await getattr(session, ending)()
        async with database.connect() as connection:
            await leasekit.postgres.aschedule(connection, [])
        await database.dispose()

    asyncio.run(put())


def of_sqlalchemy(url: str) -> str:
    return url.replace("postgresql://", "postgresql+psycopg://")


LIBRARIES: list[Put] = [
    with_psycopg,
    with_other_cursors_of_psycopg,
    with_a_connection_of_sqlalchemy,
    with_a_session,
    with_a_scoped_session,
    with_psycopg_in_a_loop,
    with_a_session_in_a_loop,
]


async def test_of_fifty_racers_of_a_dedupe_key_of_whom_half_roll_back_all_get_the_one_task_that_lives(
    url: str, nodes: list[Engine]
) -> None:
    task = NewTask(kind="k", dedupe_key="one")
    ends: tuple[Ending, Ending] = ("rollback", "commit")
    racers = [asyncio.to_thread(with_psycopg, url, task, ends[n % 2]) for n in range(25)]
    answers = await asyncio.gather(*(node.schedule([task]) for _ in range(12) for node in nodes), *racers)
    for node in nodes:
        await ticked(node)
    (lives,) = await found(nodes[0])
    assert {scheduled.id for answer in answers if answer is not None for scheduled in answer} == {lives}
    assert rows(url) == []


async def test_a_racer_of_a_dedupe_key_lives_if_the_one_before_it_rolls_back(url: str, nodes: list[Engine]) -> None:
    with psycopg.connect(url) as first:
        leasekit.postgres.schedule(first, NewTask(kind="k", id="first", dedupe_key="one"))
        await asyncio.to_thread(with_psycopg, url, NewTask(kind="k", id="second", dedupe_key="one"), "commit")
        first.rollback()
    await appeared(nodes[0], "second")
    await ticked(nodes[0])
    assert await found(nodes[0]) == ["second"]


@pytest.mark.parametrize("put", LIBRARIES, ids=lambda put: put.__name__)
async def test_a_task_exists_if_and_only_if_its_transaction_commits(put: Put, url: str, nodes: list[Engine]) -> None:
    payload = {"to": "ada", "text": 'a "quoted" :name, %s and \0', "number": 1.0}
    await asyncio.to_thread(put, url, NewTask(kind="k", id="never", payload=payload), "rollback")
    await asyncio.to_thread(put, url, NewTask(kind="k", id="there", payload=payload), "commit")
    info = await appeared(nodes[0], "there")
    assert (info.kind, info.status) == ("k", Status.NEW)
    await ticked(nodes[0])
    assert await found(nodes[0]) == ["there"]
    assert rows(url) == []
    claimed = await nodes[1].claim(worker="w", kinds=["k"], limit=1, wait=0, claim_id="c")
    assert claimed.tasks[0].id == "there"


async def test_a_commit_wakes_a_claim_that_waits(url: str, nodes: list[Engine]) -> None:
    claim = asyncio.create_task(nodes[1].claim(worker="w", kinds=["k"], limit=1, wait=60, claim_id="c"))
    await asyncio.sleep(0)
    await asyncio.to_thread(with_psycopg, url, NewTask(kind="k", id="t"), "commit")
    async with asyncio.timeout(50):
        claimed = await claim
    assert [task.id for task in claimed.tasks] == ["t"]


async def test_a_tick_takes_in_what_came_without_a_message(url: str, nodes: list[Engine]) -> None:
    with psycopg.connect(url) as connection:
        ids = leasekit.postgres.schedule(connection, [NewTask(kind="k"), NewTask(kind="k")], wake=False)
    assert await found(nodes[0]) == []
    await ticked(nodes[0])
    assert await found(nodes[0]) == sorted(ids)


async def test_what_was_committed_while_no_node_ran_waits_for_one(url: str) -> None:
    with psycopg.connect(url) as connection:
        leasekit.postgres.schedule(connection, NewTask(kind="k", id="t"))
    async with Engine(PostgresStore(url)) as node:
        await appeared(node, "t")


async def test_an_open_transaction_holds_up_no_other(url: str, nodes: list[Engine], connection: Any) -> None:
    leasekit.postgres.schedule(connection, NewTask(kind="k", id="late"))
    await asyncio.to_thread(with_psycopg, url, NewTask(kind="k", id="early"), "commit")
    await appeared(nodes[0], "early")
    connection.commit()
    await appeared(nodes[0], "late")


async def test_many_nodes_make_one_task_of_each_row(url: str, nodes: list[Engine]) -> None:
    ids = [f"t{number}" for number in range(700)]
    with psycopg.connect(url) as connection:
        leasekit.postgres.schedule(connection, [NewTask(kind="k", id=task_id) for task_id in ids], wake=False)
    await asyncio.gather(*(ticked(node) for node in nodes * 3))
    assert await found(nodes[0]) == sorted(ids)
    assert rows(url) == []


async def test_rows_that_another_node_has_are_left_to_it(url: str, nodes: list[Engine], connection: Any) -> None:
    with psycopg.connect(url) as other:
        leasekit.postgres.schedule(other, [NewTask(kind="k", id="a"), NewTask(kind="k", id="b")], wake=False)
    connection.execute("SELECT FROM leasekit.inbox WHERE task LIKE '%\"a\"%' FOR UPDATE")
    await ticked(nodes[0])
    assert await found(nodes[0]) == ["b"]


async def test_a_task_that_waits_begins_after_its_delay_counted_from_the_call(url: str, nodes: list[Engine]) -> None:
    with psycopg.connect(url) as connection:
        leasekit.postgres.schedule(connection, NewTask(kind="k", id="t", delay=3600), wake=False)
        connection.execute("UPDATE leasekit.inbox SET at = '2026-01-01T00:00:00Z'")
    await ticked(nodes[0])
    info = await nodes[0].queries.get("t")
    assert info is not None
    assert info.at == datetime(2026, 1, 1, 1, tzinfo=UTC)


BAD = {
    "no JSON": "{",
    "no task": "[]",
    "an unknown option": '{"kind": "k", "colour": "red"}',
    "a bad kind": '{"kind": ""}',
    "two tasks": '{"kind": "k"}, {"kind": "k"}',
    "another list": '{"kind": "k"}], "tasks": [{"kind": "k"}',
    "deep": '{"kind": "k", "payload": ' + 100_000 * "[" + 100_000 * "]" + "}",
    "another task": '{"kind": "k", "id": "taken", "payload": 2}',
    "too large": '{"kind": "k", "payload": "' + 5_000_000 * "x" + '"}',
    "empty": "",
    "a reason with what no text of PostgreSQL has": '{"kind": "k", "x\\u0000y": 1}',
    "another one": '{"kind": "k", "retry": {"policy": "a\\u0000b"}}',
    "a reason that a terminal would obey": '{"kind": "k", "x\\u001b[2J\\ny": 1}',
}


@pytest.mark.parametrize("task", BAD.values(), ids=BAD.keys())
async def test_a_row_that_cannot_become_a_task_is_set_aside_alone(
    task: str, url: str, nodes: list[Engine], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox.logger.filters[0], "_windows", {})  # other tests may have used up this minute's lines
    await nodes[0].schedule([NewTask(kind="k", id="taken", payload=1)])
    with psycopg.connect(url) as connection:
        connection.execute("INSERT INTO leasekit.inbox (task) VALUES (%s)", [task])
        leasekit.postgres.schedule(connection, NewTask(kind="k", id="good"), wake=False)
    await ticked(nodes[0])
    assert await found(nodes[0]) == ["good", "taken"]
    (why,) = rows(url)
    assert why.isprintable()
    await ticked(nodes[0])
    assert caplog.text.count("set aside") == 1


async def test_many_bad_rows_do_not_fill_the_log(
    url: str, nodes: list[Engine], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox.logger.filters[0], "_windows", {})
    with psycopg.connect(url) as connection:
        connection.execute("INSERT INTO leasekit.inbox (task) SELECT 'no task' FROM generate_series(1, 25)")
    await ticked(nodes[0])
    assert len(rows(url)) == 25
    assert caplog.text.count("set aside") == 10


@pytest.mark.parametrize("at", ["-infinity", "infinity", "4000-01-01 BC", "294000-01-01"])
async def test_a_row_that_was_written_at_no_time_of_a_clock_stops_no_other(
    at: str, url: str, nodes: list[Engine]
) -> None:
    with psycopg.connect(url) as connection:
        odd = '{"kind": "k", "id": "odd", "delay": 5}'
        connection.execute("INSERT INTO leasekit.inbox (task, at) VALUES (%s, %s)", [odd, at])
        leasekit.postgres.schedule(connection, NewTask(kind="k", id="good"), wake=False)
    await ticked(nodes[0])
    assert await found(nodes[0]) == ["good", "odd"]


async def test_a_task_that_would_wait_for_itself_is_set_aside_alone(url: str, nodes: list[Engine]) -> None:
    tasks = [NewTask(kind="k", id="a", after=["b"]), NewTask(kind="k", id="b", after=["a"]), NewTask(kind="k", id="c")]
    with psycopg.connect(url) as connection:
        leasekit.postgres.schedule(connection, tasks, wake=False)
    await ticked(nodes[0])
    assert await found(nodes[0]) == ["a", "c"]
    (why,) = rows(url)
    assert "circle" in why


async def test_rows_that_are_refused_together_are_tried_by_halves(
    url: str, nodes: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    take_in = inbox.take_in

    def counted(turn: Any, numbers: Any = None) -> int:
        asked.append(numbers)
        return take_in(turn, numbers)

    monkeypatch.setattr(inbox, "take_in", counted)
    circle = [NewTask(kind="k", id="a", after=["b"]), NewTask(kind="k", id="b", after=["a"])]
    with psycopg.connect(url) as connection:
        good = [NewTask(kind="k") for _ in range(2 * inbox.STEP - 2)]
        leasekit.postgres.schedule(connection, [*good[:50], *circle, *good[50:]], wake=False)
    await ticked(nodes[0])
    assert len(await found(nodes[0])) == 2 * inbox.STEP - 1
    assert len(rows(url)) == 1
    assert len(asked) < 30


async def test_nothing_waits_for_the_inbox(url: str, nodes: list[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes[0].commit, "ask", _never_for(TAKE_IN, nodes[0].commit.ask))
    with psycopg.connect(url) as connection:
        leasekit.postgres.schedule(connection, NewTask(kind="k", id="t"), wake=False)
    async with asyncio.timeout(30):
        await nodes[0].tick()
        await nodes[0].tick()
    await ticked(nodes[1])
    assert await found(nodes[1]) == ["t"]


def _never_for(rank: RequestClass, ask: Any) -> Any:
    async def asked(of: RequestClass, *given: Any, **options: Any) -> Any:
        if of is rank:
            await asyncio.get_running_loop().create_future()
        return await ask(of, *given, **options)

    return asked


async def test_an_inbox_that_cannot_be_taken_in_stops_nothing_else(
    url: str, nodes: list[Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(inbox, "take_in", Mock(side_effect=ArithmeticError("of a fault")))
        with psycopg.connect(url) as connection:
            leasekit.postgres.schedule(connection, NewTask(kind="k", id="t"), wake=False)
        await ticked(nodes[0])
        assert "the inbox waits for the next tick" in caplog.text
    await ticked(nodes[0])
    assert await found(nodes[0]) == ["t"]


async def test_large_tasks_are_taken_in_some_at_a_time(
    url: str, nodes: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "_BYTES", 1000)
    taken: list[int] = []
    take_in = inbox.take_in

    def counted(*given: Any) -> int:
        taken.append(take_in(*given))
        return taken[-1]

    monkeypatch.setattr(inbox, "take_in", counted)
    with psycopg.connect(url) as connection:
        tasks = [NewTask(kind="k", payload="x" * 600) for _ in range(3)]
        leasekit.postgres.schedule(connection, tasks, wake=False)
    await ticked(nodes[0])
    assert taken == [1, 1, 1, 0]


async def test_what_other_programs_write_is_taken_in(url: str, nodes: list[Engine]) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("""INSERT INTO leasekit.inbox (task) VALUES ('{"kind": "k", "payload": {"a": 1}}')""")
    await ticked(nodes[0])
    (task_id,) = await found(nodes[0])
    info = await nodes[0].queries.get(task_id)
    assert info is not None
    assert info.kind == "k"


async def test_a_failed_statement_of_the_application_leaves_no_task(url: str, nodes: list[Engine]) -> None:
    def fail() -> None:
        with psycopg.connect(url) as connection:
            leasekit.postgres.schedule(connection, NewTask(kind="k"))
            connection.execute("SELECT 1 / 0")

    with pytest.raises(psycopg.errors.DivisionByZero):
        fail()
    await ticked(nodes[0])
    assert await found(nodes[0]) == []


async def test_an_application_needs_the_right_to_insert_tasks_and_no_other(url: str, nodes: list[Engine]) -> None:
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute("CREATE ROLE shop LOGIN; GRANT USAGE ON SCHEMA leasekit TO shop")
        owner.execute("GRANT INSERT (task) ON leasekit.inbox TO shop")
        try:
            with psycopg.connect(url, user="shop", autocommit=True) as connection:
                for name, wake in (("rung", True), ("not-rung", False)):
                    leasekit.postgres.schedule(connection, NewTask(kind="k", id=name), wake=wake)
                with pytest.raises(psycopg.errors.InsufficientPrivilege):  # it cannot take the numbers of others
                    connection.execute("INSERT INTO leasekit.inbox (number) OVERRIDING SYSTEM VALUE VALUES (9)")
        finally:
            owner.execute("DROP OWNED BY shop; DROP ROLE shop")
    await ticked(nodes[0])
    for name in ("rung", "not-rung"):  # whichever node has taken its row
        await appeared(nodes[0], name)


@pytest.mark.parametrize("put", [with_psycopg, with_a_session])
def test_a_character_that_the_encoding_of_a_connection_lacks_is_refused(put: Put, url: str) -> None:
    latin = f"{url}{'&' if '?' in url else '?'}client_encoding=latin1"
    put(latin, NewTask(kind="k", payload="\u00e9"), "commit")
    with pytest.raises(Refused, match=r"character '\\u20ac', which .* latin-1 cannot send: .*client_encoding=UTF8"):
        put(latin, NewTask(kind="k", payload="\u20ac"), "commit")
    assert len(rows(url)) == 1


def test_what_no_service_would_take_is_refused_in_the_call(url: str) -> None:
    with psycopg.connect(url) as connection:
        with pytest.raises(Refused, match="item 0 does not fit"):
            leasekit.postgres.schedule(connection, NewTask(kind=""))
        connection.execute("SELECT 1")  # nothing was sent: the transaction is as it was
    assert rows(url) == []


@pytest.mark.parametrize(("connection", "named"), [(1.5, "builtins.float"), (None, "NoneType")], ids=repr)
def test_a_connection_of_another_library_is_refused_by_name(connection: Any, named: str) -> None:
    with pytest.raises(TypeError, match=re.escape(named)):
        leasekit.postgres.schedule(connection, NewTask(kind="k"))


def test_a_cursor_is_no_connection(connection: Any) -> None:
    with pytest.raises(TypeError, match=r"psycopg\.Cursor"), connection.cursor() as cursor:
        leasekit.postgres.schedule(cursor, NewTask(kind="k"))


async def test_each_call_says_which_one_a_connection_needs(url: str) -> None:
    async with await psycopg.AsyncConnection.connect(url) as of_loop:
        with pytest.raises(TypeError, match="await aschedule"):
            leasekit.postgres.schedule(of_loop, NewTask(kind="k"))
    with psycopg.connect(url) as of_threads, pytest.raises(TypeError, match="call `schedule`"):
        await leasekit.postgres.aschedule(of_threads, NewTask(kind="k"))


async def test_a_task_of_a_run_has_it_as_its_parent(url: str, nodes: list[Engine]) -> None:
    """So a task that is scheduled in a transaction of a handler is in the handler's chain."""
    await nodes[0].schedule([NewTask(kind="k", id="first")])
    claimed = await nodes[0].claim(worker="w", kinds=["k"], limit=1, wait=0, claim_id="c")
    run = Mock(is_over=False)
    place = _lineage.enter(claimed.tasks[0], run)
    with psycopg.connect(url) as connection:
        leasekit.postgres.schedule(connection, NewTask(kind="k", id="second"), wake=False)
    _lineage.leave(place)
    await ticked(nodes[0])
    info = await nodes[0].queries.get("second")
    assert info is not None
    assert (info.parent, info.root) == ("first", "first")
