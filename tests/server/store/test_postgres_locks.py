"""Rows of a PostgreSQL database that another session keeps locked: what waits for them, and what does not."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import psycopg
import pytest

from leasekit.errors import Unavailable
from leasekit.server.engine import Engine
from leasekit.server.roles import claims
from leasekit.server.store.postgres import tx
from leasekit.server.store.postgres.store import PostgresStore
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import Beat, NewTask, Settlement, Task, Verdict
from tests.ports import free_port
from tests.postgres_server import PostgresServer
from tests.waiting import eventually, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.emptied()


@pytest.fixture
async def engine(url: str) -> AsyncIterator[Engine]:
    async with Engine(PostgresStore(url)) as one:
        yield one


@pytest.fixture
async def held(engine: Engine) -> dict[str, Task]:
    """Three tasks that a worker has claimed."""
    await engine.schedule([NewTask(kind="k", id=task_id) for task_id in ("a", "b", "c")])
    claimed = await engine.claim(worker="w", kinds=["k"], limit=3, wait=0, claim_id="c")
    return {task.id: task for task in claimed.tasks}


@pytest.fixture
def locked(url: str, held: dict[str, Task]) -> Iterator[str]:
    """The id of one of them, whose row somebody has locked by hand."""
    with psycopg.connect(url) as connection:
        connection.execute("SELECT FROM leasekit.trigger WHERE id = 'b' FOR UPDATE")
        yield "b"
        connection.rollback()


def words(verdicts: list[Verdict]) -> dict[str, str]:
    return {verdict.id: verdict.verdict for verdict in verdicts}


async def beat(engine: Engine, held: dict[str, Task]) -> list[Verdict]:
    return await engine.heartbeat("w", [Beat(id=task.id, token=task.token, started=True) for task in held.values()])


async def test_a_locked_lease_is_renewed_later_and_the_others_at_once(
    engine: Engine, held: dict[str, Task], locked: str
) -> None:
    verdicts = await beat(engine, held)
    assert words(verdicts) == {"a": "renewed", "b": "throttled", "c": "renewed"}
    assert all((verdict.retry_after or 0) > 0 for verdict in verdicts if verdict.id == locked)


async def test_a_locked_run_is_settled_later_and_the_others_at_once(
    engine: Engine, held: dict[str, Task], url: str
) -> None:
    ends = [Settlement(id=task.id, token=task.token, outcome="success") for task in held.values()]
    with psycopg.connect(url) as connection:
        connection.execute("SELECT FROM leasekit.trigger WHERE id = 'b' FOR UPDATE")
        first = await engine.results("w", ends)
    assert words(first) == {"a": "settled", "b": "throttled", "c": "settled"}
    assert words(await engine.results("w", ends)) == dict.fromkeys("abc", "settled")


@pytest.mark.usefixtures("locked")
async def test_a_beat_of_a_task_that_does_not_exist_is_gone_while_another_is_locked(engine: Engine) -> None:
    verdicts = await engine.heartbeat("w", [Beat(id="b", token="t"), Beat(id="none", token="t")])
    assert words(verdicts) == {"b": "throttled", "none": "gone"}


async def test_a_cancel_of_a_locked_task_fails_and_heartbeats_go_on(
    engine: Engine, held: dict[str, Task], locked: str
) -> None:
    cancelling = asyncio.create_task(engine.cancel([locked]))
    verdicts = await beat(engine, {name: task for name, task in held.items() if name != locked})
    assert words(verdicts) == {"a": "renewed", "c": "renewed"}
    with pytest.raises(Unavailable, match="locked by another session"):
        await cancelling


async def test_a_cancel_judges_the_row_as_another_node_leaves_it(engine: Engine, url: str) -> None:
    await engine.schedule([NewTask(kind="k", id="t")])
    with psycopg.connect(url) as connection:  # the other node grants the task
        connection.execute(
            "UPDATE leasekit.trigger SET status = 'claimed', owner = 'w', token = 't', fence = 1,"
            " next_trigger_at = next_trigger_at + 60, lease_until = next_trigger_at + 60"
        )
        cancelling = asyncio.create_task(engine.cancel(["t"]))
        await until(lambda: somebody_waits(url))
        connection.commit()
    assert words(await cancelling) == {"t": "cancel_requested"}


def somebody_waits(url: str) -> bool:
    with psycopg.connect(url) as connection:
        return connection.execute("SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock'").rowcount > 0


async def test_tasks_that_are_not_locked_are_claimed_and_others_expire(
    engine: Engine, held: dict[str, Task], locked: str, url: str
) -> None:
    with psycopg.connect(url) as connection:  # all leases have ended
        connection.execute("UPDATE leasekit.trigger SET next_trigger_at = 1, lease_until = 1 WHERE id <> %s", (locked,))
    claimed = await engine.claim(worker="w", kinds=["k"], limit=3, wait=0, claim_id="d")
    assert [task.id for task in claimed.tasks] == ["a", "c"]
    assert held["a"].fence < claimed.tasks[0].fence


async def test_a_claim_that_finds_only_a_locked_task_looks_again_after_a_pause(
    engine: Engine, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Sequence[claims.WaitingClaim]] = []
    note = claims._note_what_is_left

    def noted(
        turn: UnitOfWork,
        waiting: Sequence[claims.WaitingClaim],
        emptied: Sequence[claims.WaitingClaim],
        *rest: Any,
        tried: int,
    ) -> None:
        looks.append(emptied)
        note(turn, waiting, emptied, *rest, tried=tried)

    monkeypatch.setattr(claims, "_note_what_is_left", noted)
    monkeypatch.setattr(claims, "_LOCKED", 3600)
    await engine.schedule([NewTask(kind="k", id="d")])
    with psycopg.connect(url) as connection:
        connection.execute("SELECT FROM leasekit.trigger WHERE id = 'd' FOR UPDATE")
        waiting = asyncio.create_task(engine.claim(worker="w", kinds=["k"], limit=1, wait=60, claim_id="c"))
        await until(lambda: bool(looks))
        for number in range(10):  # it would be woken between these
            await engine.schedule([NewTask(kind="other", id=f"{number}")])
        assert [[list(item.kinds) for item in emptied] for emptied in looks] == [[["k"]]]
        monkeypatch.setattr(claims, "_LOCKED", 0.01)
        engine._long_polls._wake("k", 1)
        await until(lambda: len(looks) > 5)  # in pauses, until the row is free
        connection.rollback()
    assert [task.id for task in (await waiting).tasks] == ["d"]


@pytest.mark.usefixtures("locked")
async def test_a_node_starts_beside_a_locked_lease_and_restarts_the_others(engine: Engine, url: str) -> None:
    await engine.__aexit__()
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE leasekit.node SET seen = seen - 3600")
    async with Engine(PostgresStore(url)):
        with psycopg.connect(url) as connection:
            rows = connection.execute("SELECT id, was_extended FROM leasekit.trigger").fetchall()
    assert dict(rows) == {"a": True, "b": False, "c": True}


async def test_a_node_that_starts_waits_for_a_lease_that_is_locked_for_a_moment(
    engine: Engine, url: str, held: dict[str, Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.__aexit__()
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE leasekit.node SET seen = seen - 3600")
    with psycopg.connect(url) as other:
        other.execute("SELECT FROM leasekit.trigger WHERE id = 'b' FOR UPDATE")

        def waits() -> Iterator[float]:
            yield 0.0  # it is locked at the first look
            other.rollback()
            yield 0.0

        monkeypatch.setattr(tx, "_RESTART_WAITS", waits())
        async with Engine(PostgresStore(url)):
            rows = other.execute("SELECT id, was_extended FROM leasekit.trigger").fetchall()
    assert dict(rows) == dict.fromkeys(held, True)


async def test_a_database_that_never_answers_is_given_up(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasekit.server.store.postgres.store._PATIENCE", 0.5)
    async with Engine(PostgresStore(url)) as node:
        with psycopg.connect(url) as connection:
            connection.execute("LOCK TABLE leasekit.task")
            with pytest.raises(Unavailable, match=r"no answer for 0\.5 s"):
                await node.schedule([NewTask(kind="k")])
        assert (await node.schedule([NewTask(kind="k")]))[0].created


async def test_a_node_that_reads_no_more_keeps_its_locks_for_five_seconds_at_most() -> None:
    port = free_port()
    server = PostgresServer(options=["-c", "listen_addresses=127.0.0.1"], port=port)
    try:
        server.start()
        url = server.emptied()
        store = PostgresStore(f"{url.partition('?')[0].replace('@', f'@127.0.0.1:{port}')}")
        store.open()
        with store.transaction() as tx:
            milliseconds, longest = tx.execute("SHOW tcp_user_timeout"), tx.execute("SHOW transaction_timeout")
        store.close()
        assert milliseconds == [("5000",)], "on the server's side of the connection"
        assert longest == [("90s",)]
    finally:
        server.remove()


async def test_a_node_that_stands_still_in_a_transaction_keeps_its_locks_for_some_seconds_only(
    url: str, held: dict[str, Task]
) -> None:
    """It has read rows, and sends nothing any more."""
    store = PostgresStore(url)
    store.open()

    def is_free() -> bool:
        with psycopg.connect(url) as other:
            return bool(other.execute("SELECT FROM leasekit.trigger WHERE id = 'b' FOR UPDATE SKIP LOCKED").fetchall())

    def stand_still() -> None:
        with store.transaction() as tx:
            assert tx.triggers([held["b"].id])
            assert not is_free()
            eventually(is_free)

    with pytest.raises(Unavailable):
        await asyncio.to_thread(stand_still)
    store.close()
