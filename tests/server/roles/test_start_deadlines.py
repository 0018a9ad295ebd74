"""Start deadlines: a task that has not begun in time is dropped, whatever it waits for."""

from datetime import timedelta
from typing import Any

import pytest

from leasekit.server.roles import start_deadlines
from leasekit.server.roles.gates import GateChange
from leasekit.task import KindSettings, NewTask, Ticket
from leasekit.wire import RedriveRequest, RescheduleRequest
from tests.server.conftest import Bench

pytestmark = pytest.mark.anyio

LATE = "it had not begun in time: start_deadline is 60 s"


async def end(bench: Bench, task_id: str) -> tuple[str, str | None]:
    info = await bench.info(task_id)
    return info.status.value, info.reason


async def test_a_claim_grants_no_task_too_late_also_between_two_looks(bench: Bench) -> None:
    await bench.put("late", start_deadline=60.0)
    await bench.put("other")
    bench.clock.advance(60)
    assert await bench.ids() == ["other"]
    assert await end(bench, "late") == ("dropped", LATE)


async def test_a_task_is_granted_until_its_deadline(bench: Bench) -> None:
    await bench.put("a", start_deadline=60.0)
    await bench.later(59.9)
    assert await bench.ids() == ["a"]


async def test_the_deadline_counts_from_the_due_time(bench: Bench) -> None:
    await bench.put("a", start_deadline=60.0, delay=100.0)
    info = await bench.info("a")
    assert info.start_by == info.at + timedelta(seconds=60)
    await bench.later(159)
    assert await bench.ids() == ["a"]


async def test_a_task_for_which_no_worker_asks_is_dropped_by_the_consumer(bench: Bench) -> None:
    await bench.put("a", start_deadline=60.0)
    await bench.later(60)
    assert await end(bench, "a") == ("dropped", LATE)


async def test_many_late_tasks_are_dropped_in_batches(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_deadlines, "_STEP", 2)
    await bench.put(*"abc", start_deadline=60.0)
    await bench.later(60)
    assert [await bench.status(name) for name in "abc"] == ["dropped", "dropped", "new"]
    await bench.later(1)
    assert await bench.status("c") == "dropped"


@pytest.mark.parametrize("waits_for", ["another", "kind", "collection"])
async def test_whatever_a_task_waits_for_it_is_dropped(bench: Bench, waits_for: str) -> None:
    await bench.taken("first")
    scope, name = ("kind", "k") if waits_for == "kind" else ("collection", "c")
    if waits_for != "another":
        await bench.engine.operations.set_gate(GateChange(scope, name, "pause", None, None, None, "ada"))
    after = ["first"] if waits_for == "another" else []
    await bench.put("late", collection="c", after=after, start_deadline=60.0)
    assert await bench.ids() == []  # a claim parks tasks of a closed collection
    await bench.later(60)
    assert await end(bench, "late") == ("dropped", LATE)
    if waits_for != "another":
        await bench.engine.operations.set_gate(GateChange(scope, name, "open", None, None, None, "ada"))
    await bench.later(1)
    assert await bench.ids() == []


async def test_what_runs_after_a_dropped_task_is_dropped_too(bench: Bench) -> None:
    await bench.put("late", start_deadline=60.0)
    await bench.put("follower", after=["late"])
    await bench.later(60)
    assert await end(bench, "follower") == ("dropped", '"late", which it was to run after, ended as dropped')


async def test_a_task_that_has_begun_is_not_dropped_when_it_runs_again(bench: Bench) -> None:
    task = await bench.taken("a", start_deadline=60.0)
    await bench.beat(task)
    await bench.settle(task, "release")
    task = await bench.take()  # a second claim, which has not begun
    await bench.settle(task, "release")
    await bench.later(100)
    assert await bench.ids() == ["a"]


async def test_a_retry_of_a_run_that_was_too_short_for_a_heartbeat_is_not_dropped(bench: Bench) -> None:
    await bench.settle(await bench.taken("a", start_deadline=60.0), "retry", retry_after=0)
    await bench.later(100)
    assert await bench.ids() == ["a"]
    await bench.later(1)
    assert (await bench.info("a")).start_by is None


