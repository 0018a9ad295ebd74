"""Several engines over one PostgreSQL database: what one node does, the others see and do not repeat."""
# pyright: reportPrivateUsage=false

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from datetime import timedelta

import psycopg
import pytest

from leasekit.errors import BackendError, ConfigError, Unavailable
from leasekit.server.engine import Engine
from leasekit.server.roles import gates
from leasekit.server.roles.gates import GateChange
from leasekit.server.store.postgres import schema
from leasekit.server.store.postgres.store import PostgresStore
from leasekit.server.store.postgres.tx import JOIN_WRITERS
from leasekit.task import Beat, KindSettings, NewTask, Settlement, Task
from leasekit.wire import PurgeRequest, RescheduleRequest
from tests.postgres_server import PostgresServer
from tests.waiting import eventually, until

pytestmark = pytest.mark.anyio

NODES = 3


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.emptied()


@pytest.fixture
async def nodes(url: str) -> AsyncIterator[list[Engine]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Engine(PostgresStore(url))) for _ in range(NODES)]


async def taken(node: Engine, *, wait: float = 0, limit: int = 1, claim_id: str = "c", worker: str = "w") -> list[Task]:
    claimed = await node.claim(worker=worker, kinds=["k"], limit=limit, wait=wait, claim_id=claim_id)
    return list(claimed.tasks)


async def test_fifty_claimers_over_three_nodes_never_share_a_task(nodes: list[Engine]) -> None:
    count = 1000
    await nodes[0].schedule([NewTask(kind="k", id=f"t{n}") for n in range(count)])
    got: list[str] = []

    async def claimer(number: int) -> None:
        node, turn = nodes[number % NODES], 0
        while tasks := await taken(node, limit=1 + number % 7, worker=f"w{number}", claim_id=f"{number}-{turn}"):
            got.extend(task.id for task in tasks)
            ends = [Settlement(id=task.id, token=task.token, outcome="success") for task in tasks]
            assert {verdict.verdict for verdict in await node.results(f"w{number}", ends)} == {"settled"}
            turn += 1

    await asyncio.gather(*map(claimer, range(50)))
    assert Counter(got) == Counter({f"t{n}": 1 for n in range(count)})
    assert (await nodes[1].queries.stats()).kinds == {"k": {"success": count}}


async def test_the_settings_of_a_kind_hold_on_all_nodes_from_their_commit_on(nodes: list[Engine]) -> None:
    first, *others = nodes
    for turn, priority in enumerate((0, 4, None, 1)):
        settings = None if priority is None else KindSettings(priority=priority)
        await nodes[turn % NODES].operations.set_kind("k", settings, by="one")
        for number, node in enumerate(nodes):
            await node.schedule([NewTask(kind="k", id=f"t{turn}-{number}")])
            info = await first.queries.get(f"t{turn}-{number}")
            assert info is not None
            assert info.priority == (2 if priority is None else priority)
    assert [info.kind for info in await others[0].queries.kinds()] == ["k"]


async def test_what_nodes_declare_and_set_at_one_moment_is_never_forgotten(nodes: list[Engine]) -> None:
    by_code, by_hand = KindSettings(weight=2.0), KindSettings(weight=3.0)
    for kind in map(str, range(20)):
        asked = ((by_code, True), (by_hand, False), (by_code, True))
        await asyncio.gather(
            *(
                node.operations.set_kind(kind, settings, by=None, is_declared=is_declared)
                for node, (settings, is_declared) in zip(nodes, asked, strict=True)
            )
        )
        await nodes[0].operations.set_kind(kind, by_hand, by=None)
        info = await nodes[1].operations.set_kind(kind, by_code, by=None, is_declared=True)
        assert info is not None
        assert (info.settings, info.declared) == (by_hand, by_code)


