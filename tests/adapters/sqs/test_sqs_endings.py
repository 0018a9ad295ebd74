"""How messages end: what is sent for each outcome, and what is never sent twice."""

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import anyio
import pytest

from leasekit.errors import BackendError, Refused
from leasekit.task import Beat, FixedDelays, NewTask, Outcome, Settlement, Task, Verdict
from leasekit_aws.boto_clients import BotoClients
from leasekit_sqs import SqsBackend
from leasekit_sqs.receipts import Receipt
from tests.adapters.sqs.conftest import Connect
from tests.adapters.sqs.fake import Fake

pytestmark = pytest.mark.anyio

CHANGE, DELETE, SEND = "ChangeMessageVisibilityBatch", "DeleteMessageBatch", "SendMessageBatch"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def received(backend: SqsBackend, aws: Fake, count: int = 1) -> list[Task]:
    for n in range(count):
        aws.put(backend.address.queue, f'{{"n": {n}}}')
    return (await backend.claim(["k"], limit=count, wait=0, claim_id="c")).tasks


async def ended(backend: SqsBackend, task: Task, outcome: Outcome = "success", **more: Any) -> Verdict:
    (verdict,) = await backend.settle([Settlement(id=task.id, token=task.token, outcome=outcome, **more)])
    return verdict


def message(aws: Fake, queue: str = "q", n: int = 0) -> Any:
    return aws.queues[queue].messages[n]


@pytest.mark.parametrize("outcome", ["success", "cancelled"])
async def test_what_is_done_with_is_deleted(connected: Connect, aws: Fake, outcome: Outcome) -> None:
    backend = connected()
    (task,) = await received(backend, aws)
    assert (await ended(backend, task, outcome)).verdict == "settled"
    assert message(aws).deleted


async def test_ten_deletions_are_one_call(connected: Connect, aws: Fake) -> None:
    backend = connected()
    tasks = await received(backend, aws, 23)
    verdicts = await backend.settle([Settlement(id=t.id, token=t.token, outcome="success") for t in tasks])
    assert {verdict.verdict for verdict in verdicts} == {"settled"}
    assert sorted(len(call["Entries"]) for call in aws.asked(DELETE)) == [3, 10, 10]


async def test_outcomes_of_a_batch_are_answered_in_order(connected: Connect, aws: Fake) -> None:
    backend = connected()
    aws.queue("q").dead_letter_queue = "dead"
    aws.queue("dead")
    tasks = await received(backend, aws, 6)
    outcomes: list[Outcome] = ["success", "retry", "fatal", "release", "cancelled", "crash"]
    aws.fail(DELETE, "InternalError", 0, fault=False)
    verdicts = await backend.settle(
        [Settlement(id=t.id, token=t.token, outcome=o) for t, o in zip(tasks, outcomes, strict=True)]
    )
    assert [verdict.id for verdict in verdicts] == [task.id for task in tasks]
    # The first deletion that SQS gets is that of the success: the fatal one is copied before.
    assert [verdict.verdict for verdict in verdicts] == ["failed", *["settled"] * 5]


@pytest.mark.parametrize(
    ("outcome", "more", "wait"),
    [
        ("retry", {"retry_after": 0.0}, 0),
        ("retry", {"retry_after": 7.2}, 8),
        ("release", {}, 0),
        ("release", {"retry_after": 60.0}, 60),
        ("crash", {}, 0),
    ],
)
async def test_what_is_given_back_is_hidden_for_its_wait(
    connected: Connect, aws: Fake, outcome: Outcome, more: dict[str, Any], wait: int
) -> None:
    backend = connected()
    (task,) = await received(backend, aws)
    assert (await ended(backend, task, outcome, **more)).verdict == "settled"
    assert message(aws).visible_at == aws.now + wait


async def test_a_retry_waits_by_the_policy_of_its_task(connected: Connect, aws: Fake) -> None:
    backend = connected()
    aws.queue("q")
    await backend.schedule([NewTask(kind="k", retry=FixedDelays(waits=[10, 100]))])
    waits: list[float] = []
    for _ in range(2):
        (task,) = (await backend.claim(["k"], limit=1, wait=0, claim_id="c")).tasks
        await ended(backend, task, "retry")
        waits.append(message(aws).visible_at - aws.now)
        aws.now = message(aws).visible_at
    assert waits == [10, 100]


