"""Who gets which task, and how it is waited for."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import anyio
import pytest
from msgspec import Raw

from leasekit.errors import Throttled, Unavailable
from leasekit.server import long_poll
from leasekit.server.roles import claims
from leasekit.task import Claimed, NewTask, Outcome
from tests.server.conftest import Bench

pytestmark = pytest.mark.anyio


async def settled_down() -> None:
    """Let the loop do what it can without anything from outside."""
    for _ in range(5):
        await asyncio.sleep(0)


async def is_waiting(bench: Bench, number: int) -> None:
    """Until so many claims are parked."""
    with anyio.fail_after(60):
        while sum(poll.is_parked for poll in bench.engine._long_polls._polls.values()) != number:  # noqa: ASYNC110  a fact of another thread
            await asyncio.sleep(0.001)


async def until_done(*tasks: "asyncio.Task[Any]") -> list[Any]:
    with anyio.fail_after(60):
        return list(await asyncio.gather(*tasks))


# How much


MIB = 1024 * 1024
BIG = Raw(b'"' + b"x" * (MIB - 2) + b'"')


async def test_a_claims_answer_is_bounded_and_the_rest_stays_ready_in_its_order(bench: Bench) -> None:
    for n in range(20):
        await bench.put(f"t{n:02}", payload=BIG, priority=n // 10)
    got = [await bench.ids(limit=100) for _ in range(4)]
    assert got == [[f"t{n:02}" for n in range(at, min(at + 8, 20))] for at in (0, 8, 16, 24)]


async def test_progress_counts_as_well(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_ANSWER", 60)
    monkeypatch.setattr(claims, "_ALWAYS_FIT", 0)
    await bench.put("a", "b", "c", payload=Raw(b"1234567890"))
    for task in (await bench.claim()).tasks:
        await bench.settle(task, "release", progress="x" * 23)
    assert await bench.ids() == ["a"]


async def test_a_task_that_is_bigger_than_an_answer_may_be_is_handed_out_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_ANSWER", 5)
    monkeypatch.setattr(claims, "_ALWAYS_FIT", 0)
    await bench.put("a", "b", payload=Raw(b"1234567890"))
    assert [await bench.ids() for _ in range(3)] == [["a"], ["b"], []]


async def test_what_did_not_fit_goes_to_the_next_who_asks_at_the_same_time(bench: Bench) -> None:
    await bench.engine.schedule([NewTask(kind="k", payload=BIG) for _ in range(20)])
    answers = await until_done(*(asyncio.create_task(bench.claim(limit=100)) for _ in range(6)))
    assert sorted(len(claimed.tasks) for claimed in answers) == [0, 0, 0, 4, 8, 8]


async def test_what_did_not_fit_goes_to_those_who_wait_too(bench: Bench) -> None:
    asking = [asyncio.create_task(bench.claim(limit=100, wait=30)) for _ in range(3)]
    await is_waiting(bench, 3)
    await bench.engine.schedule([NewTask(kind="k", payload=BIG) for _ in range(20)])
    answers = await until_done(*asking)
    assert sorted(len(claimed.tasks) for claimed in answers) == [4, 8, 8]


# Which


async def test_the_most_urgent_goes_first_then_the_longest_due(bench: Bench) -> None:
    for name, priority in [("c2", 2), ("a0", 0), ("d4", 4), ("b1", 1), ("e2", 2)]:
        await bench.put(name, priority=priority)
        bench.clock.advance(1)
    early = datetime.fromtimestamp(bench.clock.wall - 100, UTC)
    await bench.put("f2", priority=2, at=early)
    assert await bench.ids() == ["a0", "b1", "f2", "c2", "e2", "d4"]


async def test_among_equals_the_first_to_come_goes_first(bench: Bench) -> None:
    ids = [f"t{n}" for n in range(20)]
    await bench.put(*ids)
    assert [await bench.ids(limit=3) for _ in range(7)] == [ids[at : at + 3] for at in range(0, 20, 3)]


async def test_several_kinds_are_served_as_one_queue(bench: Bench) -> None:
    for n in range(30):
        await bench.put(f"t{n:02}", kind="abc"[n % 3], priority=n % 2)
        bench.clock.advance(1)
    got = await bench.ids(kinds=("a", "b", "c"))
    assert got == [f"t{n:02}" for n in range(0, 30, 2)] + [f"t{n:02}" for n in range(1, 30, 2)]


async def test_more_than_a_chunk_of_one_kind_beside_others(bench: Bench) -> None:
    await bench.put(*(f"a{n:04}" for n in range(1500)), kind="a")
    await bench.put(*(f"b{n:04}" for n in range(20)), kind="b")
    got = await bench.ids(kinds=("b", "a", "c"), limit=1000) + await bench.ids(kinds=("a", "b"), limit=1000)
    assert [task_id for task_id in got if task_id[0] == "a"] == [f"a{n:04}" for n in range(1500)]
    assert [task_id for task_id in got[:40] if task_id[0] == "b"] == [f"b{n:04}" for n in range(20)]


async def test_only_kinds_that_were_asked_for(bench: Bench) -> None:
    await bench.put("a", kind="a")
    assert await bench.ids(kinds=("b", "A", "")) == []


async def test_no_task_goes_to_two(bench: Bench) -> None:
    await bench.put(*(f"t{n}" for n in range(200)))
    answers = await asyncio.gather(*(bench.claim(limit=7) for _ in range(40)))
    got = [task.id for answer in answers for task in answer.tasks]
    assert sorted(got) == sorted(f"t{n}" for n in range(200))


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_process_that_has_the_name_of_another_gets_nothing_that_runs_there(
    bench: Bench, restarts: bool
) -> None:
    """Tasks come back when their leases end, and not because a worker of that name is heard again."""
    await bench.put("a", "b")
    first = await bench.take()
    second = await bench.take()  # by another process, of the same name
    assert {first.id, second.id} == {"a", "b"}
    assert (await bench.settle(second, "release")).verdict == "settled"  # it stops …
    second = await bench.take()
    if restarts:
        await bench.restart()
    assert (second.id, await bench.ids()) == ("b", [])
    await bench.later(200)
    assert (await bench.beat(first, started=True)).verdict == "renewed"
    await bench.later(200)  # … and dies: of what that name holds, the lease of the dead alone has ended
    assert await bench.ids() == ["b"]
    assert (await bench.beat(second)).verdict == "gone"
    assert (await bench.settle(first)).verdict == "settled"


async def test_every_grant_has_a_new_token_and_a_greater_fence(bench: Bench) -> None:
    await bench.put("a")
    tokens, fences = set[str](), list[int]()
    for outcome in ("release", "crash", "release"):
        task = await bench.take()
        tokens.add(task.token)
        fences.append(task.fence)
        await bench.settle(task, outcome)
    assert len(tokens) == 3
    assert all(len(token) >= 22 for token in tokens)
    assert fences == sorted(set(fences))


async def test_a_lease_that_ended_is_taken_back_by_the_claim_itself(bench: Bench) -> None:
    first = await bench.taken("a", claim_timeout=10)
    bench.clock.advance(10)
    second = await bench.take()
    assert (second.id, second.attempt, second.fence) == ("a", 2, first.fence + 1)
    assert (await bench.info("a")).crashes == 1


# Claim again


async def test_a_repeat_gets_the_same_tasks_tokens_and_waited(bench: Bench) -> None:
    await bench.put("a", "b", "c")
    first = await bench.claim(limit=2, claim_id="c1")
    bench.clock.advance(5)
    second = await bench.claim(limit=2, claim_id="c1")
    assert encoded(second) == encoded(first)


async def test_a_repeat_gets_only_what_is_still_live(bench: Bench) -> None:
    await bench.put("a", claim_timeout=10)
    await bench.put("b", "c", claim_timeout=100)
    first = await bench.claim(claim_id="c1")
    await bench.settle(first.tasks[1], "release")
    bench.clock.advance(10)
    again = await bench.claim(claim_id="c1")
    assert [(task.id, task.token) for task in again.tasks] == [("c", first.tasks[2].token)]


async def test_a_repeat_after_all_has_ended_is_empty_and_takes_nothing_new(bench: Bench) -> None:
    task = await bench.taken("a", claim_timeout=10)
    await bench.put("b")
    first = await bench.claim(claim_id="c1")
    await bench.settle(first.tasks[0])
    await bench.put("c")
    assert (await bench.claim(claim_id="c1")).tasks == []
    assert await bench.ids() == ["c"]
    assert task.id == "a"


async def test_a_repeat_gets_the_same_after_a_restart(bench: Bench) -> None:
    await bench.put("a", "b")
    first = await bench.claim(claim_id="c1")
    await bench.restart()
    assert encoded(await bench.claim(claim_id="c1")) == encoded(first)
    assert (await bench.beat(first.tasks[0])).verdict == "renewed"


async def test_a_task_taken_by_another_since_is_not_in_the_repeat(bench: Bench) -> None:
    await bench.put("a", claim_timeout=10)
    await bench.claim(claim_id="c1")
    bench.clock.advance(10)
    assert await bench.ids(claim_id="c2") == ["a"]
    assert await bench.ids(claim_id="c1") == []


async def test_an_empty_answer_is_not_remembered(bench: Bench) -> None:
    assert await bench.ids(claim_id="c1") == []
    await bench.put("a")
    assert await bench.ids(claim_id="c1") == ["a"]


async def test_a_claim_that_was_ended_is_granted_nothing_for_a_day_and_through_restarts(bench: Bench) -> None:
    assert await bench.ids(claim_id="c1", limit=0) == []
    await bench.put("a")
    assert await bench.ids(claim_id="c1") == []
    await bench.restart()
    await bench.later(1_100)
    assert await bench.ids(claim_id="c1", wait=30) == []
    assert await bench.status("a") == "new"
    assert await bench.ids(claim_id="c2") == ["a"]


async def test_a_claim_that_is_ended_keeps_what_it_was_granted(bench: Bench) -> None:
    await bench.put("a", "b", "c")
    first = await bench.claim(claim_id="c1", limit=2)
    bench.clock.advance(5)
    for limit in (0, 0, 9):
        assert encoded(await bench.claim(claim_id="c1", limit=limit)) == encoded(first)


async def test_a_claim_id_is_its_workers_own(bench: Bench) -> None:
    await bench.put("a")
    assert await bench.ids(claim_id="c1", worker="one") == ["a"]
    assert await bench.ids(claim_id="c1", worker="two") == []


async def test_what_claims_were_answered_is_forgotten_after_twenty_minutes(bench: Bench) -> None:
    await bench.taken("a", claim_timeout=200_000)
    await bench.put("b", claim_timeout=200_000)
    assert await bench.ids(claim_id="c1") == ["b"]
    await bench.put("c")
    for _ in range(19):
        await bench.later(60)
        await bench.engine.sweeper.sweep()
    assert await bench.ids(claim_id="c1") == ["b"]
    for _ in range(2):
        await bench.later(60)
        await bench.engine.sweeper.sweep()
    assert await bench.ids(claim_id="c1") == ["c"]


async def test_a_clock_that_steps_while_the_server_is_down_makes_it_forget_no_answer(bench: Bench) -> None:
    await bench.put("a", "b", claim_timeout=200_000)
    assert await bench.ids(claim_id="c1", limit=1) == ["a"]
    bench.clock.step(3_600)
    await bench.restart()
    await bench.engine.sweeper.sweep()
    assert await bench.ids(claim_id="c1", limit=1) == ["a"]


# Waiting


async def test_a_waiting_claim_is_woken_by_a_schedule_and_says_how_long_it_waited(bench: Bench) -> None:
    asking = asyncio.create_task(bench.claim(wait=30))
    await is_waiting(bench, 1)
    bench.clock.advance(12)
    await bench.put("a")
    (claimed,) = await until_done(asking)
    assert [task.id for task in claimed.tasks] == ["a"]
    assert claimed.waited == 12


@pytest.mark.parametrize(("outcome", "more"), [("release", {}), ("crash", {}), ("retry", {"retry_after": 0.0})])
async def test_a_waiting_claim_is_woken_by_what_is_given_back(
    bench: Bench, outcome: Outcome, more: dict[str, Any]
) -> None:
    task = await bench.taken("a")
    asking = asyncio.create_task(bench.claim(wait=30))
    await is_waiting(bench, 1)
    await bench.settle(task, outcome, **more)
    (claimed,) = await until_done(asking)
    assert claimed.tasks[0].id == "a"


async def test_a_waiting_claim_is_woken_by_successors(bench: Bench) -> None:
    task = await bench.taken("a", kind="first")
    asking = asyncio.create_task(bench.claim(wait=30))
    await is_waiting(bench, 1)
    await bench.settle(task, then=[NewTask(kind="k", id="b")])
    (claimed,) = await until_done(asking)
    assert claimed.tasks[0].id == "b"


@pytest.mark.parametrize("when", ["before", "while"])
async def test_a_waiting_claim_gets_a_task_when_it_is_due(bench: Bench, when: str) -> None:
    due = datetime.fromtimestamp(bench.clock.wall + 5, UTC)
    if when == "before":
        await bench.put("a", at=due)
    asking = asyncio.create_task(bench.claim(wait=30))
    await is_waiting(bench, 1)
    if when == "while":
        await bench.put("a", at=due)
    await bench.later(5)
    (claimed,) = await until_done(asking)
    assert claimed.tasks[0].id == "a"


async def test_a_timer_wakes_a_claim_without_the_consumer(bench: Bench) -> None:
    asking = asyncio.create_task(bench.claim(wait=30))
    await is_waiting(bench, 1)
    await bench.put("a", at=datetime.fromtimestamp(bench.clock.wall + 0.05, UTC))
    bench.clock.advance(0.05)
    (claimed,) = await until_done(asking)
    assert claimed.tasks[0].id == "a"


async def test_a_waiting_claim_gets_a_task_whose_lease_ended(bench: Bench) -> None:
    await bench.taken("a", claim_timeout=10)
    asking = asyncio.create_task(bench.claim(wait=30))
    await is_waiting(bench, 1)
    await bench.later(10)
    (claimed,) = await until_done(asking)
    assert claimed.tasks[0].id == "a"


async def test_waiting_claims_are_served_first_come_first_served(bench: Bench) -> None:
    asking: list[asyncio.Task[Claimed]] = []
    for n in range(5):
        asking.append(asyncio.create_task(bench.claim(wait=30, limit=1)))
        await is_waiting(bench, n + 1)
    for n in range(5):
        await bench.put(f"t{n}")
    answers = await until_done(*asking)
    assert [answer.tasks[0].id for answer in answers] == [f"t{n}" for n in range(5)]


async def test_one_task_wakes_one_claim_and_leaves_the_others_waiting(bench: Bench) -> None:
    first = asyncio.create_task(bench.claim(wait=30, kinds=("k", "x")))
    await is_waiting(bench, 1)
    second = asyncio.create_task(bench.claim(wait=30, kinds=("k",)))
    await is_waiting(bench, 2)
    await bench.put("a")
    await until_done(first)
    await is_waiting(bench, 1)
    assert not second.done()
    await bench.put("b")
    (claimed,) = await until_done(second)
    assert claimed.tasks[0].id == "b"


async def test_as_many_are_tried_as_there_are_tasks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asking = [asyncio.create_task(bench.claim(wait=30, limit=1)) for _ in range(20)]
    await is_waiting(bench, 20)
    tried: list[int] = []
    room = bench.engine._long_polls
    attempt = room._attempt

    def attempted(asked: Any, done: Any) -> None:
        tried.append(asked.number)
        attempt(asked, done)

    monkeypatch.setattr(room, "_attempt", attempted)
    await bench.put("a", "b", "c")
    await until_done(*asking[:3])
    await is_waiting(bench, 17)
    assert tried == [1, 2, 3]
    for one in asking[3:]:
        one.cancel()


async def test_a_task_that_is_waited_for_is_accepted_and_handed_out_in_one_transaction(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = asyncio.create_task(bench.claim(wait=30))
    await is_waiting(bench, 1)
    seen: list[set[str]] = []
    commit = bench.engine.commit
    transact = commit._transact

    def transacted(jobs: Any) -> Any:
        seen.append({job.rank.name for job in jobs})
        return transact(jobs)

    monkeypatch.setattr(commit, "_transact", transacted)
    await bench.put("a")
    (claimed,) = await until_done(asking)
    assert [task.id for task in claimed.tasks] == ["a"]
    assert [ranks for ranks in seen if "claims" in ranks][-1] == {"schedules", "claims"}


async def test_what_the_first_leaves_goes_to_those_behind(bench: Bench) -> None:
    """The first takes what is more urgent, of a kind that nobody else wants."""
    first = asyncio.create_task(bench.claim(wait=30, limit=1, kinds=("j", "k")))
    await is_waiting(bench, 1)
    second = asyncio.create_task(bench.claim(wait=30, limit=1, kinds=("k",)))
    await is_waiting(bench, 2)
    await bench.engine.schedule([NewTask(kind="k", id="k1"), NewTask(kind="j", id="j1", priority=0)])
    answers = await until_done(first, second)
    assert [answer.tasks[0].id for answer in answers] == ["j1", "k1"]


async def test_whoever_leaves_passes_the_turn_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    first = asyncio.create_task(bench.claim(wait=30))
    await is_waiting(bench, 1)
    second = asyncio.create_task(bench.claim(wait=30))
    await is_waiting(bench, 2)
    room = bench.engine._long_polls
    held: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(room, "_attempt", lambda *attempt: held.append(attempt))
        patch.setattr(room, "expect", lambda arriving: None)  # it comes by another way than a schedule
        await bench.put("a")
        await is_waiting(bench, 1)
    # The first is to be tried for the task, and leaves before it is.
    first.cancel()
    await settled_down()
    room._attempt(*held[0])
    (claimed,) = await until_done(second)
    assert [task.id for task in claimed.tasks] == ["a"]


async def test_a_claim_keeps_its_place_when_it_was_tried_in_vain(bench: Bench) -> None:
    asking: list[asyncio.Task[Claimed]] = []
    for n in range(3):
        asking.append(asyncio.create_task(bench.claim(wait=30, limit=1)))
        await is_waiting(bench, n + 1)
    for _ in range(3):
        await bench.later(0.1)  # the consumer has the first tried
        await is_waiting(bench, 3)
    await bench.put("a")
    (claimed,) = await until_done(asking[0])
    assert claimed.tasks[0].id == "a"
    for one in asking[1:]:
        one.cancel()


async def test_everyone_is_told_when_the_next_is_due(bench: Bench) -> None:
    """The one that is tried takes what is due now; what is due later is for the one behind."""
    first = asyncio.create_task(bench.claim(wait=30, limit=1))
    await is_waiting(bench, 1)
    second = asyncio.create_task(bench.claim(wait=30, limit=1, kinds=("other", "k")))
    await is_waiting(bench, 2)
    later = datetime.fromtimestamp(bench.clock.wall + 5, UTC)
    await bench.engine.schedule([NewTask(kind="k", id="now"), NewTask(kind="k", id="later", at=later)])
    await until_done(first)
    await is_waiting(bench, 1)
    assert bench.engine._long_polls._due == {"k": bench.clock.wall + 5}
    await bench.later(5)
    (claimed,) = await until_done(second)
    assert claimed.tasks[0].id == "later"


async def test_a_transaction_hands_out_so_much_and_the_rest_in_the_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_MOST", 5)
    await bench.put(*(f"t{n:02}" for n in range(30)))
    with bench.engine.commit._wake:  # they share a transaction
        asking = [asyncio.create_task(bench.claim(limit=3)) for _ in range(10)]
        await settled_down()
    answers = await until_done(*asking)
    assert [task.id for answer in answers for task in answer.tasks] == [f"t{n:02}" for n in range(30)]


async def test_a_repeat_joins_the_claim_that_waits(bench: Bench) -> None:
    asking = [asyncio.create_task(bench.claim(wait=30, claim_id="c1", limit=1)) for _ in range(3)]
    await is_waiting(bench, 1)
    await bench.put("a", "b", "c")
    answers = await until_done(*asking)
    assert [[task.id for task in answer.tasks] for answer in answers] == [["a"]] * 3
    assert len({answer.tasks[0].token for answer in answers}) == 1


async def test_a_repeat_that_does_not_wait_ends_the_claim_that_does(bench: Bench) -> None:
    asking = asyncio.create_task(bench.claim(wait=30, claim_id="c1"))
    await is_waiting(bench, 1)
    again = asyncio.create_task(bench.claim(wait=0, claim_id="c1"))
    assert [answer.tasks for answer in await until_done(asking, again)] == [[], []]
    await bench.put("a")
    assert await bench.status("a") == "new"


async def test_a_claim_that_waits_is_answered_with_nothing_when_it_is_ended_and_granted_nothing_after(
    bench: Bench,
) -> None:
    asking = asyncio.create_task(bench.claim(wait=30, claim_id="c1"))
    await is_waiting(bench, 1)
    ending = asyncio.create_task(bench.claim(limit=0, wait=30, claim_id="c1"))
    assert [answer.tasks for answer in await until_done(asking, ending)] == [[], []]
    await bench.put("a")
    assert await bench.ids(claim_id="c1") == []
    assert await bench.status("a") == "new"


async def test_what_is_being_granted_as_a_claim_is_ended_is_told_to_the_call_that_ends_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.put("a")
    transaction, begun, go_on = bench.engine._store.transaction, threading.Event(), threading.Event()

    @contextmanager
    def slow() -> Iterator[Any]:
        with transaction() as tx:
            yield tx
            begun.set()
            go_on.wait(60)

    monkeypatch.setattr(bench.engine._store, "transaction", slow)
    asking = asyncio.create_task(bench.claim(wait=30, claim_id="c1"))
    await asyncio.to_thread(begun.wait, 60)
    ending = asyncio.create_task(bench.claim(limit=0, claim_id="c1"))
    await settled_down()
    go_on.set()
    asked, ended = await until_done(asking, ending)
    assert asked.tasks == []
    assert [task.id for task in ended.tasks] == ["a"]


async def test_a_claim_that_is_ended_is_told_its_tasks_without_reading_their_values(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.put("a", payload={"n": 1})
    (task,) = (await bench.claim(claim_id="c1")).tasks
    transaction = bench.engine._store.transaction

    @contextmanager
    def unread() -> Iterator[Any]:
        with transaction() as tx, monkeypatch.context() as patch:
            patch.setattr(type(tx), "contents", lambda *_: pytest.fail("values were read"))
            yield tx

    monkeypatch.setattr(bench.engine._store, "transaction", unread)
    (ended,) = (await bench.claim(claim_id="c1", limit=0)).tasks
    assert (ended.id, ended.token, ended.fence) == (task.id, task.token, task.fence)
    assert (bytes(ended.payload), bytes(ended.progress)) == (b"null", b"null")


async def test_a_repeat_that_comes_while_its_claim_is_being_ended_has_values(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not join the call that ends the claim: a body would run without its payload."""
    await bench.put("a", payload=[1])
    await bench.claim(claim_id="c1")
    ending = asyncio.create_task(bench.claim(claim_id="c1", limit=0))
    repeat = asyncio.create_task(bench.claim(claim_id="c1"))
    ended, again = await until_done(ending, repeat)
    assert [bytes(answer.tasks[0].payload) for answer in (ended, again)] == [b"null", b"[1]"]


