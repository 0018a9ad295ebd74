"""Claims: which messages become which tasks, from how many calls."""

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from leasekit.errors import BackendError, ProtocolError, Refused, Throttled, Unavailable
from leasekit.task import Beat, Task
from leasekit_sqs import SqsBackend, receiving
from tests.adapters.sqs.conftest import Connect
from tests.adapters.sqs.fake import Fake

pytestmark = pytest.mark.anyio

RECEIVE = "ReceiveMessage"


def of_kind(kind: str) -> dict[str, Any]:
    return {"leasekit.kind": {"DataType": "String", "StringValue": kind}}


async def claim(backend: SqsBackend, *kinds: str, limit: int = 1, wait: float = 0) -> list[Task]:
    return (await backend.claim(kinds or ["k"], limit=limit, wait=wait, claim_id="claim-1")).tasks


async def test_a_message_of_a_stranger_is_a_task(connected: Connect, aws: Fake) -> None:
    aws.put("q", '{"page": 1}')
    (task,) = await claim(connected(ttl=60))
    assert (task.id, task.kind, task.payload, task.ttl, task.fence, task.attempt) == (
        "message-1", "k", {"page": 1}, 60, 0, 1,
    )  # fmt: skip
    assert (task.collection, task.traceparent, task.progress) == (None, None, None)


@pytest.mark.parametrize("body", ["plain words", "{broken", "[" * 100_000, "", "NaN"])
async def test_what_is_no_json_is_a_string(connected: Connect, aws: Fake, body: str) -> None:
    aws.put("q", body)
    (task,) = await claim(connected())
    assert task.payload == body


async def test_the_token_is_the_receipt_handle(connected: Connect, aws: Fake) -> None:
    aws.put("q", "1")
    (task,) = await claim(connected())
    assert len(task.token) > 128
    assert "/" in task.token
    assert aws.queues["q"].messages[0].handles == [task.token]


async def test_attempts_are_receives(connected: Connect, aws: Fake) -> None:
    aws.put("q", "1")
    backend = connected(ttl=60)
    attempts: list[int] = []
    for _ in range(3):
        attempts += [task.attempt for task in await claim(backend)]
        aws.now += 61
    assert attempts == [1, 2, 3]


@pytest.mark.parametrize(("limit", "counts"), [(1, [1]), (10, [10]), (25, [10, 10, 5]), (100, [10, 10, 10, 10])])
async def test_several_calls_are_made_as_long_as_messages_come(
    connected: Connect, aws: Fake, limit: int, counts: list[int]
) -> None:
    for _ in range(30):
        aws.put("q", "1")
    assert len(await claim(connected(), limit=limit)) == min(limit, 30)
    assert [call["MaxNumberOfMessages"] for call in aws.asked(RECEIVE)] == counts


async def test_only_the_first_call_waits(connected: Connect, aws: Fake) -> None:
    aws.put("q", "1")
    await claim(connected(), limit=5, wait=20)
    assert [call["WaitTimeSeconds"] for call in aws.asked(RECEIVE)] == [5, 0]


@pytest.mark.parametrize(
    ("options", "wait", "seconds"),
    [
        ({}, 20, 5),
        ({"wait": 20}, 60, 20),
        ({"wait": 20}, 0.5, 1),
        ({"wait": 20, "ttl": 8}, 60, 2),
        ({"ttl": 2}, 60, 1),
        ({"wait": 0}, 60, 0),
    ],
)
async def test_a_poll_is_no_longer_than_it_may_be(
    connected: Connect, aws: Fake, options: dict[str, Any], wait: float, seconds: int
) -> None:
    aws.put("q", "1")
    await claim(connected(**options), wait=wait)
    assert [call["WaitTimeSeconds"] for call in aws.asked(RECEIVE)] == [seconds]


async def test_the_visibility_timeout_is_given_and_never_the_queues(connected: Connect, aws: Fake) -> None:
    aws.put("q", "1")
    await claim(connected(ttl=77))
    assert aws.queues["q"].messages[0].visible_at == aws.now + 77


async def test_where_the_queue_is_is_asked_once(connected: Connect, aws: Fake) -> None:
    aws.queue("q")
    backend = connected(account="123456789012")
    for _ in range(3):
        await claim(backend)
    assert aws.asked("GetQueueUrl") == [{"QueueName": "q", "QueueOwnerAWSAccountId": "123456789012"}]