async def test_of_changes_at_one_moment_that_are_based_on_the_same_settings_one_is_made(nodes: list[Engine]) -> None:
    for kind in map(str, range(20)):
        was, chosen = KindSettings(), [KindSettings(priority=number) for number in range(NODES)]
        made = await asyncio.gather(
            *(
                node.operations.set_kind(kind, settings, by=None, was=was)
                for node, settings in zip(nodes, chosen, strict=True)
            ),
            return_exceptions=True,
        )
        assert sorted(type(answer).__name__ for answer in made) == ["Conflict"] * (NODES - 1) + ["KindInfo"]


async def test_no_instant_has_more_leases_than_the_concurrency_of_their_kind_on_all_nodes_together(
    nodes: list[Engine], url: str
) -> None:
    count, places = 200, 4
    await nodes[0].operations.set_kind("k", KindSettings(concurrency=places), by=None)
    await nodes[0].schedule([NewTask(kind="k", id=f"t{n}") for n in range(count)])
    seen, done = Counter[int](), list[str]()

    async def work(number: int) -> None:
        node, turn = nodes[number % NODES], 0
        while len(done) < count:
            for task in await taken(node, wait=1, limit=3, worker=f"w{number}", claim_id=f"{number}-{turn}"):
                await node.results(f"w{number}", [Settlement(id=task.id, token=task.token, outcome="success")])
                done.append(task.id)
            turn += 1

    async def watch(connection: psycopg.AsyncConnection[tuple[int]]) -> None:
        while len(done) < count:
            cursor = await connection.execute("SELECT count(*) FROM leasekit.trigger WHERE owner IS NOT NULL")
            seen[(await cursor.fetchone() or (0,))[0]] += 1

    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await asyncio.gather(watch(connection), *map(work, range(3 * NODES)))
    assert sorted(done) == sorted(f"t{n}" for n in range(count))
    assert max(seen) == places


async def test_a_claim_of_one_node_hears_of_a_place_that_is_free_on_another(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasekit.server.engine._PERIOD", 3600.0)  # no node looks by itself
    monkeypatch.setattr("leasekit.server.rooms._LOOK", 3600.0)
    async with Engine(PostgresStore(url)) as first, Engine(PostgresStore(url)) as second:
        for node in (first, second):
            await node.tick()
        await first.operations.set_kind("k", KindSettings(concurrency=1), by=None)
        await first.schedule([NewTask(kind="k", id=task_id) for task_id in ("a", "b")])
        (held,) = await taken(first)
        waiting = asyncio.create_task(taken(second, wait=20, claim_id="d"))
        await until(lambda: "k" in second._long_polls._full)
        await first.results("w", [Settlement(id=held.id, token=held.token, outcome="success")])
        assert [task.id for task in await waiting] == ["b"]


async def test_a_node_that_finds_another_starting_tasks_of_a_limited_kind_does_not_wait_for_it(url: str) -> None:
    async with Engine(PostgresStore(url)) as node:
        await node.operations.set_kind("k", KindSettings(concurrency=1), by=None)
        await node.schedule([NewTask(kind="k", id="a"), NewTask(kind="other", id="b")])
        stranger = PostgresStore(url)
        stranger.open()
        with stranger.transaction() as tx:
            assert tx.begin_starts(["k"]) == ["k"]
            claimed = await node.claim(worker="w", kinds=["k", "other"], limit=5, wait=0, claim_id="c")
            assert [task.id for task in claimed.tasks] == ["b"]
            waiting = asyncio.create_task(taken(node, wait=60, claim_id="d"))
            await until(lambda: "k" in node._long_polls._full)
        stranger.close()
        assert [task.id for task in await waiting] == ["a"]


async def test_changes_of_kinds_on_all_nodes_at_once_are_one_after_another(nodes: list[Engine]) -> None:
    async def change(number: int) -> None:
        await nodes[number % NODES].operations.set_kind(
            f"k{number % 5}", KindSettings(max_attempts=1 + number), by=None
        )

    await asyncio.gather(*map(change, range(30)))
    kinds = await nodes[0].queries.kinds()
    assert [info.kind for info in kinds] == [f"k{number}" for number in range(5)]
    for node in nodes:
        assert await node.queries.kinds() == kinds


async def closed(node: Engine, scope: str, name: str, mode: str = "pause") -> None:
    await node.operations.set_gate(GateChange(scope, name, mode, None, None, None, None))


@pytest.mark.parametrize(("scope", "name"), [("kind", "k"), ("collection", "c")])
async def test_no_node_grants_a_task_after_the_answer_that_closes_its_gate(
    nodes: list[Engine], scope: str, name: str
) -> None:
    count, running = 600, True
    await nodes[0].schedule([NewTask(kind="k", id=f"t{n}", collection="c") for n in range(count)])

    async def claimer(number: int) -> None:
        turn = 0
        while running:
            await taken(nodes[number % NODES], worker=f"w{number}", claim_id=f"{number}-{turn}")
            turn += 1

    claimers = [asyncio.create_task(claimer(number)) for number in range(9)]
    for turn in range(8):
        await closed(nodes[turn % NODES], scope, name)
        before = (await nodes[0].queries.stats()).kinds
        for node in nodes:  # each has judged claims since then
            assert await taken(node, worker="last", claim_id=f"{turn}-{id(node)}") == []
        assert (await nodes[0].queries.stats()).kinds == before
        await closed(nodes[turn % NODES], scope, name, "open")
        await asyncio.sleep(0.02)
    running = False
    await asyncio.gather(*claimers)
    assert (await nodes[0].queries.stats()).kinds["k"].get("claimed", 0) > 0


async def test_a_gate_waits_for_the_transactions_that_were_judged_before_it(nodes: list[Engine], url: str) -> None:
    async with await psycopg.AsyncConnection.connect(url) as other:  # a node in the middle of a claim
        await other.execute(JOIN_WRITERS)
        closing = asyncio.create_task(closed(nodes[0], "kind", "k"))
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
            waits = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            while await (await connection.execute(waits)).fetchone() is None:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)
        assert not closing.done()
        await other.rollback()
        await closing


