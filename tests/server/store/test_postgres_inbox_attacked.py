"""Attacks on the inbox: a task exists once if, and only if, its transaction commits; a bad row stops nothing else."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from random import Random

import msgspec
import psycopg
import pytest
from psycopg import IsolationLevel

import leasekit.postgres
from leasekit import NewTask
from leasekit.server.engine import Engine
from leasekit.server.store.postgres.store import PostgresStore
from tests.postgres_server import PostgresServer
from tests.sampling import in_soak, slow_after

pytestmark = pytest.mark.anyio

SHOP = Path(__file__).parents[3] / "examples" / "19_transaction.py"

DYING_NODE = """
import asyncio, os, signal, sys
import psycopg
from leasekit.server.engine import Engine
from leasekit.server.store.postgres.store import PostgresStore

url, before, after = sys.argv[1], sys.argv[2], sys.argv[3]
execute, seen = psycopg.Connection.execute, set()

def killed(self, query, *args, **options):
    seen.add("inbox" if "FOR UPDATE SKIP LOCKED" in str(query) and "leasekit.inbox" in str(query) else "")
    if "inbox" in seen and before and before in str(query):
        os.kill(os.getpid(), signal.SIGKILL)
    answer = execute(self, query, *args, **options)
    if "inbox" in seen and after and after in str(query):
        os.kill(os.getpid(), signal.SIGKILL)
    return answer

psycopg.Connection.execute = killed

async def main():
    async with Engine(PostgresStore(url)) as node:
        await node.tick()
        await node._inbox.idle()

asyncio.run(main())
"""
STEPS = [("DELETE FROM leasekit.inbox", ""), ("", "DELETE FROM leasekit.inbox"), ("COMMIT", ""), ("", "COMMIT")]


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.emptied()


@pytest.fixture
async def node(url: str) -> AsyncIterator[Engine]:
    async with Engine(PostgresStore(url)) as node:
        yield node


async def found(node: Engine) -> list[str]:
    """Return the tasks of kind `k`, once the inbox is empty but for rows that were set aside."""
    await node.tick()
    await node._inbox.idle()
    return sorted(task.id for task in (await node.queries.list_tasks(kind="k", limit=1000)).tasks)


def waiting(url: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT count(*) FROM leasekit.inbox WHERE refused IS NULL").fetchone()
    assert row is not None
    return int(row[0])


def exit_code(command: list[str], environment: Mapping[str, str] = os.environ) -> int:
    return subprocess.run(command, env=environment, check=False).returncode


@pytest.mark.parametrize(("before", "after"), STEPS, ids=lambda step: step or "-")
async def test_a_node_that_is_killed_while_it_takes_in_leaves_one_task_of_each_row(
    before: str, after: str, url: str
) -> None:
    with psycopg.connect(url) as connection:
        leasekit.postgres.schedule(connection, [NewTask(kind="k", id=name) for name in "abc"], wake=False)
    assert exit_code([sys.executable, "-c", DYING_NODE, url, before, after]) == -signal.SIGKILL
    async with Engine(PostgresStore(url)) as node:
        while waiting(url):  # the database has still to notice that the node is dead
            await node.tick()
            await node._inbox.idle()
        assert await found(node) == ["a", "b", "c"]


DYING_APPLICATION = """
import asyncio, os, signal, sys
from importlib.util import module_from_spec, spec_from_file_location
import httpx, sqlalchemy as sa

path, point = sys.argv[1:]
spec = spec_from_file_location("shop", path)
shop = sys.modules["shop"] = module_from_spec(spec)
spec.loader.exec_module(shop)

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def before(connection, cursor, statement, *_):
    if point == "before the order" and "customer_order" in statement:
        die()
    if point == "before the task" and "leasekit.inbox" in statement:
        die()

def after(connection, cursor, statement, *_):
    if point == "after the task" and "leasekit.inbox" in statement:
        die()

def commit(connection):
    if point == "in the commit":
        connection.exec_driver_sql("COMMIT")
    if point in {"in the commit", "before the commit"}:
        die()

async def main():
    for name, listener in {"before_cursor_execute": before, "after_cursor_execute": after, "commit": commit}.items():
        sa.event.listen(shop.database.sync_engine, name, listener)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(shop.app), base_url="http://shop") as browser:
        assert (await browser.post("/orders/7", params={"to": "ada"})).status_code == 201
    die()

