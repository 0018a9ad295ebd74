"""Fair shares on several nodes of a PostgreSQL database: no task is missed, and none comes twice."""
# pyright: reportPrivateUsage=false

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

import psycopg
import pytest

from leasekit.server.engine import Engine
from leasekit.server.roles import claims, frontend
from leasekit.server.store import Tx
from leasekit.server.store.postgres.store import _PLANS, PostgresStore
from leasekit.server.store.postgres.tx import _FORGET_SHARES
from leasekit.server.store.sql.tx import SqlTx
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import NewTask, Settlement
from tests.postgres_server import PostgresServer
from tests.waiting import eventually

NODES = 3


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.emptied()


@pytest.fixture
async def nodes(url: str) -> AsyncIterator[list[Engine]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Engine(PostgresStore(url))) for _ in range(NODES)]


@pytest.fixture
def stores(url: str) -> Iterator[list[PostgresStore]]:
    opened = [PostgresStore(url) for _ in range(2)]
    for store in opened:
        store.open()
    yield opened
    for store in opened:
        store.close()


def turn(tx: Tx) -> UnitOfWork:
    return UnitOfWork(tx, now=1_000_000.0, instant=1_000_000.0, random=random.Random(1))


def put(tx: Tx, *ids: str) -> None:
    frontend.schedule(turn(tx), [NewTask(kind="k", id=task_id, key=task_id[0]) for task_id in ids])


def take(tx: Tx, claim_id: str, limit: int = 10) -> list[str]:
    (answer,) = claims.claim(turn(tx), [claims.WaitingClaim(0, "w", claim_id, ("k",), limit, 0.0)])
    return [] if answer.claimed is None else [task.id for task in answer.claimed.tasks]


def taken(store: PostgresStore, claim_id: str) -> list[str]:
    with store.transaction() as tx:
        return take(tx, claim_id)


@pytest.mark.anyio
async def test_claimers_and_producers_on_three_nodes_miss_no_task_and_share_none(nodes: list[Engine]) -> None:
    got: list[str] = []
    ids = [f"{key}{number}" for number in range(60) for key in "abcdefghij"]

    async def produce(node: Engine, ours: Sequence[str]) -> None:
        for start in range(0, len(ours), 7):
            batch = ours[start : start + 7]
            await node.schedule([NewTask(kind="k", id=task_id, key=task_id[0]) for task_id in batch])

    async def claimer(number: int) -> None:
        node, turns = nodes[number % NODES], 0
        while len(got) < len(ids):
            claimed = await node.claim(
                worker=f"w{number}", kinds=["k"], limit=1 + number % 5, wait=0.2, claim_id=f"{number}-{turns}"
            )
            got.extend(task.id for task in claimed.tasks)
            ends = [Settlement(id=task.id, token=task.token, outcome="success") for task in claimed.tasks]
            await node.results(f"w{number}", ends)
            turns += 1

    producers = [produce(node, ids[number::NODES]) for number, node in enumerate(nodes)]
    await asyncio.gather(*producers, *map(claimer, range(12)))
    assert Counter(got) == Counter(ids)
    assert sum(node.commit.retries for node in nodes) == 0, "the nodes waited for each other in a circle"


@pytest.mark.anyio
async def test_nodes_keep_keys_together_within_a_batch_of_each(nodes: list[Engine]) -> None:
    await nodes[0].schedule([NewTask(kind="k", key="giant") for _ in range(900)])
    await nodes[0].schedule([NewTask(kind="k", id=f"s{number}", key="small") for number in range(60)])
    got: list[str] = []

    async def claimer(number: int) -> None:
        for turns in range(10):
            claimed = await nodes[number].claim(
                worker=f"w{number}", kinds=["k"], limit=4, wait=0, claim_id=f"{number}-{turns}"
            )
            got.extend(task.id for task in claimed.tasks)

    await asyncio.gather(*map(claimer, range(NODES)))
    assert abs(sum(task_id.startswith("s") for task_id in got) - 60) <= 4 * NODES
    assert len(got) == 120