async def test_nodes_that_open_a_collection_together_put_each_task_back_once(
    nodes: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "STEP", 3)
    ids = [f"t{n}" for n in range(60)]
    await nodes[0].schedule([NewTask(kind="k", id=task_id, collection="c") for task_id in ids])
    await closed(nodes[0], "collection", "c")
    assert await taken(nodes[1]) == []
    await closed(nodes[0], "collection", "c", "open")
    while any(node.commit.kinds.gates.rows for node in nodes):
        await asyncio.gather(*(node.tick() for node in nodes))
    assert [task.id for task in await taken(nodes[2], limit=100, claim_id="all")] == ids


async def test_nodes_hear_of_a_gate_that_opens(nodes: list[Engine]) -> None:
    await closed(nodes[0], "kind", "k")
    await nodes[0].schedule([NewTask(kind="k", id="t")])
    waiting = asyncio.create_task(taken(nodes[1], wait=30))
    await until(lambda: nodes[1].claims_waiting == 1)
    await closed(nodes[2], "kind", "k", "open")
    assert [task.id for task in await waiting] == ["t"]


async def test_no_node_grants_a_task_to_a_worker_after_the_answer_that_drains_it(nodes: list[Engine]) -> None:
    count, running = 600, True
    await nodes[0].schedule([NewTask(kind="k", id=f"t{n}") for n in range(count)])
    granted: list[int] = []

    async def claimer(number: int) -> None:
        turn = 0
        while running:
            granted.append(len(await taken(nodes[number % NODES], claim_id=f"{number}-{turn}")))
            turn += 1

    claimers = [asyncio.create_task(claimer(number)) for number in range(9)]
    await until(lambda: sum(granted) > 0)
    for turn in range(5):
        assert await nodes[turn % NODES].operations.drain("w", by=None) is not None
        before = (await nodes[0].queries.stats()).kinds
        for node in nodes:  # each has judged claims since then
            claimed = await node.claim(worker="w", kinds=["k"], limit=1, wait=0, claim_id=f"{turn}-{id(node)}")
            assert (claimed.tasks, claimed.draining) == ([], True)
        assert (await nodes[0].queries.stats()).kinds == before
        await nodes[(turn + 1) % NODES].operations.undrain("w", by=None)
        so_far = sum(granted)
        await until(lambda so_far=so_far: sum(granted) > so_far)  # type: ignore[misc]
    running = False
    await asyncio.gather(*claimers)


