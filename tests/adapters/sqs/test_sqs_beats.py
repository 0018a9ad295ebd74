"""Heartbeats: what SQS answers, and what is believed of it. The service is as AWS documents it; its clock is turned."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from leasekit.task import Beat, Task, Verdict
from leasekit_sqs import SqsBackend
from tests.adapters.sqs.conftest import Connect
from tests.adapters.sqs.fake import Fake

pytestmark = pytest.mark.anyio

EXTEND = "ChangeMessageVisibilityBatch"


async def received(backend: SqsBackend, aws: Fake, count: int = 1) -> list[Task]:
    for n in range(count):
        aws.put("q", f'{{"n": {n}}}')
    return (await backend.claim(["k"], limit=count, wait=0, claim_id="c")).tasks


def beats(tasks: list[Task]) -> list[Beat]:
    return [Beat(id=task.id, token=task.token) for task in tasks]


async def beaten(backend: SqsBackend, task: Task) -> Verdict:
    (verdict,) = await backend.beat(beats([task]))
    return verdict


def words(verdicts: list[Verdict]) -> list[str]:
    return [verdict.verdict for verdict in verdicts]


async def test_ten_messages_are_one_call(connected: Connect, aws: Fake) -> None:
    backend = connected()
    verdicts = await backend.beat(beats(await received(backend, aws, 25)))
    assert words(verdicts) == ["renewed"] * 25
    assert sorted(len(call["Entries"]) for call in aws.asked(EXTEND)) == [5, 10, 10]


async def test_a_beat_hides_the_message_for_the_ttl(connected: Connect, aws: Fake) -> None:
    backend = connected(ttl=60)
    (task,) = await received(backend, aws)
    aws.now += 50
    verdict = await beaten(backend, task)
    assert (verdict.verdict, verdict.ttl) == ("renewed", 60)
    assert aws.queues["q"].messages[0].visible_at == aws.now + 60


async def test_an_entry_that_fails_fails_alone(connected: Connect, aws: Fake) -> None:
    backend = connected()
    tasks = await received(backend, aws, 5)
    aws.fail(EXTEND, "InternalError", 1, 3, fault=False)
    verdicts = await backend.beat(beats(tasks))
    assert words(verdicts) == ["renewed", "failed", "renewed", "failed", "renewed"]
    assert [verdict.id for verdict in verdicts] == [task.id for task in tasks]
    assert words(await backend.beat(beats(tasks))) == ["renewed"] * 5


@pytest.mark.parametrize(
    ("code", "message", "reason"),
    [
        ("ReceiptHandleIsInvalid", "because", "unknown"),
        ("MessageNotInflight", "because", "expired"),
        ("AWS.SimpleQueueService.MessageNotInflight", "because", "expired"),
        (
            "InvalidParameterValue",
            "Value x for parameter ReceiptHandle is invalid. Reason: The receipt handle has expired.",
            "expired",
        ),
        (
            "InvalidParameterValue",
            "Reason: Message does not exist or is not available for visibility timeout change.",
            "unknown",
        ),
    ],
)
async def test_what_is_not_ours_any_more_is_gone(
    connected: Connect, aws: Fake, code: str, message: str, reason: str
) -> None:
    backend = connected()
    (task,) = await received(backend, aws)
    aws.fail(EXTEND, code, 0, message=message)
    verdict = await beaten(backend, task)
    assert (verdict.verdict, verdict.reason) == ("gone", reason)


async def test_a_deleted_message_is_gone(connected: Connect, aws: Fake) -> None:
    backend = connected()
    (task,) = await received(backend, aws)
    aws.queues["q"].messages[0].deleted = True
    verdict = await beaten(backend, task)
    assert (verdict.verdict, verdict.reason) == ("gone", "unknown")


async def test_a_handle_that_sqs_repeats_is_cut(connected: Connect, aws: Fake) -> None:
    backend = connected()
    (task,) = await received(backend, aws)
    aws.fail(EXTEND, "Strange", 0, message=f"Value {task.token} is strange")
    assert (await beaten(backend, task)).reason == f"Answered: Strange: Value {task.token[:6]}… is strange"


async def test_a_parameter_that_is_wrong_is_no_loss(connected: Connect, aws: Fake) -> None:
    backend = connected()
    (task,) = await received(backend, aws)
    aws.fail(EXTEND, "InvalidParameterValue", 0, message="Value 1 for parameter VisibilityTimeout is invalid.")
    assert (await beaten(backend, task)).verdict == "failed"


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "RequestThrottled"),
        (400, "ThrottlingException"),
        (400, "KmsThrottled"),
        (400, "KMS.ThrottlingException"),
        (400, "OverLimit"),
        (429, "Anything"),
        (503, "ServiceUnavailable"),
        (503, ""),
    ],
)
async def test_throttling_is_told_apart(connected: Connect, aws: Fake, status: int, code: str) -> None:
    backend = connected()
    tasks = await received(backend, aws, 2)
    aws.error(EXTEND, status, code)
    assert words(await backend.beat(beats(tasks))) == ["throttled", "throttled"]
    assert words(await backend.beat(beats(tasks))) == ["renewed", "renewed"]


async def test_an_entry_that_is_throttled_is_throttled_alone(connected: Connect, aws: Fake) -> None:
    backend = connected()
    tasks = await received(backend, aws, 2)
    aws.fail(EXTEND, "RequestThrottled", 1)
    assert words(await backend.beat(beats(tasks))) == ["renewed", "throttled"]


@pytest.mark.parametrize(
    "code",
    ["ExpiredToken", "ExpiredTokenException", "InvalidClientTokenId", "UnrecognizedClientException"],
)
async def test_credentials_that_are_not_accepted_are_no_loss_and_are_named(
    connected: Connect, aws: Fake, code: str
) -> None:
    backend = connected()
    (task,) = await received(backend, aws)
    aws.error(EXTEND, 403, code, "The security token included in the request is expired")
    verdict = await beaten(backend, task)
    assert verdict.verdict == "failed"
    assert "AWS does not accept these credentials" in (verdict.reason or "")
    assert code in (verdict.reason or "")
    assert (await beaten(backend, task)).verdict == "renewed"


@pytest.mark.parametrize("is_entry", [True, False])
async def test_a_permission_that_is_missing_is_no_loss_and_the_call_is_named(
    connected: Connect, aws: Fake, is_entry: bool
) -> None:
    backend = connected()
    (task,) = await received(backend, aws)
    if is_entry:
        aws.fail(EXTEND, "AccessDenied", 0)
    else:
        aws.error(EXTEND, 403, "AccessDenied")
    verdict = await beaten(backend, task)
    assert verdict.verdict == "failed"
    assert f"AWS refuses this call: {EXTEND}: AccessDenied: because" in (verdict.reason or "")


@pytest.mark.parametrize("applied", [True, False])
async def test_an_answer_that_is_lost_is_no_loss_of_the_lease(connected: Connect, aws: Fake, applied: bool) -> None:
    backend = connected()
    (task,) = await received(backend, aws)
    aws.lose(EXTEND, applied=applied)
    assert (await beaten(backend, task)).verdict == "failed"
    assert (await beaten(backend, task)).verdict == "renewed"


async def test_a_beat_is_tried_once(connected: Connect, aws: Fake) -> None:
    backend = connected()
    (task,) = await received(backend, aws)
    aws.lose(EXTEND, applied=False)
    await beaten(backend, task)
    aws.error(EXTEND, 500, "InternalError")
    await beaten(backend, task)
    assert len(aws.asked(EXTEND)) == 2


async def test_one_call_that_fails_leaves_the_others(connected: Connect, aws: Fake) -> None:
    backend = connected()
    tasks = await received(backend, aws, 20)
    aws.error(EXTEND, 500, "InternalError")
    verdicts = await backend.beat(beats(tasks))
    assert sorted(words(verdicts)) == ["failed"] * 10 + ["renewed"] * 10


@pytest.mark.parametrize(("address", "queues"), [("q", ["q", "q"]), ("{kind}", ["a", "b"])])
async def test_one_call_that_is_not_answered_leaves_the_others(
    connected: Connect, aws: Fake, address: str, queues: list[str]
) -> None:
    """The keeper waits for a twelfth of the ttl, and would know nothing of the others then."""
    backend = connected(address, ttl=24)
    tasks: list[Task] = []
    for queue in queues:
        for _ in range(10):
            aws.put(queue, "{}")
        tasks += (await backend.claim([queue], limit=10, wait=0, claim_id="c")).tasks
    _, go_on = aws.hold(EXTEND)
    async with asyncio.timeout(60):
        verdicts = await backend.beat(beats(tasks))
    go_on.set()
    assert sorted(words(verdicts)) == ["failed"] * 10 + ["renewed"] * 10
    # Less than the two seconds of the keeper.
    assert {verdict.reason for verdict in verdicts} == {None, "Unavailable: no answer within 1.6 s"}


async def test_what_has_run_out_is_not_asked_for_again(connected: Connect, aws: Fake) -> None:
    """SQS would answer *done*, and hide nothing: see `Fake._hide`."""
    backend = connected(ttl=60)
    (task,) = await received(backend, aws)
    aws.now += 60
    verdict = await beaten(backend, task)
    assert (verdict.verdict, verdict.reason) == ("gone", "expired")
    assert aws.asked(EXTEND) == []


async def test_an_answer_that_comes_after_the_end_is_not_believed(connected: Connect, aws: Fake) -> None:
    backend = connected(ttl=60)
    (task,) = await received(backend, aws)
    aws.now += 50

    def late(apply: Callable[[], Any], params: Any) -> Any:
        aws.now += 11  # on its way
        return apply()

    aws.meet(EXTEND, late)
    verdict = await beaten(backend, task)
    assert (verdict.verdict, verdict.reason) == ("gone", "expired")


async def test_a_receive_counts_from_when_it_was_asked_for(connected: Connect, aws: Fake) -> None:
    backend = connected(ttl=60)
    aws.put("q", "1")

    def slow(apply: Callable[[], Any], params: Any) -> Any:
        answer = apply()
        aws.now += 59.9
        return answer

    aws.meet("ReceiveMessage", slow)
    (task,) = (await backend.claim(["k"], limit=1, wait=0, claim_id="c")).tasks
    assert (await beaten(backend, task)).verdict == "gone"


async def test_the_token_of_an_earlier_receive_does_not_hide_it_from_its_new_holder(
    connected: Connect, aws: Fake
) -> None:
    first, second = connected(ttl=60), connected(ttl=60)
    (stale,) = await received(first, aws)
    aws.now += 61
    (task,) = (await second.claim(["k"], limit=1, wait=0, claim_id="d")).tasks
    aws.now += 1
    assert (await beaten(first, stale)).verdict == "gone"
    assert aws.queues["q"].messages[0].visible_at == aws.now - 1 + 60
    assert (await beaten(second, task)).verdict == "renewed"


async def test_a_stranger_is_gone_without_a_call(connected: Connect, aws: Fake) -> None:
    backend = connected()
    await received(backend, aws)
    (verdict,) = await backend.beat([Beat(id="message-1", token="made-up")])
    assert (verdict.verdict, verdict.reason) == ("gone", "unknown")
    assert aws.asked(EXTEND) == []


# Twelve hours ---------------------------------------------------------------------------------------------------


async def kept(backend: SqsBackend, aws: Fake, task: Task, *, until: float, every: float) -> list[Verdict]:
    verdicts: list[Verdict] = []
    while aws.now < until:
        verdicts.append(await beaten(backend, task))
        aws.now += every
    return verdicts


async def test_twelve_hours_are_granted_to_the_last_minutes_and_not_more(connected: Connect, aws: Fake) -> None:
    backend = connected(ttl=3600)
    (task,) = await received(backend, aws)
    end = aws.now + 12 * 3600
    verdicts = await kept(backend, aws, task, until=end - 3600 - 65, every=1200)
    assert {(verdict.verdict, verdict.ttl) for verdict in verdicts} == {("renewed", 3600)}
    while (verdict := await beaten(backend, task)).verdict == "renewed":
        assert verdict.ttl is not None
        assert aws.now + verdict.ttl <= end
        last = verdict.ttl
        aws.now += max(1, verdict.ttl / 3)
    assert verdict.verdict == "gone"
    assert "12 h in all, and they are over" in (verdict.reason or "")
    assert last < 5
    assert end - aws.now < 120


async def test_the_end_of_the_twelve_hours_is_said_once_and_in_time(
    connected: Connect, aws: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    backend = connected(ttl=120)
    (task,) = await received(backend, aws)
    aws.queues["q"].messages[0].visible_at = end = aws.now + 12 * 3600
    receipt = backend.receipts.find(task.id, task.token)
    assert receipt is not None
    receipt.until = end
    aws.now = end - 20 * 60
    with caplog.at_level(logging.WARNING, logger="leasekit"):
        assert (await beaten(backend, task)).verdict == "renewed"
        assert caplog.records == []
        aws.now = end - 15 * 60
        receipt.until = end
        assert [(await beaten(backend, task)).verdict for _ in range(2)] == ["renewed", "renewed"]
    (record,) = caplog.records
    assert "12 h in all; 14 min are left" in record.getMessage()
    assert task.token not in record.getMessage()
    assert (record.task_id, record.token_start) == (task.id, task.token[:6])  # type: ignore[attr-defined]


async def test_more_than_is_left_of_the_twelve_hours_is_no_loss(connected: Connect, aws: Fake) -> None:
    """A loop of the user's own may have received it earlier than it said."""
    backend = connected(ttl=60)
    (task,) = await received(backend, aws)
    aws.queues["q"].messages[0].received_at -= 12 * 3600 - 30
    verdict = await beaten(backend, task)
    assert verdict.verdict == "failed"
    assert "beyond the limit [43200 seconds]" in (verdict.reason or "")