@pytest.mark.parametrize(
    ("options", "attributes", "seconds"),
    [
        ({"ttl": 120}, {}, 120),
        ({"ttl": 120, "retry": 45}, {}, 45),
        ({"ttl": 120, "retry": 0}, {}, 0),
        ({"ttl": 120, "retry": 45}, {"leasekit.retry": '{"policy": "list", "waits": [9]}'}, 9),
        ({"ttl": 120}, {"leasekit.id": "copied by Fatal"}, 120),
    ],
)
async def test_a_message_of_another_sender_waits_as_the_url_says_or_as_after_the_death_of_a_worker(
    connected: Connect, aws: Fake, options: dict[str, Any], attributes: dict[str, str], seconds: int
) -> None:
    backend = connected(**options)
    own = {name: {"DataType": "String", "StringValue": text} for name, text in attributes.items()}
    aws.put("q", "work", attributes=own)
    (task,) = (await backend.claim(["k"], limit=1, wait=0, claim_id="c")).tasks
    await ended(backend, task, "retry")
    assert message(aws).visible_at == aws.now + seconds


async def test_a_scheduled_task_without_a_policy_waits_by_the_default(connected: Connect, aws: Fake) -> None:
    backend = connected()
    aws.queue("q")
    await backend.schedule([NewTask(kind="k")])
    (task,) = (await backend.claim(["k"], limit=1, wait=0, claim_id="c")).tasks
    await ended(backend, task, "retry")
    assert message(aws).visible_at - aws.now <= 2


async def test_no_wait_reaches_beyond_the_twelve_hours(connected: Connect, aws: Fake) -> None:
    backend = connected(ttl=43_000)
    (task,) = await received(backend, aws)
    aws.now += 1000
    assert (await ended(backend, task, "retry", retry_after=86_400.0)).verdict == "settled"
    assert 42_000 < message(aws).visible_at - aws.now <= 43_200 - 1000


async def test_a_repeat_is_settled_without_a_call_and_anything_else_is_gone(connected: Connect, aws: Fake) -> None:
    backend = connected()
    (task,) = await received(backend, aws)
    verdicts = [await ended(backend, task, outcome) for outcome in ("success", "success", "retry")]
    assert [(verdict.verdict, verdict.reason) for verdict in verdicts] == [
        ("settled", None), ("settled", None), ("gone", "settled"),
    ]  # fmt: skip
    assert len(aws.asked(DELETE)) == 1


# Fatal ----------------------------------------------------------------------------------------------------------


async def test_a_fatal_failure_goes_to_the_dead_letters_with_all_that_it_had(connected: Connect, aws: Fake) -> None:
    backend = connected()
    aws.queue("q", dead_letter_queue="dead")
    aws.queue("dead")
    await backend.schedule([NewTask(kind="k", id="task-1", payload={"page": 1}, traceparent=TRACE)])
    (task,) = (await backend.claim(["k"], limit=1, wait=0, claim_id="c")).tasks
    error = {"type": "ValueError", "message": "no such\npage", "traceback": "…"}
    assert (await ended(backend, task, "fatal", error=error)).verdict == "settled"
    assert message(aws).deleted
    copy = message(aws, "dead")
    assert json.loads(copy.body) == {"page": 1}
    assert {name: value["StringValue"] for name, value in copy.attributes.items()} == {
        "leasekit.id": "task-1", "leasekit.kind": "k", "traceparent": TRACE,
        "leasekit.error": "ValueError: no such page",
    }  # fmt: skip


