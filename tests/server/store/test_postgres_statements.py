"""Statements on PostgreSQL: their plans, what renewals write, arrays of values, and errors that come up late."""

import os
import socket
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace
from psycopg import errors

from leasekit.server.engine import Engine
from leasekit.server.store import Contended, Run
from leasekit.server.store.postgres.session import Connection, PostgresSession, array
from leasekit.server.store.postgres.store import PostgresStore
from leasekit.task import Beat, KindSettings, NewTask, Settlement
from tests.postgres_server import PostgresServer
from tests.waiting import until

LEASES, BATCH, ROUNDS = 10_000, 1_000, 5

SCANS = 10
# An index that is made scans its table, too: once.
_SCANS = """
SELECT relname FROM pg_stat_user_tables WHERE schemaname = 'leasekit' AND seq_scan >= 10
    AND relname NOT IN ('store', 'node', 'task_count', 'version', 'access_token')
"""
"""Tables that were scanned again and again, but for small ones: of tokens, at most a thousand, all are read."""
_TABLES = "SELECT relname FROM pg_stat_user_tables WHERE schemaname = 'leasekit'"
_RUNS = "SELECT n_tup_ins FROM pg_stat_user_tables WHERE relid = 'leasekit.run'::regclass"


@pytest.mark.parametrize(
    "values",
    [
        ["plain", "null", "NULL", "", " ", "{a,b}", "[a]", 'a"b', "a\\b", "\\n", "é€😀", None],
        ["line\nend", "\t", "\x7f", "a\\\n", "\u2028"],
        [],
    ],
)
def test_texts_arrive_as_they_are_in_an_array(postgres: PostgresServer, values: list[str | None]) -> None:
    with psycopg.connect(postgres.url("postgres")) as connection:
        assert connection.execute("SELECT %s::text[]", (array(values),)).fetchone() == (values,)


def test_numbers_arrive_as_they_are_in_an_array(postgres: PostgresServer) -> None:
    numbers = [0.1, -1e-9, 1e22, 1.7e308, 1_763_900_000.123457, None]
    with psycopg.connect(postgres.url("postgres")) as connection:
        assert connection.execute("SELECT %s::float8[]", (array(numbers),)).fetchone() == (numbers,)