async def test_a_claim_answers_empty_when_its_wait_is_over(bench: Bench) -> None:
    with anyio.fail_after(60):
        assert (await bench.claim(wait=0.05)).tasks == []
    await bench.put("a")
    assert await bench.ids() == ["a"]


async def test_a_commit_of_which_nobody_knows_how_it_ended_grants_a_claim_that_waits_no_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store failed after it had written: the requests are applied anew, and the claim finds what it got."""
    asking = asyncio.create_task(bench.claim(wait=30, limit=1))
    await is_waiting(bench, 1)
    transaction, ambiguous = bench.engine._store.transaction, iter([True])

    @contextmanager
    def written_and_failed() -> Iterator[Any]:
        with transaction() as tx:
            yield tx
        if next(ambiguous, False):
            raise Unavailable("the disk failed")

    monkeypatch.setattr(bench.engine._store, "transaction", written_and_failed)
    await bench.put("a", "b")
    (claimed,) = await until_done(asking)
    held = [task_id for task_id in ("a", "b") if await bench.status(task_id) == "claimed"]
    assert held == [task.id for task in claimed.tasks]


async def test_nothing_is_granted_to_a_claim_whose_caller_left(bench: Bench) -> None:
    asking = asyncio.create_task(bench.claim(wait=30, claim_id="c1"))
    await is_waiting(bench, 1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await bench.put("a")
    assert await bench.status("a") == "new"
    assert await bench.ids(claim_id="c2") == ["a"]


async def test_nothing_is_granted_to_a_claim_whose_caller_left_before_it_was_tried(bench: Bench) -> None:
    await bench.put("a")
    asking = asyncio.create_task(bench.claim(wait=30))
    # It is handed to the writer and given up in one breath; the writer must look again when it gets to it.
    bench.engine.commit._wake.acquire()
    try:
        await settled_down()
        asking.cancel()
        await settled_down()
    finally:
        bench.engine.commit._wake.release()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await bench.ids() == ["a"]


async def test_a_claim_goes_on_while_one_of_its_callers_waits(bench: Bench) -> None:
    asking = [asyncio.create_task(bench.claim(wait=30, claim_id="c1")) for _ in range(2)]
    await is_waiting(bench, 1)
    asking[0].cancel()
    await settled_down()
    await bench.put("a")
    (claimed,) = await until_done(asking[1])
    assert claimed.tasks[0].id == "a"


async def test_too_many_that_wait_are_told_to_come_later(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_poll, "_MOST", 2)
    asking = [asyncio.create_task(bench.claim(wait=30)) for _ in range(2)]
    await is_waiting(bench, 2)
    with pytest.raises(Throttled):
        await bench.claim(wait=30)
    assert (await bench.claim(wait=0)).tasks == []
    await bench.put("a", "b")
    await until_done(asking[0])
    asking[1].cancel()


async def test_claims_that_wait_leave_nothing_behind(bench: Bench) -> None:
    asking = [asyncio.create_task(bench.claim(wait=0.02, kinds=("k", f"x{n}"))) for n in range(20)]
    await until_done(*asking)
    room = bench.engine._long_polls
    assert (room._polls, room._parked, room._due) == ({}, {}, {})


async def test_when_waits_end_nobody_waits_any_more(bench: Bench) -> None:
    asking = [asyncio.create_task(bench.claim(wait=30)) for _ in range(3)]
    await is_waiting(bench, 3)
    bench.engine.end_waits()
    asking.append(asyncio.create_task(bench.claim(wait=30)))
    assert [claimed.tasks for claimed in await until_done(*asking)] == [[]] * 4


async def test_what_is_being_granted_when_waits_end_is_answered_with_its_tasks(bench: Bench) -> None:
    await bench.put("a")
    asking = asyncio.create_task(bench.claim(wait=30))
    await asyncio.sleep(0)  # the writer has it now
    bench.engine.end_waits()
    (claimed,) = await until_done(asking)
    assert [task.id for task in claimed.tasks] == ["a"]


async def test_those_who_wait_are_answered_when_the_engine_stops(bench: Bench) -> None:
    asking = asyncio.create_task(bench.claim(wait=30))
    await is_waiting(bench, 1)
    await bench.restart()
    (claimed,) = await until_done(asking)
    assert claimed.tasks == []


def encoded(claimed: Claimed) -> Any:
    return claimed.waited, [(t.id, t.token, t.ttl, t.fence, t.attempt, bytes(t.payload)) for t in claimed.tasks]