async def test_a_claim_that_waits_at_another_node_hears_of_a_drain(nodes: list[Engine]) -> None:
    waiting = asyncio.create_task(nodes[1].claim(worker="w", kinds=["k"], limit=1, wait=30, claim_id="c"))
    await until(lambda: nodes[1].claims_waiting == 1)
    while await nodes[0].operations.drain("w", by=None) is None:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.05)
    assert (await waiting).draining
    (worker,) = await nodes[2].fleet.workers()
    assert worker.draining_since is not None


async def test_nodes_that_purge_at_once_remove_each_task_once_and_leave_leases_alone(nodes: list[Engine]) -> None:
    count = 1500
    await nodes[0].schedule([NewTask(kind="old", id=f"o{n}") for n in range(count)])
    await nodes[0].schedule([NewTask(kind="k", id="held")])
    (held,) = await taken(nodes[1])
    for start in range(0, count, 500):
        await nodes[0].cancel([f"o{n}" for n in range(start, start + 500)])

    async def purge(node: Engine) -> int:
        removed, cursor = 0, None
        while True:
            step = await node.operations.purge(PurgeRequest(cursor=cursor))
            removed += sum(step.kinds.get("old", {}).values())
            if (cursor := step.cursor) is None:
                return removed

    reaping = asyncio.gather(*(node.tick() for node in nodes), *(node.sweeper.sweep() for node in nodes))
    removed = await asyncio.gather(*map(purge, nodes))
    await reaping
    assert sum(removed) == count
    assert (await nodes[2].queries.stats()).kinds == {"k": {"claimed": 1}}
    (verdict,) = await nodes[2].heartbeat("w", [Beat(id=held.id, token=held.token)])
    assert verdict.verdict == "renewed"


@pytest.mark.parametrize("same", ["id", "dedupe_key"])
async def test_one_id_or_key_from_fifty_clients_over_three_nodes_makes_one_task(nodes: list[Engine], same: str) -> None:
    asked = [nodes[n % NODES].schedule([NewTask(kind="k", **{same: "one"})]) for n in range(50)]  # type: ignore[arg-type]
    answers = [answer for answers in await asyncio.gather(*asked) for answer in answers]
    assert [answer.created for answer in answers].count(True) == 1
    assert len({answer.id for answer in answers}) == 1
    assert (await nodes[2].queries.stats()).kinds == {"k": {"new": 1}}


async def test_opposed_orders_of_the_same_ids_make_each_task_once(nodes: list[Engine]) -> None:
    ids = [f"t{n}" for n in range(200)]
    orders = [ids, ids[::-1], ids[100:] + ids[:100]]
    for turn in range(5):
        asked = [
            node.schedule([NewTask(kind="k", id=f"{turn}-{task_id}") for task_id in order])
            for node, order in zip(nodes, orders, strict=True)
        ]
        answers = [answer for answers in await asyncio.gather(*asked) for answer in answers]
        assert Counter(answer.id for answer in answers if answer.created) == Counter(f"{turn}-{one}" for one in ids)


async def test_a_claim_that_waits_gets_a_task_from_another_node(nodes: list[Engine]) -> None:
    waiting = asyncio.create_task(taken(nodes[0], wait=30))
    await until(lambda: nodes[0].claims_waiting and nodes[1].clock.has_company)
    await nodes[1].schedule([NewTask(kind="k", id="t")])
    assert [task.id for task in await waiting] == ["t"]


async def test_a_lease_is_renewed_and_settled_at_any_node_once(nodes: list[Engine]) -> None:
    await nodes[0].schedule([NewTask(kind="k", id="t")])
    (task,) = await taken(nodes[0])
    (beat,) = await nodes[1].heartbeat("w", [Beat(id="t", token=task.token, started=True)])
    assert beat.verdict == "renewed"
    ends = [Settlement(id="t", token=task.token, outcome="success", result=n) for n in range(NODES)]
    verdicts = await asyncio.gather(*(node.results("w", [end]) for node, end in zip(nodes, ends, strict=True)))
    assert sorted(verdict.verdict for (verdict,) in verdicts) == ["gone", "gone", "settled"]