@pytest.mark.parametrize(("error", "said"), [({"type": "OSError", "message": "full"}, "OSError: full"), (None, None)])
async def test_a_message_that_was_redriven_names_its_latest_failure(
    connected: Connect, aws: Fake, error: dict[str, str] | None, said: str | None
) -> None:
    backend = connected()
    aws.queue("q", dead_letter_queue="dead")
    aws.queue("dead")
    earlier = {"DataType": "String", "StringValue": "ValueError: of its first life"}
    aws.put("q", "work", attributes={"leasekit.error": earlier, "tenant": earlier})
    (task,) = (await backend.claim(["k"], limit=1, wait=0, claim_id="c")).tasks
    assert (await ended(backend, task, "fatal", error=error)).verdict == "settled"
    copy = message(aws, "dead").attributes
    assert copy["tenant"] == earlier
    assert copy.get("leasekit.error", {}).get("StringValue") == said


@pytest.mark.parametrize("dead", ["dead", "dead.fifo"])
async def test_a_dead_letter_keeps_the_group_and_the_trace_header_of_a_foreign_message(
    connected: Connect, aws: Fake, dead: str
) -> None:
    queue = dead.replace("dead", "q")
    backend = connected(queue)
    aws.queue(queue, dead_letter_queue=dead)
    aws.queue(dead)
    aws.put(queue, "work", group="blue", trace_header="Root=1-5759e988-bd862e3fe1be46a994272793")
    (task,) = (await backend.claim(["k"], limit=1, wait=0, claim_id="c")).tasks
    await ended(backend, task, "fatal")
    copy = message(aws, dead)
    assert (copy.group, copy.trace_header) == ("blue", "Root=1-5759e988-bd862e3fe1be46a994272793")


async def test_a_copy_keeps_to_what_sqs_takes(connected: Connect, aws: Fake) -> None:
    backend = connected()
    aws.queue("q", dead_letter_queue="dead")
    aws.queue("dead")
    ten = {f"own-{n}": {"DataType": "String", "StringValue": "x"} for n in range(10)}
    aws.put("q", "plain", attributes=ten)
    (task,) = (await backend.claim(["k"], limit=1, wait=0, claim_id="c")).tasks
    await ended(backend, task, "fatal", error={"type": "E", "message": "\x00\uffff" * 5000})
    assert message(aws, "dead").attributes == ten


