"""Queues of due tasks in SQS, as moto plays it: messages, and the tasks that workers get by them."""

import asyncio
import logging
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing
from typing import Any

import pytest
from types_boto3_sqs import SQSClient

from leasekit._driver.keeping.queue_claims import QueueClaims
from leasekit.errors import BackendError, Throttled, Unavailable
from leasekit.queues import QueueName
from leasekit.server.engine import Engine
from leasekit.server.store.memory import MemoryStore
from leasekit.task import NewTask, Settlement, Ticket
from leasekit.testing.memory import MemoryBackend, MemoryService
from leasekit_aws.boto_clients import BotoClients
from leasekit_sqs import task_queues
from leasekit_sqs.queue_names import QueuesAddress
from leasekit_sqs.task_queues import SqsQueues
from tests.adapters.sqs.conftest import Ahead
from tests.waiting import until

pytestmark = pytest.mark.anyio

K0, K2, J2 = QueueName("k", 0), QueueName("k", 2), QueueName("j.x", 2)
A, B, C = Ticket(id="a", fence=0), Ticket(id="b 7", fence=3), Ticket(id="c", fence=2**62)


@pytest.fixture
def address() -> QueuesAddress:
    return QueuesAddress(template=f"t{uuid.uuid4().hex[:8]}-{{kind}}-{{priority}}", wait=1)


Open = Callable[[], SqsQueues]


@pytest.fixture
async def opened(address: QueuesAddress, clients: BotoClients) -> AsyncIterator[Open]:
    """Open the queues of this test: a server's, or a worker's."""
    made: list[SqsQueues] = []

    def open_queues() -> SqsQueues:
        made.append(SqsQueues(address, clients=clients))
        return made[-1]

    yield open_queues
    await asyncio.gather(*(queues.aclose() for queues in made))


@pytest.fixture
def queues(opened: Open) -> SqsQueues:
    return opened()


async def received(queues: SqsQueues, *kinds: str, limit: int = 10, wait: float = 0) -> list[Ticket]:
    return [message.ticket for message in await queues.receive(kinds or ("k",), limit=limit, wait=wait)]


async def test_the_queue_of_a_kind_and_priority_is_created_with_its_first_message(
    queues: SqsQueues, sqs: SQSClient, address: QueuesAddress
) -> None:
    assert await queues.depth(K2) == 0
    assert await queues.send(K2, [A]) == []
    assert sqs.get_queue_url(QueueName=address.name_of(K2))
    assert await queues.depth(K2) == 1


async def test_messages_come_as_they_were_sent_the_most_urgent_queue_first(queues: SqsQueues) -> None:
    await queues.send(K2, [A])
    await queues.send(J2, [C])
    await queues.send(K0, [B])
    first, *others = await received(queues, "k", "j.x")
    assert first == B
    assert sorted(ticket.id for ticket in others) == ["a", "c"]


