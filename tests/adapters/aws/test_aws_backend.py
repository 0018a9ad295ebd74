"""What both adapters do on bad days: lost answers, throttling, credentials, values and answers that make no sense."""

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import boto3.session
import msgspec
import pytest

from leasekit import ProtocolError, Refused, Task, Throttled, Unavailable
from leasekit.backend import Backend
from leasekit.task import Beat, Outcome, Settlement, Verdict
from leasekit_aws import AwsBackend, BotoClients, Call, daemon_threads
from leasekit_sfn import SfnService
from leasekit_swf import SwfService, connect
from tests.adapters.aws.conftest import Aws

pytestmark = pytest.mark.anyio

ARN = "arn:aws:states:eu-central-1:123456789012:activity:resize"


def a_task() -> Task:
    return Task(id="a", kind="resize", token="t", ttl=300)


async def claim(backend: Backend, *kinds: str, wait: float = 20) -> list[Task]:
    async with asyncio.timeout(30):
        return (await backend.claim(kinds or ("resize",), limit=1, wait=wait, claim_id="c")).tasks


async def beat(backend: Backend, task: Task, **more: Any) -> Verdict:
    (verdict,) = await backend.beat([Beat(id=task.id, token=task.token, **more)])
    return verdict


async def settle(backend: Backend, task: Task, outcome: Outcome = "success", **more: Any) -> Verdict:
    (verdict,) = await backend.settle([Settlement(id=task.id, token=task.token, outcome=outcome, **more)])
    return verdict


async def until(aws: Aws, fact: Callable[[], object]) -> None:
    await asyncio.to_thread(aws.wait_until, fact)


async def test_the_kinds_of_a_claim_are_bounded(backend: Backend) -> None:
    with pytest.raises(Refused, match="101 kinds"):
        await claim(backend, *(f"k{n}" for n in range(101)), wait=0)