async def test_the_url_of_another_queue_is_no_answer(connected: Connect, aws: Fake) -> None:
    """A proxy may mix up the answers to two look-ups, and what is found is remembered for good."""
    aws.put("jobs-a", "1")
    aws.put("jobs-b", "2")
    backend = connected("jobs-{kind}")
    aws.meet("GetQueueUrl", lambda apply, params: {"QueueUrl": apply()["QueueUrl"].replace("jobs-a", "jobs-b")})
    with pytest.raises(ProtocolError, match="without the URL of queue 'jobs-a'"):
        await claim(backend, "a")
    (task,) = await claim(backend, "a")
    assert task.payload == 1


async def test_a_claim_has_waited_until_its_first_message_was_asked_for(connected: Connect, aws: Fake) -> None:
    """SQS does not say when it was granted: not before that."""
    backend = connected("jobs-{kind}")
    aws.queue("jobs-a")
    aws.queue("jobs-b")

    def slow(apply: Callable[[], Any], params: Any) -> Any:
        answer = apply()
        aws.now += 3
        return answer

    waited: list[float | None] = []
    for _ in range(2):  # in turn: the other queue is the first one then
        aws.put("jobs-b", "1")
        aws.meet(RECEIVE, slow)
        aws.meet(RECEIVE, slow)
        claimed = await backend.claim(["a", "b"], limit=1, wait=0, claim_id="c")
        assert len(claimed.tasks) == 1
        waited.append(claimed.waited)
    assert waited == [0, 3]


async def test_what_was_received_before_the_claim_has_to_be_confirmed_by_a_beat(connected: Connect, aws: Fake) -> None:
    backend = connected()
    aws.queue("q")
    await claim(backend, "b")
    aws.put("q", "1", attributes=of_kind("b"))
    assert await claim(backend, "a") == []
    aws.now += 1
    claimed = await backend.claim(["b"], limit=1, wait=0, claim_id="c")
    assert [task.kind for task in claimed.tasks] == ["b"]
    assert claimed.waited is None


# Kinds ----------------------------------------------------------------------------------------------------------


async def test_a_message_names_its_kind(connected: Connect, aws: Fake) -> None:
    for kind in ("a", "b"):
        aws.put("q", "1", attributes=of_kind(kind))
    assert [task.kind for task in await claim(connected(), "a", "b", limit=5)] == ["a", "b"]


