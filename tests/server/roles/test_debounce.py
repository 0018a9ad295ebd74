"""Dedupe keys that end with their task, and submissions that replace what waits."""

from typing import Any

import pytest

from leasekit.errors import Refused
from leasekit.server.roles import gates
from leasekit.task import NewTask, Scheduled, Ticket
from leasekit.wire import GateRequest, PurgeRequest, RescheduleRequest
from tests.server.conftest import Bench, plain

pytestmark = pytest.mark.anyio


async def submit(bench: Bench, payload: Any = None, **options: Any) -> Scheduled:
    given: Any = {"kind": "k", "dedupe_key": "key", "delay": 10.0, "debounce": 60.0} | options
    (answer,) = await bench.engine.schedule([NewTask(payload=payload, **given)])
    return answer


async def test_a_live_key_is_free_once_its_task_has_ended(bench: Bench) -> None:
    (first,) = await bench.put("a", dedupe_key="key", dedupe_scope="live")
    (second,) = await bench.put("b", dedupe_key="key", dedupe_scope="live")
    assert (first.created, second.id, second.created) == (True, "a", False)
    task = await bench.take()
    (third,) = await bench.put("c", dedupe_key="key", dedupe_scope="live")
    assert (third.id, third.status) == ("a", "claimed")
    await bench.settle(task, "retry", retry_after=0)  # it runs again
    (fourth,) = await bench.put("d", dedupe_key="key", dedupe_scope="live")
    assert not fourth.created
    await bench.settle(await bench.take())
    await bench.restart()
    (fifth,) = await bench.put("e", dedupe_key="key", dedupe_scope="live")
    (sixth,) = await bench.put("f", dedupe_key="key")
    assert (fifth.created, sixth.id) == (True, "e")


async def test_no_end_removal_or_late_report_of_the_task_before_frees_the_key_of_the_next(bench: Bench) -> None:
    live: dict[str, Any] = {"dedupe_key": "key", "dedupe_scope": "live"}
    first = await bench.taken("a", **live)
    await bench.later(1000)  # its lease has ended …
    assert (await bench.cancel("a")).verdict == "cancelled"
    assert (await bench.put("b", **live))[0].created
    assert (await bench.settle(first)).verdict == "gone"  # … and its holder reports after all

    async def owner() -> str:
        (answer,) = await bench.put("c", **live)
        return answer.id

    assert await owner() == "b"
    assert (await bench.engine.operations.purge(PurgeRequest(ids=["a"]))).kinds == {"k": {"cancelled": 1}}
    assert await owner() == "b"
    await bench.take()
    await bench.later(1000)  # the lease of the owner ends, and not its life
    assert (await owner(), await bench.status("b")) == ("b", "enqueued")


async def test_a_key_for_as_long_as_the_task_is_kept_counts_beside_live_ones(bench: Bench) -> None:
    await bench.settle(await bench.taken("a", dedupe_key="key", dedupe_scope="live"))
    (kept,) = await bench.put("b", dedupe_key="key")
    assert (kept.id, kept.created) == ("a", False)


async def test_the_last_of_many_submissions_counts_and_waits_from_then_on(bench: Bench) -> None:
    first = await submit(bench, 1)
    bench.clock.advance(5)
    second = await submit(bench, 2)
    assert (first.created, first.replaced) == (True, False)
    assert (second.id, second.created, second.replaced, second.status) == (first.id, False, True, "new")
    await bench.restart()
    await bench.later(9)
    assert await bench.ids() == []
    await bench.later(1)
    task = await bench.take()
    assert (task.id, plain(task.payload), task.attempt) == (first.id, 2, 1)


async def test_it_is_not_put_off_for_longer_than_it_says(bench: Bench) -> None:
    first = await submit(bench, 0)
    for n in range(1, 13):
        await bench.later(5)
        assert (await submit(bench, n)).id == first.id
    task = await bench.take()  # 60 s after the first
    assert (task.id, plain(task.payload)) == (first.id, 12)
    assert (await submit(bench, delay=100.0)).created
    await bench.later(60)  # the first is not put off for longer either
    assert len(await bench.ids()) == 1


