"""Limits of keys: how many tasks of one key run at once and start in a second, and who hears that there is room."""

import asyncio
from collections import Counter
from random import Random
from typing import Any

import pytest

from leasekit.server import due_tasks
from leasekit.server.roles import claims
from leasekit.server.roles.gates import GateChange
from leasekit.task import KindSettings, Outcome, Task
from tests.sampling import slow_after
from tests.server.conftest import Bench

pytestmark = [pytest.mark.anyio, pytest.mark.slow_with("postgres")]


async def limit(bench: Bench, most: int | None = 1, **settings: Any) -> None:
    given = settings if most is None else {"key_concurrency": most, **settings}
    await bench.engine.operations.set_kind("k", KindSettings(**given), by="ada")


async def put(bench: Bench, *ids: str, **options: Any) -> None:
    """Schedule tasks whose key is the first letter of the id; `-` is none."""
    for task_id in ids:
        await bench.put(task_id, **{"key": None if task_id[0] == "-" else task_id[0], **options})


async def parked(bench: Bench) -> None:
    """Wait until a claim is parked, and nothing is due for it, as far as the engine knows."""
    while "k" not in bench.engine._long_polls.kinds():  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0)


def of(claimed: list[Task], task_id: str) -> Task:
    return next(task for task in claimed if task.id == task_id)


async def waiting_claim(bench: Bench) -> "asyncio.Task[list[str]]":
    waiting = asyncio.create_task(bench.ids(wait=30))
    await parked(bench)
    return waiting


async def test_no_more_tasks_of_a_key_run_than_its_limit_and_the_others_go_on(bench: Bench) -> None:
    await limit(bench, 2)
    await put(bench, "a1", "a2", "a3", "b1", "-1", "-2", "-3")
    assert sorted(await bench.ids()) == ["-1", "-2", "-3", "a1", "a2", "b1"]
    await put(bench, "a4", "b2")
    assert await bench.ids() == ["b2"]
    await bench.restart()
    assert await bench.ids() == []
    info = await bench.info("a3")
    assert (info.attempt, info.status) == (0, "new")


async def test_a_claim_of_one_task_at_a_time_keeps_the_limit(bench: Bench) -> None:
    await limit(bench)
    await put(bench, "a1", "a2", "b1", "b2")
    assert sorted([(await bench.take()).id, (await bench.take()).id]) == ["a1", "b1"]
    assert await bench.ids(limit=1) == []


async def test_a_place_of_a_key_is_free_however_a_run_ends(bench: Bench) -> None:
    await limit(bench)
    await put(bench, "a1", "a2", "a3", "a4", claim_timeout=10.0, max_crashes=0)
    outcomes: tuple[Outcome, ...] = ("success", "fatal")
    for outcome in outcomes:
        await bench.settle(await bench.take(), outcome)
    task = await bench.take()
    assert await bench.ids() == []
    await bench.settle(task, "release")
    assert await bench.take()
    assert await bench.ids() == []
    await bench.later(11)  # its lease expires
    assert await bench.take()


@pytest.mark.parametrize("is_lifted", [False, True])
async def test_a_full_key_without_waiting_tasks_is_not_full_for_its_next_task(bench: Bench, is_lifted: bool) -> None:
    await limit(bench)
    await put(bench, "a1", "a2", "b1")
    claimed = (await bench.claim()).tasks
    assert sorted(task.id for task in claimed) == ["a1", "b1"]
    await bench.engine.cancel(["a2"])
    await bench.settle(of(claimed, "a1"))
    if is_lifted:
        await bench.engine.operations.set_kind("k", None, by="ada")
    await put(bench, "a3")
    assert await bench.ids() == ["a3"]


async def test_the_limit_of_a_key_holds_over_all_priorities(bench: Bench) -> None:
    await limit(bench)
    await put(bench, "a1", "b1", priority=3)
    await put(bench, "a2", priority=1)
    first = (await bench.claim()).tasks
    assert [task.id for task in first] == ["a2", "b1"]
    assert await bench.ids() == []
    await bench.settle(of(first, "a2"))
    assert await bench.ids() == ["a1"]