async def test_without_dead_letters_a_fatal_failure_is_deleted_and_said(
    connected: Connect, aws: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    backend = connected()
    (task,) = await received(backend, aws)
    with caplog.at_level(logging.WARNING, logger="leasekit"):
        assert (await ended(backend, task, "fatal")).verdict == "settled"
    assert message(aws).deleted
    (record,) = caplog.records
    assert "failed for good and is deleted" in record.getMessage()


async def test_a_copy_that_failed_deletes_nothing(connected: Connect, aws: Fake) -> None:
    backend = connected()
    aws.queue("q", dead_letter_queue="dead")
    aws.queue("dead")
    (task,) = await received(backend, aws)
    aws.error(SEND, 403, "AccessDenied")
    verdict = await ended(backend, task, "fatal")
    assert verdict.verdict == "failed"
    assert "AccessDenied" in (verdict.reason or "")
    assert not message(aws).deleted


async def test_one_look_for_the_dead_letter_queue_serves_all_messages_of_a_call(connected: Connect, aws: Fake) -> None:
    """One after the other, looks that hang would outlast the call, and what else it ends would have no answer."""
    backend = connected()
    tasks = await received(backend, aws, 3)
    aws.error("GetQueueAttributes", 500, "InternalError")
    outcomes: list[Outcome] = ["fatal", "fatal", "success"]
    verdicts = await backend.settle(
        [Settlement(id=task.id, token=task.token, outcome=how) for task, how in zip(tasks, outcomes, strict=True)]
    )
    assert [verdict.verdict for verdict in verdicts] == ["failed", "failed", "settled"]
    assert len(aws.asked("GetQueueAttributes")) == 1


async def test_dead_letters_go_where_the_queue_says_now(connected: Connect, aws: Fake) -> None:
    """A worker runs for months, and an operator may set up another dead-letter queue, or remove the old one."""
    backend = connected()
    aws.queue("q", dead_letter_queue="old")
    aws.queue("old")
    aws.queue("new")
    first, second = await received(backend, aws, 2)
    await ended(backend, first, "fatal")
    aws.queue("q").dead_letter_queue = "new"
    del aws.queues["old"]
    assert (await ended(backend, second, "fatal")).verdict == "settled"
    assert len(aws.queues["new"].messages) == 1


async def test_a_deletion_that_failed_makes_no_second_copy(connected: Connect, aws: Fake) -> None:
    backend = connected()
    aws.queue("q", dead_letter_queue="dead")
    aws.queue("dead")
    (task,) = await received(backend, aws)
    aws.lose(DELETE, applied=False)
    assert (await ended(backend, task, "fatal")).verdict == "failed"
    assert (await ended(backend, task, "fatal")).verdict == "settled"
    assert message(aws).deleted
    assert len(aws.queues["dead"].messages) == 1


async def test_dead_letters_of_a_fifo_queue_keep_their_group(connected: Connect, aws: Fake) -> None:
    backend = connected("q.fifo")
    aws.queue("q.fifo", dead_letter_queue="dead.fifo")
    aws.queue("dead.fifo")
    await backend.schedule([NewTask(kind="k", collection="blue")])
    (task,) = (await backend.claim(["k"], limit=1, wait=0, claim_id="c")).tasks
    await ended(backend, task, "fatal")
    assert message(aws, "dead.fifo").group == "blue"


# Answers that are lost ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("applied", [True, False])
async def test_a_deletion_whose_answer_was_lost_is_repeated(connected: Connect, aws: Fake, applied: bool) -> None:
    backend = connected()
    (task,) = await received(backend, aws)
    aws.lose(DELETE, applied=applied)
    assert (await ended(backend, task)).verdict == "failed"
    assert (await ended(backend, task)).verdict == "settled"
    assert message(aws).deleted


@pytest.mark.parametrize("outcome", ["success", "fatal"])
async def test_a_beat_tells_of_a_deletion_with_a_lost_answer(connected: Connect, aws: Fake, outcome: Outcome) -> None:
    """So its block ends without `LeaseLost`, though SQS answers none of its deletions."""
    backend = connected()
    aws.queue("q", dead_letter_queue="dead")
    aws.queue("dead")
    (task,) = await received(backend, aws)
    aws.lose(DELETE, applied=True)
    aws.lose(DELETE, applied=True)
    assert (await ended(backend, task, outcome)).verdict == "failed"
    (verdict,) = await backend.beat([Beat(id=task.id, token=task.token)])
    assert (verdict.verdict, verdict.reason) == ("gone", "settled")
    assert (await ended(backend, task, outcome)).verdict == "settled"
    assert len(aws.asked(DELETE)) == 1


async def test_a_release_whose_answer_was_lost_does_not_show_the_message_that_another_holds(
    connected: Connect, aws: Fake
) -> None:
    first, second = connected(), connected()
    (task,) = await received(first, aws)
    aws.lose(CHANGE, applied=True)
    assert (await ended(first, task, "release")).verdict == "failed"
    (again,) = (await second.claim(["k"], limit=1, wait=0, claim_id="d")).tasks
    assert (await ended(first, task, "release")).verdict == "settled"
    assert message(aws).visible_at == aws.now + 300
    assert (await second.beat([Beat(id=again.id, token=again.token)]))[0].verdict == "renewed"


async def test_a_retry_whose_answer_was_lost_is_repeated_only_while_nobody_else_can_have_it(
    connected: Connect, aws: Fake
) -> None:
    backend = connected()
    (task,) = await received(backend, aws)
    due = aws.now + 100
    aws.lose(CHANGE, applied=False)
    assert (await ended(backend, task, "retry", retry_after=100.0)).verdict == "failed"
    aws.now += 40
    aws.lose(CHANGE, applied=False)
    assert (await ended(backend, task, "retry", retry_after=100.0)).verdict == "failed"
    aws.now += 40
    assert (await ended(backend, task, "retry", retry_after=100.0)).verdict == "settled"
    assert message(aws).visible_at == due
    assert [call["Entries"][0]["VisibilityTimeout"] for call in aws.asked(CHANGE)] == [100, 60, 20]


async def test_a_retry_whose_answer_was_lost_waits_for_its_whole_time_though_its_lease_ends_before(
    connected: Connect, aws: Fake
) -> None:
    backend = connected(ttl=30)
    (task,) = await received(backend, aws)
    aws.lose(CHANGE, applied=True)
    assert (await ended(backend, task, "retry", retry_after=600.0)).verdict == "failed"
    aws.now += 1
    assert (await ended(backend, task, "retry", retry_after=600.0)).verdict == "settled"
    assert message(aws).visible_at == aws.now + 599


async def test_a_retry_whose_answer_was_lost_is_not_repeated_so_late_that_another_may_have_it_by_then(
    connected: Connect, aws: Fake
) -> None:
    backend = connected()
    (task,) = await received(backend, aws)
    aws.lose(CHANGE, applied=True)
    assert (await ended(backend, task, "retry", retry_after=10.0)).verdict == "failed"
    aws.now += 9.9
    assert (await ended(backend, task, "retry", retry_after=10.0)).verdict == "settled"
    assert len(aws.asked(CHANGE)) == 1


async def test_a_retry_that_is_overdue_is_left_alone(connected: Connect, aws: Fake) -> None:
    backend = connected()
    (task,) = await received(backend, aws)
    aws.lose(CHANGE, applied=True)
    assert (await ended(backend, task, "retry", retry_after=10.0)).verdict == "failed"
    aws.now += 10
    assert (await ended(backend, task, "retry", retry_after=10.0)).verdict == "settled"
    assert len(aws.asked(CHANGE)) == 1


@pytest.mark.parametrize(
    ("status", "code", "word"), [(400, "RequestThrottled", "throttled"), (403, "ExpiredToken", "failed")]
)
async def test_what_certainly_was_not_done_is_repeated(
    connected: Connect, aws: Fake, status: int, code: str, word: str
) -> None:
    backend = connected()
    (task,) = await received(backend, aws)
    aws.error(CHANGE, status, code)
    assert (await ended(backend, task, "release")).verdict == word
    assert (await ended(backend, task, "release")).verdict == "settled"
    assert message(aws).visible_at == aws.now


async def test_a_result_outlives_credentials_that_have_expired(connected: Connect, aws: Fake) -> None:
    """Refused, it would be dropped: see the keeper."""
    backend = connected()
    (task,) = await received(backend, aws)
    aws.error(DELETE, 403, "ExpiredToken")
    assert (await ended(backend, task)).verdict == "failed"
    assert (await ended(backend, task)).verdict == "settled"


async def test_what_has_run_out_is_not_given_back(connected: Connect, aws: Fake) -> None:
    first, second = connected(ttl=60), connected(ttl=60)
    (task,) = await received(first, aws)
    aws.now += 61
    assert len((await second.claim(["k"], limit=1, wait=0, claim_id="d")).tasks) == 1
    verdict = await ended(first, task, "release")
    assert (verdict.verdict, verdict.reason) == ("gone", "expired")
    assert message(aws).visible_at == aws.now + 60


async def test_a_fifo_queue_does_not_delete_what_has_run_out(connected: Connect, aws: Fake) -> None:
    backend = connected("q.fifo", ttl=60)
    (task,) = await received(backend, aws)
    aws.now += 61
    verdict = await ended(backend, task)
    assert (verdict.verdict, verdict.reason) == ("gone", "expired")


async def test_a_give_back_waits_for_the_beat_that_is_under_way(connected: Connect, aws: Fake) -> None:
    """Arriving later, that beat would hide the message again."""
    backend = connected()
    (task,) = await received(backend, aws)
    arrived, go_on = aws.hold(CHANGE)
    beating = asyncio.create_task(backend.beat([Beat(id=task.id, token=task.token)]))
    assert await anyio.to_thread.run_sync(arrived.wait, 20)
    beating.cancel()  # the keeper has waited for long enough; the call is still under way
    async with anyio.create_task_group() as group:
        group.start_soon(partial(ended, backend, task, "retry", retry_after=100.0))
        await anyio.wait_all_tasks_blocked()
        await anyio.sleep(0.1)  # time to go wrong
        go_on.set()
    assert message(aws).visible_at == aws.now + 100


async def test_the_end_of_a_block_that_settles_nothing_waits_for_the_beat_that_is_under_way(
    connected: Connect, aws: Fake
) -> None:
    """After it, the user's own code may hide the message for longer, or show it to other workers."""
    backend = connected()
    (task,) = await received(backend, aws)
    receipt = backend.receipts.get(task.token)
    assert receipt is not None
    receipt.settles = False
    arrived, go_on = aws.hold(CHANGE)
    beating = asyncio.create_task(backend.beat([Beat(id=task.id, token=task.token)]))
    assert await anyio.to_thread.run_sync(arrived.wait, 20)
    beating.cancel()
    for _ in range(2):  # the outbox asks again if the answer takes too long
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await ended(backend, task)
    assert (await backend.beat([Beat(id=task.id, token=task.token)]))[0].verdict == "gone"
    go_on.set()
    assert (await ended(backend, task)).verdict == "settled"
    assert len(aws.asked(CHANGE)) == 1
    assert message(aws).visible_at == aws.now + 300


async def test_a_give_back_waits_for_an_earlier_beat_though_a_later_one_was_answered(
    connected: Connect, aws: Fake
) -> None:
    backend = connected()
    (task,) = await received(backend, aws)
    arrived, go_on = aws.hold(CHANGE)
    beating = asyncio.create_task(backend.beat([Beat(id=task.id, token=task.token)]))
    assert await anyio.to_thread.run_sync(arrived.wait, 20)
    beating.cancel()
    assert (await backend.beat([Beat(id=task.id, token=task.token)]))[0].verdict == "renewed"
    async with anyio.create_task_group() as group:
        group.start_soon(partial(ended, backend, task, "retry", retry_after=100.0))
        await anyio.wait_all_tasks_blocked()
        await anyio.sleep(0.1)  # time to go wrong
        go_on.set()
    assert message(aws).visible_at == aws.now + 100


@pytest.mark.parametrize("outcome", ["retry", "release"])
async def test_a_give_back_that_its_caller_gave_up_does_not_show_the_message_that_another_holds(
    connected: Connect, aws: Fake, outcome: Outcome
) -> None:
    """The outbox waits for ten seconds, and then reports again; by then, SQS may have obeyed the first call."""
    first, second = connected(), connected()
    (task,) = await received(first, aws)
    arrived, go_on = aws.hold(CHANGE, applied=True)
    ending = asyncio.create_task(ended(first, task, outcome, retry_after=0.0))
    assert await anyio.to_thread.run_sync(arrived.wait, 20)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    (again,) = (await second.claim(["k"], limit=1, wait=0, claim_id="d")).tasks
    assert (await ended(first, task, outcome, retry_after=0.0)).verdict == "settled"
    assert message(aws).visible_at == aws.now + 300
    go_on.set()
    assert (await ended(second, again)).verdict == "settled"


async def test_no_beat_begins_while_a_message_is_given_back_for_its_attributes(connected: Connect, aws: Fake) -> None:
    """It would replace the time of the next receiver by the ttl of this one, which may be shorter."""
    backend = connected()
    aws.queue("q", dead_letter_queue="dead")
    aws.queue("dead")
    (task,) = await received(backend, aws)
    receipt = backend.receipts.get(task.token)
    assert receipt is not None
    receipt.has_all_attributes = False
    arrived, go_on = aws.hold(CHANGE, applied=True)
    async with anyio.create_task_group() as group:
        group.start_soon(partial(ended, backend, task, "fatal"))
        assert await anyio.to_thread.run_sync(arrived.wait, 20)
        assert (await backend.beat([Beat(id=task.id, token=task.token)]))[0].verdict == "gone"
        go_on.set()
    assert len(aws.asked(CHANGE)) == 1


@pytest.mark.parametrize("turns", range(4))
async def test_a_give_back_waits_for_a_beat_that_was_decided_on_just_before(
    connected: Connect, aws: Fake, turns: int
) -> None:
    backend = connected()
    (task,) = await received(backend, aws)
    arrived, go_on = aws.hold(CHANGE)
    async with anyio.create_task_group() as group:
        group.start_soon(partial(ended, backend, task, "retry", retry_after=100.0))
        for _ in range(turns):
            await asyncio.sleep(0)
        group.start_soon(backend.beat, [Beat(id=task.id, token=task.token)])
        assert await anyio.to_thread.run_sync(arrived.wait, 20)
        await anyio.sleep(0.1)  # time to go wrong
        go_on.set()
    assert message(aws).visible_at == aws.now + 100


# What comes from elsewhere --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "hidden"), [({"wait": 5}, 6), ({"wait": 20, "ttl": 40}, 11), ({"wait": 0}, 0)])
async def test_a_supervisor_gives_back_what_the_process_that_ended_has_held(
    connected: Connect, aws: Fake, options: dict[str, Any], hidden: int
) -> None:
    """When the poll that this process may have left open is over: it would get the message, for nobody."""
    (task,) = await received(connected(**options), aws)
    supervisor = connected(**options)
    for _ in range(2):
        assert (await ended(supervisor, task, "crash")).verdict == "settled"
    assert message(aws).visible_at == aws.now + hidden
    assert len(aws.asked(CHANGE)) == 1


async def test_a_supervisor_gives_nothing_back_later_than_half_the_margin(connected: Connect, aws: Fake) -> None:
    """Its holder ended a margin before the message comes back, and no later: another may have it by then."""
    (task,) = await received(connected(ttl=30), aws)
    supervisor = connected(ttl=30)
    aws.fail(CHANGE, "RequestThrottled", 0)
    assert (await ended(supervisor, task, "crash")).verdict == "throttled"
    aws.now += 1.5
    verdict = await ended(supervisor, task, "crash")
    assert (verdict.verdict, verdict.reason) == ("gone", "expired")
    assert len(aws.asked(CHANGE)) == 1


async def test_that_time_counts_from_when_the_end_was_first_heard_of(connected: Connect, aws: Fake) -> None:
    (task,) = await received(connected(ttl=30), aws)
    supervisor = connected(ttl=30)
    aws.error("GetQueueUrl", 500, "InternalError")
    with pytest.raises(BackendError):
        await ended(supervisor, task, "crash")
    aws.now += 1.5
    verdict = await ended(supervisor, task, "crash")
    assert (verdict.verdict, verdict.reason) == ("gone", "expired")
    assert not aws.asked(CHANGE)


@pytest.mark.parametrize(("after", "verdict"), [(28.4, "settled"), (28.5, "gone")])
async def test_a_give_back_that_could_arrive_too_late_does_not_leave(
    connected: Connect, aws: Fake, after: float, verdict: str
) -> None:
    backend = connected(ttl=30)
    (task,) = await received(backend, aws)
    aws.now += after
    assert (await ended(backend, task, "release")).verdict == verdict


@pytest.fixture(params=["credentials", "host"])
def delay(
    request: pytest.FixtureRequest, _aws: tuple[Fake, BotoClients], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[float], None]]:
    """Have the next call wait so long for credentials before it is signed, or for the look-up of its host."""
    aws, clients = _aws
    events, waits, look_up = clients._client(is_poll=False).meta.events, [0.0], socket.getaddrinfo

    def wait(*args: Any, **more: Any) -> Any:
        aws.now += waits.pop() if waits else 0.0
        return look_up(*args, **more) if args else None

    def set_up(seconds: float) -> None:
        clients.close()  # the next call opens a connection
        waits[:] = [seconds]

    if request.param == "host":
        monkeypatch.setattr(socket, "getaddrinfo", wait)
        yield set_up
    else:
        events.register("before-sign", wait)
        yield set_up
        events.unregister("before-sign", wait)


