"""Nodes that reach PostgreSQL through PgBouncer in transaction mode, where each transaction has another session."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator

import psycopg
import pytest

from leasekit.errors import Unavailable
from leasekit.server.engine import Engine
from leasekit.server.store.postgres.store import PostgresStore
from leasekit.task import NewTask, Settlement
from tests.postgres_server import PostgresServer, free_port
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
        assert (await one.stats()).kinds == {"k": {"success": 60}}


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
