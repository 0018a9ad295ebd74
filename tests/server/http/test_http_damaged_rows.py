"""One damaged row of the store concerns its own task: that one is set aside, and all others go on."""

import logging
import sqlite3
import uuid
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from itertools import cycle, product
from pathlib import Path
from random import Random
from typing import Any

import psycopg
import pytest

import leasekit_http
from leasekit.server.shared import connect, connect_database
from leasekit.task import Beat, FixedDelays, NewTask, Settlement, Status, Task, TaskInfo
from leasekit.wire import LAST_INSTANT
from tests.postgres_server import PostgresServer
from tests.sampling import in_soak
from tests.server.http.conftest import run

pytestmark = pytest.mark.anyio

YEAR = 365 * 86400.0
TEXT, BLOB = "CAST(x'ff' AS TEXT)", "x'ff'"  # values as SQL
VALUES = [
    "NULL", "''", "'not json'", "'null'", "'nan'", "5", "-1", "0", "1e300", "9e999", "9223372036854775807",
    TEXT, BLOB, "'2026-01-01'", "'new'", "'claimed'", "'processing'", "'enqueued'", "'success'", "'dead'",
]  # fmt: skip
COLUMNS = {
    "task": [
        "kind", "collection", "priority", "created_at", "at", "max_attempts", "max_crashes", "max_runtime",
        "enqueue_timeout", "retry", "dedupe_key", "traceparent", "digest", "payload",
    ],
    "trigger": [
        "id", "kind", "priority", "claim_timeout", "heartbeat_timeout", "status", "fence", "attempt", "crashes",
        "failures", "cancel_requested", "owner", "token", "next_trigger_at", "reason", "max_runtime", "run_until",
    ],
    "progress": ["value"],
    "run": ["attempt", "outcome", "at", "worker", "token", "digest", "result", "error"],
    "claim": ["grants", "granted_at", "waited"],
    "dedupe": ["id", "until"],
}  # fmt: skip


FIRST = "seq = (SELECT min(seq) FROM task)"
# A column of PostgreSQL has one type. A literal in quotes is of any type that can be read from its text.
IN_POSTGRES = {"NULL": "NULL", "9e999": "'infinity'", "5": r"'\x05'", BLOB: r"'\xff'", TEXT: r"'\xff'"}


class Place:
    """A server over a store, and a door to it."""

    def __init__(self, backend: Any, url: str) -> None:
        self.backend, self._url = backend, url
        self.is_shared = not url.startswith("sqlite:")

    def damage(self, table: str, column: str, value: str, where: str = FIRST) -> None:
        """Overwrite a value, as a program with the file or the database in its hands may."""
        if not self.is_shared:
            with closing(sqlite3.connect(self._url.removeprefix("sqlite:///"), isolation_level=None)) as file:
                file.execute("PRAGMA foreign_keys = OFF")
                file.execute(f"UPDATE OR IGNORE {table} SET {column} = {value} WHERE {where}")  # noqa: S608
            return
        value = IN_POSTGRES.get(value, f"'{value.strip(chr(39))}'")
        refusals = psycopg.DataError, psycopg.IntegrityError  # the column cannot hold this value
        with suppress(*refusals), psycopg.connect(self._url, options="-c search_path=leasekit") as connection:
            connection.execute(f"UPDATE {table} SET {column} = {value} WHERE {where}".encode())  # noqa: S608

    async def claim(self, *kinds: str) -> list[Task]:
        """What can be had of these kinds at once."""
        claimed = await self.backend.claim(kinds, limit=10, wait=0, claim_id=uuid.uuid4().hex)
        return sorted(claimed.tasks, key=lambda task: task.id)

    async def get(self, task_id: str) -> TaskInfo:
        info: TaskInfo | None = await self.backend.get(task_id)
        assert info is not None
        return info

    async def ids(self) -> list[str]:
        return [info.id for info in (await self.backend.list_tasks()).tasks]

    async def settle(self, *tasks: Task, outcome: Any = "success") -> list[str]:
        settlements = [Settlement(id=task.id, token=task.token, outcome=outcome) for task in tasks]
        return [verdict.verdict for verdict in await self.backend.settle(settlements)]

    async def prepare(self) -> None:
        await self.backend.schedule([
            NewTask(kind="k", id="bad", payload=[1], retry=FixedDelays(waits=[1, 2]), dedupe_key="d", max_attempts=5),
            NewTask(kind="k", id="good", payload=[2]),
            NewTask(kind="o", id="other", payload=[3]),
        ])  # fmt: skip


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/tasks.db"


