"""Scheduling: what is sent, what is refused before anything is, and what is sent once."""

import json
import math
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import leasekit
from leasekit.backend import Scheduler, TaskSink
from leasekit.errors import ConfigError, LeasekitError, Refused, Throttled, Unavailable
from leasekit.task import Exponential, FixedDelays, NewTask, Status
from leasekit_sqs.messages import plain_id
from tests.adapters.sqs.conftest import Connect
from tests.adapters.sqs.fake import Answer, Fake, Params

pytestmark = pytest.mark.anyio

SEND = "SendMessageBatch"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def entries(aws: Fake) -> list[dict[str, Any]]:
    return [entry for call in aws.asked(SEND) for entry in call["Entries"]]


def attributes(entry: dict[str, Any]) -> dict[str, str]:
    return {name: value["StringValue"] for name, value in entry["MessageAttributes"].items()}


async def test_it_takes_work_and_cannot_tell_of_single_tasks(connected: Connect) -> None:
    backend = connected()
    assert isinstance(backend, TaskSink)
    assert not isinstance(backend, Scheduler)


async def test_a_task_is_a_message_with_attributes(connected: Connect, aws: Fake) -> None:
    aws.queue("q")
    backend = connected()
    (answer,) = await backend.schedule(
        [NewTask(kind="k", id="t", payload={"page": 1}, traceparent=TRACE, retry=FixedDelays(waits=[5]))]
    )
    assert (answer.id, answer.created, answer.status) == ("t", True, Status.NEW)
    (entry,) = entries(aws)
    assert json.loads(entry["MessageBody"]) == {"page": 1}
    assert attributes(entry) == {
        "leasekit.id": "t", "leasekit.kind": "k", "traceparent": TRACE,
        "leasekit.retry": '{"policy":"list","waits":[5]}',
    }  # fmt: skip


async def test_what_was_scheduled_comes_back_as_it_was(connected: Connect, aws: Fake) -> None:
    aws.queue("q")
    backend = connected()
    await backend.schedule([NewTask(kind="k", id="t", payload=[None], traceparent=TRACE, collection="blue")])
    (task,) = (await backend.claim(["k"], limit=1, wait=0, claim_id="c")).tasks
    assert (task.id, task.kind, task.payload, task.traceparent, task.collection) == ("t", "k", [None], TRACE, "blue")


async def test_what_is_usual_takes_no_attribute(connected: Connect, aws: Fake) -> None:
    aws.queue("q")
    await connected().schedule([NewTask(kind="k", id="t", retry=Exponential())])
    assert attributes(entries(aws)[0]).keys() == {"leasekit.id", "leasekit.kind"}


async def test_characters_that_xml_lacks_are_escaped(connected: Connect, aws: Fake) -> None:
    aws.queue("q")
    payload = "\x00 \x1b \ufffe \uffff 🎈"
    await connected().schedule([NewTask(kind="k", payload=payload)])
    body = entries(aws)[0]["MessageBody"]
    assert json.loads(body) == payload
    assert not set(body) & set("\x00\x1b\ufffe\uffff")


async def test_ten_messages_are_one_call(connected: Connect, aws: Fake) -> None:
    aws.queue("q")
    answers = await connected().schedule([NewTask(kind="k", payload=n) for n in range(23)])
    assert len({answer.id for answer in answers}) == 23
    assert sorted(len(call["Entries"]) for call in aws.asked(SEND)) == [3, 10, 10]


async def test_no_call_is_bigger_than_sqs_takes(connected: Connect, aws: Fake) -> None:
    aws.queue("q")
    await connected().schedule([NewTask(kind="k", payload="x" * 400_000) for _ in range(5)])
    assert sorted(len(call["Entries"]) for call in aws.asked(SEND)) == [1, 2, 2]


async def test_a_kind_goes_into_its_queue(connected: Connect, aws: Fake) -> None:
    aws.queue("jobs-a")
    aws.queue("jobs-b")
    await connected("jobs-{kind}").schedule([NewTask(kind="a"), NewTask(kind="b"), NewTask(kind="a")])
    assert {name: len(queue.messages) for name, queue in aws.queues.items()} == {"jobs-a": 2, "jobs-b": 1}