async def test_a_node_that_has_renewed_a_lease_sees_that_another_has_settled_it(nodes: list[Engine]) -> None:
    await nodes[0].schedule([NewTask(kind="k", id="t")])
    (task,) = await taken(nodes[0])
    beats = [Beat(id="t", token=task.token)]
    assert [verdict.verdict for verdict in await nodes[1].heartbeat("w", beats)] == ["renewed"]
    await nodes[0].results("w", [Settlement(id="t", token=task.token, outcome="success")])
    assert [verdict.reason for verdict in await nodes[1].heartbeat("w", beats)] == ["settled"]


async def test_a_repeated_claim_at_another_node_gets_the_same_tasks(nodes: list[Engine]) -> None:
    await nodes[0].schedule([NewTask(kind="k", id=f"t{n}") for n in range(4)])
    first = await taken(nodes[0], limit=2, claim_id="same")
    again = await taken(nodes[1], limit=2, claim_id="same")
    assert [(task.id, task.token) for task in again] == [(task.id, task.token) for task in first]


async def test_a_claim_that_waits_at_two_nodes_is_granted_once(nodes: list[Engine]) -> None:
    waiting = [asyncio.create_task(taken(node, wait=30, claim_id="same")) for node in nodes[:2]]
    await until(lambda: all(node.claims_waiting for node in nodes[:2]))
    await nodes[2].schedule([NewTask(kind="k", id=f"t{n}") for n in range(2)])
    first, second = await asyncio.gather(*waiting)
    assert [(task.id, task.token) for task in first] == [(task.id, task.token) for task in second]
    assert (await nodes[2].queries.stats()).kinds == {"k": {"claimed": 1, "new": 1}}


async def test_a_node_that_joins_or_leaves_extends_no_lease(nodes: list[Engine], url: str) -> None:
    await nodes[0].schedule([NewTask(kind="k", id="t")])
    await taken(nodes[0])
    before = await nodes[0].queries.get("t")
    async with Engine(PostgresStore(url)) as joining:
        assert await joining.queries.get("t") == before
    assert await nodes[0].queries.get("t") == before


async def test_the_counts_are_those_of_all_nodes_also_of_those_that_are_gone(url: str) -> None:
    for number in range(3):
        async with Engine(PostgresStore(url)) as node:
            await node.schedule([NewTask(kind="k", id=f"t{number}")])
            assert (await node.queries.stats()).kinds == {"k": {"new": number + 1}}