async def test_many_messages_are_sent_received_and_deleted_in_tens(
    queues: SqsQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[tuple[str, int]] = []
    send = BotoClients.send

    def count(self: BotoClients, call: Any, **options: Any) -> dict[str, Any]:
        answer = send(self, call, **options)
        of = answer.get("Messages") if call.operation == "receive_message" else call.params.get("Entries")
        sizes.extend([(call.operation, len(of))] if of else [])
        return answer

    monkeypatch.setattr(BotoClients, "send", count)
    tickets = [Ticket(id=f"t{number}", fence=0) for number in range(25)]
    assert await queues.send(K2, tickets) == []
    messages = await queues.receive(["k"], limit=100, wait=0)
    assert sorted(message.ticket.id for message in messages) == sorted(ticket.id for ticket in tickets)
    await queues.delete(messages)
    assert await queues.depth(K2) == 0
    for operation in ("send_message_batch", "receive_message", "delete_message_batch"):
        assert sorted(size for of, size in sizes if of == operation) == [5, 10, 10]


async def test_a_limit_leaves_the_rest_in_the_queue(queues: SqsQueues) -> None:
    await queues.send(K2, [A, B])
    assert len(await received(queues, limit=1)) == 1
    assert len(await received(queues)) == 1


async def test_a_received_message_is_invisible_until_it_is_shown(queues: SqsQueues) -> None:
    await queues.send(K2, [A])
    (message,) = await queues.receive(["k"], limit=1, wait=0)
    assert await received(queues) == []
    await queues.show([message])
    assert await received(queues) == [A]


async def test_a_message_whose_receiver_died_comes_again(queues: SqsQueues, ahead: Ahead) -> None:
    await queues.send(K2, [A])
    assert await received(queues) == [A]
    ahead.seconds += 31
    assert await received(queues) == [A]


async def test_a_deleted_message_does_not_come_again_and_may_be_deleted_twice(queues: SqsQueues) -> None:
    await queues.send(K2, [A])
    messages = await queues.receive(["k"], limit=10, wait=0)
    await queues.delete(messages)
    await queues.delete(messages)
    await queues.show(messages)
    assert await received(queues) == []
    assert await queues.depth(K2) == 0


async def test_a_receive_waits_for_a_message(queues: SqsQueues, opened: Open) -> None:
    await queues._create(K2)
    waiting = asyncio.create_task(received(queues, wait=60))
    await until(lambda: K2 in queues._polls)
    await opened().send(K2, [A])
    assert await waiting == [A]


async def test_a_receive_finds_a_queue_that_is_created_while_it_waits(
    queues: SqsQueues, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_queues, "_ABSENT", 0.2)
    waiting = asyncio.create_task(received(queues, wait=60))
    await until(lambda: K2 in queues._absent_until)
    await opened().send(K2, [A])
    assert await waiting == [A]


async def test_what_a_poll_brings_when_no_receive_waits_any_more_is_visible_again(
    queues: SqsQueues, opened: Open
) -> None:
    await queues._create(K2)
    waiting = asyncio.create_task(received(queues, wait=60))
    await until(lambda: K2 in queues._polls)
    waiting.cancel()
    await asyncio.wait([waiting])
    other = opened()
    await other.send(K2, [A])
    await until(lambda: not queues._polls)
    assert await received(other, wait=60) == [A]


async def test_a_poll_that_was_left_serves_the_next_receive(queues: SqsQueues, opened: Open) -> None:
    await queues._create(K2)
    waiting = asyncio.create_task(received(queues, wait=60))
    await until(lambda: K2 in queues._polls)
    waiting.cancel()
    poll = queues._polls[K2]
    again = asyncio.create_task(received(queues, wait=60))
    await until(lambda: bool(queues._waiters))
    assert queues._polls[K2] is poll or poll.done()
    await opened().send(K2, [A])
    assert await again == [A]


async def test_more_queues_than_polls_take_turns(queues: SqsQueues, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_queues, "_AT_ONCE", 1)
    for name in (K0, K2, J2):
        await queues._create(name)
    waiting = asyncio.create_task(received(queues, "k", "j.x", wait=60))
    await until(lambda: bool(queues._polls))
    await queues.send(J2, [C])
    assert await waiting == [C]


async def test_a_queue_that_was_deleted_is_created_again(
    queues: SqsQueues, sqs: SQSClient, address: QueuesAddress
) -> None:
    await queues.send(K2, [A])
    sqs.delete_queue(QueueUrl=sqs.get_queue_url(QueueName=address.name_of(K2))["QueueUrl"])
    assert await received(queues) == []
    await queues.send(K2, [B])
    assert await received(queues) == [B]


async def test_a_message_of_another_sender_is_left_and_said_once(
    queues: SqsQueues, sqs: SQSClient, address: QueuesAddress, caplog: pytest.LogCaptureFixture
) -> None:
    await queues.send(K2, [A])
    url = sqs.get_queue_url(QueueName=address.name_of(K2))["QueueUrl"]
    for body in ("hello", '{"id":"x"}'):
        sqs.send_message(QueueUrl=url, MessageBody=body)
    assert await received(queues) == [A]
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert "is not of leasekit, and left" in errors[0]


async def test_a_queue_that_fails_does_not_keep_the_messages_of_others(
    queues: SqsQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    await queues.send(K0, [A])
    await queues.send(K2, [B])
    fail(monkeypatch, "receive_message", "-0", Throttled("too many"))
    assert await received(queues, wait=60) == [B]
    with pytest.raises(Throttled):
        await received(queues)


async def test_messages_that_could_not_be_sent_are_named(queues: SqsQueues, monkeypatch: pytest.MonkeyPatch) -> None:
    tickets = [Ticket(id=f"t{number}", fence=0) for number in range(11)]
    await queues._create(K2)
    calls = iter([Unavailable("away"), None])
    fail(monkeypatch, "send_message_batch", "-2", calls)
    assert len(await queues.send(K2, tickets)) in (1, 10)
    monkeypatch.undo()


async def test_an_sqs_that_is_away_is_unavailable(address: QueuesAddress, closed_port: int) -> None:
    with closing(BotoClients("sqs", region="eu-west-1", endpoint=f"http://127.0.0.1:{closed_port}")) as clients:
        queues = SqsQueues(address, clients=clients)
        with pytest.raises(Unavailable):
            await queues.send(K2, [A])
        with pytest.raises(Unavailable):
            await received(queues, wait=60)
        await queues.aclose()


def fail(monkeypatch: pytest.MonkeyPatch, operation: str, of: str, error: Any) -> None:
    """Make calls of this operation fail for queues whose names end so, by an error or the next one of several."""
    send, lock = BotoClients.send, threading.Lock()

    def failing(self: BotoClients, call: Any, **options: Any) -> dict[str, Any]:
        if call.operation == operation and call.params["QueueUrl"].endswith(of):
            with lock:
                raised = error if isinstance(error, BackendError) else next(error)
            if raised is not None:
                raise raised
        return send(self, call, **options)

    monkeypatch.setattr(BotoClients, "send", failing)


class Rig:
    """A server with queues in SQS, and a worker that claims by them."""

    def __init__(self, queues: SqsQueues) -> None:
        self.queues = queues
        self.backend = MemoryBackend(MemoryService(), worker="w")
        self.claims = QueueClaims(self.backend, queues, now=asyncio.get_running_loop().time)
        self._claims = 0

    async def put(self, *ids: str) -> None:
        await self.backend.schedule([NewTask(id=task_id, kind="k") for task_id in ids])

    async def claim(self) -> list[str]:
        self._claims += 1
        claimed = await self.claims.claim(["k"], limit=10, wait=0, claim_id=f"c{self._claims}")
        self.tasks = claimed.tasks
        return [task.id for task in claimed.tasks]

    async def is_empty(self) -> bool:
        return await self.queues.depth(K2) == 0


@pytest.fixture
async def rig(queues: SqsQueues) -> Rig:
    return Rig(queues)


async def all_deleted(rig: Rig) -> None:
    while not await rig.is_empty():  # noqa: ASYNC110 - the queue is asked over HTTP
        await asyncio.sleep(0.01)


async def test_a_message_that_is_delivered_twice_gives_one_lease(rig: Rig) -> None:
    await rig.put("a")
    await rig.queues.send(K2, [A, A])
    assert await rig.claim() == ["a"]
    await rig.claim()
    await all_deleted(rig)


async def test_messages_that_come_out_of_order_give_each_task_once(rig: Rig) -> None:
    ids = [f"t{number}" for number in range(9)]
    await rig.put(*ids)
    await rig.queues.send(K2, [Ticket(id=task_id, fence=0) for task_id in reversed(ids)])
    assert sorted(await rig.claim()) == ids


async def test_a_message_that_comes_after_its_tasks_run_does_not_bring_the_retry_forward(rig: Rig) -> None:
    await rig.put("a")
    await rig.queues.send(K2, [A])
    await rig.claim()
    await rig.backend.settle([Settlement(id="a", token=rig.tasks[0].token, outcome="retry", retry_after=1000)])
    await rig.queues.send(K2, [A])  # late
    assert await rig.claim() == []
    await all_deleted(rig)


async def test_a_message_that_comes_after_its_task_has_ended_is_deleted(rig: Rig) -> None:
    await rig.put("a")
    await rig.queues.send(K2, [A])
    await rig.claim()
    await rig.backend.settle([Settlement(id="a", token=rig.tasks[0].token, outcome="success")])
    await rig.queues.send(K2, [A])  # late
    assert await rig.claim() == []
    await all_deleted(rig)


async def test_due_tasks_of_a_server_come_by_way_of_sqs(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_queues, "_ABSENT", 0.2)
    ids = {f"t{number}" for number in range(120)}
    workers = opened()
    async with Engine(MemoryStore(), queues=opened()) as engine:
        await engine.schedule([NewTask(id=task_id, kind="k") for task_id in ids])
        found: set[str] = set()
        while found != ids:
            messages: Sequence[Any] = await workers.receive(["k"], limit=50, wait=60)
            found.update(message.ticket.id for message in messages)
            await workers.delete(messages)
