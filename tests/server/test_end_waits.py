"""Requests that wait for the end of a task: what wakes them, what they are answered, and what many of them cost."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from leasekit.errors import Throttled, Unavailable
from leasekit.server import end_waits, queries
from leasekit.server.end_waits import EndWaits
from leasekit.server.engine import Engine
from leasekit.server.fair_bound import CALLER
from leasekit.server.roles.gates import GateChange
from leasekit.server.store.sqlite.store import SqliteStore
from leasekit.task import Ended, NewTask, Status, TaskInfo
from leasekit.wire import PurgeRequest
from tests.server.conftest import Bench
from tests.waiting import turns, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only news of an end wakes a request: the store is looked at when the request comes, and never again."""
    monkeypatch.setattr(end_waits, "_PERIOD", 3600.0)


async def waiting(engine: Engine, task_id: str, wait: float = 3600) -> "asyncio.Task[TaskInfo | None]":
    """A request that waits, and that the store was looked at for."""
    before = engine.ends_awaited
    request = asyncio.create_task(engine.queries.get(task_id, wait=wait))
    await until(lambda: engine.ends_awaited > before and not engine._end_waits._new)
    return request


async def answer_to(request: "asyncio.Task[TaskInfo | None]") -> TaskInfo:
    """The answer, which must come long before the time of the request is over: then any end is found."""
    await until(request.done)
    info = await request
    assert info is not None
    return info


# What ends a wait ---------------------------------------------------------------------------------------------


async def succeed(bench: Bench) -> None:
    await bench.settle(await bench.take())


async def fail_for_good(bench: Bench) -> None:
    await bench.settle(await bench.take(), "fatal")


async def cancel(bench: Bench) -> None:
    await bench.cancel("a")


async def expire(bench: Bench) -> None:
    await bench.take()
    await bench.later(100_000)


async def drop(bench: Bench) -> None:
    await bench.engine.operations.set_gate(GateChange("kind", "k", "drop", None, None, None, None))
    await bench.later(1)


@pytest.mark.usefixtures("no_looks")
@pytest.mark.parametrize(
    ("end", "status"),
    [
        (succeed, "success"),
        (fail_for_good, "fatal_failure"),
        (cancel, "cancelled"),
        (expire, "dead"),
        (drop, "cancelled"),
    ],
)
async def test_whatever_ends_a_task_answers_the_request(
    bench: Bench, end: Callable[[Bench], Awaitable[None]], status: str
) -> None:
    await bench.put("a", max_crashes=0)
    request = await waiting(bench.engine, "a")
    await end(bench)
    info = await answer_to(request)
    assert info.status.value == status


@pytest.mark.usefixtures("no_looks")
async def test_a_task_that_fails_and_is_tried_again_has_not_ended(bench: Bench) -> None:
    await bench.put("a")
    request = await waiting(bench.engine, "a")
    await bench.settle(await bench.take(), "retry", retry_after=0)
    await turns()
    assert not request.done()
    await bench.settle(await bench.take())
    info = await answer_to(request)
    assert info.attempt == 2


@pytest.mark.usefixtures("no_looks")
async def test_the_answer_has_the_result(bench: Bench) -> None:
    await bench.put("a")
    request = await waiting(bench.engine, "a")
    await bench.settle(await bench.take(), result=[1, 2])
    info = await answer_to(request)
    assert bytes(info.result) == b"[1,2]"


async def test_a_task_that_has_ended_is_answered_at_once(bench: Bench) -> None:
    await bench.put("a")
    await bench.cancel("a")
    info = await bench.engine.queries.get("a", wait=60)
    assert info is not None
    assert info.status is Status.CANCELLED


async def test_a_task_that_does_not_exist_is_answered_at_once(bench: Bench) -> None:
    assert await bench.engine.queries.get("nothing", wait=60) is None


async def test_after_the_time_a_task_is_answered_as_it_is(bench: Bench) -> None:
    await bench.put("a")
    info = await bench.engine.queries.get("a", wait=0.01)
    assert info is not None
    assert info.status is Status.NEW
    assert bench.engine.ends_awaited == 0


async def test_a_stop_answers_requests_at_once_and_later_ones_too(bench: Bench) -> None:
    await bench.put("a")
    request = await waiting(bench.engine, "a")
    bench.engine.end_waits()
    for info in (await request, await bench.engine.queries.get("a", wait=60)):
        assert info is not None
        assert info.status is Status.NEW


