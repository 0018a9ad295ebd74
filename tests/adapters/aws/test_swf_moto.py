"""SWF as moto plays it: a whole workflow, with boto3 as its decider. (What moto lacks is in the other files.)"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

import leasekit
import leasekit_swf
from leasekit import LeaseLost, Refused, Task
from leasekit.backend import Backend
from leasekit.task import Beat, Outcome, Settlement, Verdict
from leasekit_aws import close_all

pytestmark = pytest.mark.anyio
TIMEOUTS = {
    f"defaultTask{name}Timeout": "600" for name in ("Heartbeat", "ScheduleToClose", "ScheduleToStart", "StartToClose")
}


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def swf(moto: str, credentials: None) -> Iterator[Any]:
    """A domain of its own, whose workflow is started and asks for one activity."""
    client = boto3.client("swf", endpoint_url=moto)
    client.domain = uuid.uuid4().hex  # type: ignore[attr-defined]
    domain = client.domain  # type: ignore[attr-defined]
    client.register_domain(name=domain, workflowExecutionRetentionPeriodInDays="1")
    client.register_workflow_type(
        domain=domain,
        name="order",
        version="1",
        defaultTaskList={"name": "decisions"},
        defaultChildPolicy="TERMINATE",
        defaultTaskStartToCloseTimeout="600",
        defaultExecutionStartToCloseTimeout="600",
    )
    client.register_activity_type(domain=domain, name="resize", version="1", **TIMEOUTS)  # type: ignore[arg-type]
    client.start_workflow_execution(domain=domain, workflowId="order-1", workflowType={"name": "order", "version": "1"})
    decide(client, "first")
    yield client
    close_all()
    client.close()


@pytest.fixture
async def backend(moto: str, swf: Any) -> AsyncIterator[Backend]:
    backend = leasekit_swf.connect(f"swf://{swf.domain}/images?endpoint={moto}&ttl=600", worker="w")
    yield backend
    await backend.aclose()


def decide(swf: Any, input_: str) -> Any:
    """What its decider does: look at the history, schedule the activity. Returns what it has seen of the last one."""
    task = swf.poll_for_decision_task(domain=swf.domain, taskList={"name": "decisions"})
    schedule = {
        "activityType": {"name": "resize", "version": "1"},
        "activityId": f"resize-{input_}",  # moto lets none be used twice, SWF does once the former has ended
        "taskList": {"name": "images"},
        "input": input_,
    }
    decision = {"decisionType": "ScheduleActivityTask", "scheduleActivityTaskDecisionAttributes": schedule}
    swf.respond_decision_task_completed(taskToken=task["taskToken"], decisions=[decision])
    ends = ("activityTaskCompletedEventAttributes", "activityTaskFailedEventAttributes")
    return [event[end] for event in task["events"] for end in ends if end in event]


async def claimed(backend: Backend) -> Task:
    (task,) = (await backend.claim(["resize"], limit=1, wait=20, claim_id="c")).tasks
    return task


async def settled(backend: Backend, task: Task, outcome: Outcome, **more: Any) -> Verdict:
    (verdict,) = await backend.settle([Settlement(id=task.id, token=task.token, outcome=outcome, **more)])
    return verdict


async def test_a_task_is_claimed_beaten_and_completed(backend: Backend, swf: Any) -> None:
    task = await claimed(backend)
    assert task.id.startswith("order-1:")
    assert (task.kind, task.payload, task.ttl) == ("resize", "first", 600)
    (verdict,) = await backend.beat([Beat(id=task.id, token=task.token, progress={"page": 1})])
    assert (verdict.verdict, verdict.ttl, verdict.cancel_requested) == ("renewed", 600, False)
    assert (await settled(backend, task, "success", result=[1])).verdict == "settled"
    (seen,) = await asyncio.to_thread(decide, swf, "again")
    assert seen["result"] == "[1]"


async def test_a_failure_tells_the_decider_why_and_fences_grow_within_a_run(backend: Backend, swf: Any) -> None:
    first = await claimed(backend)
    assert (await settled(backend, first, "retry", error={"type": "E"}, retry_after=5.0)).verdict == "settled"
    (seen,) = await asyncio.to_thread(decide, swf, "again")
    assert (seen["reason"], seen["details"]) == ("retry", '{"error":{"type":"E"},"retry_after":5.0}')
    second = await claimed(backend)
    assert second.id.rpartition(":")[0] == first.id.rpartition(":")[0]
    assert second.fence > first.fence
    assert second.token != first.token


async def test_a_beat_after_the_end_is_gone(backend: Backend) -> None:
    task = await claimed(backend)
    await settled(backend, task, "success")
    (verdict,) = await backend.beat([Beat(id=task.id, token=task.token)])
    assert (verdict.verdict, verdict.reason) == ("gone", "settled")


async def test_what_somebody_else_has_ended_is_gone(backend: Backend, swf: Any) -> None:
    task = await claimed(backend)
    swf.respond_activity_task_completed(taskToken=task.token)
    assert (await settled(backend, task, "success")).verdict == "gone"


async def test_an_unknown_domain_is_refused(moto: str, credentials: None) -> None:
    nowhere = leasekit_swf.connect(f"swf://nowhere/images?endpoint={moto}", worker="w")
    with pytest.raises(Refused, match="Unknown domain"):
        await nowhere.claim(["resize"], limit=1, wait=5, claim_id="c")
    await nowhere.aclose()


def polled(swf: Any) -> Any:
    return swf.poll_for_activity_task(domain=swf.domain, taskList={"name": "images"}, identity="mine")


def test_a_poller_of_ones_own_is_kept(swf: Any) -> None:
    with leasekit.lease(leasekit_swf.task(polled(swf), client=swf, ttl=600)) as held:
        held.complete("thumbnail")
    (seen,) = decide(swf, "again")
    assert seen["result"] == '"thumbnail"'


def test_a_poller_of_ones_own_hears_that_its_task_is_gone(swf: Any) -> None:
    task = polled(swf)
    swf.respond_activity_task_completed(taskToken=task["taskToken"], result="by another hand")
    with pytest.raises(LeaseLost), leasekit.lease(leasekit_swf.task(task, client=swf, ttl=600)):
        pytest.fail("its body ran")
