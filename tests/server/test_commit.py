"""Group commit: who shares a transaction, who fails, and who survives."""

import asyncio
import dataclasses
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import anyio
import pytest

from leasekit.errors import Throttled, Unavailable
from leasekit.server import commit as module
from leasekit.server.clock import StoreClock
from leasekit.server.commit import GroupCommit, RequestClass
from leasekit.server.fair_bound import CALLER
from leasekit.server.store import Dedupe, Store
from leasekit.server.store.memory import MemoryStore
from leasekit.server.unit_of_work import NewlyDue, UnitOfWork
from tests.waiting import until

pytestmark = pytest.mark.anyio


class Recorder:
    """Two classes of requests that write what they are told, and notes of what shared a transaction."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.turns: list[list[str]] = []
        self.readied: list[dict[str, NewlyDue]] = []
        self.gaps = 0
        self.clock = StoreClock(None, None)
        self.may_go = threading.Event()
        self.may_go.set()
        self.is_busy = threading.Event()
        self.first = RequestClass("firsts", self.apply, 10)
        self.last = RequestClass("lasts", self.apply, 10)
        self._turn: UnitOfWork | None = None

    @asynccontextmanager
    async def commit(self) -> AsyncIterator[GroupCommit]:
        commit = GroupCommit(
            self.store,
            [self.first, self.last],
            clock=self.clock,
            random=Random(1),
            on_ready=lambda readied: self.readied.append(dict(readied)),
            on_gap=self.gap,
        )
        await commit.start()
        try:
            yield commit
        finally:
            self.may_go.set()
            await commit.stop()

    def gap(self, turn: UnitOfWork, shift: float | None) -> None:
        self.gaps += 1

    def apply(self, turn: UnitOfWork, requests: Sequence[str]) -> list[str]:
        self.is_busy.set()
        self.may_go.wait(60)
        if turn is not self._turn:
            self._turn = turn
            self.turns.append([])
        self.turns[-1] += requests
        for request in requests:
            turn.tx.dedupes([("k", request)])  # only what was read is replaced
            turn.tx.set_dedupes([Dedupe("k", request, "id", None)])
            if request.startswith("ready"):
                turn.ready(request, 5.0)
            if "bad" in request:
                raise ValueError(request)
            if request.startswith("big"):
                raise Unavailable("the disk is full")
        return [request.upper() for request in requests]

    def written(self) -> set[str]:
        with self.store.transaction() as tx:
            keys = {("k", name) for names in self.turns for name in names}
            return {key for _, key in tx.dedupes(keys)}

    async def held_up(self, commit: GroupCommit) -> "asyncio.Task[Any]":
        """A request that the writer is busy with until it may go."""
        self.may_go.clear()
        self.is_busy.clear()
        ahead = asyncio.create_task(commit.ask(self.first, "ahead", size=1))
        await until(self.is_busy.is_set)
        return ahead

    async def together(self, commit: GroupCommit, *requests: str) -> list[Any]:
        """Have these wait until all of them are there."""
        ahead = await self.held_up(commit)
        ranks = [self.last if request[-1].islower() else self.first for request in requests]
        asking = [
            asyncio.create_task(commit.ask(rank, request, size=1))
            for rank, request in zip(ranks, requests, strict=True)
        ]
        await until(lambda: sum(map(len, commit._queues.values())) == len(requests))
        self.may_go.set()
        with anyio.fail_after(60):
            await ahead
            return await asyncio.gather(*asking, return_exceptions=True)


@pytest.fixture
def recorder(make_store: Callable[[], Store]) -> Recorder:
    return Recorder(make_store())


async def test_a_request_alone_does_not_wait_for_company(recorder: Recorder) -> None:
    async with recorder.commit() as commit:
        assert await commit.ask(recorder.last, "a", size=1) == "A"
    assert recorder.turns == [["a"]]


async def test_what_gathers_meanwhile_shares_a_transaction_in_order_of_survival(recorder: Recorder) -> None:
    async with recorder.commit() as commit:
        answers = await recorder.together(commit, "a", "b1", "c", "d1")
        assert answers == ["A", "B1", "C", "D1"]
        assert recorder.turns == [["ahead"], ["b1", "d1", "a", "c"]]


async def test_a_small_request_does_not_overtake_one_that_outranks_it(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_COMMIT", 8)
    async with recorder.commit() as commit:
        ahead = await recorder.held_up(commit)
        asking = [
            asyncio.create_task(commit.ask(rank, name, size=size))
            for rank, name, size in [(recorder.last, "c", 1), (recorder.first, "a1", 4), (recorder.first, "b1", 5)]
        ]
        await until(lambda: sum(map(len, commit._queues.values())) == 3)
        recorder.may_go.set()
        with anyio.fail_after(60):
            await asyncio.gather(ahead, *asking)
    assert recorder.turns == [["ahead"], ["a1"], ["b1", "c"]]


async def test_light_requests_count_less_of_a_transaction(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COMMIT", 2)
    recorder.first = dataclasses.replace(recorder.first, weight=0.5)
    async with recorder.commit() as commit:
        await recorder.together(commit, "x", "y", "a1", "b1", "c1", "d1", "e1", "f1")
    assert recorder.turns == [["ahead"], ["a1", "b1", "c1", "d1"], ["e1", "f1", "x"], ["y"]]


async def test_no_flood_of_a_class_keeps_out_the_classes_after_it(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_COMMIT", 1)
    monkeypatch.setattr(module, "_SHARE", 2)
    async with recorder.commit() as commit:
        await recorder.together(commit, "x", "y", "z", *(f"{name}1" for name in "abcdefg"))
    assert recorder.turns == [["ahead"], ["a1"], ["b1"], ["c1", "x", "y"], ["d1"], ["e1"], ["f1", "z"], ["g1"]]


async def test_a_caller_of_large_requests_that_floods_two_classes_leaves_the_share_of_one_to_others(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_COMMIT", 1)
    monkeypatch.setattr(module, "_SHARE", 3)
    async with recorder.commit() as commit:
        ahead = await recorder.held_up(commit)
        asking = [commit.begin(recorder.first, f"{n}1", size=1) for n in range(7)]
        asking += [commit.begin(recorder.last, f"{n}x", size=3) for n in range(2)]
        CALLER.set("other")
        asking += [commit.begin(recorder.last, f"{n}y", size=1) for n in range(3)]
        CALLER.set("")
        recorder.may_go.set()
        with anyio.fail_after(60):
            await asyncio.gather(ahead, *asking)
    others = [[name for name in turn if name.endswith("y")] for turn in recorder.turns]
    assert [names for names in others if names] == [["0y", "1y", "2y"]]


async def test_callers_take_turns_and_none_fills_the_queue_of_a_class(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_COMMIT", 4)

    async with recorder.commit() as commit:
        ahead = await recorder.held_up(commit)
        asking = [commit.begin(recorder.last, f"{n}x", size=2) for n in range(5)]
        with pytest.raises(Throttled):
            commit.begin(recorder.last, "5x", size=2)
        CALLER.set("other")
        asking.append(commit.begin(recorder.last, "other's", size=2))
        assert commit.backlog["lasts"] == 12
        CALLER.set("")
        recorder.may_go.set()
        with anyio.fail_after(60):
            await asyncio.gather(ahead, *asking)
        assert commit.backlog["lasts"] == 0
    assert recorder.turns == [["ahead"], ["0x", "other's"], ["1x", "2x"], ["3x", "4x"]]


async def test_the_room_of_a_queue_is_told_though_the_writer_takes_from_it_at_that_moment(recorder: Recorder) -> None:
    async with recorder.commit() as commit:
        ahead = await recorder.held_up(commit)
        asking = commit.begin(recorder.last, "a", size=2)

        class Taken(Counter[str]):
            """What waits is taken by another thread, if that may, as soon as somebody has looked."""

            def __getitem__(self, caller: str) -> int:
                waiting = super().__getitem__(caller)
                if threading.current_thread() is threading.main_thread():
                    writer = threading.Thread(target=self.take)
                    writer.start()
                    writer.join()
                return waiting

            def take(self) -> None:
                if commit._wake.acquire(blocking=False):
                    self.clear()
                    commit._wake.release()

        waiting = commit._waiting[recorder.last]
        waiting._of = Taken(waiting._of)
        assert commit.room(recorder.last) == recorder.last.capacity - 2
        recorder.may_go.set()
        with anyio.fail_after(60):
            await asyncio.gather(ahead, asking)


async def test_one_bad_request_fails_alone(recorder: Recorder) -> None:
    async with recorder.commit() as commit:
        answers = await recorder.together(commit, "a", "bad", "c", "bad1")
        assert [answers[0], answers[2]] == ["A", "C"]
        assert (str(answers[1]), str(answers[3])) == ("bad", "bad1")
        assert recorder.written() == {"ahead", "a", "c"}


async def test_bad_requests_of_one_caller_hold_up_others_for_one_of_them_at_a_time(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with recorder.commit() as commit:
        ahead = await recorder.held_up(commit)
        bad = [commit.begin(recorder.last, f"{n}-bad", size=1) for n in range(5)]
        CALLER.set("other")
        good = [commit.begin(recorder.last, "first good", size=1)]
        at_once = module.GroupCommit._put_back

        def put_back(self: GroupCommit, jobs: Any, *, seconds: float) -> Any:
            if len(good) == 1:
                good.extend(asyncio.run_coroutine_threadsafe(late(), loop).result(60))
            return at_once(self, jobs, seconds=seconds)

        async def late() -> "list[asyncio.Future[Any]]":
            CALLER.set("other")
            return [commit.begin(recorder.last, f"late good {n}", size=1) for n in range(3)]

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(module.GroupCommit, "_put_back", put_back)
        recorder.may_go.set()
        with anyio.fail_after(60):
            answers = await asyncio.gather(ahead, *bad, return_exceptions=True)
            await asyncio.gather(*good)
        assert [str(answer) for answer in answers] == ["AHEAD", *(f"{n}-bad" for n in range(5))]
    turns = [turn for turn in recorder.turns if not any("bad" in name for name in turn)]
    assert turns == [["ahead"], ["first good"], ["late good 0", "late good 1", "late good 2"]]
    assert recorder.turns.index(turns[2]) < recorder.turns.index(["0-bad"])


async def test_a_bad_request_holds_up_good_ones_of_its_caller_for_a_few_turns(recorder: Recorder) -> None:
    async with recorder.commit() as commit:
        ahead = await recorder.held_up(commit)
        names = [f"{n}" if n != 5 else "bad" for n in range(recorder.last.capacity - 1)]
        asking = [commit.begin(recorder.last, name, size=1) for name in names]
        first = commit.begin(recorder.first, "f1", size=1)
        recorder.may_go.set()
        with anyio.fail_after(60):
            answers = await asyncio.gather(ahead, first, *asking, return_exceptions=True)
    assert sum(isinstance(answer, ValueError) for answer in answers) == 1
    assert len(recorder.turns) <= 2 * len(names).bit_length() + 4
    assert ["f1"] in recorder.turns, "another class does not fail with it again"


@pytest.mark.parametrize(("seconds", "work"), [(0.0, 250), (0.02, 1000), (60.0, 2500)])
async def test_what_failed_counts_in_its_callers_turn_by_the_time_that_it_took(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, seconds: float, work: int
) -> None:
    at_once, works = module.GroupCommit._put_back, list[int]()

    def put_back(self: GroupCommit, jobs: Any, **_: float) -> Any:
        outcome = at_once(self, jobs, seconds=seconds)
        works.append(jobs[0].work)
        return outcome

    monkeypatch.setattr(module.GroupCommit, "_put_back", put_back)
    async with recorder.commit() as commit:
        await recorder.together(commit, "a", "bad", "c", "d")
    assert set(works) == {work}


@pytest.mark.parametrize("how", ["stop", "writer"])
async def test_requests_that_wait_for_another_turn_are_answered_also_at_the_end(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    at_once = module.GroupCommit._put_back

    def put_back(self: GroupCommit, jobs: Any, *, seconds: float) -> Any:
        outcome = at_once(self, jobs, seconds=seconds)
        if how == "writer" and jobs[0].apart and len(jobs) < 5:
            raise SystemExit
        self._is_open = False
        return outcome

    monkeypatch.setattr(module.GroupCommit, "_put_back", put_back)
    async with recorder.commit() as commit:
        ahead = await recorder.held_up(commit)
        asking = [commit.begin(recorder.last, name, size=1) for name in ("a", "bad", "c", "d", "e")]
        recorder.may_go.set()
        with anyio.fail_after(60):
            answers = await asyncio.gather(ahead, *asking, return_exceptions=True)
    if how == "writer":
        assert all(isinstance(answer, Unavailable) for answer in answers[1:])
    else:
        assert [str(answer) for answer in answers] == ["AHEAD", "A", "bad", "C", "D", "E"]
        assert commit.backlog["lasts"] == 0


async def test_where_the_store_fails_the_other_classes_still_get_through(recorder: Recorder) -> None:
    async with recorder.commit() as commit:
        answers = await recorder.together(commit, "a1", "big", "c")
        assert answers[0] == "A1"
        assert all(isinstance(answer, Unavailable) for answer in answers[1:])
        assert recorder.written() == {"ahead", "a1"}


async def test_a_fault_is_told_until_something_could_be_written_again(recorder: Recorder) -> None:
    async with recorder.commit() as commit:
        with pytest.raises(Unavailable):
            await commit.ask(recorder.last, "big", size=1)
        assert commit.fault == "the disk is full"
        await commit.ask(recorder.last, "a", size=1)
        assert commit.fault is None


async def test_what_became_ready_is_told_after_the_commit(recorder: Recorder) -> None:
    async with recorder.commit() as commit:
        await recorder.together(commit, "ready-a", "ready-b", "bad", "ready-a")
        await commit.ask(recorder.last, "x", size=1)
    one = NewlyDue(1, None)
    assert recorder.readied == [{"ready-a": one, "ready-b": one}, {"ready-a": one}]


async def test_what_failed_made_nothing_ready(recorder: Recorder) -> None:
    async with recorder.commit() as commit:
        answers = await recorder.together(commit, "ready-bad", "a")
        assert isinstance(answers[0], ValueError)
    assert recorder.readied == []


async def test_a_gap_is_told_in_the_first_transaction_that_ends_well(recorder: Recorder) -> None:
    async with recorder.commit() as commit:
        with pytest.raises(ValueError, match="bad"):
            await commit.ask(recorder.last, "bad", size=1)
        assert recorder.gaps == 1
        await commit.ask(recorder.last, "a", size=1)
        await commit.ask(recorder.last, "b", size=1)
        assert recorder.gaps == 2


async def test_a_long_outage_of_the_store_is_a_gap_and_a_short_one_is_none(recorder: Recorder) -> None:
    now = [100.0]
    recorder.clock = StoreClock(lambda: now[0], None)
    async with recorder.commit() as commit:

        async def fail() -> None:
            with pytest.raises(Unavailable):
                await commit.ask(recorder.last, "big", size=1)

        await commit.ask(recorder.last, "a", size=1)
        for seconds, more in [(9.0, 0), (0.0, 0), (11.0, 1)]:
            gaps = recorder.gaps
            await fail()
            now[0] += seconds / 2
            await fail()
            now[0] += seconds / 2
            await commit.ask(recorder.last, "b", size=1)
            await commit.ask(recorder.last, "c", size=1)
            assert recorder.gaps - gaps == more


async def test_a_full_queue_refuses_early_and_says_when_to_come_back(recorder: Recorder) -> None:
    async with recorder.commit() as commit:
        ahead = await recorder.held_up(commit)
        waits = asyncio.create_task(commit.ask(recorder.last, "a", size=10))
        await until(lambda: commit._queues[recorder.last])
        with pytest.raises(Throttled, match="too many lasts") as throttled:
            await commit.ask(recorder.last, "b", size=1)
        assert throttled.value.retry_after is not None
        assert 0.5 <= throttled.value.retry_after <= 1.5
        first = asyncio.create_task(commit.ask(recorder.first, "c", size=1))
        await until(lambda: commit._queues[recorder.first])
        recorder.may_go.set()
        with anyio.fail_after(60):
            assert list(await asyncio.gather(ahead, waits, first)) == ["AHEAD", "A", "C"]
        assert await commit.ask(recorder.last, "b", size=1) == "B"


async def test_a_request_larger_than_the_queue_is_taken_when_nothing_waits(recorder: Recorder) -> None:
    async with recorder.commit() as commit:
        assert await commit.ask(recorder.last, "a", size=100_000) == "A"


async def test_what_was_accepted_is_written_before_the_end(recorder: Recorder) -> None:
    async with recorder.commit() as commit:
        ahead = await recorder.held_up(commit)
        asking = [asyncio.create_task(commit.ask(recorder.last, f"{n}x", size=1)) for n in range(5)]
        await until(lambda: len(commit._queues[recorder.last]) == 5)
    await ahead
    with anyio.fail_after(60):
        assert await asyncio.gather(*asking) == [f"{n}X" for n in range(5)]


async def test_after_the_end_nothing_is_accepted(recorder: Recorder) -> None:
    async with recorder.commit() as commit:
        pass
    with pytest.raises(Unavailable, match="closed"):
        await commit.ask(recorder.last, "a", size=1)
    assert "leasekit-writer" not in {thread.name for thread in threading.enumerate()}


async def test_an_answer_that_nobody_waits_for_hurts_nobody(recorder: Recorder) -> None:
    async with recorder.commit() as commit:
        ahead = await recorder.held_up(commit)
        ahead.cancel()
        recorder.may_go.set()
        assert await commit.ask(recorder.last, "b", size=1) == "B"
        assert recorder.written() == {"ahead", "b"}


async def test_a_store_that_does_not_open_is_told_and_leaves_no_thread() -> None:
    class Broken(MemoryStore):
        def open(self) -> None:
            raise Unavailable("no")

    recorder = Recorder(Broken())
    with pytest.raises(Unavailable, match="no"):
        async with recorder.commit():
            pass
    assert "leasekit-writer" not in {thread.name for thread in threading.enumerate()}


async def test_a_store_that_does_not_close_keeps_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(MemoryStore):
        def close(self) -> None:
            raise Unavailable("no")

    with anyio.fail_after(60):
        async with Recorder(Broken()).commit():
            pass
    assert "the writer thread has failed" in caplog.text


async def test_who_comes_after_the_writer_has_ended_badly_is_told_at_once(
    recorder: Recorder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(turn: UnitOfWork, requests: Sequence[str]) -> list[str]:
        recorder.is_busy.set()
        recorder.may_go.wait(60)
        raise SystemExit

    monkeypatch.setattr(recorder, "first", RequestClass("firsts", leave, 10))
    with anyio.fail_after(60):
        async with recorder.commit() as commit:
            ahead = await recorder.held_up(commit)
            waiting = asyncio.create_task(commit.ask(recorder.last, "b", size=1))
            await until(lambda: sum(commit.backlog.values()))
            recorder.may_go.set()
            for request in (ahead, waiting):
                with pytest.raises(Unavailable, match="has failed"):
                    await request
            with pytest.raises(Unavailable, match="restart the server"):
                await commit.ask(recorder.last, "c", size=1)
    assert commit.fault is not None
    assert "the writer thread has failed" in caplog.text
