"""Nodes that reach PostgreSQL through PgBouncer in transaction mode, where each transaction has another session."""
# pyright: reportPrivateUsage=false

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import cast

import psycopg
import pytest

from leasekit.errors import Unavailable
from leasekit.server.engine import Engine
from leasekit.server.store.postgres.session import PostgresSession
from leasekit.server.store.postgres.store import PostgresStore
from leasekit.task import NewTask, Settlement
from tests.ports import free_port
from tests.postgres_server import PostgresServer
from tests.waiting import eventually, until

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(PGBOUNCER is None, reason="there is no pgbouncer here, which no package index has"),
]


@pytest.fixture
def pooled(postgres: PostgresServer) -> Iterator[str]:
    postgres.emptied()
    folder, port = postgres.folder, free_port()
    users, settings = folder / "users", folder / "pgbouncer.ini"
    users.write_text('"postgres" ""\n')
    settings.write_text(
        f"[databases]\n* = host={folder}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n"
        f"unix_socket_dir =\nauth_type = trust\nauth_file = {users}\npool_mode = transaction\ndefault_pool_size = 3\n"
    )
    user = ["-u", "nobody"] if os.geteuid() == 0 else []
    assert PGBOUNCER is not None
    process = subprocess.Popen([PGBOUNCER, "-q", *user, settings], stderr=subprocess.DEVNULL)
    pooled = f"postgresql://postgres@127.0.0.1:{port}/leasekit_tests"

    def is_up() -> bool:
        try:
            psycopg.connect(pooled).close()
        except psycopg.OperationalError:
            return False
        return True

    eventually(is_up, "PgBouncer")
    yield pooled
    process.terminate()
    process.wait()


async def test_two_nodes_share_tasks_behind_a_pooler(pooled: str) -> None:
    async with Engine(PostgresStore(pooled, prepare=False)) as one, Engine(PostgresStore(pooled, prepare=False)) as two:
        for turn in range(20):  # more than it takes until statements would be prepared
            await one.schedule([NewTask(kind="k") for _ in range(3)])
            claimed = await two.claim(worker="w", kinds=["k"], limit=5, wait=0, claim_id=str(turn))
            ends = [Settlement(id=task.id, token=task.token, outcome="success") for task in claimed.tasks]
            assert [verdict.verdict for verdict in await two.results("w", ends)] == ["settled"] * 3
        assert (await one.queries.stats()).kinds == {"k": {"success": 60}}


async def test_a_claim_that_waits_is_served_though_no_message_comes_through_a_pooler(pooled: str) -> None:
    async with Engine(PostgresStore(pooled, prepare=False)) as one, Engine(PostgresStore(pooled, prepare=False)) as two:
        waiting = asyncio.create_task(two.claim(worker="w", kinds=["k"], limit=1, wait=30, claim_id="c"))
        await until(lambda: two.claims_waiting)
        await one.schedule([NewTask(kind="k", id="t")])
        assert [task.id for task in (await waiting).tasks] == ["t"]


async def test_prepared_statements_behind_a_pooler_are_an_error_that_says_what_to_do(pooled: str) -> None:
    async def use() -> None:
        async with Engine(PostgresStore(pooled)) as one, Engine(PostgresStore(pooled)) as two:
            for _ in range(50):
                for node in (one, two):
                    await node.schedule([NewTask(kind="k")])

    with pytest.raises(Unavailable, match=r"add \?prepare=off to the URL"):
        await use()


def test_a_session_never_runs_a_statement_that_another_client_has_prepared(pooled: str) -> None:
    store = PostgresStore(pooled)
    one, two = store._connect(), store._connect()

    def run(connection: psycopg.Connection[tuple[str]], query: bytes) -> tuple[str] | None:
        return connection.execute(query, prepare=True).fetchone()

    for connection, query in ((one, b"SELECT 'of one'"), (two, b"SELECT 'of two'")):
        connection.execute("BEGIN")  # so that each has a session of its own
        assert run(connection, query) == (query.decode().split("'")[1],)
    one.execute("COMMIT")
    two.execute("COMMIT")
    one.execute("BEGIN")  # in the session that was used last: that of `two`
    with pytest.raises(psycopg.errors.InvalidSqlStatementName):
        run(one, b"SELECT 'of one'")
    one.close()
    two.close()


def test_messages_that_come_through_a_pooler_are_not_kept(pooled: str) -> None:
    store = PostgresStore(pooled, prepare=False)
    store.open()
    with store.view() as view:
        for connection in (store._connection(), cast("PostgresSession", view._session).connection):
            connection.execute("LISTEN leasekit")  # as a listener did, in a session that a pooler gives to others
            connection.execute("NOTIFY leasekit, 'x'")
    with store.transaction(), store.view():
        pass
    for connection in (store._connection(), *store._idle):
        connection.execute("SELECT 1")
        assert not connection._notifies_backlog
    store.close()
