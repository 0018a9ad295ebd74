"""Reschedules: another due time or priority for a task that waits, whatever it waits for."""

from datetime import UTC, datetime
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from leasekit.errors import Refused
from leasekit.server.access import KindPatterns
from leasekit.server.roles import gates
from leasekit.server.roles.rescheduling import Answer
from leasekit.task import KindSettings, NewTask, Rescheduled, Ticket
from leasekit.wire import GateRequest, RedriveRequest, RescheduleRequest
from tests.server.conftest import Bench, plain

pytestmark = pytest.mark.anyio


async def reschedule(bench: Bench, task_id: str, **wanted: Any) -> Answer:
    return await bench.engine.operations.reschedule(task_id, RescheduleRequest(**wanted), by="ada")


async def refusal(bench: Bench, task_id: str) -> str:
    with pytest.raises(Refused) as refused:
        await reschedule(bench, task_id, delay=0)
    return str(refused.value)


async def close(bench: Bench, collection: str, mode: Any = "pause") -> None:
    await bench.engine.operations.set_gate(gates.Gated.collection(collection).closed(GateRequest(mode=mode), "w"))


async def open_(bench: Bench, collection: str) -> None:
    await bench.engine.operations.set_gate(gates.Gated.collection(collection).opened("w"))


async def test_a_task_of_later_can_be_due_now(bench: Bench) -> None:
    await bench.put("a", delay=600)
    answer = await reschedule(bench, "a", delay=0)
    at = datetime.fromtimestamp(bench.clock.wall, UTC)
    assert answer == Rescheduled(id="a", status="new", at=at, priority=2)  # type: ignore[arg-type]
    assert await bench.ids() == ["a"]
    assert (await bench.info("a")).at == at


async def test_a_task_that_is_due_can_be_put_off(bench: Bench) -> None:
    await bench.put("a")
    at = datetime.fromtimestamp(bench.clock.wall + 60, UTC)
    await reschedule(bench, "a", at=at)
    assert await bench.ids() == []
    assert (await bench.info("a")).at == at
    await bench.restart()
    await bench.later(60)
    assert await bench.ids() == ["a"]
    assert (await bench.info("a")).at == at


async def test_a_claim_that_waits_is_told(bench: Bench) -> None:
    await bench.put("a", delay=600)
    async with anyio.create_task_group() as group:
        granted: list[str] = []

        async def claim() -> None:
            granted.extend(await bench.ids(wait=60))

        group.start_soon(claim)
        while not bench.engine.claims_waiting:
            await anyio.lowlevel.checkpoint()
        await reschedule(bench, "a", delay=0)
    assert granted == ["a"]


async def test_a_retry_that_waits_can_be_due_now_and_keeps_its_attempts_and_its_error(bench: Bench) -> None:
    task = await bench.taken("a")
    await bench.settle(task, "retry", error={"type": "OSError", "message": "full"}, retry_after=600)
    await reschedule(bench, "a", delay=0)
    info = await bench.info("a")
    assert (info.status, info.attempt, plain(info.error)["type"]) == ("retriable_failure", 1, "OSError")
    assert (await bench.engine.queries.list_tasks(error_type="OSError")).tasks[0].id == "a"
    assert (await bench.take()).attempt == 2


@pytest.mark.parametrize("key", [None, "tenant"])
async def test_a_task_goes_to_the_lane_of_its_new_priority(bench: Bench, key: str | None) -> None:
    await bench.put("a", "b", "c", key=key)
    await reschedule(bench, "c", priority=0)
    await reschedule(bench, "a", priority=4)
    assert [(await bench.info(name)).priority for name in "abc"] == [4, 2, 0]
    if key is None:  # else the next process would mend the queues of keys
        await bench.restart()
    granted = (await bench.claim()).tasks
    assert [(task.id, task.priority) for task in granted] == [("c", 0), ("b", 2), ("a", 4)]


async def test_a_task_with_a_key_is_put_off_and_is_due_in_its_queue(bench: Bench) -> None:
    await bench.put("a", "b", key="tenant")
    await reschedule(bench, "a", delay=60)
    assert await bench.ids() == ["b"]
    await bench.later(60)
    assert await bench.ids() == ["a"]


async def test_a_key_at_its_limit_holds_for_a_task_that_is_due_now(bench: Bench) -> None:
    await bench.engine.operations.set_kind("k", KindSettings(key_concurrency=1), by=None)
    await bench.put("a", "b", key="tenant")
    running = await bench.take()
    assert await bench.ids() == []  # by now the key has left its lane
    await reschedule(bench, "b", delay=0, priority=0)
    assert await bench.ids() == []
    await bench.settle(running)
    assert await bench.ids() == ["b"]


async def test_a_task_that_waits_for_others_goes_on_waiting_and_is_due_then(bench: Bench) -> None:
    await bench.put("a")
    await bench.put("b", kind="l", after=["a"])
    await reschedule(bench, "b", delay=0)
    assert await bench.ids(kinds=("l",)) == []
    answer = await reschedule(bench, "b", delay=60, priority=1)
    assert isinstance(answer, Rescheduled)
    assert answer.at.timestamp() == bench.clock.wall + 60
    assert await bench.ids(kinds=("l",)) == []
    await bench.settle(await bench.take())
    assert await bench.ids(kinds=("l",)) == []
    await bench.later(60)
    assert [(task.id, task.priority) for task in (await bench.claim(kinds=("l",))).tasks] == [("b", 1)]


