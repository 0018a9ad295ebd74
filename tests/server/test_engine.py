"""The engine's life, and what those who watch it see."""

import asyncio
import logging
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from leasekit.errors import StoreLocked, Throttled, Unavailable
from leasekit.server.engine import Engine
from leasekit.server.request_classes import HEARTBEAT, work_of_task
from leasekit.server.roles.claims import Answer
from leasekit.server.store import Store
from leasekit.server.store.sqlite.store import SqliteStore
from leasekit.server.store.urls import open_store
from leasekit.task import Beat, NewTask, Settlement
from tests.server.conftest import Bench
from tests.waiting import until

pytestmark = pytest.mark.anyio


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("leasekit")}


async def test_empty_batches_answer_empty(bench: Bench) -> None:
    engine = bench.engine
    answers = [await engine.schedule([]), await engine.cancel([]), await engine.heartbeat("w", [])]
    assert [*answers, await engine.results("w", [])] == [[], [], [], []]


async def test_under_load_requests_survive_in_this_order(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def submit(rank: Any, _: Any, *, done: Any, **__: Any) -> None:
        asked.append(rank.name)
        asyncio.get_running_loop().call_soon(done, Answer() if rank.name in ("claims", "schedules") else [])

    engine: Engine = bench.engine
    with monkeypatch.context() as patch:
        patch.setattr(engine.commit, "submit", submit)
        await engine.heartbeat("w", [Beat(id="a", token="t")])
        await engine.results("w", [Settlement(id="a", token="t", outcome="release")])
        await engine.results("w", [Settlement(id="a", token="t", outcome=what) for what in ("release", "success")])
        await engine.cancel(["a"])
        await bench.claim()
        await bench.put("a")
    order = [rank.name for rank in engine.commit._queues]
    assert asked == ["heartbeats", "releases", "results", "cancels", "claims", "schedules"]
    assert [name for name in order if name in asked] == asked


async def test_workers_are_those_who_hold_or_were_heard_of_lately(bench: Bench) -> None:
    await bench.put("a", "b", claim_timeout=10_000)
    await bench.claim(worker="one")
    bench.clock.advance(500)
    await bench.claim(worker="two")
    one, two = await bench.engine.fleet.workers()
    assert (one.name, one.running, two.name, two.running) == ("one", 2, "two", 0)
    assert two.last_seen is not None
    assert two.last_seen.timestamp() == bench.clock.wall
    bench.clock.advance(200)
    assert [worker.name for worker in await bench.engine.fleet.workers()] == ["one", "two"]
    await bench.later(500)
    (one,) = await bench.engine.fleet.workers()
    assert (one.name, one.last_seen) == ("one", None)


async def test_an_engine_that_serves_is_ready(bench: Bench) -> None:
    assert await bench.engine.ready() is None


async def test_an_engine_that_is_not_open_says_so(make_store: Callable[[], Store]) -> None:
    engine = Engine(make_store())
    assert await engine.ready() == "the engine is not open"
    with pytest.raises(Unavailable):
        await engine.queries.get("a")
    with pytest.raises(Unavailable):
        await engine.schedule([NewTask(kind="k")])


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_an_engine_that_fails_or_is_cancelled_while_it_opens_leaves_no_writer(
    make_store: Callable[[], Store], monkeypatch: pytest.MonkeyPatch, *, is_cancelled: bool
) -> None:
    before, engine, reading = threads(), Engine(make_store()), anyio.Event()

    async def read() -> None:
        reading.set()
        await anyio.sleep(math.inf if is_cancelled else 0)
        raise Unavailable("the connection of a reader was cut")

    monkeypatch.setattr(engine.token_watch, "read", read)
    opening = asyncio.create_task(engine.__aenter__())
    await reading.wait()
    if is_cancelled:
        opening.cancel()
    with pytest.raises(asyncio.CancelledError if is_cancelled else Unavailable):
        await opening
    await until(lambda: threads() <= before)


@pytest.mark.parametrize(
    "step",
    ["token_watch.stop", "_write_minutes", "neighbours.stop", "_inbox.stop", "_end_waits.close", "_readers.close"],
)
async def test_a_close_that_is_cancelled_at_any_step_leaves_no_writer(
    make_store: Callable[[], Store], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    engine, reached = Engine(make_store()), anyio.Event()
    *path, name = step.split(".")
    part = getattr(engine, path[0]) if path else engine
    if part is None:
        pytest.skip("one engine alone has no neighbours")
    await engine.__aenter__()
    undone = getattr(part, name)

    async def hang(*_: object) -> None:
        reached.set()
        await anyio.sleep_forever()

    monkeypatch.setattr(part, name, hang)
    closing = asyncio.create_task(engine.__aexit__())
    await reached.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await until(lambda: not engine.commit._thread.is_alive())
    await undone(*([[]] if name == "_write_minutes" else []))  # what the cancel has left out


async def test_a_read_without_an_answer_holds_up_no_event_loop_while_its_engine_closes(
    make_store: Callable[[], Store],
) -> None:
    engine, begun, answer = Engine(make_store()), threading.Event(), threading.Event()

    def read() -> bool:
        begun.set()
        return answer.wait(30)

    await engine.__aenter__()
    reading = asyncio.create_task(engine._readers.run(read))
    await until(begun.is_set)
    closing = asyncio.create_task(engine.__aexit__())
    await until(lambda: not engine._readers.are_open)
    answer.set()  # by the event loop, which goes on
    assert await reading
    await closing


async def test_an_engine_whose_store_cannot_be_written_says_why_until_it_can(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bench.engine._store
    transaction = store.transaction
    with monkeypatch.context() as patch:

        def full() -> Any:
            raise Unavailable("the store failed: database or disk is full")

        patch.setattr(store, "transaction", full)
        with pytest.raises(Unavailable):
            await bench.put("a")
        assert "disk is full" in (await bench.engine.ready() or "")
        assert transaction is not None
    await bench.later(1)
    assert await bench.engine.ready() is None


async def test_a_full_disk_fails_what_does_not_fit_and_nothing_else(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "tasks.db")
    async with Engine(store) as engine:
        await engine.schedule([NewTask(kind="k", id="a")])
        (task,) = (await engine.claim(worker="w", kinds=["k"], limit=1, wait=0, claim_id="c")).tasks
        connection = store._connection
        assert connection is not None
        connection.connection.driver_connection.execute("PRAGMA max_page_count = 1")  # type: ignore[union-attr]
        with pytest.raises(Unavailable, match="database or disk is full"):
            await engine.schedule([NewTask(kind="k", id="big", payload="x" * 1_000_000)])
        assert "disk is full" in (engine.commit.fault or "")
        (beat,) = await engine.heartbeat("w", [Beat(id=task.id, token=task.token)])
        assert beat.verdict == "renewed"
        assert await engine.queries.get("big") is None
        assert await engine.ready() is None


async def test_a_writer_that_hangs_is_not_ready(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasekit.server.engine._PATIENCE", 0.05)
    go = threading.Event()
    transaction = bench.engine._store.transaction

    def slow() -> Any:
        go.wait(60)
        return transaction()

    monkeypatch.setattr(bench.engine._store, "transaction", slow)
    assert "has not answered" in (await bench.engine.ready() or "")
    go.set()


async def test_beats_for_which_there_is_no_room_are_throttled_one_by_one(bench: Bench) -> None:
    await bench.put("a", "b", "c")
    beats = [Beat(id=task.id, token=task.token) for task in (await bench.claim()).tasks]
    waiting = bench.engine.commit._waiting[HEARTBEAT]
    waiting.add("", HEARTBEAT.capacity - 2)  # as much waits
    verdicts = await bench.engine.heartbeat("w", beats)
    assert [(verdict.id, verdict.verdict) for verdict in verdicts] == [
        ("a", "renewed"), ("b", "renewed"), ("c", "throttled"),
    ]  # fmt: skip
    assert 0.5 <= (verdicts[2].retry_after or 0) <= 1.5
    waiting.add("", 2)
    with pytest.raises(Throttled):
        await bench.engine.heartbeat("w", beats)


async def test_too_many_reads_are_told_to_come_later(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasekit.server.readers._WAITING", 0)
    with pytest.raises(Throttled):
        await bench.engine.queries.stats()


async def test_a_read_does_not_wait_for_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"sqlite:///{tmp_path}/tasks.db")
    async with Engine(store) as engine:
        await engine.schedule([NewTask(kind="k", id="a")])
        go = threading.Event()
        transaction = store.transaction

        def slow() -> Any:
            go.wait(60)
            return transaction()

        monkeypatch.setattr(store, "transaction", slow)
        writing = asyncio.create_task(engine.schedule([NewTask(kind="k", id="b")]))
        with anyio.fail_after(50):
            assert await engine.queries.get("a") is not None
            assert await engine.queries.get("b") is None
            go.set()
            await writing
            assert await engine.queries.get("b") is not None


async def test_closing_leaves_no_thread_and_no_lock(make_store: Callable[[], Store]) -> None:
    before = threads()
    for _ in range(2):
        async with Engine(make_store()) as engine:
            await engine.schedule([NewTask(kind="k", id="a")])
            assert (await engine.queries.stats()).kinds == {"k": {"new": 1}}
            assert {"leasekit-writer"} <= threads() - before
    await until(lambda: threads() == before)  # the thread of the writer's log ends by itself


async def test_a_second_engine_on_the_same_file_is_refused_and_leaves_no_thread(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/tasks.db"
    async with Engine(open_store(url)) as engine:
        before = threads()
        with pytest.raises(StoreLocked):
            async with Engine(open_store(url)):
                pass
        await until(lambda: threads() == before)
        assert await engine.ready() is None


async def test_the_consumer_looks_by_itself(make_store: Callable[[], Store], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasekit.server.engine._PERIOD", 0.01)
    now = [1000.0]
    async with Engine(make_store(), clock=lambda: now[0]) as engine:
        await engine.schedule([NewTask(kind="k", id="a", claim_timeout=10)])
        await engine.claim(worker="w", kinds=["k"], limit=1, wait=0, claim_id="c")
        now[0] += 10
        with anyio.fail_after(60):
            while (await engine.queries.stats()).kinds["k"] != {"enqueued": 1}:  # noqa: ASYNC110  a fact of another thread
                await asyncio.sleep(0.005)


async def test_the_consumer_goes_on_after_failures_which_the_log_says_once(
    make_store: Callable[[], Store], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("leasekit.server.engine._PERIOD", 0.01)
    monkeypatch.setattr(logging.getLogger("leasekit.server.writes"), "filters", [])
    store: Store = make_store()
    async with Engine(store) as engine:
        failures = 0
        with monkeypatch.context() as patch:

            def broken() -> Any:
                nonlocal failures
                failures += 1
                raise Unavailable("no")

            patch.setattr(store, "transaction", broken)
            with anyio.fail_after(60):
                while failures < 3:  # noqa: ASYNC110  a fact of another thread
                    await asyncio.sleep(0.005)
        with anyio.fail_after(60):
            while await engine.ready() is not None:  # noqa: ASYNC110  a fact of another thread
                await asyncio.sleep(0.005)
    assert [record.getMessage() for record in caplog.records] == [
        "writes fail, and no restart is needed once they succeed again: no",
        "writes succeed again",
    ]


async def test_real_clocks_do_for_a_whole_life(make_store: Callable[[], Store]) -> None:
    async with Engine(make_store()) as engine:
        await engine.schedule([NewTask(kind="k", id="a")])
        claimed = await engine.claim(worker="w", kinds=["k"], limit=1, wait=0, claim_id="c")
        assert claimed.waited is not None
        assert 0 <= claimed.waited < 10


def test_waits_and_tags_count_in_the_size_of_a_request() -> None:
    """Each of them is a row of its own: a thousand tasks with twenty tags held up everybody's heartbeats."""
    assert work_of_task(NewTask(kind="k", after=["a", "b", "c"], tags=["x", "y"])) == 6