async def test_a_task_for_later_is_delayed(connected: Connect, aws: Fake) -> None:
    aws.queue("q")
    soon = datetime.now(UTC) + timedelta(seconds=600)
    await connected().schedule([NewTask(kind="k", at=soon), NewTask(kind="k", at=soon - timedelta(days=1))])
    later, now = entries(aws)
    assert 500 < later["DelaySeconds"] <= 600
    assert "DelaySeconds" not in now


async def test_a_delay_is_sent_in_whole_seconds(connected: Connect, aws: Fake) -> None:
    aws.queue("q")
    await connected().schedule([NewTask(kind="k", delay=59.5), NewTask(kind="k", delay=0)])
    assert [entry.get("DelaySeconds") for entry in entries(aws)] == [60, None]


LATER = datetime.now(UTC) + timedelta(days=1)


@pytest.mark.parametrize(
    ("queue", "field", "options"),
    [
        ("q", "priority", {"priority": 0}),
        ("q", "max_attempts", {"max_attempts": 3}),
        ("q", "max_attempts", {"max_attempts": None}),
        ("q", "max_crashes", {"max_crashes": 0}),
        ("q", "max_runtime", {"max_runtime": 60}),
        ("q", "expiry", {"expiry": "retry"}),
        ("q", "enqueue_timeout", {"enqueue_timeout": 5}),
        ("q", "claim_timeout", {"claim_timeout": 60}),
        ("q", "heartbeat_timeout", {"heartbeat_timeout": 60}),
        ("q", "dedupe_key", {"dedupe_key": "x"}),
        ("q", "at", {"at": LATER}),
        ("q", "delay", {"delay": 901}),
        ("q", "after", {"after": ["a-1"]}),
        ("q", "collection", {"collection": "with spaces"}),
        ("q", "requires", {"requires": {"gpu": "t4"}}),
        ("q", "prefers", {"prefers": {"gpu": "t4"}, "prefer_for": 5}),
        ("q", "id", {"id": "a/b"}),
        ("q", "kind", {"kind": ""}),
        ("q.fifo", "dedupe_window", {"dedupe_key": "x"}),
        ("q.fifo", "dedupe_window", {"dedupe_key": "x", "dedupe_window": 3600}),
        ("q.fifo", "at", {"at": LATER}),
        ("q.fifo", "delay", {"delay": 1}),
    ],
)
async def test_what_sqs_cannot_do_is_refused_before_anything_is_sent(
    connected: Connect, aws: Fake, queue: str, field: str, options: dict[str, Any]
) -> None:
    aws.queue(queue)
    with pytest.raises(Refused) as refusal:
        await connected(queue).schedule([NewTask(kind="k"), NewTask(**{"kind": "k"} | options)])
    assert [(error["item"], error["field"]) for error in refusal.value.errors] == [(1, field)]
    assert all(error["detail"] for error in refusal.value.errors)
    assert aws.asked(SEND) == []


async def test_every_complaint_is_named(connected: Connect) -> None:
    with pytest.raises(Refused) as refusal:
        await connected().schedule([NewTask(kind="k", priority=0, at=LATER), NewTask(kind="k", max_runtime=5)])
    assert [(error["item"], error["field"]) for error in refusal.value.errors] == [
        (0, "priority"), (0, "at"), (1, "max_runtime"),
    ]  # fmt: skip


@pytest.mark.parametrize("payload", ["x" * (1024 * 1024), object(), "\ud800"], ids=["big", "object", "surrogate"])
async def test_a_payload_that_cannot_be_sent_is_refused(connected: Connect, aws: Fake, payload: Any) -> None:
    aws.queue("q")
    with pytest.raises(Refused) as refusal:
        await connected().schedule([NewTask(kind="k"), NewTask(kind="k", payload=payload)])
    assert [(error["item"], error["field"]) for error in refusal.value.errors] == [(1, "payload")]
    assert aws.asked(SEND) == []


