"""Tasks after others: each end that there is, many followers, circles, and what is kept for how long."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from leasekit.errors import Refused
from leasekit.server import engine
from leasekit.server.roles import circles, following
from leasekit.server.roles.backlog import count_waiting
from leasekit.server.roles.gates import GateChange
from leasekit.server.store.memory import MemoryStore
from leasekit.server.store.sql import later
from leasekit.server.store.sqlite.store import SqliteStore
from leasekit.task import NewTask, Settlement, Status
from leasekit.wire import PurgeRequest, RedriveRequest
from tests.server.conftest import Bench

pytestmark = pytest.mark.anyio

MONTH = 31 * 86400.0


async def gate(bench: Bench, scope: str, name: str, mode: str = "drop") -> None:
    await bench.engine.operations.set_gate(GateChange(scope, name, mode, None, None, None, None))
    await bench.engine.tick()


async def settled(bench: Bench, outcome: Any = "success") -> None:
    assert (await bench.settle(await bench.take(), outcome)).verdict == "settled"


async def expired(bench: Bench) -> None:
    await bench.take()
    await bench.later(1000.0)


async def cancelled_while_it_runs(bench: Bench) -> None:
    task = await bench.take()
    assert (await bench.cancel("a")).verdict == "cancel_requested"
    await bench.settle(task, "cancelled")


async def succeeded_late(bench: Bench) -> None:
    task = await bench.take()
    await bench.later(1000.0)
    assert await bench.status("b") == ("dropped" if (await bench.info("a")).status is Status.DEAD else "new")
    await bench.settle(task)


async def dropped_in_a_claim(bench: Bench) -> None:
    await bench.engine.operations.set_gate(GateChange("collection", "c", "drop", None, None, None, None))
    assert await bench.ids() == []


ENDS: dict[str, tuple[dict[str, Any], Callable[[Bench], Awaitable[Any]], str]] = {
    "success": ({}, settled, "success"),
    "late": ({}, succeeded_late, "success"),
    "fatal": ({}, lambda bench: settled(bench, "fatal"), "fatal_failure"),
    "dead": ({"max_attempts": 1}, lambda bench: settled(bench, "retry"), "dead"),
    "crashed": ({"max_crashes": 0}, lambda bench: settled(bench, "crash"), "dead"),
    "expired": ({"max_crashes": 0}, expired, "dead"),
    "timed out": ({"max_attempts": 1, "expiry": "retry"}, expired, "dead"),
    "cancelled": ({}, lambda bench: bench.cancel("a"), "cancelled"),
    "cancelled run": ({}, cancelled_while_it_runs, "cancelled"),
    "gate of kind": ({}, lambda bench: gate(bench, "kind", "k"), "cancelled"),
    "gate of collection": ({"collection": "c"}, dropped_in_a_claim, "cancelled"),
}


@pytest.mark.parametrize("end", ENDS)
async def test_each_end_of_a_task_is_told_to_those_that_wait_for_it(bench: Bench, end: str) -> None:
    options, ends, status = ENDS[end]
    await bench.put("c", kind="other", after=["b"])
    await bench.put("b", kind="other", after=["a"])
    await bench.put("a", **options)
    await ends(bench)
    assert await bench.status("a") == status
    if status == "success":
        assert await bench.ids(kinds=("other",)) == ["b"]
        assert await bench.status("c") == "new"
        return
    assert (await bench.info("b")).reason == f'"a", which it was to run after, ended as {status}'
    assert (await bench.info("c")).reason == '"b", which it was to run after, ended as dropped'
    assert {await bench.status("b"), await bench.status("c")} == {"dropped"}
    assert await bench.ids(kinds=("other",)) == []


@pytest.mark.parametrize("end", ENDS)
async def test_a_task_that_comes_after_the_end_is_judged_alike(bench: Bench, end: str) -> None:
    options, ends, status = ENDS[end]
    await bench.put("b", kind="other", after=["unknown"])
    await bench.put("a", **options)
    if end != "late":
        await ends(bench)
    else:
        await settled(bench)
    await bench.restart()
    await bench.put("late", kind="other", after=["a"])
    assert await bench.status("late") == ("new" if status == "success" else "dropped")
    assert await bench.ids(kinds=("other",)) == (["late"] if status == "success" else [])


async def test_a_claim_that_waits_is_granted_the_follower_in_the_transaction_of_the_end(bench: Bench) -> None:
    await bench.put("a")
    await bench.put("b", kind="other", after=["a"])
    claim = asyncio.create_task(bench.claim(kinds=("other",), wait=20))
    while not bench.engine._long_polls.kinds():  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0)
    await settled(bench)
    assert [task.id for task in (await asyncio.wait_for(claim, 20)).tasks] == ["b"]


async def test_it_is_due_at_its_own_time_or_when_it_is_ready(bench: Bench) -> None:
    await bench.put("a")
    await bench.put("later", kind="other", after=["a"], delay=60.0)
    await bench.put("soon", kind="other", after=["a"], delay=5.0)
    assert (await bench.info("soon")).at.timestamp() == bench.clock.wall + 5
    await bench.later(10.0)
    await settled(bench)
    assert (await bench.info("soon")).at.timestamp() == bench.clock.wall
    assert await bench.ids(kinds=("other",)) == ["soon"]
    await bench.later(50.0)
    assert await bench.ids(kinds=("other",)) == ["later"]


@pytest.mark.parametrize("outcome", ["success", "fatal"])
async def test_many_followers_are_told_in_steps_and_the_end_is_kept_until_all_know(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, outcome: Any
) -> None:
    step, names = 3, [f"b{n:02}" for n in range(20)]
    monkeypatch.setattr(following.follow, "__kwdefaults__", {"most": step})
    monkeypatch.setattr(following.keep, "__kwdefaults__", {"most": step})
    monkeypatch.setattr(following, "STEP", step)
    await bench.put("a")
    await bench.put(*names, kind="other", after=["a"])
    await bench.put("z", kind="last", after=["b19"])
    await settled(bench, outcome)
    told = [name for name in names if (await bench.info(name)).reason != 'waits for "a" to succeed']
    assert told == names[:step]
    assert (await bench.engine.operations.purge(PurgeRequest(kind="k"))).kinds == {}
    await bench.restart()
    assert await bench.ids(kinds=("other",)) == (names if outcome == "success" else [])
    if outcome != "success":
        await bench.engine.tick()
        assert await bench.status("z") == "dropped"
    assert (await bench.engine.operations.purge(PurgeRequest(kind="k"))).kinds == {
        "k": {"success": 1} if outcome == "success" else {"fatal_failure": 1}
    }


async def test_what_waits_is_kept_however_long_and_what_has_succeeded_may_go(bench: Bench) -> None:
    await bench.put("b", kind="other", after=["a", "later"])
    await bench.put("a")
    await settled(bench)
    await bench.later(MONTH)
    await bench.engine.sweeper.sweep()
    assert await bench.engine.queries.get("a") is None
    await bench.put("later")
    await settled(bench)
    assert await bench.ids(kinds=("other",)) == ["b"]


async def test_a_circle_is_refused_and_its_way_is_told(bench: Bench) -> None:
    await bench.put("c", after=["b", "elsewhere"])
    await bench.put("b", after=["a"])
    with pytest.raises(Refused) as refusal:
        await bench.engine.schedule([NewTask(kind="k", id="x"), NewTask(kind="k", id="a", after=["c"])])
    (error,) = refusal.value.errors
    assert (error["item"], error["field"]) == (1, "after")
    assert '"a" after "c" after "b" after "a"' in error["detail"]
    assert await bench.engine.queries.get("x") is None
    with pytest.raises(Refused, match=r'"d" after "e" after "d"'):
        await bench.engine.schedule([NewTask(kind="k", id=one, after=[two]) for one, two in ("de", "ed")])
    await bench.put("a")
    await settled(bench)
    assert await bench.ids() == ["b"]


async def test_a_circle_in_successors_fails_the_report_only(bench: Bench) -> None:
    await bench.put("b", after=["a"])
    task = await bench.taken("first")
    then = [NewTask(kind="k", id="a", after=["b"])]
    with pytest.raises(Refused, match="circle"):
        await bench.engine.results("w", [Settlement(id="first", token=task.token, outcome="success", then=then)])
    assert (await bench.settle(task)).verdict == "settled"


async def test_a_circle_of_two_writers_is_dropped(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circles, "refuse", lambda *_: None)  # neither sees the other's half
    await bench.put("a", after=["b"])
    await bench.put("b", after=["a"])
    await bench.engine.tick()
    infos = [await bench.info(name) for name in "ab"]
    assert {info.status for info in infos} == {Status.DROPPED}
    assert '"b" after "a" after "b"' in (infos[1].reason or "")


async def test_a_diamond_is_no_circle(bench: Bench) -> None:
    for n in reversed(range(6)):
        await bench.put(f"t{n}", after=[f"t{m}" for m in range(n)])
    for n in range(6):
        assert (await bench.settle(task := await bench.take())).verdict == "settled"
        assert task.id == f"t{n}"


async def test_an_end_that_a_writer_could_not_see_is_told_at_the_next_look(bench: Bench) -> None:
    await bench.put("a")
    await settled(bench)
    begin = following.begin

    def blind(turn: Any, rows: Any, after: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(turn.tx), "triggers", lambda *_: {})  # another writer has not committed yet
            return begin(turn, rows, after)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(following, "begin", blind)
        await bench.put("b", kind="other", after=["a"])
    assert await bench.status("b") == "new"
    await bench.engine.tick()
    assert await bench.ids(kinds=("other",)) == ["b"]


async def test_tasks_that_wait_for_others_are_counted_whatever_lane_they_will_come_to(bench: Bench) -> None:
    await bench.put("a")
    await bench.put("b", "c", after=["a"])
    await bench.put("keyed", after=["a"], key="x")
    await bench.put("urgent", after=["a"], priority=0)
    await bench.put("labelled", after=["a"], requires={"gpu": "t4"})
    await bench.put("later", delay=60.0)

    async def counted() -> tuple[int, int, int]:
        stats = (await bench.engine.queries.stats()).kinds
        backlog = (await bench.engine.queries.backlogs(count_waiting(stats)))["k"]
        return backlog.due, backlog.later, backlog.awaiting

    assert await counted() == (1, 6, 5)
    await settled(bench)
    assert await counted() == (5, 1, 0)


async def test_after_a_redrive_followers_wait_again_for_what_has_not_succeeded(bench: Bench) -> None:
    await bench.put("b", kind="other", after=["a", "done"])
    await bench.put("done")
    await settled(bench)
    await bench.put("a")
    await settled(bench, "fatal")
    for ids in (["b"], ["a"], ["b"]):
        await bench.engine.operations.redrive(RedriveRequest(ids=ids))
    assert (await bench.info("b")).reason == 'waits for "a" to succeed'
    await settled(bench)
    assert await bench.ids(kinds=("other",)) == ["b"]


async def test_a_claim_that_waits_is_granted_what_a_redrive_makes_ready_beside_what_waits_again(bench: Bench) -> None:
    await bench.put("b", kind="other", after=["a"])
    await bench.put("d", kind="other", after=["c"])
    for name, outcome in (("a", "fatal"), ("c", "fatal")):
        await bench.put(name)
        await settled(bench, outcome)
    await bench.engine.operations.redrive(RedriveRequest(ids=["c"]))
    await settled(bench)
    claim = asyncio.create_task(bench.claim(kinds=("other",), wait=20))
    while not bench.engine._long_polls.kinds():  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0)
    await bench.engine.operations.redrive(RedriveRequest(ids=["a"]))
    await bench.engine.operations.redrive(RedriveRequest(ids=["b", "d"]))
    assert [task.id for task in (await asyncio.wait_for(claim, 20)).tasks] == ["d"]


async def test_a_cancelled_follower_is_forgotten(bench: Bench) -> None:
    await bench.put("b", "c", kind="other", after=["a"])
    assert (await bench.cancel("b")).verdict == "cancelled"
    await bench.put("a")
    await settled(bench)
    assert await bench.ids(kinds=("other",)) == ["c"]
    assert await bench.status("b") == "cancelled"


async def test_where_no_task_waits_no_end_is_looked_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(bench.engine._store, MemoryStore):
        pytest.skip("a look costs nothing")
    asked: list[Any] = []
    with bench.engine._store.view() as view:
        session: Any = type(view._session)  # type: ignore[attr-defined]
    rows = session.rows

    def counted(self: Any, statement: Any, **values: Any) -> Any:
        asked.append(statement)
        return rows(self, statement, **values)

    monkeypatch.setattr(session, "rows", counted)
    await bench.put("a")
    await settled(bench)
    assert asked
    assert not {later.WAITS, later.WAITS_OF, later.WAKES} & set(asked)


async def test_a_damaged_task_is_an_end_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_PERIOD", 3600.0)
    bench = Bench(lambda: SqliteStore(tmp_path / "tasks.db"))
    async with bench.engine:
        await bench.put("a", "b")
        await bench.put("c", kind="other", after=["a"])
        await bench.put("d", kind="other", after=["b"])
        with closing(sqlite3.connect(tmp_path / "tasks.db")) as other, other:
            other.execute("UPDATE trigger SET fence = 'x' WHERE id = 'a'")
            other.execute("UPDATE task SET payload = '{' WHERE id = 'b'")
        assert await bench.ids() == []
        await bench.engine.tick()
        assert [await bench.status(name) for name in "abcd"] == ["dead", "dead", "dropped", "dropped"]