@pytest.mark.parametrize(
    ("name", "value"),
    [("synchronous_commit", "off"), ("client_encoding", "SQL_ASCII"), ("array_nulls", "off"), ("lock_timeout", "1")],
)
async def test_what_a_database_has_set_loses_nothing(url: str, name: str, value: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE leasekit_tests SET {name} = {value}".encode())
        try:
            async with Engine(PostgresStore(url)) as node:
                answers = [(await node.schedule([NewTask(kind="k", dedupe_key="é")]))[0] for _ in range(2)]
                await node.schedule([NewTask(kind="k", collection=name) for name in ("a", None)])
                named = (await node.queries.list_tasks(limit=2, newest=True)).tasks
                assert [task.collection for task in named] == [None, "a"]
            store = PostgresStore(url)
            store.open()
            with store.transaction() as tx:
                assert tx.execute("SHOW synchronous_commit") == [("on",)]
            with store.view() as view:
                assert view.execute("SHOW lock_timeout") == [("0",)]
            store.close()
        finally:
            connection.execute(f"ALTER DATABASE leasekit_tests RESET {name}".encode())
    assert [answer.created for answer in answers] == [True, False]


async def test_a_user_without_rights_is_told_so(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE ROLE nobody_else LOGIN")
    stranger = PostgresStore(url.replace("postgres@", "nobody_else@"))
    with pytest.raises(Unavailable, match="lacks rights: permission denied for schema leasekit"):
        stranger.open()
    with pytest.raises(Unavailable, match="lacks rights"):
        stranger.lacks()


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
async def test_a_database_that_cannot_keep_all_texts_is_refused(postgres: PostgresServer, encoding: str) -> None:
    url = postgres.new_database(encoding)
    with pytest.raises(ConfigError, match=f"has the encoding {encoding}"):
        PostgresStore(url).migrate()
    with pytest.raises(ConfigError, match=f"has the encoding {encoding}"):
        PostgresStore(url).open()


async def test_a_function_of_another_role_is_never_called(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA other")
        connection.execute(
            "CREATE FUNCTION other.unnest(text[]) RETURNS SETOF text LANGUAGE plpgsql AS 'BEGIN RAISE ''called''; END'"
        )
        connection.execute("ALTER DATABASE leasekit_tests SET search_path = other")
        try:
            async with Engine(PostgresStore(url)) as node:
                await node.schedule([NewTask(kind="k", id="t")])
                assert [task.id for task in await taken(node)] == ["t"]
                assert [task.id for task in (await node.queries.list_tasks(limit=1)).tasks] == ["t"]
        finally:
            connection.execute("ALTER DATABASE leasekit_tests RESET search_path")
            connection.execute("DROP SCHEMA other CASCADE")


async def test_a_read_does_not_fail_because_the_database_has_ended_idle_connections(url: str) -> None:
    async with Engine(PostgresStore(url)) as node:
        await node.queries.stats()
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE application_name = 'leasekit' AND state = 'idle'"
            )
        assert (await node.queries.stats()).kinds == {}


def test_tables_without_a_version_are_not_migrated(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    PostgresStore(url).migrate()
    with psycopg.connect(url) as connection:
        connection.execute("DELETE FROM leasekit.version")
    with pytest.raises(BackendError, match="has tables, and not their version: restore both"):
        PostgresStore(url).migrate()


async def test_tables_that_are_gone_are_an_outage(url: str) -> None:
    async with Engine(PostgresStore(url)) as node:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("ALTER SCHEMA leasekit RENAME TO away")
            try:
                with pytest.raises(Unavailable, match="has lost its tables"):
                    await node.schedule([NewTask(kind="k")])
                with pytest.raises(Unavailable, match="has lost its tables"):
                    await node.queries.stats()
                assert "has lost its tables" in (await node.ready() or "")
            finally:
                connection.execute("ALTER SCHEMA away RENAME TO leasekit")
        await node.schedule([NewTask(kind="k")])


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
def test_migrations_that_start_together_go_one_after_another(postgres: PostgresServer, isolation: str) -> None:
    url = postgres.new_database()
    count = 3
    with psycopg.connect(url, autocommit=True) as connection, ThreadPoolExecutor(count) as threads:
        connection.execute(
            f"ALTER DATABASE {connection.info.dbname} SET default_transaction_isolation = '{isolation}'".encode()
        )
        connection.execute("SELECT pg_advisory_lock(%s)", (schema._LOCK,))
        made = [threads.submit(PostgresStore(url).migrate) for _ in range(count)]
        waiting = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        eventually(lambda: len(connection.execute(waiting).fetchall()) == count, "all wait for the lock")
        connection.execute("SELECT pg_advisory_unlock(%s)", (schema._LOCK,))
        assert sorted(number for versions in made for number in versions.result()) == [*range(1, schema.HEAD + 1)]


def test_two_connections_never_give_statements_the_same_name(url: str) -> None:
    names: list[set[str]] = []
    for _ in range(2):
        store = PostgresStore(url)
        store.open()
        with store.transaction() as tx:
            names.append({name for (name,) in tx.execute("SELECT name FROM pg_prepared_statements")})
        store.close()
    assert all(names)
    assert not names[0] & names[1]


async def test_of_twenty_tasks_that_end_on_all_nodes_at_once_the_last_starts_the_follower_once(
    nodes: list[Engine],
) -> None:
    for turn in range(10):
        names = [f"t{turn}-{n}" for n in range(20)]
        await nodes[0].schedule([NewTask(kind="k", id=name) for name in names])
        await nodes[1].schedule([NewTask(kind="next", id=f"next-{turn}", after=names)])
        tasks = await taken(nodes[0], limit=20, claim_id=f"c{turn}")
        got: list[str] = []

        async def claimer(node: Engine, turn: int, got: list[str] = got) -> None:
            claimed = await node.claim(worker="w", kinds=["next"], limit=9, wait=5, claim_id=f"{turn}-{id(node)}")
            got.extend(task.id for task in claimed.tasks)

        claimers = [asyncio.create_task(claimer(node, turn)) for node in nodes]
        ends = [
            nodes[n % NODES].results("w", [Settlement(id=task.id, token=task.token, outcome="success")])
            for n, task in enumerate(tasks)
        ]
        assert {verdict.verdict for (verdict,) in await asyncio.gather(*ends)} == {"settled"}
        await until(got.__len__)
        for claim in claimers:
            claim.cancel()
        await asyncio.gather(*claimers, return_exceptions=True)
        assert got == [f"next-{turn}"]
    assert (await nodes[0].queries.stats()).kinds["next"] == {"claimed": 10}


async def test_a_follower_that_is_locked_does_not_delay_the_end_and_is_told_later(
    nodes: list[Engine], url: str
) -> None:
    await nodes[0].schedule([NewTask(kind="k", id="a"), NewTask(kind="next", id="b", after=["a"])])
    (task,) = await taken(nodes[0])
    async with await psycopg.AsyncConnection.connect(url) as other:
        await other.execute("SELECT FROM leasekit.trigger WHERE id = 'b' FOR UPDATE")
        (verdict,) = await nodes[0].results("w", [Settlement(id="a", token=task.token, outcome="success")])
        assert verdict.verdict == "settled"
        assert (await nodes[0].operations.purge(PurgeRequest(kind="k"))).kinds == {}
    claimed = await nodes[1].claim(worker="w", kinds=["next"], limit=1, wait=20, claim_id="next")
    assert [task.id for task in claimed.tasks] == ["b"]


async def test_the_first_wait_of_a_store_comes_before_or_after_each_end(nodes: list[Engine], url: str) -> None:
    for turn in range(15):
        async with await psycopg.AsyncConnection.connect(url) as other:
            await other.execute("UPDATE leasekit.store SET has_waits = false")
        await nodes[0].schedule([NewTask(kind="k", id=f"a{turn}")])
        (task,) = await taken(nodes[0], claim_id=f"c{turn}")
        end = [Settlement(id=task.id, token=task.token, outcome="success")]
        scheduling = asyncio.create_task(nodes[2].schedule([NewTask(kind="next", id=f"b{turn}", after=[task.id])]))
        while (await nodes[1].results("w", end))[0].verdict == "throttled":  # its row is locked for a moment
            pass
        await scheduling
        claimed = await nodes[0].claim(worker="w", kinds=["next"], limit=1, wait=20, claim_id=f"next-{turn}")
        assert [task.id for task in claimed.tasks] == [f"b{turn}"]


async def test_a_node_that_knows_no_start_deadline_yet_moves_those_of_others(nodes: list[Engine]) -> None:
    a, b = nodes[:2]
    await b.tick()
    await a.schedule([NewTask(kind="k", id="moved", start_deadline=60.0)])
    answer = await b.operations.reschedule("moved", RescheduleRequest(delay=3600.0), by="ada")
    info = await b.queries.get("moved")
    assert answer is not None
    assert info is not None
    assert info.start_by == answer.at + timedelta(seconds=60)


async def test_a_node_that_knows_no_start_deadline_yet_hears_that_a_task_has_begun(
    nodes: list[Engine], url: str
) -> None:
    a, b = nodes[:2]
    await b.tick()
    await a.schedule([NewTask(kind="k", id="begun", start_deadline=60.0)])
    (task,) = await taken(b)
    await b.heartbeat("w", [Beat(id="begun", token=task.token)])
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT count(*) FROM leasekit.deadline").fetchone() == (0,)
