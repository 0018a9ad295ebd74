"""Gates: what waits behind a closed one, what ends, and who hears that it opens."""

import asyncio
import logging
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from leasekit.errors import Refused
from leasekit.server.due_tasks import _SHUT_OUT
from leasekit.server.engine import Engine
from leasekit.server.roles import gates
from leasekit.server.roles.gates import GateChange
from leasekit.server.store.sqlite.store import SqliteStore
from leasekit.task import GateInfo, NewTask, Status
from tests.server.conftest import Bench

pytestmark = pytest.mark.anyio


async def close(bench: Bench, scope: str = "kind", name: str = "k", *, mode: str = "pause", **more: Any) -> GateInfo:
    fields = {"until": None, "duration": None, "reason": None, "by": "ada"} | more
    info = await bench.engine.operations.set_gate(GateChange(scope, name, mode, **fields))
    assert info is not None
    return info


async def reopen(bench: Bench, scope: str = "kind", name: str = "k") -> None:
    assert await bench.engine.operations.set_gate(GateChange(scope, name, "open", None, None, None, "bob")) is None


async def parked(bench: Bench) -> None:
    """Wait until a claim is parked."""
    while not bench.engine._long_polls.kinds():  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0)


def now(bench: Bench) -> datetime:
    return datetime.fromtimestamp(bench.clock.wall, UTC)


async def test_a_gate_is_listed_until_it_is_opened(bench: Bench) -> None:
    of_collection = await close(bench, "collection", "c", mode="drop", reason="unpaid")
    of_kind = await close(bench, duration=60.0)
    assert of_kind == GateInfo(
        kind="k", mode="pause", until=now(bench) + timedelta(seconds=60), changed_at=now(bench), changed_by="ada"
    )
    assert of_collection == GateInfo(
        collection="c", mode="drop", reason="unpaid", changed_at=now(bench), changed_by="ada"
    )
    assert await bench.engine.queries.gates() == [of_kind, of_collection]
    await bench.restart()
    assert await bench.engine.queries.gates() == [of_kind, of_collection]
    for _ in range(2):
        await reopen(bench)
    assert await bench.engine.queries.gates() == [of_collection]


async def test_a_paused_kind_is_not_claimed_and_spends_no_attempt(bench: Bench) -> None:
    await bench.put("before")
    await close(bench)
    await bench.put("after")
    await bench.put("other", kind="other")
    assert await bench.ids(kinds=("k", "other")) == ["other"]
    await bench.restart()
    assert await bench.ids() == []
    await reopen(bench)
    claimed = (await bench.claim()).tasks
    assert [(task.id, task.attempt) for task in claimed] == [("before", 1), ("after", 1)]


async def test_a_run_in_progress_goes_on_and_its_retry_waits(bench: Bench) -> None:
    task = await bench.taken("a")
    await close(bench)
    assert (await bench.beat(task, started=True)).verdict == "renewed"
    assert (await bench.settle(task, "release")).verdict == "settled"
    assert await bench.ids() == []
    await reopen(bench)
    assert await bench.ids() == ["a"]


@pytest.mark.parametrize("scope", ["kind", "collection"])
async def test_a_waiting_claim_is_woken_when_the_gate_is_opened(bench: Bench, scope: str) -> None:
    name = {"kind": "k", "collection": "c"}[scope]
    await close(bench, scope, name)
    await bench.put("a", collection="c")
    waiting = asyncio.create_task(bench.claim(wait=30))
    await parked(bench)
    await bench.put("b", collection="c")
    assert not waiting.done()
    await reopen(bench, scope, name)
    assert [task.id for task in (await waiting).tasks][:1] == ["a"]


@pytest.mark.parametrize("scope", ["kind", "collection"])
async def test_a_gate_opens_by_itself_and_wakes_waiting_claims(bench: Bench, scope: str) -> None:
    name = {"kind": "k", "collection": "c"}[scope]
    await close(bench, scope, name, duration=60.0)
    await bench.put("a", collection="c")
    waiting = asyncio.create_task(bench.claim(wait=30))
    await parked(bench)
    await bench.later(59)
    assert not waiting.done()
    await bench.later(1)
    assert [task.id for task in (await waiting).tasks] == ["a"]
    assert await bench.engine.queries.gates() == []
    assert bench.engine.queries.gates_here == []