async def test_calls_that_do_not_end_have_a_bounded_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those whose answers come byte by byte: no timeout of botocore ends them."""
    monkeypatch.setattr(daemon_threads, "MOST_CALLS", 3)
    begun, end, threads = threading.Semaphore(0), threading.Event(), list[threading.Thread]()

    def send(call: Call, **_: Any) -> dict[str, Any]:
        threads.append(threading.current_thread())
        begun.release()
        end.wait()
        return {"cancelRequested": False}

    backend, task = AwsBackend(SwfService(), cast("BotoClients", SimpleNamespace(send=send))), a_task()
    for _ in range(3):
        given_up = asyncio.create_task(beat(backend, task))
        assert await asyncio.to_thread(begun.acquire, timeout=20)
        given_up.cancel()
    verdict = await beat(backend, task)
    assert verdict.verdict == "failed"
    assert "Unreached: 3 calls of this connection have no end yet" in (verdict.reason or "")
    assert len(threads) == 3
    end.set()
    for thread in threads:
        await asyncio.to_thread(thread.join, 20)
    assert (await beat(backend, task)).verdict == "renewed"


# Answers that got lost


async def test_a_result_whose_answer_was_lost_is_settled_when_it_is_repeated(aws: Aws, backend: Backend) -> None:
    work = aws.schedule("render", "resize")
    (task,) = await claim(backend)
    aws.next("RespondActivityTaskCompleted", aws.lost)
    assert (await settle(backend, task, result=1)).verdict == "failed"
    assert work.state == "ended"
    assert (await settle(backend, task, result=1)).verdict == "settled"
    assert (await settle(backend, task, "fatal")).verdict == "gone"


async def test_a_result_that_was_refused_for_time_is_gone_however_often_it_is_said(aws: Aws, backend: Backend) -> None:
    aws.schedule("render", "resize")
    (task,) = await claim(backend)
    aws.turn(301)
    verdicts = [await settle(backend, task) for _ in range(2)]
    assert [(verdict.verdict, verdict.reason) for verdict in verdicts] == [("gone", "expired")] * 2


@pytest.mark.parametrize("code", ["ThrottlingException", "ExpiredTokenException"])
async def test_a_result_that_was_not_applied_is_not_taken_for_settled_later(
    aws: Aws, backend: Backend, code: str
) -> None:
    aws.schedule("render", "resize")
    (task,) = await claim(backend)
    aws.next("RespondActivityTaskCompleted", aws.fault(code))
    await settle(backend, task)
    aws.turn(301)
    assert (await settle(backend, task)).verdict == "gone"


async def test_an_answer_that_is_delivered_twice_renews_nothing_and_ends_nothing(aws: Aws, steps: Backend) -> None:
    works = [aws.schedule(ARN, "resize") for _ in range(2)]
    tasks = [task for _ in works for task in await claim(steps)]
    assert (await beat(steps, tasks[0])).verdict == "renewed"
    aws.shifts = True
    for operation in (beat, settle):
        verdict = await operation(steps, tasks[1])
        assert verdict.verdict == "failed"
        assert "request id of an earlier one" in str(verdict.reason)
        assert (await operation(steps, tasks[0])).verdict in ("renewed", "settled")  # on another connection


async def test_a_refusal_that_is_delivered_twice_loses_no_other_lease(aws: Aws, steps: Backend) -> None:
    works = [aws.schedule(ARN, "resize") for _ in range(2)]
    lost, kept = [task for _ in works for task in await claim(steps)]
    aws.next("SendTaskHeartbeat", aws.fault("TaskTimedOut"))
    assert (await beat(steps, lost)).verdict == "gone"
    aws.shifts = True
    assert [(await beat(steps, kept)).verdict for _ in range(2)] == ["failed", "renewed"]


# Errors


@pytest.mark.parametrize(
    ("code", "status", "verdict"),
    [
        ("ThrottlingException", 400, "throttled"),
        ("ServiceUnavailable", 503, "failed"),
        ("InternalFailure", 500, "failed"),
        ("ExpiredTokenException", 400, "failed"),
        ("OperationNotPermittedFault", 400, "failed"),
        ("ValidationException", 400, "failed"),
        ("UnknownResourceFault", 400, "gone"),
    ],
)
async def test_an_error_is_a_verdict_for_its_own_lease(
    aws: Aws, backend: Backend, code: str, status: int, verdict: str
) -> None:
    aws.schedule("render", "resize")
    (task,) = await claim(backend)
    aws.next("RecordActivityTaskHeartbeat", aws.fault(code, status=status))
    assert (await beat(backend, task)).verdict == verdict
    assert (await beat(backend, task)).verdict == "renewed"


async def test_a_closed_workflow_says_that_nobody_wants_it_any_more(aws: Aws, backend: Backend) -> None:
    work = aws.schedule("render", "resize")
    (task,) = await claim(backend)
    aws.close(work)
    verdict = await beat(backend, task)
    assert (verdict.verdict, verdict.reason) == ("gone", "cancelled")


async def test_a_cancellation_is_an_order_and_its_end_is_reported_as_one(aws: Aws, backend: Backend) -> None:
    work = aws.schedule("render", "resize")
    (task,) = await claim(backend)
    work.cancelled = True
    verdict = await beat(backend, task)
    assert (verdict.verdict, verdict.cancel_requested) == ("renewed", True)
    assert (await settle(backend, task, "cancelled", error="wound down")).verdict == "settled"
    assert work.end == {"cancelled": '{"error":"wound down"}'}


async def test_a_throttled_poll_is_throttled(aws: Aws, backend: Backend) -> None:
    aws.next("PollForActivityTask", aws.fault("LimitExceededFault"))
    with pytest.raises(Throttled):
        await claim(backend)


async def test_credentials_are_refused_at_once_by_a_claim_but_kept_trying_by_a_result(
    aws: Aws, backend: Backend
) -> None:
    aws.schedule("render", "resize")
    (task,) = await claim(backend)
    aws.next("PollForActivityTask", aws.fault("UnrecognizedClientException"))
    with pytest.raises(Refused, match="credentials"):
        await claim(backend)
    aws.next("RespondActivityTaskCompleted", aws.fault("ExpiredTokenException"))
    verdict = await settle(backend, task)
    assert verdict.verdict == "failed"
    assert "credentials" in (verdict.reason or "")
    assert (await settle(backend, task)).verdict == "settled"


async def test_no_credentials_at_all_are_told_apart(
    backend: Backend, session: boto3.session.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boto3.session, "Session", type(session))  # a new one: that of all tests has credentials
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(Refused, match="no usable AWS credentials"):
        await claim(backend)


async def test_no_region_is_refused_with_boto3s_words(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    backend = connect("swf://media/render", worker="w")
    with pytest.raises(Refused, match="region"):
        await claim(backend)
    await backend.aclose()


async def test_a_service_that_is_not_there_is_unavailable(credentials: None) -> None:
    backend = connect("swf://media/render?endpoint=http://127.0.0.1:1", worker="w")
    with pytest.raises(Unavailable):
        await claim(backend)
    await backend.aclose()


async def test_a_call_is_one_try(aws: Aws, backend: Backend) -> None:
    aws.schedule("render", "resize")
    (task,) = await claim(backend)
    aws.next("RecordActivityTaskHeartbeat", aws.fault("InternalFailure", status=500))
    await beat(backend, task)
    assert len(aws.asked("RecordActivityTaskHeartbeat")) == 1


# Values that do not fit


@pytest.mark.parametrize(("size", "fits"), [(2046, True), (2047, False)])
async def test_progress_has_2048_characters_at_most(aws: Aws, backend: Backend, size: int, *, fits: bool) -> None:
    work = aws.schedule("render", "resize")
    (task,) = await claim(backend)
    if fits:
        assert (await beat(backend, task, progress="ü" * size)).verdict == "renewed"
        assert len(work.details[0]) == 2048
    else:
        with pytest.raises(Refused, match="2,049 characters") as refused:
            await backend.beat([Beat(id="a", token="b"), Beat(id=task.id, token=task.token, progress="x" * size)])
        assert [(error["item"], error["field"]) for error in refused.value.errors] == [(1, "progress")]
        assert not aws.asked("RecordActivityTaskHeartbeat")


@pytest.mark.parametrize(("size", "fits"), [(32766, True), (32767, False)])
async def test_a_result_has_32768_characters_at_most(aws: Aws, backend: Backend, size: int, *, fits: bool) -> None:
    aws.schedule("render", "resize")
    (task,) = await claim(backend)
    if fits:
        assert (await settle(backend, task, result="x" * size)).verdict == "settled"
    else:
        with pytest.raises(Refused, match="result"):
            await settle(backend, task, result="x" * size)


@pytest.mark.parametrize(("size", "fits"), [(131071, True), (131072, False)])
async def test_an_output_of_step_functions_is_counted_in_bytes(
    aws: Aws, steps: Backend, size: int, *, fits: bool
) -> None:
    aws.schedule(ARN, "resize")
    (task,) = await claim(steps)
    if fits:
        assert (await settle(steps, task, result="ü" * size)).verdict == "settled"
    else:
        with pytest.raises(Refused, match="262,146 bytes"):
            await settle(steps, task, result="ü" * size)


@pytest.mark.parametrize("error", [{"type": "E", "message": "m" * 10, "traceback": "t" * 40000}, "m" * 40000, None])
async def test_an_error_that_is_too_long_is_cut_and_not_refused(aws: Aws, backend: Backend, error: Any) -> None:
    work = aws.schedule("render", "resize")
    (task,) = await claim(backend)
    assert (await settle(backend, task, "retry", error=error, progress=["p"])).verdict == "settled"
    assert work.end["details"].endswith(',"progress":["p"]}')
    assert "mmmmmmmmmm" in work.end["details"] or error is None


async def test_progress_that_leaves_no_room_for_the_error_is_left_out(aws: Aws, steps: Backend) -> None:
    work = aws.schedule(ARN, "resize")
    (task,) = await claim(steps)
    assert (await settle(steps, task, "retry", error={"message": "why"}, progress="p" * 40000)).verdict == "settled"
    assert work.end == {"error": "retry", "cause": '{"error":"why"}'}


async def test_a_workers_name_is_cut_to_what_step_functions_takes(aws: Aws, steps: Backend) -> None:
    await claim(steps, wait=0)
    await until(aws, lambda: bool(aws.asked("GetActivityTask")))
    assert aws.asked("GetActivityTask")[0]["workerName"] == "w" * 80


@pytest.mark.parametrize(
    ("raw", "payload"),
    [("plain text", "plain text"), ("{'not': json}", "{'not': json}"), ("[1, 2", "[1, 2"), ("NaN", "NaN"), ("7", 7)],
)
async def test_an_input_that_is_no_json_is_the_string_itself(
    aws: Aws, backend: Backend, raw: str, payload: Any
) -> None:
    aws.schedule("render", "resize", raw=raw)
    (task,) = await claim(backend)
    assert task.payload == payload


# Answers that make no sense


POLLED = {
    "taskToken": "token",
    "activityId": "a",
    "startedEventId": 7,
    "workflowExecution": {"workflowId": "w", "runId": "r"},
    "activityType": {"name": "resize", "version": "1"},
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"activityId": None},
        {"activityId": "x" * 257},
        {"startedEventId": "7"},
        {"startedEventId": True},
        {"startedEventId": -1},
        {"startedEventId": 2**70},
        {"workflowExecution": None},
        {"workflowExecution": {"workflowId": "w"}},
        {"activityType": {"version": "1"}},
        {"activityType": {"name": ""}},
        {"taskToken": "x" * 2049},
        {"input": "x" * (1024 * 1024 + 1)},
    ],
    ids=lambda wrong: str(wrong)[:50],
)
async def test_a_task_that_makes_no_sense_is_a_protocol_error_and_given_back(
    aws: Aws, backend: Backend, wrong: dict[str, Any]
) -> None:
    aws.next("PollForActivityTask", {key: value for key, value in (POLLED | wrong).items() if value is not None})
    with pytest.raises(ProtocolError):
        await claim(backend)
    if "taskToken" not in wrong:
        await until(aws, lambda: bool(aws.asked("RespondActivityTaskFailed")))
        assert aws.asked("RespondActivityTaskFailed")[0]["taskToken"] == "token"


@pytest.mark.parametrize("wrong", [{"taskToken": 7}, {"input": 7, "taskToken": "t"}, {"taskToken": ["t"]}], ids=str)
async def test_a_task_of_step_functions_that_makes_no_sense_is_a_protocol_error(
    aws: Aws, steps: Backend, wrong: dict[str, Any]
) -> None:
    aws.next("GetActivityTask", wrong)
    with pytest.raises(ProtocolError):
        await claim(steps)


@pytest.mark.parametrize("answer", [{}, {"cancelRequested": "no"}, {"cancelRequested": None}, {"else": 1}], ids=str)
async def test_a_heartbeat_that_is_not_answered_as_one_has_failed(
    aws: Aws, backend: Backend, answer: dict[str, Any]
) -> None:
    aws.schedule("render", "resize")
    (task,) = await claim(backend)
    aws.next("RecordActivityTaskHeartbeat", answer)
    assert (await beat(backend, task)).verdict == "failed"


PAGES = {
    "portal": (200, b"<html>Welcome to the hotel</html>", {"content-type": "text/html"}),
    "empty": (200, b"", {}),
    "proxy": (403, b"<html>forbidden</html>", {"content-type": "text/html"}),
    "redirect": (302, b"", {"location": "http://127.0.0.1:1/"}),
    "number": (400, b'{"__type": 7, "message": []}', {"x-amzn-requestid": "r"}),
    "list": (400, b"[]", {"x-amzn-requestid": "r"}),
    "broken": (400, b'{"__type": "Thr', {"x-amzn-requestid": "r"}),
    "binary": (500, b"\xff\xfe\x00", {"x-amzn-requestid": "r"}),
}


@pytest.mark.parametrize("page", PAGES)
async def test_what_is_no_answer_of_aws_renews_and_settles_nothing(aws: Aws, steps: Backend, page: str) -> None:
    """Step Functions answers heartbeats with nothing: any page of anybody's would look like a renewal."""
    aws.schedule(ARN, "resize")
    (task,) = await claim(steps)
    aws.next("SendTaskHeartbeat", aws.page(*PAGES[page]))
    aws.next("GetActivityTask", aws.page(*PAGES[page]))
    assert (await beat(steps, task)).verdict == "failed"
    with pytest.raises((ProtocolError, Unavailable, Refused)):
        await claim(steps)
    aws.next("SendTaskSuccess", aws.page(*PAGES[page]))
    assert (await settle(steps, task)).verdict == "failed"
    assert (await beat(steps, task)).verdict == "renewed"