def test_a_task_is_not_missed_that_comes_while_a_claim_empties_its_key(stores: list[PostgresStore]) -> None:
    first, second = stores
    with first.transaction() as tx:
        put(tx, "a1")
    with first.transaction() as claiming:
        assert take(claiming, "c1") == ["a1"]
        with second.transaction() as tx:  # commits before the claim writes that the key has no tasks
            put(tx, "a2")
    assert taken(first, "c2") == ["a2"]


def test_a_key_that_another_node_lets_join_while_a_claim_reads_is_not_missed(
    stores: list[PostgresStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = stores
    with first.transaction() as tx:
        put(tx, "a1", "a2")

    def join() -> None:
        monkeypatch.undo()
        with second.transaction() as other:
            assert take(other, "c1", limit=1) == ["a1"]

    def interrupted(read: Callable[..., Any]) -> Callable[..., Any]:
        def first_read(*args: Any, **options: Any) -> Any:
            found = read(*args, **options)
            join()
            return found

        return first_read

    monkeypatch.setattr(SqlTx, "active_shares", interrupted(SqlTx.active_shares))
    monkeypatch.setattr(SqlTx, "joining_shares", interrupted(SqlTx.joining_shares))
    assert taken(first, "c2") == ["a2"]


def test_a_claim_waits_for_a_producer_that_has_locked_a_share(stores: list[PostgresStore], url: str) -> None:
    first, second = stores
    with first.transaction() as tx:
        put(tx, "a1")
    claimed: list[str] = []
    with second.transaction() as producing:
        put(producing, "a2")
        producing.finish()
        producing.execute("SELECT 1")  # all that was sent has been done
        claim = threading.Thread(target=lambda: claimed.extend(taken(first, "c1")))
        claim.start()
        with psycopg.connect(url, autocommit=True) as connection:
            waits = "SELECT 1 FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'"
            eventually(lambda: connection.execute(waits).fetchone() is not None)
    claim.join()
    assert claimed == ["a1"]
    assert taken(first, "c2") == ["a2"]


def test_a_claim_that_is_undone_charges_nothing(stores: list[PostgresStore]) -> None:
    store, _ = stores
    with store.transaction() as tx:
        put(tx, "a1", "a2", "b1")
    with suppress(KeyboardInterrupt), store.transaction() as tx:
        assert len(take(tx, "c1", limit=2)) == 2
        raise KeyboardInterrupt
    with store.transaction() as tx:
        assert take(tx, "c2", limit=2) == ["a1", "b1"]


def test_idle_keys_are_found_by_their_lane_and_its_least_share_is_looked_up_once(postgres: PostgresServer) -> None:
    """Also by the plan of a table that is empty: with 4,000 kinds, to compare all keys with all lanes takes 4 s."""
    url = postgres.new_database()
    PostgresStore(url).migrate()
    with psycopg.connect(url) as connection:
        for name, value in _PLANS.items():
            connection.execute(f"SET {name} = {value}".encode())
        rows = connection.execute(f"EXPLAIN {_FORGET_SHARES}".encode(), (100, 100)).fetchall()
    plan = [line for (line,) in rows]
    assert not [line for line in plan if "Join Filter" in line]
    lane, deleted = (
        next(n for n, line in enumerate(plan) if word in line) for word in ("CTE lane", "ix_share_idle on share one")
    )
    assert [n for n, line in enumerate(plan) if "ix_share_active" in line and not lane < n < deleted] == []


def test_a_task_that_another_version_has_ended_or_given_back_is_no_longer_in_the_queue(
    stores: list[PostgresStore],
) -> None:
    """A node of version 1 writes `trigger` alone."""
    store, _ = stores
    with store.transaction() as tx:
        put(tx, "a1", "a2", "a3")
        tx.execute("SELECT 1")
    with store.transaction() as tx:
        tx._connection.execute(
            "UPDATE leasekit.trigger SET status = 'cancelled', next_trigger_at = NULL, ended_at = 1 WHERE id = 'a1'"
        )
        tx._connection.execute("UPDATE leasekit.trigger SET next_trigger_at = 5 WHERE id = 'a2'")
    assert sorted(taken(store, "c1")) == ["a2", "a3"]
    with store.transaction() as tx:
        tx.tend_shares(limit=100)
    with store.transaction() as tx:
        assert tx.lanes(["k"]) == []