@pytest.fixture
async def embedded(url: str) -> AsyncIterator[Place]:
    backend = connect(url, worker="w")
    yield Place(backend, url)
    await backend.aclose()


@pytest.fixture
async def http(url: str) -> AsyncIterator[Place]:
    with run(url) as server:
        backend = leasekit_http.connect(f"http://127.0.0.1:{server.port}", worker="w")
        yield Place(backend, url)
        await backend.aclose()


@pytest.fixture
async def postgresql(postgres: PostgresServer) -> AsyncIterator[Place]:
    url = postgres.emptied()
    backend = connect_database(url, worker="w")
    yield Place(backend, url)
    await backend.aclose()


@pytest.fixture(params=["embedded", "http", "postgresql"])
def place(request: pytest.FixtureRequest) -> Place:
    place: Place = request.getfixturevalue(request.param)
    return place


@pytest.mark.parametrize("payload", ["'not json'", BLOB, TEXT, "''", "5", "'[1'"])
async def test_a_payload_that_is_no_json_holds_up_nobody(
    place: Place, payload: str, caplog: pytest.LogCaptureFixture
) -> None:
    await place.prepare()
    place.damage("task", "payload", payload)
    with caplog.at_level(logging.ERROR, "leasekit.server"):
        assert [task.id for task in await place.claim("k", "o")] == ["good", "other"]
    assert "'bad'" in caplog.text
    info = await place.get("bad")
    assert (info.status, info.payload, info.attempt) == (Status.DEAD, None, 0)
    assert "payload" in (info.reason or "")
    assert await place.ids() == ["bad", "good", "other"]
    assert (await place.backend.stats()).kinds["k"] == {"dead": 1, "claimed": 1}


async def test_a_claim_that_met_damage_alone_gets_what_is_behind_it(place: Place) -> None:
    await place.prepare()
    place.damage("task", "payload", "'not json'")
    claimed = await place.backend.claim(["k"], limit=1, wait=20, claim_id="c")
    assert [task.id for task in claimed.tasks] == ["good"]


async def test_progress_that_is_no_json_is_set_aside_with_its_task(place: Place) -> None:
    await place.prepare()
    held = await place.claim("k", "o")
    await place.backend.beat([Beat(id="bad", token=held[0].token, progress={"at": 1})])
    assert await place.settle(*held, outcome="release") == ["settled"] * 3
    place.damage("progress", "value", "'not json'")
    assert [task.id for task in await place.claim("k", "o")] == ["good", "other"]
    assert (await place.get("bad")).status is Status.DEAD


async def test_a_claim_that_is_repeated_after_the_damage_brings_the_others(place: Place) -> None:
    await place.prepare()
    first = await place.backend.claim(["k", "o"], limit=3, wait=0, claim_id="c")
    place.damage("task", "payload", "'not json'")
    again = await place.backend.claim(["k", "o"], limit=3, wait=0, claim_id="c")
    tokens = {task.id: task.token for task in first.tasks if task.id != "bad"}
    assert {task.id: task.token for task in again.tasks} == tokens


@pytest.mark.parametrize("status", ["'garbage'", BLOB, TEXT, "''", "'success'", "'claimed'"])
async def test_a_status_that_makes_no_sense_holds_up_nobody(place: Place, status: str) -> None:
    await place.prepare()
    place.damage("trigger", "status", status)
    assert await place.ids() == ["bad", "good", "other"]
    assert [task.id for task in await place.claim("k", "o")] == ["good", "other"]
    assert (await place.get("bad")).status.ended
    (scheduled,) = await place.backend.schedule([NewTask(kind="k", id="bad", payload=[1])])
    assert not scheduled.created
    # The counts in PostgreSQL are kept as changes, and nobody has told of this one.
    stale = {"new"} if place.is_shared else set[str]()
    assert set((await place.backend.stats()).kinds["k"]) <= {"dead", "success", "claimed"} | stale


async def test_a_policy_that_makes_no_sense_ends_its_task_and_no_other(place: Place) -> None:
    await place.prepare()
    place.damage("task", "retry", "'not json'")
    held = await place.claim("k", "o")
    assert await place.settle(*held, outcome="retry") == ["settled"] * 3
    info = await place.get("bad")
    assert (info.status, [run.outcome for run in info.history]) == (Status.DEAD, ["retry"])
    assert "retry" in (info.reason or "")
    assert (await place.get("good")).status is Status.RETRIABLE_FAILURE