async def test_a_task_that_a_worker_gives_back_from_its_buffer_too_late_is_dropped(bench: Bench) -> None:
    task = await bench.taken("a", start_deadline=60.0)
    await bench.beat(task, started=False)
    await bench.later(60)
    assert await bench.status("a") == "claimed"  # granted in time
    await bench.later(1)  # the regular look meets it again
    await bench.settle(task, "release")
    assert await bench.ids() == []
    assert await end(bench, "a") == ("dropped", LATE)


async def test_a_task_whose_lease_expires_before_it_has_begun_is_dropped_if_it_is_too_late(bench: Bench) -> None:
    await bench.taken("a", start_deadline=60.0, heartbeat_timeout=61.0)
    await bench.later(60)
    await bench.later(2)
    assert await bench.ids() == []
    assert await end(bench, "a") == ("dropped", LATE)


async def test_tasks_in_the_buffers_of_workers_hold_up_no_late_task(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_deadlines, "_STEP", 2)
    await bench.put(*"abc", start_deadline=60.0)
    assert await bench.ids(limit=3) == [*"abc"]
    await bench.put("late", start_deadline=60.0)
    await bench.later(60)
    assert await end(bench, "late") == ("dropped", LATE)


async def test_a_task_whose_handler_has_crashed_before_its_first_heartbeat_is_not_dropped(bench: Bench) -> None:
    await bench.settle(await bench.taken("a", start_deadline=60.0), "crash")
    await bench.later(100)
    assert await bench.ids() == ["a"]


async def test_a_message_of_a_queue_brings_no_late_task(bench: Bench) -> None:
    await bench.put("a", start_deadline=60.0)
    bench.clock.advance(60)
    claimed = await bench.engine.claim(
        worker="w", kinds=["k"], limit=1, wait=0, claim_id="t", tickets=[Ticket(id="a", fence=0)]
    )
    assert claimed.tasks == []
    assert await end(bench, "a") == ("dropped", LATE)


@pytest.mark.parametrize("how", ["reschedule", "debounce"])
async def test_another_due_time_moves_the_deadline(bench: Bench, how: str) -> None:
    options: dict[str, Any] = {"dedupe_key": "key", "debounce": 3600.0, "start_deadline": 60.0}
    await bench.put("a", **options)
    if how == "reschedule":
        await bench.engine.operations.reschedule("a", RescheduleRequest(delay=100.0), by="ada")
    else:
        await bench.put("b", delay=100.0, **options)
    await bench.later(159)
    assert await bench.ids() == ["a"]


async def test_another_priority_does_not_move_it(bench: Bench) -> None:
    await bench.put("a", start_deadline=60.0)
    before = (await bench.info("a")).start_by
    bench.clock.advance(30)
    await bench.engine.operations.reschedule("a", RescheduleRequest(priority=0), by="ada")
    assert (await bench.info("a")).start_by == before


async def test_a_kind_can_set_it_and_a_submission_can_undo_that(bench: Bench) -> None:
    await bench.engine.operations.set_kind("k", KindSettings(start_deadline=60.0), by="ada")
    await bench.put("late")
    await bench.put("patient", start_deadline=None)
    await bench.later(60)
    assert await bench.ids() == ["patient"]
    assert await end(bench, "late") == ("dropped", LATE)


async def test_a_name_has_none(bench: Bench) -> None:
    await bench.engine.schedule([NewTask(kind="named:n", id="named:n", start_deadline=1.0)])
    await bench.later(10)
    assert (await bench.info("named:n")).status.value == "new"


async def test_a_redriven_task_has_all_the_time(bench: Bench) -> None:
    await bench.put("a", start_deadline=60.0)
    await bench.later(60)
    await bench.engine.operations.redrive(RedriveRequest(ids=["a"]))
    await bench.later(100)
    assert await bench.ids() == ["a"]


async def test_a_task_that_has_failed_for_good_is_not_dropped_in_its_new_life(bench: Bench) -> None:
    await bench.put("a", start_deadline=60.0)
    await bench.settle(await bench.take(), "fatal")
    await bench.engine.operations.redrive(RedriveRequest(ids=["a"]))
    await bench.later(100)
    assert await bench.ids() == ["a"]


async def test_deadlines_outlive_a_restart(bench: Bench) -> None:
    await bench.put("a", start_deadline=60.0)
    bench.clock.advance(60)
    await bench.restart()
    await bench.later(0)
    assert await end(bench, "a") == ("dropped", LATE)