async def test_a_late_settlement_frees_no_place_of_a_key_twice(bench: Bench) -> None:
    await limit(bench)
    await put(bench, "a1", "a2", "a3", claim_timeout=10.0)
    late = await bench.take()
    await bench.later(11)
    assert (await bench.take()).id == "a2"
    assert (await bench.settle(late)).verdict == "settled"
    assert await bench.ids() == []


async def test_a_key_limit_that_is_lowered_ends_no_run(bench: Bench) -> None:
    await put(bench, *(f"a{number}" for number in range(5)))
    first = (await bench.claim(limit=3)).tasks
    await limit(bench, 2)
    assert (await bench.beat(first[0])).verdict == "renewed"
    await bench.settle(first[0])
    assert await bench.ids() == []
    await bench.settle(first[1])
    assert await bench.ids() == ["a3"]
    await limit(bench, None)
    assert await bench.ids() == ["a4"]


@pytest.mark.parametrize("end", ["settled", "expired", "lifted"])
async def test_a_claim_that_waits_gets_a_task_when_its_key_has_a_place(bench: Bench, end: str) -> None:
    await limit(bench)
    await put(bench, "a1", claim_timeout=10.0)
    held = await bench.take()
    await put(bench, "a2", priority=0)
    waiting = await waiting_claim(bench)
    if end == "settled":
        await bench.settle(held)
    elif end == "expired":
        await bench.later(11)
    else:
        await limit(bench, 2)
    assert await waiting == ["a2"]


async def test_a_full_key_costs_later_claims_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await limit(bench)
    await put(bench, *(f"{key}{number}" for key in "abcdefgh" for number in range(2)))
    assert len(await bench.ids()) == 8
    await bench.ids()
    read: list[Any] = []
    monkeypatch.setattr(due_tasks, "FairLane", lambda *args, **_: read.append(args))
    assert await bench.ids() == []
    assert read == []


async def test_many_keys_that_are_full_delay_no_other_key(bench: Bench) -> None:
    await limit(bench)
    full = [f"full-{number}" for number in range(150)]
    for turn in range(2):
        for key in full:
            await bench.put(f"{key}-{turn}", key=key)
        assert len(await bench.ids()) + len(await bench.ids()) == (len(full) if turn == 0 else 0)
    for key in full:
        await bench.put(f"{key}-2", key=key)
    bench.clock.advance(1)  # so that the full keys come first
    await bench.put("free", key="free")
    assert await bench.ids(limit=1) == ["free"]


async def test_a_key_that_comes_back_takes_its_turn_with_the_others(bench: Bench) -> None:
    await limit(bench)
    await put(bench, *(f"a{number}" for number in range(9)), *(f"b{number}" for number in range(9)))
    await put(bench, *(f"-{number}" for number in range(40)))
    taken = (await bench.claim(limit=30)).tasks
    await bench.settle(of(taken, "a0"))
    await bench.settle(of(taken, "b0"))
    assert sorted(key[0] for key in await bench.ids(limit=3)) == ["-", "a", "b"]


async def test_both_limits_hold(bench: Bench) -> None:
    await limit(bench, 1, concurrency=2)
    await put(bench, "a1", "a2", "b1", "c1")
    first = (await bench.claim()).tasks
    assert sorted(task.id for task in first) == ["a1", "b1"]
    await bench.settle(of(first, "a1"))
    assert len(await bench.ids()) == 1


async def test_a_kind_that_is_dropped_ends_the_tasks_of_full_keys_too(bench: Bench) -> None:
    await limit(bench)
    await put(bench, "a1", "a2", "a3")
    await bench.ids()
    await bench.ids()
    await bench.engine.operations.set_gate(GateChange("kind", "k", "drop", None, None, None, None))
    await bench.later(1)
    assert [await bench.status(task_id) for task_id in ("a1", "a2", "a3")] == ["claimed", "cancelled", "cancelled"]


