"""Clients and workers over `sqs://`, with SQS as moto plays it."""

import json
import logging
import threading
import uuid
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from types_boto3_sqs import SQSClient

import leasekit
from leasekit import Client, Fatal, LeasekitError, Worker, lease
from leasekit.hooks import Event, Settled
from leasekit.task import Stats
from tests.adapters.sqs.conftest import Url


@pytest.fixture
def client(url: Url) -> Iterator[Client]:
    with leasekit.connect(url(wait=1)) as client:
        yield client


def queue_url(sqs: SQSClient, queue: str) -> str:
    found: str = sqs.get_queue_url(QueueName=queue)["QueueUrl"]
    return found


def left(client: Client, queue: str) -> int:
    counts: dict[str, int] = client.stats().kinds[queue]
    return sum(counts.values())


def test_a_task_goes_through_its_life(client: Client, queue: str) -> None:
    scheduled = client.schedule("thumbnail", {"page": 1}, collection="blue")
    for task in client.tasks("thumbnail"):
        assert (task.id, task.collection) == (scheduled.id, "blue")
        with lease(task) as held:
            assert held.fence == 0
            assert held.remaining() > 200
            held.complete({"ok": True})
        break
    assert left(client, queue) == 0


def test_a_message_of_anybody_is_a_task(client: Client, sqs: SQSClient, queue: str) -> None:
    sqs.send_message(QueueUrl=queue_url(sqs, queue), MessageBody="plain words")
    for task in client.tasks("anything"):
        with lease(task) as held:
            assert held.task.payload == "plain words"
        break
    assert left(client, queue) == 0


def test_a_loop_that_is_idle_ends(client: Client) -> None:
    assert list(client.tasks("k", until_idle=0.5)) == []


def test_what_a_loop_did_not_lease_is_given_back(client: Client, queue: str) -> None:
    client.schedule("k")
    tasks = client.tasks("k", until_idle=3)
    assert next(tasks).attempt == 1
    again = next(tasks)
    assert again.attempt == 2
    with lease(again):
        pass
    assert left(client, queue) == 0


