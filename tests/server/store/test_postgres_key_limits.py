"""Limits of keys on several nodes of a PostgreSQL database: they are never passed, and no free place is missed."""

import asyncio
import itertools
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import psycopg
import pytest

from leasekit.server.engine import Engine
from leasekit.server.roles import claims, frontend, hsc, kinds
from leasekit.server.store import Tx
from leasekit.server.store.postgres.store import PostgresStore
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import KindSettings, NewTask, Outcome, Settlement, Task
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
    with opened[0].transaction() as tx:
        kinds.change(turn(tx), [kinds.KindChange("k", KindSettings(key_concurrency=1), None)])
    yield opened
    for store in opened:
        store.close()


def turn(tx: Tx) -> UnitOfWork:
    return UnitOfWork(tx, now=1_000_000.0, instant=1_000_000.0, random=random.Random(1))


def put(tx: Tx, *ids: str, priority: int = 2) -> None:
    frontend.schedule(turn(tx), [NewTask(kind="k", id=task_id, key=task_id[0], priority=priority) for task_id in ids])


def take(tx: Tx, claim_id: str) -> list[Task]:
    (answer,) = claims.claim(turn(tx), [claims.WaitingClaim(0, "w", claim_id, ("k",), 10, 0.0)])
    return [] if answer.claimed is None else list(answer.claimed.tasks)


def end(tx: Tx, task: Task) -> None:
    (verdict,) = hsc.results(turn(tx), [Settlement(id=task.id, token=task.token, outcome="success")])
    assert verdict.verdict == "settled"


def taken(store: PostgresStore, claim_id: str) -> list[Task]:
    with store.transaction() as tx:
        return take(tx, claim_id)


def test_two_claims_at_one_moment_do_not_pass_the_limit_of_a_key(stores: list[PostgresStore]) -> None:
    first, second = stores
    with first.transaction() as tx:
        put(tx, "a1", "a2")
    with first.transaction() as tx:
        assert [task.id for task in take(tx, "c1")] == ["a1"]
        assert taken(second, "c2") == []
    assert taken(second, "c3") == []


def test_a_place_that_another_node_frees_while_a_claim_finds_the_key_full_is_seen(stores: list[PostgresStore]) -> None:
    first, second = stores
    with first.transaction() as tx:
        put(tx, "a1")
    (held,) = taken(first, "c1")
    with first.transaction() as tx:
        put(tx, "a2")
    with first.transaction() as claiming:
        assert take(claiming, "c2") == []
        with second.transaction() as ending:  # commits before the claim takes the key out of its lane
            end(ending, held)
    assert [task.id for task in taken(first, "c3")] == ["a2"]


@pytest.mark.parametrize("priority", [2, 0])
def test_a_key_that_another_node_takes_out_while_its_run_ends_comes_back(
    stores: list[PostgresStore], priority: int
) -> None:
    first, second = stores
    with first.transaction() as tx:
        put(tx, "a1")
    (held,) = taken(first, "c1")
    with first.transaction() as ending:
        end(ending, held)
        with second.transaction() as tx:
            put(tx, "a2", priority=priority)
        assert taken(second, "c2") == []  # for this node the run still goes on
    assert [task.id for task in taken(second, "c3")] == ["a2"]


def test_the_end_of_a_run_waits_for_a_node_that_takes_its_key_out(stores: list[PostgresStore], url: str) -> None:
    first, second = stores
    with first.transaction() as tx:
        put(tx, "a1")
    (held,) = taken(first, "c1")
    with first.transaction() as tx:
        put(tx, "a2")

    def settle() -> None:
        with second.transaction() as tx:
            end(tx, held)

    with first.transaction() as claiming:
        assert take(claiming, "c2") == []
        claiming.finish()
        ending = threading.Thread(target=settle)
        ending.start()
        with psycopg.connect(url, autocommit=True) as connection:
            waits = "SELECT 1 FROM pg_locks WHERE NOT granted AND locktype = 'advisory'"
            eventually(lambda: connection.execute(waits).fetchone() is not None)
    ending.join()
    assert [task.id for task in taken(first, "c3")] == ["a2"]