@pytest.mark.parametrize("outcome", ["retry", "release"])
async def test_a_give_back_that_waited_does_not_leave_too_late(
    connected: Connect, aws: Fake, delay: Callable[[float], None], outcome: Outcome
) -> None:
    """It would show a message that another worker has received meanwhile."""
    backend = connected(ttl=30)
    (task,) = await received(backend, aws)
    delay(28.0)
    assert (await ended(backend, task, outcome, retry_after=10.0)).verdict == "settled"
    (task,) = await received(backend, aws)
    delay(29.0)
    verdict = await ended(backend, task, outcome, retry_after=10.0)
    assert (verdict.verdict, len(aws.asked(CHANGE))) == ("failed", 1)
    assert "could not leave in time" in (verdict.reason or "")
    verdict = await ended(backend, task, outcome, retry_after=10.0)
    assert (verdict.verdict, verdict.reason) == ("gone", "expired")


async def test_a_beat_that_waited_does_not_leave_too_late(
    connected: Connect, aws: Fake, delay: Callable[[float], None]
) -> None:
    """It would hide the message of another worker for the ttl of this one, which may be shorter."""
    backend = connected(ttl=30)
    (task,) = await received(backend, aws)
    delay(30.0)
    assert (await backend.beat([Beat(id=task.id, token=task.token)]))[0].verdict == "gone"
    assert not aws.asked(CHANGE)