async def test_a_task_that_a_gate_has_parked_waits_behind_it_until_its_new_time(bench: Bench) -> None:
    await bench.put("a", "b", collection="c")
    await close(bench, "c")
    assert await bench.ids() == []  # both are parked
    await reschedule(bench, "a", delay=60)
    await reschedule(bench, "b", priority=0)
    assert (await bench.info("b")).at.timestamp() == bench.clock.wall
    assert await bench.ids() == []
    await open_(bench, "c")
    await bench.later(1)
    assert await bench.ids() == ["b"]
    await bench.later(59)
    assert await bench.ids() == ["a"]


@pytest.mark.parametrize("kinds", [None, KindPatterns(["others"])])
async def test_a_request_that_changes_nothing_leaves_a_parked_task_behind_its_gate(
    bench: Bench, kinds: KindPatterns | None
) -> None:
    await bench.put("a", collection="c")
    await close(bench, "c")
    wanted = RescheduleRequest(delay=0, request_id="r")
    await bench.engine.operations.reschedule("a", wanted, by="ada")  # the answer was lost
    assert await bench.ids() == []  # it is parked
    await bench.engine.operations.reschedule("a", wanted, by="ada", kinds=kinds)
    await open_(bench, "c")
    await bench.later(1)
    assert await bench.ids() == ["a"]


async def test_a_message_that_was_sent_before_brings_no_later_time_forward(bench: Bench) -> None:
    task = await bench.taken("a")
    await bench.settle(task, "release")
    fence = (await bench.info("a")).fence
    await reschedule(bench, "a", delay=60)
    ticket = [Ticket(id="a", fence=fence)]
    claimed = await bench.engine.claim(worker="w", kinds=["k"], limit=1, wait=0, claim_id="t", tickets=ticket)
    assert claimed.tasks == []


async def test_a_task_whose_lease_has_ended_waits_and_its_late_result_counts(bench: Bench) -> None:
    task = await bench.taken("a")
    bench.clock.advance(301)
    await reschedule(bench, "a", delay=60)
    assert await bench.ids() == []
    assert (await bench.settle(task)).verdict == "settled"
    info = await bench.info("a")
    assert (info.status, info.crashes) == ("success", 0)
    assert [(entry.fence, entry.outcome) for entry in info.history] == [(1, "success"), (2, "rescheduled")]


async def test_the_history_has_the_last_of_the_reschedules_between_two_runs(bench: Bench) -> None:
    await bench.put("a")
    for seconds in (10, 20, 0):
        await reschedule(bench, "a", delay=seconds, priority=1)
    task = await bench.take()
    await bench.settle(task, "release")
    await reschedule(bench, "a", priority=3)
    info = await bench.info("a")
    assert [(entry.outcome, entry.worker) for entry in info.history] == [
        ("rescheduled", "ada"), ("release", "w"), ("rescheduled", "ada"),
    ]  # fmt: skip
    assert plain(info.history[-1].result)["priority"] == 3


async def test_a_repeated_request_changes_nothing(bench: Bench) -> None:
    await bench.put("a")
    first = await reschedule(bench, "a", delay=60, request_id="r")
    bench.clock.advance(1)
    assert await reschedule(bench, "a", delay=60, request_id="r") == first
    await bench.later(59)
    task = await bench.take()
    again = await reschedule(bench, "a", delay=60, request_id="r")  # the first answer was lost, and it runs by now
    assert isinstance(again, Rescheduled)
    assert (again.status, again.at) == ("claimed", first.at if isinstance(first, Rescheduled) else None)
    assert (await bench.settle(task)).verdict == "settled"


async def test_what_does_not_wait_is_refused_with_what_to_do(bench: Bench) -> None:
    assert await reschedule(bench, "nobody", delay=0) is None
    task = await bench.taken("a")
    assert await refusal(bench, "a") == (
        "task 'a' is claimed, held by worker 'w', and only a task that waits can be rescheduled: cancel it, or ask "
        "again once it waits"
    )
    await bench.settle(task)
    assert await refusal(bench, "a") == (
        "task 'a' has ended (success), and only a task that waits can be rescheduled: schedule another under a new id"
    )
    await bench.settle(await bench.taken("b"), "fatal")
    assert (await refusal(bench, "b")).endswith("redrive it")
    await bench.engine.schedule([NewTask(kind="named:x", id="named:x")])
    assert "stands for the lease of a name" in await refusal(bench, "named:x")


async def test_a_redrive_after_a_late_result_has_a_fence_of_its_own(bench: Bench) -> None:
    task = await bench.taken("a")
    bench.clock.advance(301)
    await reschedule(bench, "a", delay=60)
    await bench.settle(task, "fatal")
    (verdict,) = (await bench.engine.operations.redrive(RedriveRequest(ids=["a"]))).tasks
    assert verdict.verdict == "redriven"
    assert [entry.fence for entry in (await bench.info("a")).history] == [1, 2, 3]


async def test_an_event_tells_of_it(bench: Bench) -> None:
    await bench.put("a", delay=60)
    stream = bench.engine.feed.follow()
    assert await anext(stream)
    await reschedule(bench, "a", delay=0)
    heard = b""
    while b"rescheduled" not in heard:
        heard += await anext(stream)
    await stream.aclose()