async def test_a_large_answer_that_is_cut_leaves_no_place_taken(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_ALWAYS_FIT", 1)
    monkeypatch.setattr(claims, "_ANSWER", 4)
    await limit(bench)
    await put(bench, "a1", "a2", "b1", "b2", payload="x")
    assert sorted(await bench.ids() + await bench.ids()) == ["a1", "b1"]


# Rate


async def test_a_key_starts_no_more_than_its_burst_and_what_has_come_since(bench: Bench) -> None:
    await limit(bench, None, key_rate=2.0, key_burst=3)
    await put(bench, *(f"a{number}" for number in range(9)), "b1", "-1", "-2", "-3", "-4")
    assert sorted(await bench.ids()) == ["-1", "-2", "-3", "-4", "a0", "a1", "a2", "b1"]
    bench.clock.advance(0.25)
    await put(bench, "b2", "b3", "b4")
    assert await bench.ids() == ["b2", "b3"]
    bench.clock.advance(0.25)
    assert sorted(await bench.ids()) == ["a3", "b4"]
    await bench.restart()
    assert await bench.ids() == []
    bench.clock.advance(100)
    assert await bench.ids() == ["a4", "a5", "a6"]
    info = await bench.info("a7")
    assert (info.attempt, info.status) == (0, "new")


async def test_a_claim_of_one_task_at_a_time_keeps_the_rate_of_a_key(bench: Bench) -> None:
    await limit(bench, None, key_rate=0.01)
    await put(bench, "a1", "b1", priority=3)
    await put(bench, "a2", "b2", priority=1)
    assert sorted([(await bench.take()).id, (await bench.take()).id]) == ["a2", "b2"]
    assert await bench.ids(limit=1) == []


async def test_a_run_that_ends_gives_no_token_back(bench: Bench) -> None:
    await limit(bench, None, key_rate=0.1)
    await put(bench, "a1", "a2")
    await bench.settle(await bench.take(), "release")
    assert await bench.ids() == []
    await bench.later(10)
    assert len(await bench.ids()) == 1


async def test_a_claim_that_waits_gets_a_task_when_its_key_has_a_token(bench: Bench) -> None:
    await limit(bench, None, key_rate=0.5)
    await put(bench, "a1", "a2")
    await bench.take()
    waiting = await waiting_claim(bench)
    await bench.later(1.5)
    assert not waiting.done()
    await bench.later(0.5)
    assert await waiting == ["a2"]


async def test_a_rate_of_keys_that_is_raised_or_lifted_holds_at_once(bench: Bench) -> None:
    await limit(bench, None, key_rate=0.001, key_burst=2)
    await put(bench, *(f"a{number}" for number in range(9)))
    assert len(await bench.ids()) == 2
    assert await bench.ids() == []
    await limit(bench, None, key_rate=1.0)
    assert await bench.ids() == []
    bench.clock.advance(1)
    assert len(await bench.ids()) == 1
    assert await bench.ids() == []
    await limit(bench, None)
    assert len(await bench.ids()) == 6


async def test_both_limits_of_a_key_hold(bench: Bench) -> None:
    await limit(bench, 1, key_rate=0.1, key_burst=2)
    await put(bench, "a1", "a2", "a3")
    first = await bench.take()
    assert await bench.ids() == []
    await bench.settle(first)
    await bench.settle(await bench.take())
    assert await bench.ids() == []
    await bench.later(10)
    assert await bench.ids() == ["a3"]


async def test_a_key_without_a_token_costs_later_claims_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await limit(bench, None, key_rate=0.01)
    await put(bench, *(f"{key}{number}" for key in "abcdefgh" for number in range(2)))
    assert len(await bench.ids()) == 8
    await bench.ids()
    await bench.later(1)
    read: list[Any] = []
    monkeypatch.setattr(due_tasks, "FairLane", lambda *args, **_: read.append(args))
    assert await bench.ids() == []
    assert read == []


async def test_the_tasks_of_keys_without_a_token_are_counted_as_due(bench: Bench) -> None:
    await limit(bench, None, key_rate=0.1)
    await put(bench, "a1", "a2", "a3", "b1")
    await bench.ids()
    await bench.ids()
    assert bench.engine.commit.tally.kinds["k"].events["limited", "key_rate"] == 1
    bench.clock.advance(7)
    backlog = (await bench.engine.queries.backlogs({"k": 2}))["k"]
    assert (backlog.due, backlog.later, backlog.keys, round(backlog.age)) == (2, 0, 1, 7)
    bench.clock.advance(7)
    assert (await bench.engine.queries.backlogs({"k": 2}))["k"].keys == 1


async def test_full_token_buckets_of_keys_are_removed(bench: Bench) -> None:
    def buckets(*keys: str) -> list[str]:
        with bench.engine._store.transaction() as tx:
            return sorted(key for _, key in tx.buckets([("k", key) for key in keys]))

    await limit(bench, None, key_rate=0.1, rate=1000.0)
    await put(bench, "a1", "b1")
    await bench.ids()
    await bench.later(5)
    await put(bench, "c1")
    await bench.ids()
    await bench.later(6)
    assert buckets("", "a", "b", "c") == ["", "c"]


async def test_a_large_answer_that_is_cut_leaves_no_token_taken(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_ALWAYS_FIT", 1)
    monkeypatch.setattr(claims, "_ANSWER", 4)
    await limit(bench, None, key_rate=0.01)
    await put(bench, "a1", "a2", "b1", "b2", payload="x")
    assert sorted(await bench.ids() + await bench.ids()) == ["a1", "b1"]


async def test_claims_that_left_full_keys_are_counted(bench: Bench) -> None:
    await limit(bench)
    await put(bench, "a1", "a2")
    await bench.ids()
    await bench.ids()
    assert bench.engine.commit.tally.kinds["k"].events["limited", "key_concurrency"] == 1


async def test_the_tasks_of_full_keys_are_counted_as_due(bench: Bench) -> None:
    await limit(bench)
    await put(bench, "a1", "a2", "a3", "b1")
    await bench.ids()
    await bench.ids()
    bench.clock.advance(7)
    backlog = (await bench.engine.queries.backlogs({"k": 2}))["k"]
    assert (backlog.due, backlog.later, backlog.keys, round(backlog.age)) == (2, 0, 1, 7)


@pytest.mark.parametrize("seed", slow_after(1, range(4)))
async def test_random_histories_keep_the_limit_and_start_each_task(bench: Bench, seed: int) -> None:
    random, most = Random(seed), 2
    await limit(bench, most)
    ids = [f"{random.choice('abc-')}{number}" for number in range(60)]
    keys = {task_id: task_id[0] for task_id in ids if task_id[0] != "-"}
    held: dict[str, Task] = {}
    left, ended = list(ids), set[str]()
    while len(ended) < len(ids):
        if left and random.random() < 0.6:
            await put(bench, left.pop(), priority=random.randint(0, 2), claim_timeout=10.0, max_crashes=1000)
        for task in (await bench.claim(limit=random.randint(1, 4))).tasks:
            held[task.id] = task
        running = Counter(keys[task_id] for task_id in held if task_id in keys)
        assert max(running.values(), default=0) <= most
        if held and random.random() < 0.6:
            task = held.pop(random.choice(sorted(held)))
            outcomes: list[Outcome] = ["success", "success", "release", "retry"]
            outcome = random.choice(outcomes)
            await bench.settle(task, outcome, **({"retry_after": 1.0} if outcome == "retry" else {}))
            if outcome == "success":
                ended.add(task.id)
        if random.random() < 0.05:
            await bench.later(11)
            held.clear()
        if random.random() < 0.03:
            await bench.restart()
        bench.clock.advance(0.3)
    assert await bench.ids() == []