@pytest.mark.parametrize("outcome", ["success", "fatal"])
async def test_a_deletion_that_waited_does_not_leave_when_the_lease_is_over(
    connected: Connect, aws: Fake, delay: Callable[[float], None], outcome: Outcome
) -> None:
    """Its block is told by then that the lease is lost, and that the message comes again."""
    backend = connected(ttl=30)
    (task,) = await received(backend, aws)
    delay(30.0)
    verdict = await ended(backend, task, outcome)
    assert (verdict.verdict, aws.asked(DELETE)) == ("failed", [])
    assert (await ended(backend, task, outcome)).verdict == "settled"  # a report that no block waits for


async def test_a_copy_that_waited_does_not_leave_when_the_lease_is_over(
    connected: Connect, aws: Fake, delay: Callable[[float], None]
) -> None:
    backend = connected(ttl=30)
    aws.queue("q", dead_letter_queue="dead")
    aws.queue("dead")
    first, second = await received(backend, aws, 2)
    await ended(backend, first, "fatal")  # the dead-letter queue is known
    delay(30.0)
    verdict = await ended(backend, second, "fatal")
    assert (verdict.verdict, len(aws.queues["dead"].messages)) == ("failed", 1)


@pytest.mark.parametrize("outcome", ["success", "retry", "release", "fatal"])
async def test_nothing_else_is_settled_for_a_stranger(connected: Connect, aws: Fake, outcome: Outcome) -> None:
    (task,) = await received(connected(), aws)
    verdict = await ended(connected(), task, outcome)
    assert (verdict.verdict, verdict.reason) == ("gone", "unknown")
    assert not message(aws).deleted


