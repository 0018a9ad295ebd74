"""Migrations of PostgreSQL: what tables of each version keep."""

from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from leasekit.errors import Refused
from leasekit.periodic import PeriodicTaskItem
from leasekit.server.engine import Engine
from leasekit.server.history import Counts
from leasekit.server.roles.gates import GateChange
from leasekit.server.roles.periodic import Put, Remove
from leasekit.server.store import MinuteRow
from leasekit.server.store.postgres import schema
from leasekit.server.store.postgres.store import PostgresStore
from leasekit.task import Beat, KindSettings, NewTask, Settlement, Status
from leasekit.wire import ChainRequest
from tests.postgres_server import PostgresServer

# Each is made when its version is the head: with tasks in each state, some seconds before `SOON_AFTER`.
DUMPS = sorted((Path(__file__).parent / "dumps").glob("postgres_*.sql"))
SOON_AFTER = 1795469465.0


def version_of(dump: Path) -> int:
    return int(dump.stem.removeprefix("postgres_"))


def test_each_version_of_the_tables_has_a_dump() -> None:
    assert [version_of(dump) for dump in DUMPS] == list(range(1, schema.HEAD + 1))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("version", "script"), [(version_of(dump), dump.read_bytes()) for dump in DUMPS], ids=[dump.stem for dump in DUMPS]
)
async def test_tables_of_each_version_keep_their_tasks_through_migrations(
    postgres: PostgresServer, version: int, script: bytes
) -> None:
    url = postgres.new_database()
    with psycopg.connect(url) as connection:
        connection.execute(script)
        found = connection.execute("SELECT token FROM leasekit.trigger WHERE id = 'held'").fetchone()
    assert found is not None
    assert PostgresStore(url).migrate() == list(range(version + 1, schema.HEAD + 1))
    async with Engine(PostgresStore(url), clock=lambda: SOON_AFTER, boot=lambda: SOON_AFTER) as engine:
        await engine.tick()
        (beat,) = await engine.heartbeat("one", [Beat(id="held", token=found[0], started=True)])
        (end,) = await engine.results("one", [Settlement(id="held", token=found[0], outcome="success")])
        assert (beat.verdict, end.verdict) == ("renewed", "settled")
        (again,) = await engine.schedule([NewTask(kind="done", dedupe_key="key")])
        assert (again.id, again.status) == ("done", Status.SUCCESS)
        claimed = await engine.claim(worker="w", kinds=["waiting", "later", "next"], limit=5, wait=0, claim_id="c")
        assert {task.id for task in claimed.tasks} == ({"waiting", "keyed", "next"} if version >= 2 else {"waiting"})
        chain = [task.id for task in (await engine.queries.list_tasks(root="held")).tasks]
        assert chain == (["held", "next"] if version >= 2 else ["held"])
        assert [(info.kind, info.settings, info.changed_by) for info in await engine.queries.kinds()] == (
            [("waiting", KindSettings(priority=0, max_attempts=3), "one")] if version >= 2 else []
        )
        assert [(gate.kind, gate.mode, gate.reason) for gate in await engine.queries.gates()] == (
            [("later", "pause", "not yet")] if version >= 2 else []
        )
        assert [(info.name, info.task.every, info.changed_by) for info in await engine.queries.periodics()] == (
            [("hourly", 3600, "one")] if version >= 2 else []
        )
        later = await engine.queries.get("later")
        assert later is not None
        assert later.start_by == (later.at + timedelta(seconds=60) if version >= 2 else None)
        blue = [task.id for task in (await engine.queries.list_tasks(tags=["blue"])).tasks]
        assert blue == (["done"] if version >= 2 else [])
        assert (await engine.queries.history(kind="done")) == (
            {"done": {int(SOON_AFTER // 60) - 1: Counts(scheduled=1, succeeded=1)}} if version >= 2 else {}
        )
        done, dead = await engine.queries.get("done"), await engine.queries.get("dead")
        assert done is not None
        assert dead is not None
        assert (bytes(done.result), dead.status) == (b'[1,null,"x"]', Status.DEAD)


@pytest.mark.anyio
async def test_a_node_serves_the_tables_before_this_version_and_finds_the_new_ones_once_they_are_there(
    postgres: PostgresServer,
) -> None:
    url = postgres.new_database()
    with psycopg.connect(url) as connection:
        connection.execute(DUMPS[-2].read_bytes())
    async with Engine(PostgresStore(url), clock=lambda: SOON_AFTER, boot=lambda: SOON_AFTER) as engine:
        await engine.schedule([NewTask(kind="k", id="before")])
        assert await engine.queries.kinds() == []
        with pytest.raises(Refused, match="run `leasekit migrate`"):
            await engine.operations.set_kind("k", KindSettings(priority=0), by=None)
        with pytest.raises(Refused, match="run `leasekit migrate`"):
            await engine.operations.set_gate(GateChange("kind", "k", "pause", None, None, None, None))
        with pytest.raises(Refused, match="run `leasekit migrate`"):
            await engine.schedule([NewTask(kind="k", after=["before"])])
        with pytest.raises(Refused, match="run `leasekit migrate`"):
            await engine.cancel_chain(ChainRequest(id="before"))
        with pytest.raises(Refused, match="run `leasekit migrate`"):
            await engine.queries.list_tasks(root="before")
        with pytest.raises(Refused, match="run `leasekit migrate`"):
            await engine.operations.change_periodic(Put("p", PeriodicTaskItem(kind="k", every=60), None))
        assert await engine.operations.change_periodic(Remove("p", None)) is await engine.queries.periodic("p") is None
        assert await engine.queries.periodics() == []
        await engine._write_minutes([MinuteRow(1, "k", "n", b"[]")])
        assert await engine._readers.read(lambda view: view.minutes(since=0)) == []
        await engine.schedule([NewTask(kind="other", id="from-before", parent="before")])
        (info,) = (await engine.queries.list_tasks(kind="other")).tasks
        assert (info.parent, info.root) == (None, "from-before")
        assert await engine.queries.gates() == []
        with pytest.raises(Refused, match="run `leasekit migrate`"):
            await engine.schedule([NewTask(kind="k", key="tenant")])
        (task,) = (await engine.claim(worker="w", kinds=["k"], limit=1, wait=0, claim_id="c")).tasks
        await engine.results("w", [Settlement(id="before", token=task.token, outcome="release")])
        await engine.tick()
        assert PostgresStore(url).migrate() == [schema.HEAD]
        await engine.operations.set_kind("k", KindSettings(priority=0), by=None)
        await engine.schedule([NewTask(kind="k", id="after")])
        before, after = await engine.queries.get("before"), await engine.queries.get("after")
        assert before is not None
        assert after is not None
        assert (before.priority, after.priority) == (2, 0)
