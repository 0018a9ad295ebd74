"""Ordered keys: the tasks of one key run one after another, whatever becomes of a run, and hold no other key up."""

import asyncio
from random import Random
from typing import Any

import pytest

from leasekit.errors import Refused
from leasekit.server.roles.gates import GateChange
from leasekit.task import FixedDelays, KindSettings, Outcome, Task, Ticket
from leasekit.wire import RedriveRequest, RescheduleRequest
from tests.sampling import slow_after
from tests.server.conftest import Bench

pytestmark = pytest.mark.anyio

HOUR = 3600.0


async def order(bench: Bench, **settings: Any) -> None:
    await bench.engine.operations.set_kind("k", KindSettings(ordered=True, **settings), by="ada")


async def put(bench: Bench, *ids: str, **options: Any) -> None:
    """Schedule tasks whose key is the first letter of the id."""
    for task_id in ids:
        await bench.put(task_id, **{"key": task_id[0], **options})


async def fail(bench: Bench, task: Task, after: float = HOUR) -> None:
    await bench.settle(task, "retry", retry_after=after)


async def test_while_a_task_waits_for_its_retry_the_others_of_its_key_wait_too_and_other_keys_go_on(
    bench: Bench,
) -> None:
    await order(bench)
    await put(bench, "a1", "a2", "b1", "b2")
    held = (await bench.claim()).tasks
    assert sorted(task.id for task in held) == ["a1", "b1"]
    for task in held:
        await (fail(bench, task) if task.id == "a1" else bench.settle(task))
    await bench.settle(await bench.take())
    assert [await bench.status("b2"), await bench.ids()] == ["success", []]
    await bench.restart()
    await bench.later(HOUR - 60)
    assert await bench.ids() == []
    await bench.later(61)
    again = await bench.take()
    assert (again.id, again.attempt) == ("a1", 2)
    assert await bench.ids() == []
    await bench.settle(again)
    assert await bench.ids() == ["a2"]


@pytest.mark.parametrize("outcome", ["retry", "release", "crash", "expired"])
async def test_a_task_that_runs_again_goes_before_the_later_ones_of_its_key(bench: Bench, outcome: str) -> None:
    await order(bench)
    await put(bench, "a1", "a2", claim_timeout=10.0, heartbeat_timeout=10.0, retry=FixedDelays(waits=[0.0]))
    first = await bench.take()
    await bench.later(1)
    if outcome == "expired":
        await bench.later(10)
    else:
        ended: Outcome = outcome  # type: ignore[assignment]
        await bench.settle(first, ended)
    await bench.later(1)
    again = await bench.take()
    assert again.id == "a1"
    assert await bench.ids() == []


@pytest.mark.parametrize("outcome", ["success", "fatal", "retry", "release"])
async def test_the_next_task_of_a_key_starts_when_the_last_run_has_ended(bench: Bench, outcome: Outcome) -> None:
    await order(bench, max_attempts=2)
    await put(bench, "a1")
    await put(bench, "a2", priority=1)
    await put(bench, "a3", priority=3)
    await bench.settle(await bench.take())
    await fail(bench, await bench.take())
    assert await bench.ids() == []
    await bench.later(HOUR)
    again = await bench.take()
    if outcome == "release":
        await bench.cancel("a1")
    await bench.settle(again, outcome)
    assert [await bench.status(task_id) for task_id in ("a1", "a2")] == [
        {"success": "success", "fatal": "fatal_failure", "retry": "dead", "release": "cancelled"}[outcome],
        "success",
    ]
    assert await bench.ids() == ["a3"]


@pytest.mark.parametrize("priority", [0, 2, 4])
async def test_a_claim_that_waits_hears_that_a_task_that_was_to_run_again_was_cancelled(
    bench: Bench, priority: int
) -> None:
    await order(bench)
    await put(bench, "a1")
    await fail(bench, await bench.take())
    await put(bench, "a2", priority=priority)
    assert await bench.ids() == []
    waiting = asyncio.create_task(bench.ids(wait=30))
    while "k" not in bench.engine._long_polls.kinds():  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0)
    await bench.cancel("a1")
    assert await asyncio.wait_for(waiting, 20) == ["a2"]


async def test_a_task_that_was_to_run_again_and_is_dropped_lets_its_key_go_on(bench: Bench) -> None:
    await order(bench)
    await put(bench, "a1")
    await fail(bench, await bench.take(), after=1)
    await put(bench, "a2", delay=HOUR)
    await bench.later(2)
    await bench.engine.operations.set_gate(GateChange("kind", "k", "drop", None, None, None, None))
    await bench.engine.tick()
    assert await bench.status("a1") == "cancelled"
    await bench.engine.operations.set_gate(GateChange("kind", "k", "open", None, None, None, None))
    await bench.later(HOUR)
    assert await bench.ids() == ["a2"]