async def test_what_is_as_far_off_as_it_can_be_is_no_damage(place: Place) -> None:
    last = NewTask(kind="k", id="last", at=LAST_INSTANT, claim_timeout=YEAR, heartbeat_timeout=YEAR)
    await place.backend.schedule([last])
    assert not await place.claim("k")
    info = await place.get("last")
    assert (info.status, info.at.year, info.reason) == (Status.NEW, 9999, None)


async def test_a_result_that_is_no_json_is_left_out(place: Place) -> None:
    await place.prepare()
    held = await place.claim("k", "o")
    assert await place.settle(*held) == ["settled"] * 3
    place.damage("run", "result", "'not json'")
    info = await place.get("bad")
    assert (info.status, info.result) == (Status.SUCCESS, None)
    assert "result" in (info.reason or "")
    assert await place.ids() == ["bad", "good", "other"]


STAGES = ["waiting", "running", "retried", "ended"]


# Sample: each column at one of the stages with one of the values, the same in each run.
@pytest.mark.soak
@pytest.mark.parametrize("table", COLUMNS)
@pytest.mark.parametrize("stage", STAGES)
async def test_whatever_is_in_a_row_the_others_go_on(
    tmp_path: Path, request: pytest.FixtureRequest, table: str, stage: str
) -> None:
    wrong = _wrong(request, table)
    for number, (column, value) in enumerate(in_soak(wrong, by_default=wrong[STAGES.index(stage) :: len(STAGES)])):
        url = f"sqlite:///{tmp_path}/{number}.db"
        await _survives(Place(connect(url, worker="w"), url), stage, table, column, value)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("table", COLUMNS)
@pytest.mark.parametrize("stage", STAGES)
async def test_whatever_is_in_a_row_of_postgresql_the_others_go_on(
    postgres: PostgresServer, request: pytest.FixtureRequest, table: str, stage: str
) -> None:
    for column, value in _wrong(request, table):
        url = postgres.emptied()
        await _survives(Place(connect_database(url, worker="w"), url), stage, table, column, value)


def _wrong(request: pytest.FixtureRequest, table: str) -> list[tuple[str, str]]:
    """Columns, and the values that they get. A fence that went back is not noticed, and cannot end again."""
    values = Random(request.node.name).sample(VALUES, len(VALUES))
    wrong = in_soak(list(product(COLUMNS[table], VALUES)), by_default=list(zip(COLUMNS[table], cycle(values))))
    return [(column, value) for column, value in wrong if (column, value) not in {("fence", "0"), ("fence", "-1")}]


async def _survives(place: Place, stage: str, table: str, column: str, value: str) -> None:
    try:
        await _others_go_on(place, stage, table, column, value)
    except BaseException as error:
        error.add_note(f"{table}.{column} = {value}")
        raise
    finally:
        await place.backend.aclose()


async def _others_go_on(place: Place, stage: str, table: str, column: str, value: str) -> None:
    await place.prepare()
    held = {task.id: task for task in await place.claim("k", "o")} if stage != "waiting" else {}
    if held:
        await place.backend.beat([Beat(id=task.id, token=task.token, progress=[1]) for task in held.values()])
    if stage == "retried":
        await place.settle(*held.values(), outcome="release")
    elif stage == "ended":
        await place.settle(held["bad"], outcome="success")
    where = FIRST if table not in ("claim", "dedupe") else "1 = 1"
    place.damage(table, column, value, where)
    assert set(await place.ids()) >= {"good", "other"}
    await place.backend.get("bad")
    await place.backend.stats()
    await place.backend.workers()
    added = [NewTask(kind="k", id=task_id, payload=[1]) for task_id in ("bad", "new")]
    assert [one.id for one in await place.backend.schedule(added)] == ["bad", "new"]
    again = await place.claim("k", "o")
    assert "new" in {task.id for task in again}
    held |= {task.id: task for task in again}
    beats = [Beat(id=task_id, token=held[task_id].token) for task_id in ("good", "other")]
    if "bad" in held:
        beats.append(Beat(id="bad", token=held["bad"].token))
    assert [one.verdict for one in await place.backend.beat(beats)][:2] == ["renewed"] * 2
    tasks = [held[task_id] for task_id in ("good", "other", "bad") if task_id in held]
    assert (await place.settle(*tasks, outcome="retry"))[:2] == ["settled"] * 2
    await place.backend.cancel(["bad", "good"])
    assert (await place.get("good")).status is Status.CANCELLED
    own = getattr(place.backend, "_own", place.backend)
    await (await own._engine()).tick()
    assert set(await place.ids()) >= {"good", "other", "new"}
