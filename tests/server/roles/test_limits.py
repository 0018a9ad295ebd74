"""Limits and shares of kinds: how many tasks run at once, how many start in a time, and who hears of a free place."""

import asyncio
from typing import Any

import pytest

from leasekit.task import KindSettings, Outcome, Settlement, Task
from tests.server.conftest import Bench

pytestmark = [pytest.mark.anyio, pytest.mark.slow_with("postgres")]


async def limit(bench: Bench, kind: str = "k", **settings: Any) -> None:
    await bench.engine.operations.set_kind(kind, KindSettings(**settings) if settings else None, by="ada")


async def parked(bench: Bench, *kinds: str) -> None:
    """Wait until claims are parked for all of these kinds."""
    while not set(kinds or ("k",)) <= set(bench.engine._long_polls.kinds()):  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0)


def tries(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that grows by each claim that the writer tries from now on."""
    tried: list[Any] = []
    attempt = bench.engine._long_polls._attempt

    def note(request: Any, done: Any) -> None:
        tried.append(request)
        attempt(request, done)

    monkeypatch.setattr(bench.engine._long_polls, "_attempt", note)
    return tried


async def end_all(bench: Bench, tasks: list[Task]) -> None:
    await bench.engine.results("w", [Settlement(id=t.id, token=t.token, outcome="success") for t in tasks])


# Concurrency


async def test_no_more_tasks_are_under_a_lease_than_the_concurrency_of_their_kind(bench: Bench) -> None:
    await limit(bench, concurrency=2)
    await bench.put("a", "b", "c", priority=1)
    await bench.put("d", priority=0)
    assert await bench.ids() == ["d", "a"]
    assert await bench.ids() == []
    await bench.restart()
    assert await bench.ids() == []
    info = await bench.info("b")
    assert (info.attempt, info.status) == (0, "new")


async def test_a_place_is_free_however_a_run_ends(bench: Bench) -> None:
    await limit(bench, concurrency=1)
    await bench.put("a", "b", "c", "d", claim_timeout=10.0, max_crashes=0)
    outcomes: tuple[Outcome, ...] = ("success", "fatal")
    for outcome in outcomes:
        await bench.settle(await bench.take(), outcome)
    task = await bench.take()
    assert await bench.ids() == []
    await bench.settle(task, "release")
    assert await bench.take()
    await bench.later(11)  # its lease expires
    assert await bench.take()


async def test_a_late_settlement_frees_no_place_twice(bench: Bench) -> None:
    await limit(bench, concurrency=1)
    await bench.put("a", "b", "c", claim_timeout=10.0)
    late = await bench.take()
    await bench.later(11)
    assert (await bench.take()).id == "b"
    assert (await bench.settle(late)).verdict == "settled"
    assert await bench.ids() == []


async def test_a_limit_that_is_lowered_ends_no_run(bench: Bench) -> None:
    await bench.put(*"abcde")
    first = (await bench.claim(limit=3)).tasks
    await limit(bench, concurrency=2)
    assert (await bench.beat(first[0])).verdict == "renewed"
    await end_all(bench, first[:1])
    assert await bench.ids() == []
    await end_all(bench, first[1:2])
    assert await bench.ids() == ["d"]
    await limit(bench)
    assert await bench.ids() == ["e"]


async def test_a_claim_that_waits_gets_a_task_when_a_place_is_free(bench: Bench) -> None:
    await limit(bench, concurrency=1)
    held = await bench.taken("a")
    await bench.put("b")
    waiting = asyncio.create_task(bench.claim(wait=30))
    await parked(bench)
    await bench.settle(held)
    assert [task.id for task in (await waiting).tasks] == ["b"]


async def test_a_claim_that_waits_gets_a_task_when_a_lease_expires(bench: Bench) -> None:
    await limit(bench, concurrency=1)
    await bench.taken("a", claim_timeout=10.0)
    await bench.put("b", priority=0)
    waiting = asyncio.create_task(bench.claim(wait=30))
    await parked(bench)
    await bench.later(11)
    assert [task.id for task in (await waiting).tasks] == ["b"]


@pytest.mark.parametrize("settings", [{"concurrency": 2}, {}])
async def test_a_claim_that_waits_gets_a_task_when_the_limit_is_lifted(bench: Bench, settings: dict[str, Any]) -> None:
    await limit(bench, concurrency=1)
    await bench.taken("a")
    await bench.put("b")
    waiting = asyncio.create_task(bench.claim(wait=30))
    await parked(bench)
    await limit(bench, **settings)
    assert [task.id for task in (await waiting).tasks] == ["b"]


async def test_claims_are_not_woken_for_tasks_that_cannot_start(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await limit(bench, concurrency=1)
    held = await bench.taken("a")
    await bench.put("b")
    waiting = asyncio.create_task(bench.claim(wait=30))
    other = asyncio.create_task(bench.claim(wait=30, kinds=("other",)))
    await parked(bench, "k", "other")
    tried = tries(bench, monkeypatch)
    for number in range(20):
        await bench.put(f"c{number}")
    assert tried == []
    await bench.settle(held)
    await waiting
    assert [request.kinds for request in tried] == [("k",)]
    other.cancel()


async def test_a_kind_without_due_tasks_is_not_at_its_limit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await limit(bench, concurrency=2)
    held = await bench.taken("a")
    waiting = asyncio.create_task(bench.claim(wait=30))
    await parked(bench)
    tried = tries(bench, monkeypatch)
    await bench.settle(held)  # nothing waits for this place
    assert tried == []
    await bench.put("b")
    assert [task.id for task in (await waiting).tasks] == ["b"]


async def test_many_tasks_behind_a_small_limit_leave_no_place_empty(bench: Bench) -> None:
    count, places = 300, 4
    await limit(bench, concurrency=places)
    await bench.put(*(f"{number:03}" for number in range(count)))
    running: list[Task] = []
    begun: list[Task] = []

    async def work(worker: str) -> None:
        while len(begun) < count:
            for task in (await bench.claim(limit=2, wait=30, worker=worker)).tasks:
                begun.append(task)
                running.append(task)
                assert len(running) <= places
                await asyncio.sleep(0)
                running.remove(task)
                await bench.settle(task)

    workers = [asyncio.create_task(work(f"w{number}")) for number in range(2 * places)]
    while len(begun) < count:  # noqa: ASYNC110 - nobody turns the clock: each wake-up is one that was told
        await asyncio.sleep(0.01)
    bench.engine.end_waits()
    await asyncio.gather(*workers)
    assert sorted(task.id for task in begun) == [f"{number:03}" for number in range(count)]
    assert {task.attempt for task in begun} == {1}


# Rate


async def test_no_more_tasks_start_than_the_burst_and_what_has_come_since(bench: Bench) -> None:
    await limit(bench, rate=2.0, burst=3)
    await bench.put(*(f"{number}" for number in range(9)))
    assert len(await bench.ids()) == 3
    bench.clock.advance(0.25)
    assert await bench.ids() == []
    bench.clock.advance(0.25)
    assert len(await bench.ids()) == 1
    await bench.restart()
    assert await bench.ids() == []
    bench.clock.advance(100)
    assert len(await bench.ids()) == 3
    assert {task.attempt for task in (await bench.engine.queries.list_tasks()).tasks} == {0, 1}


async def test_without_a_burst_the_tasks_of_a_second_start_at_once(bench: Bench) -> None:
    await limit(bench, rate=2.5)
    await bench.put(*(f"{number}" for number in range(9)))
    assert len(await bench.ids()) == 3


async def test_a_claim_that_waits_gets_a_task_when_a_token_comes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await limit(bench, rate=0.5, burst=1)
    await bench.taken("a")
    tried = tries(bench, monkeypatch)
    waiting = asyncio.create_task(bench.claim(wait=30))
    await bench.put("b")
    await parked(bench)
    await bench.later(1.5)
    assert not waiting.done()
    looks = len(tried)
    await bench.later(0.5)
    assert [task.id for task in (await waiting).tasks] == ["b"]
    if bench.engine.neighbours is None:  # a node of a database looks each second, for the case that it was told nothing
        assert len(tried) == looks + 1


async def test_a_rate_that_is_raised_holds_at_once(bench: Bench) -> None:
    await limit(bench, rate=0.001, burst=5)
    await bench.put(*(f"{number}" for number in range(9)))
    assert len(await bench.ids()) == 5
    await limit(bench, rate=1.0)
    bench.clock.advance(1)
    assert len(await bench.ids()) == 1


async def test_both_limits_hold(bench: Bench) -> None:
    await limit(bench, rate=1.0, burst=2, concurrency=1)
    await bench.put(*"abcd")
    await bench.settle(await bench.take())
    await bench.settle(await bench.take())
    assert await bench.ids() == []
    bench.clock.advance(2)
    await bench.take()
    assert await bench.ids() == []


async def test_claims_that_were_left_are_counted(bench: Bench) -> None:
    await limit(bench, concurrency=1)
    await bench.put("a", "b")
    await bench.claim()
    assert bench.engine.commit.tally.kinds["k"].events["limited", "concurrency"] == 1


# Shares


async def test_kinds_take_turns_whichever_is_longer_due(bench: Bench) -> None:
    await bench.put(*(f"a{number}" for number in range(6)), kind="a")
    bench.clock.advance(1)
    await bench.put(*(f"b{number}" for number in range(3)), kind="b")
    taken = [(await bench.take(kinds=("a", "b"))).id for _ in range(9)]
    assert taken == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "a4", "a5"]


async def test_a_backlog_does_not_delay_a_single_task_of_another_kind(bench: Bench) -> None:
    for start in range(0, 3000, 1000):
        await bench.put(*(f"a{start + number}" for number in range(1000)), kind="a")
    bench.clock.advance(1)
    for number in range(3):
        await bench.claim(kinds=("a", "b"), limit=100)
        await bench.put(f"b{number}", kind="b")
        assert f"b{number}" in await bench.ids(kinds=("a", "b"), limit=2)


@pytest.mark.parametrize("at_once", [1, 10])
async def test_kinds_share_by_weight(bench: Bench, at_once: int) -> None:
    await limit(bench, "a", weight=3.0)
    for kind in "ab":
        await bench.put(*(f"{kind}{number}" for number in range(100)), kind=kind)
    taken = [
        task.kind for _ in range(40 // at_once) for task in (await bench.claim(kinds=("a", "b"), limit=at_once)).tasks
    ]
    assert taken.count("a") == 30


async def test_priorities_come_before_shares(bench: Bench) -> None:
    await limit(bench, "a", weight=100.0)
    await bench.put("a0", "a1", kind="a", priority=3)
    await bench.put("b0", "b1", kind="b", priority=1)
    assert await bench.ids(kinds=("a", "b")) == ["b0", "b1", "a0", "a1"]


async def test_a_kind_that_was_away_has_no_credit(bench: Bench) -> None:
    for kind in "abc":
        await bench.put(*(f"{kind}{number}" for number in range(40)), kind=kind)
    await bench.claim(kinds=("a", "b"), limit=20)
    taken = [(await bench.take(kinds=("a", "c"))).kind for _ in range(8)]
    assert taken.count("a") == 4


async def test_a_task_that_has_aged_counts_as_of_the_highest_priority(bench: Bench) -> None:
    await limit(bench, "old", aging=60.0)
    await bench.put("a0", "a1", kind="old", priority=4)
    bench.clock.advance(30)
    await bench.put("a2", kind="old", priority=4)
    bench.clock.advance(30)
    await bench.put("b0", "b1", "b2", kind="new", priority=0)
    await bench.put("c0", kind="new", priority=3)
    assert await bench.ids(kinds=("old", "new")) == ["a0", "b0", "a1", "b1", "b2", "c0", "a2"]