def test_a_fatal_failure_is_found_among_the_dead_letters(url: Url, sqs: SQSClient, queue: str) -> None:
    dead = f"dead-{uuid.uuid4().hex[:8]}"
    dead_url = sqs.create_queue(QueueName=dead)["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=dead_url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 5})
    sqs.set_queue_attributes(QueueUrl=queue_url(sqs, queue), Attributes={"RedrivePolicy": policy})
    with leasekit.connect(url(wait=1)) as client:
        task_id = client.schedule("k", {"page": 1}).id
        with pytest.raises(Fatal), lease(next(client.tasks("k"))):
            raise Fatal("no such page")
        assert left(client, queue) == 0
    (message,) = sqs.receive_message(QueueUrl=dead_url, MessageAttributeNames=["All"])["Messages"]
    said = {name: value["StringValue"] for name, value in message["MessageAttributes"].items()}
    assert json.loads(message["Body"]) == {"page": 1}
    assert said["leasekit.id"] == task_id
    assert said["leasekit.error"] == "Fatal: no such page"


def test_what_sqs_cannot_tell_is_said_so(client: Client) -> None:
    for call in (
        lambda: client.get("t"),
        lambda: client.cancel("t"),
        client.list_tasks,
        lambda: client.wait_tasks("t"),
    ):
        with pytest.raises(LeasekitError, match="does not know what becomes of each"):
            call()


def test_successors_cannot_be_scheduled_in_one_transaction(client: Client) -> None:
    client.schedule("k")
    with lease(next(client.tasks("k"))) as held, pytest.raises(LeasekitError, match=r"call client\.schedule"):
        held.then("next")


@pytest.mark.parametrize("door", ["named", "once"])
def test_a_service_with_several_tasks_of_one_id_has_no_names(client: Client, door: str) -> None:
    with pytest.raises(LeasekitError, match="could have two holders"), lease(getattr(client, door)("n")):
        pytest.fail("it was granted")


def test_stats_count_what_waits_and_what_is_in_flight(client: Client, queue: str) -> None:
    for _ in range(3):
        client.schedule("k")
    with lease(next(client.tasks("k"))):
        assert client.stats() == Stats(kinds={queue: {"new": 0, "enqueued": 2, "processing": 1}})


def test_a_worker_runs_handlers_of_several_kinds(client: Client, queue: str) -> None:
    ran: list[tuple[str, Any]] = []
    done = threading.Event()
    settled: list[Settled] = []

    def hear(event: Event) -> None:
        if isinstance(event, Settled):
            settled.append(event)
            if len(settled) == 6:
                done.set()

    client.listen(hear)
    worker = Worker(client, concurrency=4)

    @worker.handler("a", run="thread")
    def a(payload: int) -> None:
        ran.append(("a", payload))

    @worker.handler("b")
    async def b(payload: int) -> None:
        ran.append(("b", payload))

    for n in range(3):
        client.schedule("a", n)
        client.schedule("b", n)
    running = threading.Thread(target=worker.run)
    running.start()
    assert done.wait(30)
    worker.stop()
    running.join(30)
    assert sorted(ran) == [(kind, n) for kind in ("a", "b") for n in range(3)]
    assert {event.verdict for event in settled} == {"settled"}
    assert left(client, queue) == 0


def test_closing_ends_a_loop_that_waits(url: Url) -> None:
    client, settled = leasekit.connect(url(wait=1)), threading.Event()

    def work() -> None:
        for task in client.tasks("k"):
            with lease(task):
                pass
            settled.set()  # from here the loop is on the connection that is closed

    client.schedule("k")
    waiting = threading.Thread(target=work)
    waiting.start()
    assert settled.wait(60)
    client.close()
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_worker_runs_the_messages_of_a_group_in_order_and_other_groups_beside_them(url: Url, sqs: SQSClient) -> None:
    """The first message of a group fails: it is tried again before the next one of its group begins."""
    queue = f"q-{uuid.uuid4().hex[:12]}.fifo"
    sqs.create_queue(QueueName=queue, Attributes={"FifoQueue": "true", "ContentBasedDeduplication": "true"})
    begun: list[tuple[str, int]] = []
    running: list[str] = []
    overlaps: list[str] = []
    both, all_done = threading.Barrier(2), threading.Event()
    with leasekit.connect(url(queue, wait=1)) as client:
        worker = Worker(client, concurrency=4)

        @worker.handler("k", run="thread")
        def k(payload: tuple[str, int]) -> None:
            group, number = payload
            overlaps.extend(other for other in running if other == group)
            running.append(group)
            is_first = payload not in begun
            begun.append(payload)
            try:
                if number == 0 and is_first:
                    both.wait(30)  # the first messages of both groups run at the same time
                    if group == "a":
                        raise ZeroDivisionError
            finally:
                running.remove(group)
            if len(begun) == 7:
                all_done.set()

        for number in range(3):
            for group in ("a", "b"):
                client.schedule("k", (group, number), collection=group, retry=leasekit.FixedDelays(waits=[1]))
        thread = threading.Thread(target=worker.run)
        thread.start()
        assert all_done.wait(60)
        worker.stop()
        thread.join(60)
        assert left(client, queue) == 0
    assert [number for group, number in begun if group == "a"] == [0, 0, 1, 2]
    assert [number for group, number in begun if group == "b"] == [0, 1, 2]
    assert overlaps == []


def test_a_worker_of_a_queue_that_does_not_exist_says_that_it_goes_on(
    url: Url, caplog: pytest.LogCaptureFixture
) -> None:
    with leasekit.connect(url("wrong", wait=1)) as client:
        worker, failed = Worker(client, concurrency=1), threading.Event()

        @worker.handler("k", run="thread")
        def k(payload: int) -> None:
            """Never called."""

        class Failed(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if "claims of 'k' fail" in record.getMessage():
                    failed.set()

        handler = Failed()
        logging.getLogger("leasekit").addHandler(handler)
        try:
            thread = threading.Thread(target=worker.run)
            thread.start()
            assert failed.wait(30)
            worker.stop()
            thread.join(30)
        finally:
            logging.getLogger("leasekit").removeHandler(handler)
    assert "are tried until the worker stops: Refused: queue 'wrong': " in caplog.text


async def in_another_way(payload: int) -> None:
    raise AssertionError(payload)


@pytest.mark.parametrize("run", ["async", "process"])
def test_a_worker_leaves_a_queue_of_messages_without_a_kind_alone(
    url: Url, sqs: SQSClient, queue: str, run: Literal["async", "process"]
) -> None:
    """Also if its kinds are claimed apart, or one of them only when its process has started."""
    for n in range(3):
        sqs.send_message(QueueUrl=queue_url(sqs, queue), MessageBody=str(n))
    ran: list[int] = []
    with leasekit.connect(url(wait=1)) as client:
        worker, stopped = Worker(client, concurrency=4), threading.Event()

        @worker.handler("a", run="thread")
        def a(payload: int) -> None:
            ran.append(payload)

        worker.handler("b", run=run)(in_another_way)

        class Stopped(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if "name no kind" in record.getMessage():
                    stopped.set()

        handler = Stopped(logging.ERROR)
        logging.getLogger("leasekit").addHandler(handler)
        try:
            thread = threading.Thread(target=worker.run)
            thread.start()
            assert stopped.wait(30)
            worker.stop()
            thread.join(30)
        finally:
            logging.getLogger("leasekit").removeHandler(handler)
    assert ran == []