asyncio.run(main())
"""
POINTS = {
    "before the commit": 0, "in the commit": 1, "before the order": 0, "before the task": 0, "after the task": 0,
    "after the answer": 1,
}  # fmt: skip


@pytest.mark.parametrize(("point", "number"), slow_after(2, POINTS.items()))
async def test_an_application_that_is_killed_has_left_the_order_and_its_task_or_neither(
    point: str, number: int, url: str
) -> None:
    with psycopg.connect(url) as connection:
        connection.execute('CREATE TABLE customer_order (id int PRIMARY KEY, "to" text NOT NULL)')
    store = os.environ | {"LEASEKIT_STORE": url}
    try:
        assert exit_code([sys.executable, "-c", DYING_APPLICATION, str(SHOP), point], store) == -signal.SIGKILL
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT count(*) FROM customer_order").fetchone() == (number,)
    finally:
        with psycopg.connect(url) as connection:
            connection.execute("DROP TABLE customer_order")
    async with Engine(PostgresStore(url)) as node:
        await node.tick()
        await node._inbox.idle()
        assert len((await node.queries.list_tasks(kind="confirm")).tasks) == number


async def test_a_savepoint_that_is_rolled_back_takes_only_its_tasks_along(url: str, node: Engine) -> None:
    with psycopg.connect(url) as connection:
        leasekit.postgres.schedule(connection, NewTask(kind="k", id="before"))
        with connection.transaction(force_rollback=True):
            leasekit.postgres.schedule(connection, NewTask(kind="k", id="never"))
        with connection.transaction():
            leasekit.postgres.schedule(connection, NewTask(kind="k", id="inner"))
        leasekit.postgres.schedule(connection, NewTask(kind="k", id="after"))
    assert await found(node) == ["after", "before", "inner"]


async def test_a_serializable_transaction_that_is_repeated_makes_one_task(url: str, node: Engine) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("DROP TABLE IF EXISTS stock; CREATE TABLE stock (n int); INSERT INTO stock VALUES (5)")

    def order(connection: psycopg.Connection, name: str) -> None:
        connection.execute("SELECT n FROM stock")
        connection.execute("UPDATE stock SET n = n - 1")
        leasekit.postgres.schedule(connection, NewTask(kind="k", id=name))

    with psycopg.connect(url) as first, psycopg.connect(url) as second:
        for connection in (first, second):
            connection.isolation_level = IsolationLevel.SERIALIZABLE
            connection.execute("SELECT n FROM stock")
        order(first, "first")
        first.commit()
        with pytest.raises(psycopg.errors.SerializationFailure):
            order(second, "second")
        second.rollback()
        assert await found(node) == ["first"]
        order(second, "second")
        second.commit()
    assert await found(node) == ["first", "second"]
    with psycopg.connect(url) as connection:
        connection.execute("DROP TABLE stock")


async def test_a_commit_whose_answer_was_lost_is_repeated_under_the_same_id(url: str, node: Engine) -> None:
    for _ in range(2):
        with psycopg.connect(url) as connection:
            leasekit.postgres.schedule(connection, NewTask(kind="k", id="t", payload=[1]))
    assert await found(node) == ["t"]
    assert waiting(url) == 0


@pytest.fixture(scope="module")
def preparing() -> Iterator[PostgresServer]:
    """A PostgreSQL in which transactions can be prepared."""
    server = PostgresServer(options=["-c", "max_prepared_transactions=4"])
    server.start()
    yield server
    server.remove()


async def test_a_prepared_transaction_has_its_task_once_it_is_committed(preparing: PostgresServer) -> None:
    url = preparing.emptied()
    with psycopg.connect(url, autocommit=True) as connection:
        for name in ("kept", "undone"):
            connection.execute("BEGIN")
            leasekit.postgres.schedule(connection, NewTask(kind="k", id=name), wake=False)
            connection.execute(f"PREPARE TRANSACTION '{name}'".encode())
        async with Engine(PostgresStore(url)) as node:
            assert await found(node) == []
            connection.execute("COMMIT PREPARED 'kept'")
            connection.execute("ROLLBACK PREPARED 'undone'")
            assert await found(node) == ["kept"]
        connection.execute("BEGIN")
        leasekit.postgres.schedule(connection, NewTask(kind="k"))  # with its NOTIFY
        with pytest.raises(psycopg.errors.FeatureNotSupported):
            connection.execute("PREPARE TRANSACTION 'wakes'")


ODD = [
    '"k\\u0000"', '"\\ud800"', "1", "null", "[]", "{}", "1e999", "NaN", "-1", "1e308", '"a/b"', '"@"', "true", '""',
    "99999999999999999999999999", "[[[]]]", '"2026-01-01T00:00:00"', '"0001-01-01T00:00:00Z"', '"named:x"', '"\\n"',
    '"9999-12-31T23:59:59Z"', '["\\u0000"]', '{"\\ud800": 1}', "0", "5e-324", '["a", "a"]', '{"a": "b"}', '{"max": 0}',
]  # fmt: skip
FIELDS = [field.encode_name for field in msgspec.structs.fields(NewTask)]


async def test_no_value_of_any_field_stops_another_row(url: str, node: Engine) -> None:
    rows = [f'{{"kind": "odd", "{field}": {value}}}' for field in FIELDS if field != "kind" for value in ODD]
    rows += [f'{{"kind": {value}}}' for value in ODD]
    random = Random(17)
    rows = random.sample(rows, in_soak(len(rows), by_default=200))
    with psycopg.connect(url) as connection:
        with connection.cursor() as cursor:
            cursor.executemany("INSERT INTO leasekit.inbox (task) VALUES (%s)", [(row,) for row in rows])
        leasekit.postgres.schedule(connection, NewTask(kind="k", id="good"), wake=False)
    assert await found(node) == ["good"]
    assert waiting(url) == 0


@pytest.mark.parametrize("message", ["", "{", "application", "application [", 'application [["inbox", 5]]', "x" * 7999])
async def test_no_message_of_another_program_stops_a_node(message: str, url: str, node: Engine) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("SELECT pg_notify('leasekit', %s)", [message])
        leasekit.postgres.schedule(connection, NewTask(kind="k", id="good"))
    assert await found(node) == ["good"]