@pytest.mark.parametrize(
    ("code", "refuses"),
    [
        ("InvalidOutput", True), ("ValidationException", True), ("SerializationException", True),
        ("ForbiddenException", False), ("UnknownOperationException", False), ("WAFBlocked", False), ("", False),
    ],
)  # fmt: skip
async def test_only_what_is_known_to_be_about_the_result_refuses_it(
    aws: Aws, steps: Backend, code: str, *, refuses: bool
) -> None:
    aws.schedule(ARN, "resize")
    (task,) = await claim(steps)
    page = msgspec.json.encode({"__type": code, "message": "no"})
    aws.next("SendTaskSuccess", aws.page(400, page, {"x-amzn-requestid": "r"}))
    if refuses:
        with pytest.raises(Refused, match=code):
            await settle(steps, task)
    else:
        assert (await settle(steps, task)).verdict == "failed"
    assert (await settle(steps, task)).verdict == "settled"


async def test_a_token_does_not_get_into_what_is_said_of_a_failure(aws: Aws, backend: Backend) -> None:
    aws.schedule("render", "resize")
    (task,) = await claim(backend)
    aws.next("RecordActivityTaskHeartbeat", aws.fault("ThrottlingException"), aws.page(200, b"", {}))
    for _ in range(2):
        assert task.token not in repr(await beat(backend, task))[len(task.id) :]


async def test_a_report_survives_its_process_with_a_token_as_long_as_the_services_are(
    aws: Aws, backend: Backend
) -> None:
    """A result that could not be reported is kept on disk as JSON."""
    aws.schedule("render", "resize")
    (task,) = await claim(backend)
    said = Settlement(id=task.id, token=task.token, outcome="success", result=1)
    assert len(said.token) > 400
    assert msgspec.json.decode(msgspec.json.encode(said), type=Settlement) == said


def test_a_service_without_addresses_polls_nothing() -> None:
    assert SwfService().polls == {}
    assert SfnService().polls == {}