async def test_paused_lanes_are_not_looked_at(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.put("a")
    await close(bench)
    tried: list[Any] = []
    attempt = bench.engine._long_polls._attempt

    def note(*args: Any) -> None:
        tried.append(args)
        attempt(*args)

    monkeypatch.setattr(bench.engine._long_polls, "_attempt", note)
    waiting = asyncio.create_task(bench.claim(wait=30))
    await parked(bench)
    await bench.put(*(f"b{n}" for n in range(20)))
    await bench.later(1)
    assert len(tried) == 1
    await reopen(bench)
    await waiting


async def test_a_gate_is_an_event_and_a_line_of_the_log(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="leasekit.server")
    events = bench.engine.feed.follow()
    await anext(events)
    for _ in range(2):
        await close(bench, reason="why")
    await reopen(bench)
    await close(bench, "collection", "c", mode="drop", duration=5.0)
    await bench.later(5)
    heard = b""
    while heard.count(b"data:") < 4:
        heard += await anext(events)
    assert heard.count(b'"gate_changed"') == 4
    assert [heard.count(f'"mode":"{mode}"'.encode()) for mode in ("pause", "open", "drop")] == [1, 2, 1]
    assert [record.getMessage() for record in caplog.records if "has" in record.getMessage()][-3:] == [
        "ada has paused the kind 'k' (why)",
        "bob has opened the kind 'k'",
        "ada has closed the collection 'c': its due tasks are dropped for 5 s",
    ]


async def test_a_gate_until_an_instant_that_has_passed_stops_nothing(bench: Bench) -> None:
    for until in (now(bench), datetime.min.replace(tzinfo=UTC)):
        await close(bench, until=until)
        assert await bench.engine.queries.gates() == []
        assert await bench.ids() == []
    await bench.put("a")
    assert await bench.ids() == ["a"]
    last = datetime.max.replace(tzinfo=timezone(-timedelta(hours=12)))
    assert (await close(bench, until=last)).until is not None


async def test_there_are_a_thousand_gates_at_most(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "_MOST", 2)
    await close(bench, name="a")
    await close(bench, name="b")
    with pytest.raises(Refused, match="there are 2 gates already: open one first"):
        await close(bench, name="c")
    await close(bench, name="b", reason="again")


async def test_a_task_says_behind_which_gate_it_waits(bench: Bench) -> None:
    await bench.put("a", collection="c")
    await bench.put("b")
    gate = await close(bench, "collection", "c", duration=60.0)
    due_at = (await bench.info("a")).at
    assert await bench.ids() == ["b"]
    info = await bench.info("a")
    assert (info.gate, info.at, info.status, info.attempt) == (gate, due_at, Status.NEW, 0)
    (listed, _) = (await bench.engine.queries.list_tasks()).tasks
    assert (listed.gate, listed.at) == (gate, due_at)
    assert (await bench.info("b")).gate is None
    await bench.later(60)
    assert (await bench.info("a")).gate is None


async def test_a_damaged_gate_has_no_effect(tmp_path: Path) -> None:
    async with Engine(SqliteStore(tmp_path / "tasks.db")) as engine:
        await engine.operations.set_gate(GateChange("kind", "k", "pause", None, None, None, None))
        await engine.operations.set_gate(GateChange("kind", "other", "pause", None, None, None, None))
    with closing(sqlite3.connect(tmp_path / "tasks.db")) as connection, connection:
        connection.execute("UPDATE gate SET until = 'x' WHERE name = 'k'")
    async with Engine(SqliteStore(tmp_path / "tasks.db")) as engine:
        await engine.schedule([NewTask(kind="k", id="a"), NewTask(kind="other")])
        claimed = await engine.claim(worker="w", kinds=["k", "other"], limit=5, wait=0, claim_id="c")
        assert [task.id for task in claimed.tasks] == ["a"]


# Dropped


async def test_due_tasks_of_a_dropped_kind_end_as_cancelled(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "STEP", 2)
    await bench.put("a", "b", "c", priority=1)
    await bench.put("d", priority=3)
    await bench.put("later", delay=100)
    held = await bench.take()
    await close(bench, mode="drop", reason="bad release")
    assert await bench.ids() == []
    await bench.later(1)
    info = await bench.info("b")
    assert (info.status, info.reason) == (Status.CANCELLED, "dropped: bad release (the kind 'k' is closed by ada)")
    assert (await bench.engine.queries.stats()).kinds == {"k": {"claimed": 1, "new": 1, "cancelled": 3}}
    assert bench.engine.commit.tally.total("dropped") == 3
    await bench.settle(held, "release")
    await bench.later(1)
    assert await bench.status("a") == Status.CANCELLED
    await reopen(bench)
    await bench.later(100)
    assert await bench.ids() == ["later"]


async def test_claims_end_the_due_tasks_of_a_dropped_collection(bench: Bench) -> None:
    await bench.put("a", "b", collection="c")
    await bench.put("open")
    await close(bench, "collection", "c", mode="drop")
    assert await bench.ids() == ["open"]
    info = await bench.info("a")
    assert (info.status, info.reason) == (Status.CANCELLED, "dropped (the collection 'c' is closed by ada)")


async def test_parked_tasks_end_when_their_collection_is_dropped(bench: Bench) -> None:
    await bench.put("a", "b", collection="c")
    await close(bench, "collection", "c")
    assert await bench.ids() == []
    await close(bench, "collection", "c", mode="drop")
    await bench.later(1)
    assert (await bench.engine.queries.stats()).kinds == {"k": {"cancelled": 2}}


# Parked


async def test_tasks_of_a_paused_collection_keep_their_order(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "STEP", 3)
    ids = [f"a{n}" for n in range(10)]
    await bench.put(*ids, collection="c")
    await bench.put("open")
    await close(bench, "collection", "c")
    assert await bench.ids(limit=2) == ["open"]
    await bench.restart()
    assert await bench.ids() == []
    await reopen(bench, "collection", "c")
    await bench.later(0)
    await bench.restart()
    assert await bench.ids() == ids
    assert not bench.engine.commit.kinds.gates.rows


async def test_a_claim_goes_on_behind_more_tasks_than_one_transaction_parks(bench: Bench) -> None:
    count = 2 * _SHUT_OUT + 10
    await bench.put(*(f"a{n}" for n in range(count)), collection="c")
    await bench.put("open")
    await close(bench, "collection", "c")
    assert await bench.ids(limit=1) == ["open"]
    await reopen(bench, "collection", "c")
    await bench.later(0)
    assert len((await bench.claim(limit=count + 1)).tasks) == count


@pytest.mark.parametrize("again", ["cancel", "late result", "redrive"])
async def test_a_parked_task_that_ends_is_not_put_back(bench: Bench, again: str) -> None:
    task = await bench.taken("a", collection="c", claim_timeout=10.0, max_attempts=1)
    await close(bench, "collection", "c")
    await bench.later(11)
    assert await bench.ids() == []
    if again == "cancel":
        assert (await bench.cancel("a")).verdict == "cancelled"
    else:
        outcome = "success" if again == "late result" else "retry"
        assert (await bench.settle(task, outcome)).verdict == "settled"  # type: ignore[arg-type]
    before = await bench.info("a")
    await reopen(bench, "collection", "c")
    await bench.later(0)
    assert await bench.ids() == []
    assert await bench.info("a") == before


async def test_a_collection_can_be_paused_again_before_all_its_tasks_are_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "STEP", 3)
    monkeypatch.setattr("leasekit.server.consumers_work._KEEP_MOST", 0)
    ids = [f"a{n}" for n in range(10)]
    await bench.put(*ids, collection="c")
    await close(bench, "collection", "c")
    assert await bench.ids() == []
    await reopen(bench, "collection", "c")
    await close(bench, "collection", "c")
    assert await bench.ids() == []
    await reopen(bench, "collection", "c")
    monkeypatch.setattr("leasekit.server.consumers_work._KEEP_MOST", 30)
    await bench.later(0)
    assert await bench.ids() == ids