async def test_a_task_keeps_its_place_when_its_wait_is_changed(bench: Bench) -> None:
    await order(bench)
    await put(bench, "a1", "a2")
    await fail(bench, await bench.take())
    operations = bench.engine.operations
    await operations.reschedule("a1", RescheduleRequest(priority=4), by="ada")
    await operations.reschedule("a1", RescheduleRequest(delay=2 * HOUR), by="ada")
    assert await bench.ids() == []
    await bench.later(HOUR + 1)
    assert await bench.ids() == []
    await operations.reschedule("a1", RescheduleRequest(delay=0), by="ada")
    assert await bench.ids() == ["a1"]


async def test_a_task_of_a_closed_collection_keeps_its_place(bench: Bench) -> None:
    await order(bench)
    await put(bench, "a1", collection="c")
    await put(bench, "a2")
    await fail(bench, await bench.take(), after=1)
    await bench.engine.operations.set_gate(GateChange("collection", "c", "pause", None, None, None, None))
    await bench.later(2)
    assert await bench.ids() == []
    assert await bench.ids() == []
    await bench.engine.operations.set_gate(GateChange("collection", "c", "open", None, None, None, None))
    assert await bench.ids() == ["a1"]


async def test_a_redriven_task_is_a_new_one_of_its_key(bench: Bench) -> None:
    await order(bench, max_attempts=2)
    await put(bench, "a1", "a2", "a3")
    await fail(bench, await bench.take(), after=0)
    await fail(bench, await bench.take(), after=0)
    assert await bench.status("a1") == "dead"
    await bench.later(1)
    await bench.engine.operations.redrive(RedriveRequest(ids=["a1"]))
    await bench.later(1)
    assert await bench.ids() == ["a2"]
    assert await bench.ids() == []


async def test_no_place_is_kept_once_the_order_is_given_up(bench: Bench) -> None:
    await order(bench)
    await put(bench, "a1", "a2", "b1")
    for _ in "ab":
        await fail(bench, await bench.take(), after=60)
    await bench.engine.operations.set_kind("k", KindSettings(key_concurrency=1), by="ada")
    held = await bench.take()
    assert (held.id, await bench.ids()) == ("a2", [])
    await order(bench)
    await bench.later(60)
    assert await bench.ids() == ["b1"]
    await bench.settle(held)
    assert await bench.ids() == ["a1"]


async def test_of_the_tasks_of_a_key_that_ran_before_it_was_ordered_one_runs_again_at_a_time(bench: Bench) -> None:
    await put(bench, "a1", "a2", "a3")
    held = (await bench.claim()).tasks
    await order(bench)
    for task in held:
        await fail(bench, task, after=60)
    await bench.later(60)
    for _ in held:
        again = await bench.take()
        assert await bench.ids() == []
        await bench.settle(again)


async def test_a_message_of_a_queue_entitles_to_a_task_that_keeps_its_place_and_to_no_other_of_its_key(
    bench: Bench,
) -> None:
    await order(bench)
    await put(bench, "a1", "a2")
    first = await bench.take()
    await fail(bench, first, after=1)
    await bench.later(2)
    claimed = await bench.claim(tickets=[Ticket(id="a2", fence=0), Ticket(id="a1", fence=first.fence)])
    assert [task.id for task in claimed.tasks] == ["a1"]


async def test_tasks_that_require_labels_cannot_be_ordered_by_a_key(bench: Bench) -> None:
    await order(bench)
    with pytest.raises(Refused, match="run in order"):
        await put(bench, "a1", requires={"gpu": "yes"})
    await bench.put("free", requires={"gpu": "yes"})
    await put(bench, "a2")


@pytest.mark.parametrize("other", [{"key_concurrency": 1}, {"key_rate": 1.0}], ids=str)
def test_other_limits_of_keys_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="leave out"):
        KindSettings(ordered=True, **other)
    assert KindSettings(ordered=False, **other).ordered is False


@pytest.mark.slow_with("postgres")
@pytest.mark.parametrize("seed", slow_after(1, range(4)))
async def test_the_tasks_of_each_key_run_in_order_through_random_histories(bench: Bench, seed: int) -> None:
    random = Random(seed)
    await order(bench, max_attempts=4, max_crashes=3)
    names = [f"{key}{number:02}" for number in range(8) for key in "abc"]
    await put(bench, *names, claim_timeout=10.0, heartbeat_timeout=10.0)
    begun: list[str] = []
    held: list[Task] = []
    while [name for name in names if not (await bench.info(name)).status.ended]:
        for task in (await bench.claim(limit=random.randint(1, 4))).tasks:
            before = [name for name in names if name[0] == task.id[0] and name < task.id]
            assert {name for name in before if not (await bench.info(name)).status.ended} == set(), task.id
            begun.append(task.id)
            held.append(task)
        match random.randrange(6):
            case 0:
                await bench.later(random.choice([1, 11]))
            case 1:
                await bench.cancel(random.choice(names))
            case 2 if not random.randrange(4):
                await bench.restart()
            case _ if held:
                outcome: Outcome = random.choice(("success", "retry", "release", "crash", "fatal"))
                task = held.pop(random.randrange(len(held)))
                await bench.settle(task, outcome, retry_after=3.0 if outcome == "retry" else None)
            case _:
                await bench.later(2)
    assert len(begun) > len(set(begun))