async def test_what_nobody_asked_for_is_left_to_others_for_a_while(
    connected: Connect, aws: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    message = aws.put("q", "1", attributes=of_kind("other"))
    backend = connected()
    with caplog.at_level(logging.WARNING, logger="leasekit"):
        for _ in range(2):
            assert await claim(backend, "k") == []
            assert message.visible_at == aws.now + 10
            aws.now += 11
    assert [record.getMessage() for record in caplog.records] == [
        "a message of queue q is of kind 'other', which is not asked for; each time it comes counts as a receive"
    ]
    assert [task.kind for task in await claim(backend, "other")] == ["other"]


async def test_messages_without_a_kind_are_of_the_one_that_the_url_names(connected: Connect, aws: Fake) -> None:
    aws.put("q", "1")
    assert [task.kind for task in await claim(connected(kind="a"), "a", "b")] == ["a"]


async def test_of_several_kinds_none_is_guessed(
    connected: Connect, aws: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    """Each further receive would bring such messages nearer to the dead-letter queue."""
    for _ in range(3):
        aws.put("q", "1")
    backend = connected()
    for _ in range(3):
        with pytest.raises(Refused, match=r"name no kind, and several .* \(a, b\).* kind=… or kind_attribute=…"):
            await claim(backend, "a", "b")
        aws.now += 1000
    assert sum(len(message.handles) for message in aws.queues["q"].messages) == 1
    assert [record.levelname for record in caplog.records] == ["ERROR"]


async def test_none_is_guessed_if_the_kinds_are_claimed_one_by_one(connected: Connect, aws: Fake) -> None:
    """A worker claims the kinds of its threads apart from those of its event loop."""
    backend = connected()
    aws.queue("q")
    assert await claim(backend, "a") == []
    aws.put("q", "1")
    with pytest.raises(Refused, match="name no kind"):
        await claim(backend, "b")


async def test_none_is_guessed_while_the_other_kinds_of_a_worker_are_not_claimed(connected: Connect, aws: Fake) -> None:
    """Their slots may be busy for longer than a minute, or their processes not there yet."""
    backend = connected()
    backend.hear_of(["a", "b"])
    aws.put("q", "1")
    with pytest.raises(Refused, match=r"name no kind, and several .* \(a, b\)"):
        await claim(backend, "a")


async def test_a_stray_without_a_kind_stops_no_claims(connected: Connect, aws: Fake) -> None:
    backend = connected()
    for attributes in (of_kind("a"), {}, of_kind("b")):
        aws.put("q", "1", attributes=attributes)
    assert [task.kind for task in await claim(backend, "a", "b", limit=5)] == ["a", "b"]


async def test_messages_without_a_kind_stop_claims_after_many_with_one(connected: Connect, aws: Fake) -> None:
    for _ in range(50):
        aws.put("q", "1", attributes=of_kind("a"))
    for _ in range(50):
        aws.put("q", "1")
    backend = connected()
    assert len(await claim(backend, "a", "b", limit=100)) == 50
    with pytest.raises(Refused, match="name no kind"):
        await claim(backend, "a", "b", limit=100)
    assert sum(len(message.handles) for message in aws.queues["q"].messages[50:]) <= 20


async def test_an_attribute_of_the_senders_own_may_name_the_kind(connected: Connect, aws: Fake) -> None:
    aws.put("q", "1", attributes={"type": {"DataType": "String", "StringValue": "b"}})
    aws.put("q", "2", attributes={"type": {"DataType": "String", "StringValue": "b"}} | of_kind("a"))
    tasks = await claim(connected(kind_attribute="type"), "a", "b", limit=5)
    assert [task.kind for task in tasks] == ["b", "a"]


async def test_each_kind_may_have_a_queue_of_its_own(connected: Connect, aws: Fake) -> None:
    aws.put("jobs-a", "1")
    aws.put("jobs-b", "2")
    tasks = await claim(connected("jobs-{kind}"), "a", "b", limit=5)
    assert sorted((task.kind, task.payload) for task in tasks) == [("a", 1), ("b", 2)]


async def test_queues_are_looked_at_in_turn(connected: Connect, aws: Fake) -> None:
    backend = connected("jobs-{kind}")
    for kind in ("a", "b"):
        for n in range(2):
            aws.put(f"jobs-{kind}", f"{n}")
    got = [task.kind for _ in range(4) for task in await claim(backend, "a", "b")]
    assert sorted(got[:2]) == ["a", "b"]
    assert sorted(got) == ["a", "a", "b", "b"]


async def test_no_queue_is_waited_for_before_all_were_looked_at(connected: Connect, aws: Fake) -> None:
    backend = connected("jobs-{kind}")
    aws.queue("jobs-a")
    aws.put("jobs-b", "1")
    for _ in range(2):
        await claim(backend, "a", "b", wait=20)
        aws.now += 301
    assert {call["WaitTimeSeconds"] for call in aws.asked(RECEIVE)} == {0}


async def test_beats_of_several_queues_go_to_each(connected: Connect, aws: Fake) -> None:
    backend = connected("jobs-{kind}")
    for kind in ("a", "b"):
        aws.put(f"jobs-{kind}", "1")
    tasks = await claim(backend, "a", "b", limit=5)
    verdicts = await backend.beat([Beat(id=task.id, token=task.token) for task in tasks])
    assert [verdict.verdict for verdict in verdicts] == ["renewed", "renewed"]
    assert len(aws.asked("ChangeMessageVisibilityBatch")) == 2


async def test_a_queue_that_does_not_exist_holds_up_no_other(connected: Connect, aws: Fake) -> None:
    backend = connected("jobs-{kind}")
    for n in range(3):
        aws.put("jobs-a", f"{n}")
    got = [task.payload for _ in range(3) for task in await claim(backend, "missing", "a")]
    assert sorted(got) == [0, 1, 2]
    with pytest.raises(Refused, match="jobs-missing"):
        await claim(backend, "missing", "a")


async def test_a_queue_that_may_not_be_read_holds_up_no_other(connected: Connect, aws: Fake) -> None:
    aws.put("jobs-a", "1")
    aws.put("jobs-b", "1")
    aws.error(RECEIVE, 403, "AccessDenied")  # of the queue that is read first
    assert len(await claim(connected("jobs-{kind}"), "a", "b", limit=5)) == 1
    assert len(aws.asked(RECEIVE)) > 1


async def test_a_queue_that_does_not_answer_holds_up_no_other(
    connected: Connect, aws: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its poll still brings goes to a later claim."""
    monkeypatch.setattr(receiving, "_SLOW", 1.0)
    backend = connected("jobs-{kind}")
    aws.put("jobs-a", "1")
    aws.put("jobs-b", "1")
    arrived, go_on = aws.hold(RECEIVE, applied=True)  # of the queue that is read first
    async with asyncio.timeout(15):
        (task,) = await claim(backend, "a", "b", limit=5)
    assert arrived.is_set()
    _, never = aws.hold(RECEIVE)
    with pytest.raises(Unavailable, match="does not answer in time"):
        await claim(backend, "a", "b", limit=5)
    go_on.set()
    never.set()
    while not (later := await claim(backend, "a", "b", limit=5)):
        pass
    assert {task.kind, later[0].kind} == {"a", "b"}


async def test_a_kind_that_can_be_no_queue_is_refused(connected: Connect) -> None:
    with pytest.raises(Refused, match="no queue can be named"):
        await claim(connected("jobs-{kind}"), "no such.kind")


# What goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (400, "RequestThrottled", Throttled),
        (400, "OverLimit", Throttled),
        (503, "ServiceUnavailable", Throttled),
        (500, "InternalError", Unavailable),
        (403, "ExpiredToken", Refused),
        (403, "AccessDenied", Refused),
        (400, "KMS.AccessDeniedException", Refused),
        (400, "InvalidAddress", Refused),
    ],
)
async def test_an_error_is_what_it_means_for_a_claim(
    connected: Connect, aws: Fake, status: int, code: str, error: type[BackendError]
) -> None:
    aws.queue("q")
    aws.error(RECEIVE, status, code)
    with pytest.raises(error):
        await claim(connected())


async def test_a_queue_that_is_not_there_is_named(connected: Connect) -> None:
    with pytest.raises(Refused, match="'nowhere'"):
        await claim(connected("nowhere"))


async def test_what_has_come_is_kept_when_the_next_call_fails(connected: Connect, aws: Fake) -> None:
    for _ in range(15):
        aws.put("q", "1")

    aws.meet(RECEIVE, lambda apply, params: apply())
    aws.lose(RECEIVE, applied=False)
    assert len(await claim(connected(), limit=20)) == 10


@pytest.mark.parametrize(
    "body", [b"<html>It works!</html>", b"", b"[]", b'{"Messages": 7}', b'{"Messages": [7, null]}']
)
async def test_an_answer_of_somebody_else_brings_no_task(connected: Connect, aws: Fake, body: bytes) -> None:
    aws.queue("q")
    aws.say(RECEIVE, body)
    try:
        assert await claim(connected()) == []
    except BackendError:
        return


async def test_one_message_that_makes_no_sense_is_left_alone(
    connected: Connect, aws: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        aws.put("q", "1")

    def strange(apply: Callable[[], Any], params: Any) -> Any:
        answer = apply()
        answer["Messages"][1]["ReceiptHandle"] = "h" * 9000
        return answer

    aws.meet(RECEIVE, strange)
    with caplog.at_level(logging.ERROR, logger="leasekit"):
        assert [task.id for task in await claim(connected(), limit=3)] == ["message-1", "message-3"]
    assert "cannot be read and is ignored" in caplog.text
    assert "hhhhhhhhhh" not in caplog.text


@pytest.mark.parametrize(
    "attributes",
    [
        {"leasekit.id": "a/b", "leasekit.kind": "x" * 200, "leasekit.retry": "{}", "traceparent": "t" * 200},
        {"leasekit.id": "", "leasekit.retry": '{"policy": "list", "waits": []}'},
        {"leasekit.id": "\n", "leasekit.retry": "[" * 1000},
    ],
)
async def test_attributes_that_make_no_sense_are_ignored(
    connected: Connect, aws: Fake, attributes: dict[str, str]
) -> None:
    message = aws.put("q", "1")
    message.attributes = {name: {"DataType": "String", "StringValue": text} for name, text in attributes.items()}
    (task,) = await claim(connected())
    assert (task.id, task.kind, task.traceparent) == ("message-1", "k", None)


@pytest.mark.parametrize("end", ["next claim", "close"])
async def test_a_message_that_comes_when_its_claim_was_given_up_goes_to_the_next_or_back(
    connected: Connect, aws: Fake, end: str
) -> None:
    backend = connected()
    message = aws.put("q", "1")
    arrived, go_on = aws.hold(RECEIVE)
    claiming = asyncio.create_task(claim(backend, wait=20))
    assert await anyio.to_thread.run_sync(arrived.wait, 20)
    claiming.cancel()
    await asyncio.wait([claiming])
    if end == "close":
        asyncio.get_running_loop().call_later(0.05, go_on.set)
        await backend.aclose()
        assert message.visible_at == aws.now
        return
    go_on.set()
    with anyio.fail_after(20):
        while not (tasks := await claim(backend)):  # noqa: ASYNC110 - it comes in a thread
            await asyncio.sleep(0.01)
    assert [task.attempt for task in tasks] == [1]


async def test_what_comes_after_closing_is_given_back_as_it_comes(
    connected: Connect, aws: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasekit_sqs.receiving._CLOSING", 0.01)
    message = aws.put("q", "1")
    arrived, go_on = aws.hold(RECEIVE)
    given_back = threading.Event()

    def seen(apply: Callable[[], Any], params: Any) -> Any:
        answer = apply()
        given_back.set()
        return answer

    aws.meet("ChangeMessageVisibilityBatch", seen)
    backend = connected()
    claiming = asyncio.create_task(claim(backend, wait=20))
    assert await anyio.to_thread.run_sync(arrived.wait, 20)
    claiming.cancel()
    await asyncio.wait([claiming])
    await backend.aclose()
    go_on.set()
    assert await anyio.to_thread.run_sync(given_back.wait, 20)
    assert message.visible_at == aws.now


@pytest.mark.parametrize("kind", ["k", "claimed before", "never claimed"])
async def test_a_message_that_comes_later_than_its_ttl_is_left_to_the_receiver_that_has_it_now(
    connected: Connect, aws: Fake, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("leasekit_sqs.receiving._CLOSING", 0.01)
    backend, other = connected(ttl=30), connected()
    aws.queue("q")
    await claim(backend, "claimed before")
    message = aws.put("q", "1", attributes=of_kind(kind))
    arrived, go_on = aws.hold(RECEIVE, applied=True)
    claiming = asyncio.create_task(claim(backend, wait=20))
    assert await anyio.to_thread.run_sync(arrived.wait, 20)
    aws.now += 31
    assert len(await claim(other, kind)) == 1
    if kind == "k":  # then the answer comes after the backend was closed
        claiming.cancel()
        await asyncio.wait([claiming])
        await backend.aclose()
        go_on.set()
    else:
        go_on.set()
        assert await claiming == []
        await backend.aclose()
    with anyio.fail_after(20):
        while any(thread.name == "leasekit-aws" for thread in threading.enumerate()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert aws.asked("ChangeMessageVisibilityBatch") == []
    assert message.visible_at == aws.now + 300


@pytest.mark.parametrize("kind", ["k", "never claimed"])
async def test_an_answer_that_is_delivered_twice_brings_no_message_twice(
    connected: Connect, aws: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    backend, other = connected(ttl=30), connected()
    message = aws.put("q", "1", attributes=of_kind(kind))
    answers: list[Any] = []

    def first(apply: Callable[[], Any], params: Any) -> Any:
        answers.append(apply())
        return answers[0]

    aws.meet(RECEIVE, first)
    await claim(backend)
    aws.now += 31
    assert len(await claim(other, kind)) == 1
    calls, closed = len(aws.calls), threading.Event()
    monkeypatch.setattr("leasekit_aws.boto_clients.BotoClients.close", lambda _: closed.set())
    aws.meet(RECEIVE, lambda apply, params: answers[0])
    assert await claim(backend) == []
    assert {operation for operation, _ in aws.calls[calls:]} == {RECEIVE}
    assert message.visible_at == aws.now + 300
    assert closed.is_set()  # answers on that connection belong to earlier requests
    assert "receipt handles came before" in caplog.text


# Order ----------------------------------------------------------------------------------------------------------


async def test_a_group_is_a_collection(connected: Connect, aws: Fake) -> None:
    aws.put("q.fifo", "1", group="blue")
    (task,) = await claim(connected("q.fifo"))
    assert task.collection == "blue"


async def test_a_receive_that_is_repeated_is_known_to_a_fifo_queue(connected: Connect, aws: Fake) -> None:
    aws.queue("q.fifo")
    backend = connected("q.fifo")
    aws.lose(RECEIVE, applied=True)
    with pytest.raises(Unavailable):
        await claim(backend)
    await claim(backend)
    assert [call["ReceiveRequestAttemptId"] for call in aws.asked(RECEIVE)] == ["claim-1-0", "claim-1-0"]


async def test_no_two_receives_of_a_claim_have_the_same_id(connected: Connect, aws: Fake) -> None:
    for group in ("blue", "red"):
        aws.put("q.fifo", "1", group=group)
    assert len(await claim(connected("q.fifo"), limit=20)) == 2
    ids = [call["ReceiveRequestAttemptId"] for call in aws.asked(RECEIVE)]
    assert len(set(ids)) == len(ids) == 3


async def test_a_fifo_queue_is_asked_for_one_message_at_a_time(connected: Connect, aws: Fake) -> None:
    """A call for more may bring several messages of a group."""
    aws.put("q.fifo", "1", group="blue")
    await claim(connected("q.fifo"), limit=20)
    assert [call["MaxNumberOfMessages"] for call in aws.asked(RECEIVE)] == [1, 1]


# Several claims of one process ----------------------------------------------------------------------------------


async def test_what_comes_to_one_claim_goes_to_the_other_that_has_asked_for_it(connected: Connect, aws: Fake) -> None:
    backend = connected()
    aws.queue("q")
    assert await claim(backend, "b") == []
    aws.put("q", "1", attributes=of_kind("b"))
    assert await claim(backend, "a") == []
    (task,) = await claim(backend, "b")
    assert (task.kind, task.attempt) == ("b", 1)
    assert (await backend.beat([Beat(id=task.id, token=task.token)]))[0].verdict == "renewed"


async def test_a_claim_that_waits_is_woken_by_what_comes_to_another(connected: Connect, aws: Fake) -> None:
    backend = connected()
    aws.queue("q")
    arrived, go_on = aws.hold(RECEIVE)
    waiting = asyncio.create_task(claim(backend, "b", wait=20))
    assert await anyio.to_thread.run_sync(arrived.wait, 20)
    aws.put("q", "1", attributes=of_kind("b"))
    assert await claim(backend, "a") == []
    with anyio.fail_after(20):
        assert [task.kind for task in await waiting] == ["b"]
    # The poll that was left behind brings one more: it is kept for the next claim.
    aws.put("q", "2", attributes=of_kind("b"))
    go_on.set()
    with anyio.fail_after(20):
        while not (tasks := await claim(backend, "b")):  # noqa: ASYNC110 - in another process, as it were
            await asyncio.sleep(0.01)
    assert [task.payload for task in tasks] == [2]
    assert aws.queues["q"].messages[1].visible_at == aws.now + 300


async def test_what_is_kept_for_another_claim_is_given_back_at_the_end(connected: Connect, aws: Fake) -> None:
    backend = connected()
    aws.queue("q")
    await claim(backend, "b")
    message = aws.put("q", "1", attributes=of_kind("b"))
    assert await claim(backend, "a") == []
    assert message.visible_at == aws.now + 300
    await backend.aclose()
    assert message.visible_at == aws.now


async def test_what_nobody_takes_is_given_back_in_time_and_warned_of(
    connected: Connect, aws: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    backend = connected(ttl=2)
    aws.queue("q")
    await claim(backend, "b")
    message = aws.put("q", "1", attributes=of_kind("b"))
    assert await claim(backend, "a") == []
    with anyio.fail_after(20):
        while message.visible_at != aws.now + 10:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert "is of kind 'b', for which no slot was free in time; each time it comes counts as a receive" in caplog.text


async def test_a_kind_that_was_asked_for_long_ago_is_somebody_elses(connected: Connect, aws: Fake) -> None:
    backend = connected()
    aws.queue("q")
    await claim(backend, "b")
    aws.now += 61
    message = aws.put("q", "1", attributes=of_kind("b"))
    assert await claim(backend, "a") == []
    assert message.visible_at == aws.now + 10


async def test_what_a_claim_has_got_before_it_was_cancelled_goes_to_the_next(connected: Connect, aws: Fake) -> None:
    backend = connected()
    aws.put("q", "1")
    aws.meet(RECEIVE, lambda apply, params: apply())
    arrived, go_on = aws.hold(RECEIVE)
    claiming = asyncio.create_task(claim(backend, limit=2))
    assert await anyio.to_thread.run_sync(arrived.wait, 20)
    claiming.cancel()
    await asyncio.wait([claiming])
    go_on.set()
    assert [(task.id, task.attempt) for task in await claim(backend)] == [("message-1", 1)]


async def test_the_kinds_of_a_claim_are_bounded(connected: Connect) -> None:
    with pytest.raises(Refused, match="101 kinds"):
        await claim(connected(), *(f"k{n}" for n in range(101)))