async def test_a_task_that_a_call_names_twice_is_sent_once(connected: Connect, aws: Fake) -> None:
    aws.queue("q")
    tasks = [NewTask(kind="k", id="t", payload=payload) for payload in (1, 2, 1)]
    answers = await connected().schedule(tasks)
    assert [answer.created for answer in answers] == [True, True, False]
    assert [message.body for message in aws.queues["q"].messages] == ["1", "2"]


@pytest.mark.parametrize("kind", ["a", "b"], ids=["same queue", "other queue"])
async def test_an_id_that_was_sent_before_is_sent_again(connected: Connect, aws: Fake, kind: str) -> None:
    """A queue does not know ids: the first task may have ended long ago, and no message would be there."""
    aws.queue("jobs-a")
    aws.queue("jobs-b")
    backend = connected("jobs-{kind}")
    for name in ("a", kind):
        (answer,) = await backend.schedule([NewTask(kind=name, id="nightly")])
        assert answer.created
    assert sum(len(queue.messages) for queue in aws.queues.values()) == 2


@pytest.mark.parametrize(("later", "sent"), [(0, [1, 2, 4]), (301, [1, 3, 5])], ids=["soon", "late"])
async def test_a_call_is_taken_for_a_repeat_until_all_of_it_is_sent_and_for_five_minutes(
    connected: Connect, aws: Fake, later: int, sent: list[int]
) -> None:
    aws.queue("q")
    backend = connected()
    tasks = [NewTask(kind="k", id="fine"), NewTask(kind="k", id="refused")]
    aws.fail(SEND, "InvalidMessageContents", 1)
    with pytest.raises(Refused):
        await backend.schedule(tasks)
    found = [len(aws.queues["q"].messages)]
    aws.now += later
    for _ in range(2):
        assert [answer.created for answer in await backend.schedule(tasks)] == [True, True]
        found.append(len(aws.queues["q"].messages))
    assert found == sent


async def test_of_a_batch_that_failed_in_part_only_what_is_missing_is_sent_again(connected: Connect, aws: Fake) -> None:
    aws.queue("q")
    backend = connected()
    tasks = [NewTask(kind="k", id=f"t{n}") for n in range(4)]
    aws.fail(SEND, "InternalError", 1, 2, fault=False)
    with pytest.raises(Unavailable):
        await backend.schedule(tasks)
    answers = await backend.schedule(tasks)
    assert [answer.id for answer in answers] == ["t0", "t1", "t2", "t3"]
    assert sorted(message.attributes["leasekit.id"]["StringValue"] for message in aws.queues["q"].messages) == [
        "t0", "t1", "t2", "t3",
    ]  # fmt: skip


@pytest.mark.parametrize(("code", "error"), [("RequestThrottled", Throttled), ("InvalidMessageContents", Refused)])
async def test_an_entry_that_is_refused_is_named(
    connected: Connect, aws: Fake, code: str, error: type[LeasekitError]
) -> None:
    aws.queue("q")
    aws.fail(SEND, code, 1)
    with pytest.raises(error) as raised:
        await connected().schedule([NewTask(kind="k"), NewTask(kind="k")])
    if isinstance(raised.value, Refused):
        assert [(error["item"], error["field"]) for error in raised.value.errors] == [(1, "payload")]


async def test_credentials_that_are_not_accepted_are_refused_at_once(connected: Connect, aws: Fake) -> None:
    aws.queue("q")
    aws.error(SEND, 403, "ExpiredToken")
    with pytest.raises(Refused, match="AWS does not accept these credentials"):
        await connected().schedule([NewTask(kind="k")])


async def test_nothing_is_asked_for_nothing(connected: Connect, aws: Fake) -> None:
    assert await connected().schedule([]) == []
    assert aws.calls == []


# Order ----------------------------------------------------------------------------------------------------------