def test_a_statement_that_fails_among_others_undoes_them_all(
    postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    store = PostgresStore(postgres.emptied())
    store.open()
    run = Run(1, 1, 1, "success", 0.0, None, None, None, None, "token", None, b"1", None)
    second, third = replace(run, fence=2), replace(run, fence=3)

    def add(*batches: list[Run]) -> None:
        with store.transaction() as tx:
            for batch in batches:
                tx.add_runs(batch)

    try:
        with pytest.raises(errors.NotNullViolation):
            add([run], [replace(second, outcome=None)], [third])
        add([run])  # also with the statements that were sent after the one that failed
        with pytest.raises(Contended):
            add([run, second], [third])
        with store.view() as view:
            assert view.last_runs([1], limit=10) == {1: [run]}
    finally:
        store.close()
    assert caplog.records == []


@pytest.mark.anyio
async def test_no_request_scans_a_table(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    PostgresStore(url).migrate()
    for _ in range(2):
        async with Engine(PostgresStore(url)) as engine:
            for number in range(SCANS):  # some plans are made anew for the first statements only
                await engine.schedule([NewTask(kind="k", dedupe_key=f"{engine}-{number}-{n}") for n in range(50)])
                claimed = await engine.claim(worker="w", kinds=["k"], limit=50, wait=0, claim_id=f"{engine}-{number}")
                beats = [Beat(id=task.id, token=task.token, started=True, progress=1) for task in claimed.tasks]
                assert {verdict.verdict for verdict in await engine.heartbeat("w", beats)} == {"renewed"}
                await engine.cancel([beats[0].id])
                ends = [Settlement(id=beat.id, token=beat.token, outcome="retry", retry_after=0.0) for beat in beats]
                assert {verdict.verdict for verdict in await engine.results("w", ends)} == {"settled"}
                await engine.queries.get(beats[0].id)
                await engine.queries.list_tasks(kind="k", limit=10)
                await engine.fleet.workers()
                await engine.operations.set_kind("k", KindSettings(priority=number % 5, retention=60.0), by=None)
                await engine.queries.kinds()
                await engine.sweeper.sweep()
                await engine.tick()
    # The sessions of the engines tell their statistics when they end.
    await until(lambda: _fetched(url, _RUNS) == [(2 * SCANS * 50,)])
    assert _fetched(url, _SCANS) == []


@pytest.mark.anyio
async def test_a_page_of_tasks_takes_few_statements(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a round trip, and the next reads wait for it."""
    url, asked, execute = postgres.emptied(), list[str](), PostgresSession.execute

    def noted(session: PostgresSession, query: str, values: Any = ()) -> Any:
        asked.append(query)
        return execute(session, query, values)

    async with Engine(PostgresStore(url)) as engine:
        await engine.schedule([NewTask(kind="k", tags=["t"])] * 100)
        monkeypatch.setattr(PostgresSession, "execute", noted)
        assert len((await engine.queries.list_tasks(limit=100)).tasks) == 100
    assert len(asked) <= 45, "the tasks are read ten at a time, with their values, in three statements"


@pytest.mark.anyio
async def test_an_index_is_read_for_what_is_looked_for_also_while_a_database_is_new(postgres: PostgresServer) -> None:
    """Nothing has counted the rows of its tables then: PostgreSQL takes each index for a short one."""
    url = postgres.new_database()
    PostgresStore(url).migrate()
    with psycopg.connect(url) as connection:
        for (table,) in _fetched(url, _TABLES):
            connection.execute(f"ALTER TABLE leasekit.{table} SET (autovacuum_enabled = false)".encode())
    async with Engine(PostgresStore(url)) as engine:
        for number in range(SCANS):  # the plans of statements are kept from the first ones
            await engine.schedule([NewTask(kind="k", key="key"), NewTask(kind="k", start_deadline=1.0)])
            await engine.claim(worker="first", kinds=["k"], limit=2, wait=0, claim_id=str(number))
        for first in range(0, 2 * BATCH, BATCH):
            numbers = range(first, first + BATCH)
            await engine.schedule([NewTask(kind="k", key=f"key-{n % 200}", tags=["t"], id=f"t-{n}") for n in numbers])
        await engine.schedule([NewTask(kind="chained", parent="t-0") for _ in range(BATCH)])
        assert (await engine.queries.list_tasks(root="t-0", kind="other")).tasks == []
        await engine.schedule([NewTask(kind="after", after=[f"t-{n}"], start_deadline=60.0) for n in range(BATCH)])
        claimed = await engine.claim(worker="w", kinds=["k"], limit=BATCH, wait=0, claim_id="c")
        ends = [Settlement(id=task.id, token=task.token, outcome="success") for task in claimed.tasks]
        assert {verdict.verdict for verdict in await engine.results("w", ends)} == {"settled"}
        await engine.tick()
    await until(lambda: _fetched(url, _RUNS) == [(BATCH,)])
    assert _fetched(url, "SELECT indexrelname, idx_tup_read FROM pg_stat_user_indexes WHERE idx_tup_read > 20000") == []


@pytest.mark.anyio
async def test_renewals_write_no_index(postgres: PostgresServer) -> None:
    url = postgres.emptied()
    began = _updates(url)
    leases: list[list[Beat]] = []
    async with Engine(PostgresStore(url)) as engine:
        for number in range(LEASES // BATCH):
            await engine.schedule([NewTask(kind="k")] * BATCH)
            claimed = await engine.claim(worker="w", kinds=["k"], limit=BATCH, wait=0, claim_id=str(number))
            leases.append([Beat(id=task.id, token=task.token, started=True) for task in claimed.tasks])
        for _ in range(ROUNDS):
            for batch in leases:
                assert {verdict.verdict for verdict in await engine.heartbeat("w", batch)} == {"renewed"}
    renewals = ROUNDS * LEASES
    await until(lambda: _updates(url)[0] - began[0] >= LEASES + renewals)  # each lease was claimed, too
    assert _updates(url)[1] - began[1] > 0.95 * renewals


def _fetched(url: str, query: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(query.encode()).fetchall()


def _updates(url: str) -> tuple[int, ...]:
    """Return how many rows of `trigger` were updated, and how many of these in their own page, without an index."""
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relid = 'leasekit.trigger'::regclass"
        ).fetchone()
    assert row is not None
    return row


def test_a_pipeline_that_no_socket_takes_at_once_is_sent_to_its_end(postgres: PostgresServer) -> None:
    with Connection.connect(postgres.url("postgres"), autocommit=True) as connection:
        connection.patience = 5
        with socket.socket(fileno=os.dup(connection.fileno())) as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with connection.pipeline() as pipeline:
            lengths = [connection.execute("SELECT length(%s)", ("x" * 2_000_000,)) for _ in range(3)]
            pipeline.sync()
        assert [length.fetchone() for length in lengths] == [(2_000_000,)] * 3