@pytest.mark.anyio
async def test_a_claim_of_one_node_hears_of_a_place_of_a_key_that_is_free_on_another(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasekit.server.engine._PERIOD", 3600.0)  # no node looks by itself
    async with Engine(PostgresStore(url)) as first, Engine(PostgresStore(url)) as second:
        for node in (first, second):
            await node.tick()
        await first.operations.set_kind("k", KindSettings(key_concurrency=1), by=None)
        await first.schedule([NewTask(kind="k", id=task_id, key="a") for task_id in ("a1", "a2")])
        (held,) = (await first.claim(worker="w", kinds=["k"], limit=2, wait=0, claim_id="c")).tasks
        waiting = asyncio.create_task(second.claim(worker="w", kinds=["k"], limit=2, wait=20, claim_id="d"))
        while "k" not in second._long_polls.kinds():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
        await first.results("w", [Settlement(id=held.id, token=held.token, outcome="success")])
        assert [task.id for task in (await waiting).tasks] == ["a2"]


@pytest.mark.anyio
async def test_workers_of_three_nodes_keep_the_limit_of_each_key_and_start_all(nodes: list[Engine], url: str) -> None:
    ids = [f"{key}{number}" for number in range(20) for key in "abc"]
    await nodes[0].operations.set_kind("k", KindSettings(key_concurrency=2), by=None)
    await nodes[0].schedule([NewTask(kind="k", id=task_id, key=task_id[0]) for task_id in ids])
    done, most = list[str](), Counter[int]()
    running = """SELECT coalesce(max(count), 0) FROM (SELECT count(*) FROM leasekit.trigger
        JOIN leasekit.keyed USING (seq) WHERE owner IS NOT NULL GROUP BY keyed.key) AS running"""

    async def work(number: int) -> None:
        node, turns = nodes[number % NODES], 0
        while len(done) < len(ids):
            claimed = await node.claim(worker="w", kinds=["k"], limit=3, wait=0.2, claim_id=f"{number}-{turns}")
            done.extend(task.id for task in claimed.tasks)
            ends = [Settlement(id=task.id, token=task.token, outcome="success") for task in claimed.tasks]
            await node.results("w", ends)
            turns += 1

    async def watch(connection: psycopg.AsyncConnection[tuple[int]]) -> None:
        while len(done) < len(ids):
            most[(await (await connection.execute(running)).fetchone() or (0,))[0]] += 1

    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await asyncio.gather(watch(connection), *map(work, range(2 * NODES)))
    assert sorted(done) == sorted(ids)
    assert max(most) <= 2


@pytest.mark.anyio
async def test_the_tasks_of_each_ordered_key_run_in_order_over_three_nodes(nodes: list[Engine]) -> None:
    chance = random.Random(7)
    await nodes[0].operations.set_kind("k", KindSettings(ordered=True), by="ada")
    names = [f"{key}{number:02}" for number in range(15) for key in "abcd"]
    await nodes[1].schedule(
        [NewTask(kind="k", id=name, key=name[0], max_attempts=None, max_crashes=1000) for name in names]
    )
    over: set[str] = set()  # ended, or about to end
    running: set[str] = set()

    async def work(number: int) -> None:
        for claim in itertools.count():
            if over.issuperset(names):
                return
            claim_id, limit = f"{number}-{claim}", chance.randint(1, 3)
            claimed = await chance.choice(nodes).claim(
                worker="w", kinds=["k"], limit=limit, wait=0.5, claim_id=claim_id
            )
            for task in claimed.tasks:
                earlier = {name for name in names if name[0] == task.id[0] and name < task.id}
                assert earlier <= over, task.id
                assert not {name for name in running if name[0] == task.id[0]}, task.id
                running.add(task.id)
            for task in claimed.tasks:
                await end_run(task)

    async def end_run(task: Task) -> None:
        outcome: Outcome = chance.choice(("success", "success", "fatal", "retry", "release", "crash"))
        running.discard(task.id)
        if outcome in {"success", "fatal"}:
            over.add(task.id)
        pause = chance.choice((0.0, 0.2)) if outcome == "retry" else None
        settlement = Settlement(id=task.id, token=task.token, outcome=outcome, retry_after=pause)
        (verdict,) = await chance.choice(nodes).results("w", [settlement])
        assert verdict.verdict == "settled"
        if verdict.reason == "dead":
            over.add(task.id)

    async with asyncio.timeout(120), asyncio.TaskGroup() as workers:
        for number in range(6):
            workers.create_task(work(number))