async def test_successors_are_refused(connected: Connect, aws: Fake) -> None:
    backend = connected()
    (task,) = await received(backend, aws)
    with pytest.raises(Refused) as refusal:
        await ended(backend, task, then=[NewTask(kind="next")])
    assert [(error["item"], error["field"]) for error in refusal.value.errors] == [(0, "then")]


async def test_what_is_settled_is_forgotten_in_time(connected: Connect, aws: Fake) -> None:
    backend = connected()
    (task,) = await received(backend, aws)
    receipt = backend.receipts.find(task.id, task.token)
    assert receipt is not None
    await ended(backend, task)
    assert receipt.message is None
    for n in range(10_000):
        other = Receipt(id="x", handle=f"h{n}", url="u", message={}, attempt=1, group=None, retry=receipt.retry)
        other.hidden(aws.now, 300)
        backend.receipts.add(other)
        backend.receipts.settled(other, "success")
    assert len(backend.receipts) == 10_000
    assert backend.receipts.find(task.id, task.token) is None


async def test_what_was_lost_is_forgotten_in_time(connected: Connect, aws: Fake) -> None:
    backend = connected(ttl=60)
    (lost,) = await received(backend, aws)
    receipt = backend.receipts.find(lost.id, lost.token)
    assert receipt is not None
    aws.now += 2 * 3600
    for n in range(1000):
        other = Receipt(id="x", handle=f"h{n}", url="u", message={}, attempt=1, group=None, retry=receipt.retry)
        other.hidden(aws.now, 300)
        backend.receipts.add(other)
    assert lost.token not in backend.receipts
    assert "h0" in backend.receipts