async def test_a_task_that_is_removed_is_answered_as_unknown(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_waits, "_PERIOD", 0.01)
    await bench.put("a")
    monkeypatch.setattr(bench.engine._end_waits, "over", lambda _: None)  # no news reaches the requests
    request = await waiting(bench.engine, "a")
    await bench.cancel("a")
    await bench.engine.operations.purge(PurgeRequest())
    monkeypatch.undo()
    assert await request is None


# Many requests ------------------------------------------------------------------------------------------------


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    async with Engine(SqliteStore(tmp_path / "tasks.db"), period=3600.0) as engine:
        yield engine


@pytest.fixture
def reads(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is read of the store from now on."""
    began: list[Any] = []
    read = engine._readers.run

    async def counted(call: Callable[[], Any], **options: Any) -> Any:
        began.append(call)
        return await read(call, **options)

    monkeypatch.setattr(engine._readers, "run", counted)
    return began


@pytest.mark.usefixtures("no_looks")
async def test_ten_thousand_requests_for_one_task_cost_one_look_and_one_read(engine: Engine, reads: list[Any]) -> None:
    await engine.schedule([NewTask(kind="k", id="a")])
    first = await waiting(engine, "a")
    assert len(reads) == 1
    requests = [asyncio.create_task(engine.queries.get("a", wait=60)) for _ in range(9_999)]
    await until(lambda: engine.ends_awaited == 10_000)
    assert len(reads) == 1, "the look for the first request is for all"
    await engine.cancel(["a"])
    infos = await asyncio.gather(first, *requests)
    assert len(reads) == 2
    assert {info.status for info in infos if info is not None} == {Status.CANCELLED}


async def test_one_look_is_for_all_tasks_that_requests_wait_for(
    engine: Engine, reads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(end_waits, "_PERIOD", 3600.0)
    ids = [f"t{n}" for n in range(1000)]
    await engine.schedule([NewTask(kind="k", id=task_id) for task_id in ids])
    requests = [asyncio.create_task(engine.queries.get(task_id, wait=60)) for task_id in ids]
    await until(lambda: engine.ends_awaited == len(ids) and not engine._end_waits._new)
    assert len(reads) == 1
    engine.end_waits()
    await asyncio.gather(*requests)


async def test_a_request_beyond_the_bound_is_refused_with_what_to_do(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(end_waits, "_MOST", 1)
    await engine.schedule([NewTask(kind="k", id="a")])
    request = await waiting(engine, "a")
    with pytest.raises(Throttled, match="the ends of 1 tasks already: ask without `wait`, or try again"):
        await engine.queries.get("a", wait=60)
    assert await engine.queries.get("a") is not None
    request.cancel()
    await asyncio.wait([request])
    request = await waiting(engine, "a")
    engine.end_waits()
    await request


async def test_requests_that_are_given_up_leave_nothing_behind(engine: Engine) -> None:
    await engine.schedule([NewTask(kind="k", id="a")])
    requests = [await waiting(engine, "a") for _ in range(3)]
    for request in requests:
        request.cancel()
    await asyncio.wait(requests)
    assert (engine.ends_awaited, engine._end_waits._awaited) == (0, {})


# News that is lost --------------------------------------------------------------------------------------------


class Fake:
    """Waits over a store of which a test says what it answers."""

    def __init__(self) -> None:
        self.over: set[str] = set()
        self.statuses: list[Status] = []
        self.looks: list[set[str]] = []
        self.fault: Exception | None = None
        self.waits = EndWaits(self.look, self.read, tell=lambda _: None)

    async def look(self, ids: Collection[str]) -> set[str]:
        self.looks.append(set(ids))
        if self.fault is not None:
            raise self.fault
        return self.over & set(ids)

    async def read(self, ids: Collection[str]) -> dict[str, TaskInfo]:
        if self.fault is not None:
            raise self.fault
        status, at = self.statuses.pop(0), datetime(2026, 1, 1, tzinfo=UTC)
        return {
            task_id: TaskInfo(id=task_id, kind="k", status=status, priority=2, attempt=1, crashes=0, fence=1, at=at)
            for task_id in ids
        }


@pytest.fixture
async def fake() -> AsyncIterator[Fake]:
    fake = Fake()
    yield fake
    await fake.waits.close()


async def test_an_end_of_which_no_news_came_is_found_by_a_look(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_waits, "_PERIOD", 0.01)
    fake.statuses = [Status.CANCELLED]
    request = asyncio.create_task(fake.waits.get("a", 60))
    await until(lambda: fake.looks)  # at once, and nothing is over yet
    fake.over = {"a"}
    info = await answer_to(request)
    assert info.status is Status.CANCELLED


async def test_a_dead_task_that_was_redriven_before_it_was_read_is_waited_for_on(fake: Fake) -> None:
    fake.statuses = [Status.NEW, Status.SUCCESS]
    request = asyncio.create_task(fake.waits.get("a", 60))
    for number in (1, 2):
        await until(lambda number=number: len(fake.looks) == number)  # type: ignore[misc]
        fake.waits.over(["a"])
    info = await answer_to(request)
    assert info.status is Status.SUCCESS


async def test_a_look_that_fails_is_made_again_in_the_next_period(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_waits, "_PERIOD", 0.01)
    fake.fault, fake.over, fake.statuses = Unavailable("no database"), {"a"}, [Status.SUCCESS]
    request = asyncio.create_task(fake.waits.get("a", 60))
    await until(lambda: len(fake.looks) >= 2)
    fake.fault = None
    assert await request is not None


async def test_a_read_that_fails_is_the_answer_to_the_request(fake: Fake) -> None:
    request = asyncio.create_task(fake.waits.get("a", 60))
    await until(lambda: fake.looks)
    fake.fault = Unavailable("no database")
    fake.waits.over(["a"])
    with pytest.raises(Unavailable, match="no database"):
        await request


# Of many tasks ------------------------------------------------------------------------------------------------


async def asking(engine: Engine, *ids: str) -> "asyncio.Task[Ended]":
    """A request for the ends of many tasks, for which the store was looked at."""
    request = asyncio.create_task(engine.queries.ended(ids, wait=3600))
    await until(lambda: engine.ends_awaited >= len(ids) and not engine._end_waits._new)
    return request


@pytest.mark.usefixtures("no_looks")
async def test_the_first_end_of_many_tasks_answers(bench: Bench) -> None:
    await bench.put(*"abc")
    request = await asking(bench.engine, *"abc")
    await bench.cancel("b")
    await until(request.done)
    assert [task.id for task in (await request).tasks] == ["b"]
    assert bench.engine.ends_awaited == 0
    assert not bench.engine._end_waits._awaited


async def test_what_has_ended_is_answered_at_once_and_in_order_with_what_is_unknown(bench: Bench) -> None:
    await bench.put(*"abc")
    await bench.cancel("c")
    await bench.cancel("a")
    found = await bench.engine.queries.ended(["c", "x", "b", "a"], wait=60)
    assert ([task.id for task in found.tasks], found.unknown) == (["c", "a"], ["x"])
    assert (await bench.engine.queries.ended(["b"])) == Ended()


async def test_large_results_come_in_several_answers(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "_ENDED_TOGETHER", 2)
    monkeypatch.setattr(queries, "_ENDED_BYTES", 1000)
    await bench.put(*"abcde", payload="x" * 600)
    left = [*"abcde"]
    for task_id in left:
        await bench.cancel(task_id)
    answers: list[int] = []
    while left:
        found = await bench.engine.queries.ended(left, wait=60)
        answers.append(len(found.tasks))
        left = [name for name in left if name not in {task.id for task in found.tasks}]
    assert answers == [2, 2, 1]


async def test_the_waits_of_one_token_keep_no_other_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_waits, "_MOST", 3)
    await bench.put(*"abc")
    ask = bench.engine.queries
    CALLER.set("first")
    first = asyncio.create_task(ask.ended([*"abc"], wait=60))
    await until(lambda: bench.engine.ends_awaited == 3)
    with pytest.raises(Throttled):
        await ask.get("a", wait=60)
    CALLER.set("other")
    other = asyncio.create_task(ask.get("a", wait=60))
    await until(lambda: bench.engine.ends_awaited == 4)
    bench.engine.end_waits()
    await asyncio.gather(first, other)


async def test_what_serves_all_requests_is_read_for_none_of_their_callers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.put("a")
    callers: list[str] = []
    run = bench.engine._readers.run

    async def noting(call: Any, **options: Any) -> Any:
        callers.append(CALLER.get())
        return await run(call, **options)

    monkeypatch.setattr(bench.engine._readers, "run", noting)
    CALLER.set("first")
    waiting = asyncio.create_task(bench.engine.queries.get("a", wait=60))
    await until(lambda: callers)
    bench.engine.end_waits()
    assert await waiting is not None
    assert callers == ["", ""]  # a look at all tasks that are awaited, and a read of those that have ended


async def test_the_tasks_of_all_requests_together_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_waits, "_MOST", 3)
    await bench.put(*"abc")
    request = await asking(bench.engine, *"abc")
    with pytest.raises(Throttled, match="the ends of 3 tasks"):
        await bench.engine.queries.ended(["a"], wait=60)
    request.cancel()