async def test_a_submission_while_the_task_runs_makes_another(bench: Bench) -> None:
    first = await submit(bench, 1, delay=0.0)
    task = await bench.take()
    second = await submit(bench, 2, delay=0.0)
    assert second.created
    third = await submit(bench, 3, delay=0.0)
    assert (third.id, third.replaced) == (second.id, True)
    await bench.settle(task, "retry", retry_after=0)
    granted = {task.id: plain(task.payload) for task in (await bench.claim()).tasks}
    assert granted == {first.id: 1, second.id: 3}  # what has run once keeps its payload: its checkpoint belongs to it


async def test_a_task_that_waits_for_its_next_attempt_keeps_its_payload(bench: Bench) -> None:
    first = await submit(bench, 1, delay=0.0)
    await bench.settle(await bench.take(), "retry", retry_after=5, progress=7)
    assert (await submit(bench, 2)).created
    await bench.later(5)
    task = await bench.take()
    assert (task.id, plain(task.payload), plain(task.progress)) == (first.id, 1, 7)


async def test_submissions_of_one_batch_are_one_task(bench: Bench) -> None:
    of: Any = {"kind": "k", "dedupe_key": "key", "debounce": 60.0}
    tasks = [NewTask(payload=n, delay=float(3 - n), **of) for n in range(3)]
    answers = await bench.engine.schedule(tasks)
    assert [answer.replaced for answer in answers] == [False, True, True]
    again = await bench.engine.schedule([NewTask(payload=n, delay=5.0, **of) for n in (7, 8)])
    assert {answer.id for answer in [*answers, *again]} == {answers[0].id}
    await bench.later(5)
    assert plain((await bench.take()).payload) == 8


@pytest.mark.parametrize("key", [None, "tenant"])
async def test_a_task_that_a_gate_has_parked_is_replaced(bench: Bench, key: str | None) -> None:
    first = await submit(bench, 1, delay=0.0, collection="c", key=key)
    gated = gates.Gated.collection("c")
    await bench.engine.operations.set_gate(gated.closed(GateRequest(), "w"))
    assert await bench.ids() == []
    assert (await submit(bench, 2, collection="c", key=key)).replaced
    await bench.engine.operations.set_gate(gated.opened("w"))
    await bench.later(1)
    assert await bench.ids() == []
    await bench.later(9)
    task = await bench.take()
    assert (task.id, plain(task.payload)) == (first.id, 2)


async def test_a_message_for_the_task_before_is_of_no_use(bench: Bench) -> None:
    first = await submit(bench, 1)
    fence = (await bench.info(first.id)).fence
    await submit(bench, 2)
    ticket = [Ticket(id=first.id, fence=fence)]
    claimed = await bench.engine.claim(worker="w", kinds=["k"], limit=1, wait=0, claim_id="t", tickets=ticket)
    assert claimed.tasks == []


async def test_a_repeat_of_the_submission_that_made_the_task_is_no_conflict(bench: Bench) -> None:
    await submit(bench, 1, id="a")
    await submit(bench, 2, id="b")
    repeated = await submit(bench, 1, id="a")
    assert (repeated.id, repeated.created, repeated.conflict, repeated.replaced) == ("a", False, False, False)
    assert plain((await bench.info("a")).payload) == 2  # an older submission replaces no newer one


async def test_a_reschedule_that_is_repeated_after_a_submission_changes_nothing(bench: Bench) -> None:
    task_id = (await submit(bench, 1)).id
    wanted = RescheduleRequest(delay=50, request_id="r")
    await bench.engine.operations.reschedule(task_id, wanted, by="ada")  # the answer was lost
    bench.clock.advance(1)
    await submit(bench, 2)
    at = (await bench.info(task_id)).at
    bench.clock.advance(1)
    again = await bench.engine.operations.reschedule(task_id, wanted, by="ada")
    assert again is not None
    assert (again.status, again.at, (await bench.info(task_id)).at) == ("new", at, at)
    await bench.later(9)
    assert plain((await bench.take()).payload) == 2


async def test_a_task_that_was_cancelled_is_not_replaced(bench: Bench) -> None:
    first = await submit(bench, 1)
    await bench.cancel(first.id)
    assert (await submit(bench, 2)).created


@pytest.mark.parametrize(
    "options",
    [
        {"debounce": 1.0},
        {"dedupe_scope": "live"},
        {"debounce": 1.0, "dedupe_key": "k", "dedupe_scope": "live"},
        {"debounce": 1.0, "dedupe_key": "k", "after": ["a"]},
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused(options: Any) -> None:
    with pytest.raises((ValueError, Refused), match=r"give one|leave them out"):
        NewTask(kind="k", **options)