async def test_a_collection_is_a_group_and_an_id_is_sent_once_for_a_fifo_queue(connected: Connect, aws: Fake) -> None:
    aws.queue("q.fifo")
    await connected("q.fifo").schedule([NewTask(kind="k", id="t", collection="blue"), NewTask(kind="k", id="u")])
    assert [(entry["MessageGroupId"], entry["MessageDeduplicationId"]) for entry in entries(aws)] == [
        ("blue", "t"), ("u", "u"),
    ]  # fmt: skip


@pytest.mark.parametrize("failing", [False, True])
async def test_the_tasks_of_a_large_batch_keep_their_order_in_a_fifo_queue(
    connected: Connect, aws: Fake, failing: bool
) -> None:
    aws.queue("q.fifo")
    backend = connected("q.fifo")
    tasks = [NewTask(kind="k", id=f"t{n}", payload=n, collection="blue") for n in range(35)]
    if failing:
        aws.error(SEND, 400, "RequestThrottled")
        with pytest.raises(Throttled):
            await backend.schedule(tasks)
        assert len(aws.asked(SEND)) == 1
    await backend.schedule(tasks)
    assert [message.body for message in aws.queues["q.fifo"].messages] == [str(n) for n in range(35)]


async def test_a_dedupe_key_counts_for_its_kind(connected: Connect, aws: Fake) -> None:
    aws.queue("q.fifo")
    keyed = [NewTask(kind=kind, dedupe_key="ü" * 200, dedupe_window=300.0) for kind in ("a", "b")]
    await connected("q.fifo").schedule(keyed)
    ids = [entry["MessageDeduplicationId"] for entry in entries(aws)]
    assert len(set(ids)) == 2
    assert all(len(one) <= 128 and one.isascii() for one in ids)


async def test_a_task_without_a_collection_has_none_when_it_comes(connected: Connect, aws: Fake) -> None:
    aws.queue("q.fifo")
    backend = connected("q.fifo")
    await backend.schedule([NewTask(kind="k", id="with spaces")])
    (task,) = (await backend.claim(["k"], limit=1, wait=0, claim_id="c")).tasks
    assert task.collection is None


# Around it ------------------------------------------------------------------------------------------------------


async def test_dead_letters_are_moved_to_where_they_are_wanted(connected: Connect, aws: Fake) -> None:
    aws.queue("q", dead_letter_queue="dead")
    aws.queue("dead")
    assert (await connected().redrive(kind="k", rate=10)).moving == "move-of-dead"
    assert aws.asked("StartMessageMoveTask") == [
        {
            "SourceArn": "arn:aws:sqs:eu-west-1:123456789012:dead",
            "DestinationArn": "arn:aws:sqs:eu-west-1:123456789012:q",
            "MaxNumberOfMessagesPerSecond": 10,
        }
    ]


async def test_a_client_redrives_a_kind_as_a_whole(connected: Connect, aws: Fake) -> None:
    aws.queue("q", dead_letter_queue="dead")
    aws.queue("dead")
    async with leasekit.Client(connected()) as client:
        answer = await client.aredrive(kind="k", rate=10)
        assert (answer.tasks, answer.moving) == ([], "move-of-dead")
        with pytest.raises(Refused, match="redrive a kind, alone"):
            await client.aredrive("a-task")


async def test_without_dead_letters_nothing_can_be_moved(connected: Connect, aws: Fake) -> None:
    aws.queue("q")
    with pytest.raises(Refused, match="RedrivePolicy"):
        await connected().redrive(kind="k")


@pytest.mark.parametrize("more", [{"task_ids": ["a"]}, {"error": "e"}, {"collection": "c"}, {"status": "dropped"}])
async def test_of_the_dead_letters_none_can_be_selected(connected: Connect, aws: Fake, more: dict[str, Any]) -> None:
    aws.queue("q", dead_letter_queue="dead")
    with pytest.raises(Refused, match="cannot select"):
        await connected().redrive(kind="k", **more)
    assert aws.asked("StartMessageMoveTask") == []


async def test_a_dry_run_says_about_how_many_dead_letters_there_are(connected: Connect, aws: Fake) -> None:
    aws.queue("q", dead_letter_queue="dead")
    aws.queue("dead")
    for _ in range(3):
        aws.put("dead", "work")
    answer = await connected().redrive(kind="k", dry_run=True)
    assert (answer.about, answer.moving, answer.tasks) == (3, None, [])
    assert aws.asked("StartMessageMoveTask") == []
    assert (await connected().redrive(kind="k")).about == 3


async def test_dead_letters_are_listed_and_stay_where_they_are(connected: Connect, aws: Fake) -> None:
    aws.queue("q", dead_letter_queue="dead")
    aws.queue("dead")
    error = {"DataType": "String", "StringValue": "ValueError: no such month"}
    aws.put("dead", '{"month": 13}', attributes={"leasekit.error": error})
    aws.put("dead", "[2]")
    backend = connected()
    for _ in range(2):
        page = await backend.list_dead(kind="k")
        assert [(task.kind, task.status, task.payload) for task in page.tasks] == [
            ("k", "dead", {"month": 13}),
            ("k", "dead", [2]),
        ]
        assert page.tasks[0].error == {"type": "ValueError", "message": "no such month"}
        assert (page.tasks[1].error, page.cursor) == (None, None)
    assert len((await backend.list_dead(kind="k", limit=1)).tasks) == 1


@pytest.mark.parametrize("more", [{"error": "e"}, {"cursor": "1"}, {"status": "fatal_failure"}, {"min_attempts": 2}])
async def test_a_sample_of_dead_letters_has_no_filters(connected: Connect, aws: Fake, more: dict[str, Any]) -> None:
    aws.queue("q", dead_letter_queue="dead")
    aws.queue("dead")
    with pytest.raises(Refused, match="SQS"):
        await connected().list_dead(kind="k", **more)
    assert aws.asked("ReceiveMessage") == []


async def test_dead_letters_are_counted_and_then_removed_as_a_whole(connected: Connect, aws: Fake) -> None:
    aws.queue("q", dead_letter_queue="dead")
    aws.queue("dead")
    aws.put("dead", "work")
    aws.put("q", "work")
    async with leasekit.Client(connected()) as client:
        assert (await client.apurge(kind="k")).kinds == {"k": {"dead": 1}}
        assert aws.asked("PurgeQueue") == []
        assert (await client.apurge(kind="k", status="dead", dry_run=False)).kinds == {"k": {"dead": 1}}  # type: ignore[arg-type]
        assert [params["QueueUrl"].rpartition("/")[2] for params in aws.asked("PurgeQueue")] == ["dead"]
        with pytest.raises(Refused, match="purge a kind, alone"):
            await client.apurge("a-task", dry_run=False)
        with pytest.raises(Refused, match="purge a kind, alone"):
            await client.apurge(kind="k", older_than=60, dry_run=False)


@pytest.mark.parametrize("rate", [0, 501, 2.5, math.nan, "10"])
async def test_dead_letters_are_moved_at_a_rate_that_sqs_knows(connected: Connect, rate: Any) -> None:
    with pytest.raises(ConfigError, match="rate must be a whole number from 1 to 500, or None, got"):
        await connected().redrive(rate=rate)


@pytest.mark.parametrize("text", ["a b", "a\tb", "a\nb", "\x7f", "é", "k" * 129])
def test_an_id_that_sqs_refuses_becomes_a_digest(text: str) -> None:
    assert re.fullmatch("[0-9a-f]{64}", plain_id(text))
    assert plain_id("k/a-1") == "k/a-1"


async def test_the_text_of_a_page_is_no_part_of_an_error(connected: Connect, aws: Fake) -> None:
    def page(apply: Callable[[], Params], params: Params) -> Params:
        raise Answer(500, raw=b"<!doctype html>\n<title>500 Internal Server Error</title>")

    aws.queue("q", dead_letter_queue="dead")
    aws.queue("dead")
    aws.meet("StartMessageMoveTask", page)
    with pytest.raises(Unavailable, match="the answer is a page of HTML or XML") as failure:
        await connected().redrive(kind="k")
    assert "doctype" not in str(failure.value)
