"""A loop of the user's own over what boto3 returns, made safe: over SQS as moto plays it."""

import itertools
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import boto3
import pytest
from botocore.client import BaseClient
from botocore.exceptions import ParamValidationError
from types_boto3_sqs import SQSClient

import leasekit_sqs
from leasekit import ConfigError, Exponential, Fatal, FixedDelays, Lease, LeaseLost, NotHeld, ProtocolError, lease
from leasekit._binding import reserve_of
from leasekit_aws.boto_clients import BotoClients, verify_of
from leasekit_sqs import loop
from leasekit_sqs.backend import boot_time
from leasekit_sqs.comparison import Comparison
from tests.adapters.sqs.fake import Fake

EXTEND = "ChangeMessageVisibilityBatch"


@pytest.fixture
def queue_url(sqs: SQSClient, queue: str) -> str:
    url: str = sqs.get_queue_url(QueueName=queue)["QueueUrl"]
    return url


class Send(Protocol):
    def __call__(self, body: str = "work", **more: Any) -> None: ...


@pytest.fixture
def send(sqs: SQSClient, queue_url: str) -> Send:
    def send(body: str = "work", **more: Any) -> None:
        sqs.send_message(QueueUrl=queue_url, MessageBody=body, **more)

    return send


class Receive(Protocol):
    def __call__(self, timeout: int | None = 30, **more: Any) -> Any: ...


@pytest.fixture
def receive(sqs: SQSClient, queue_url: str) -> Receive:
    def receive(timeout: int | None = 30, **more: Any) -> Any:
        named: dict[str, Any] = {} if timeout is None else {"VisibilityTimeout": timeout}
        found = sqs.receive_message(QueueUrl=queue_url, **named, **more)
        return next(iter(found.get("Messages", [])), None)

    return receive


@pytest.fixture
def other_client(moto: str) -> Iterator[SQSClient]:
    session = boto3.session.Session(aws_access_key_id="another", aws_secret_access_key="canary")
    client = session.client("sqs", endpoint_url=moto)
    yield client
    client.close()


def counts(sqs: SQSClient, queue_url: str) -> tuple[int, int]:
    """Messages that can be received, and those that are in flight."""
    found = sqs.get_queue_attributes(QueueUrl=queue_url, AttributeNames=["All"])["Attributes"]
    return int(found["ApproximateNumberOfMessages"]), int(found["ApproximateNumberOfMessagesNotVisible"])


def test_leaving_the_block_deletes_the_message(sqs: SQSClient, queue_url: str, send: Send, receive: Receive) -> None:
    send('{"page": 1}')
    with lease(leasekit_sqs.task(receive(), queue_url=queue_url, client=sqs)) as held:
        assert held.task.payload == {"page": 1}
        assert held.task.kind == queue_url.rpartition("/")[2]
        assert 0 < held.remaining() <= 30
        assert counts(sqs, queue_url) == (0, 1)
    assert counts(sqs, queue_url) == (0, 0)


def received(aws: Fake, *, watched: bool = False, **asked: Any) -> tuple[Any, dict[str, Any]]:
    """Return a message of a queue, and what `lease` takes beside it. No lease of an earlier test sends heartbeats."""
    leasekit_sqs.close()
    client = boto3.session.Session().client("sqs", endpoint_url=aws.endpoint)
    if watched:
        leasekit_sqs.watch(client)
    aws.put("q", "work")
    url = client.get_queue_url(QueueName="q")["QueueUrl"]
    (message,) = client.receive_message(QueueUrl=url, **asked)["Messages"]
    return message, {"queue_url": url, "client": client}


def until(is_so: Callable[[], bool]) -> None:
    patience = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < patience
        time.sleep(0.01)


@pytest.fixture
def observed(sqs: SQSClient) -> None:
    leasekit_sqs.watch(sqs)


@pytest.mark.usefixtures("observed")
def test_a_lease_that_is_shorter_than_the_queues_own_time_is_said_once(
    sqs: SQSClient, queue_url: str, send: Send, receive: Receive, caplog: pytest.LogCaptureFixture
) -> None:
    sqs.set_queue_attributes(QueueUrl=queue_url, Attributes={"VisibilityTimeout": "1200"})
    for ttl in (1200, 30, 30):  # the longer one first: it is compared too, and is no reason for a warning
        send()
        message = receive(None)
        with leasekit_sqs.lease(message, queue_url=queue_url, client=sqs, visibility_timeout=ttl, settle=False):
            while ttl < 1200 and "visibility_timeout=1200" not in caplog.text:
                time.sleep(0.01)
    leasekit_sqs.close()  # ends all comparisons
    assert caplog.text.count("visibility_timeout=1200") == 1
    assert f"queue {queue_url.rpartition('/')[2]} hides a message for 1200 s" in caplog.text


@pytest.mark.parametrize(("seconds", "warnings"), [(1200, 1), (30, 0), (20, 0)])
def test_a_lease_that_may_shorten_the_queues_own_time_is_said_once_if_the_receive_was_not_seen(
    aws: Fake, caplog: pytest.LogCaptureFixture, seconds: int, warnings: int
) -> None:
    """Its receive may have named the time of the lease, so nothing is said of a lease that is longer."""
    aws.queue("q").visibility = seconds
    message, options = received(aws)
    with leasekit_sqs.lease(message, **options):
        until(lambda: has_compared(aws, 1, caplog, warnings))
    aws.put("q", "the next")
    asked: dict[str, int] = {} if warnings else {"VisibilityTimeout": 30}
    (message,) = options["client"].receive_message(QueueUrl=options["queue_url"], **asked)["Messages"]
    with leasekit_sqs.lease(message, **options):
        until(lambda: has_compared(aws, 1 + warnings, caplog, warnings))
    leasekit_sqs.close()
    assert caplog.text.count("queue q hides a message for 1200 s") == len(caplog.records) == warnings
    assert caplog.text.count("pass visibility_timeout=1200; if each receive names VisibilityTimeout=30") == warnings


def has_compared(aws: Fake, times: int, caplog: pytest.LogCaptureFixture, warnings: int) -> bool:
    """Return whether the queue's attributes were asked for so often, and so much was said."""
    return len(aws.asked("GetQueueAttributes")) == times and len(caplog.records) >= warnings


def test_a_message_that_is_leased_again_is_not_compared_as_one_that_was_not_seen(
    aws: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str] = []
    monkeypatch.setattr(Comparison, "start", lambda _, url, **_seen: compared.append(url))
    message, options = received(aws, watched=True, VisibilityTimeout=30)
    first = leasekit_sqs.task(message, **options)
    with lease(leasekit_sqs.task(message, **options)):
        assert compared == []
    assert first.id == message["MessageId"]


@pytest.mark.parametrize("watched", [True, False])
def test_a_queue_whose_attributes_may_not_be_read_is_named_once(
    aws: Fake, caplog: pytest.LogCaptureFixture, watched: bool
) -> None:
    message, options = received(aws, watched=watched)
    aws.error("GetQueueAttributes", 403, "AccessDenied")
    with leasekit_sqs.lease(message, **options):
        until(lambda: bool(caplog.records))
    leasekit_sqs.close()
    (warning,) = caplog.messages
    assert warning.startswith("the visibility timeout of queue q cannot be read (")
    assert "AccessDenied" in warning
    assert "longer than the 30 s" in warning
    assert "Allow sqs:GetQueueAttributes" in warning


@pytest.mark.usefixtures("observed")
def test_a_lease_that_is_longer_than_the_queues_own_time_is_said_once(
    sqs: SQSClient, queue_url: str, send: Send, receive: Receive, caplog: pytest.LogCaptureFixture
) -> None:
    sqs.set_queue_attributes(QueueUrl=queue_url, Attributes={"VisibilityTimeout": "20"})
    for _ in range(2):
        send()
        message = receive(None)
        with leasekit_sqs.lease(message, queue_url=queue_url, client=sqs, visibility_timeout=180, settle=False):
            while "two workers at once" not in caplog.text:
                time.sleep(0.01)
    leasekit_sqs.close()
    assert caplog.text.count("two workers at once") == 1
    assert "hides a message for 20 s, but this loop leases it with visibility_timeout=180" in caplog.text


@pytest.mark.usefixtures("observed")
def test_a_lease_is_not_compared_with_the_queue_if_its_receive_named_the_time(
    sqs: SQSClient, queue_url: str, send: Send, receive: Receive, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str] = []
    monkeypatch.setattr(Comparison, "start", lambda _, url, **_seen: compared.append(url))
    for timeout in (60, None):
        send()
        with leasekit_sqs.lease(receive(timeout), queue_url=queue_url, client=sqs, visibility_timeout=60):
            assert compared == ([] if timeout else [queue_url])


@pytest.mark.usefixtures("observed")
def test_another_time_than_that_of_the_receive_is_refused(
    sqs: SQSClient, queue_url: str, send: Send, receive: Receive
) -> None:
    send()
    with pytest.raises(
        ConfigError, match=r"visibility_timeout is 180, .*VisibilityTimeout=5: pass .*timeout=5 .*=180 to rec"
    ):
        leasekit_sqs.lease(receive(5), queue_url=queue_url, client=sqs, visibility_timeout=180)


@pytest.mark.usefixtures("observed")
@pytest.mark.parametrize(("hidden", "most"), [(8, 3), (4, 0)])
def test_a_receive_that_may_wait_longer_than_its_messages_are_hidden_is_refused(
    sqs: SQSClient, queue_url: str, send: Send, receive: Receive, hidden: int, most: int
) -> None:
    send()
    message = receive(hidden, WaitTimeSeconds=hidden)
    said = f"may wait {hidden} s, but its messages are hidden for {hidden} s, .* set WaitTimeSeconds to {most} or less"
    with pytest.raises(ConfigError, match=said):
        leasekit_sqs.lease(message, queue_url=queue_url, client=sqs, visibility_timeout=hidden)


def test_lease_is_short_for_the_lease_of_a_task(sqs: SQSClient, queue_url: str, send: Send, receive: Receive) -> None:
    send("words")
    with leasekit_sqs.lease(receive(), queue_url=queue_url, client=sqs, kind="k", idle_timeout=60) as held:
        assert (held.task.kind, held.task.payload) == ("k", "words")
    assert counts(sqs, queue_url) == (0, 0)


def test_an_own_deletion_after_the_block_does_no_harm(
    sqs: SQSClient, queue_url: str, send: Send, receive: Receive
) -> None:
    send()
    message = receive()
    with lease(leasekit_sqs.task(message, queue_url=queue_url, client=sqs)):
        pass
    sqs.delete_message(QueueUrl=queue_url, ReceiptHandle=message["ReceiptHandle"])


Change = Callable[[SQSClient, str, str], object]


def deletes(sqs: SQSClient, url: str, handle: str) -> object:
    return sqs.delete_message(QueueUrl=url, ReceiptHandle=handle)


def deletes_batch(sqs: SQSClient, url: str, handle: str) -> object:
    return sqs.delete_message_batch(QueueUrl=url, Entries=[{"Id": "0", "ReceiptHandle": handle}])


def fails(held: Lease) -> None:
    held.fail("not yet", retry=60)


@pytest.mark.parametrize("change", [deletes, deletes_batch])
@pytest.mark.parametrize(("end", "is_warned"), [(Lease.release, True), (fails, True), (Lease.complete, False)])
def test_an_own_deletion_of_a_message_that_was_given_back_is_warned_of(
    sqs: SQSClient, queue_url: str, send: Send, receive: Receive, caplog: pytest.LogCaptureFixture,
    change: Change, end: Callable[[Lease], None], is_warned: bool,
) -> None:  # fmt: skip
    send()
    message = receive()
    with leasekit_sqs.lease(message, queue_url=queue_url, client=sqs) as held:
        end(held)
    change(sqs, queue_url, message["ReceiptHandle"])
    said = rf"your own code calls \w+ for message {message['MessageId']}, but its block has given it back: remove that"
    assert len(re.findall(said, caplog.text)) == is_warned == len(caplog.records)
    assert message["ReceiptHandle"] not in caplog.text


def extends(sqs: SQSClient, url: str, handle: str) -> object:
    """As a thread that was left running."""
    return sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=handle, VisibilityTimeout=9)


def extends_batch(sqs: SQSClient, url: str, handle: str) -> object:
    entry: Any = {"Id": "0", "ReceiptHandle": handle, "VisibilityTimeout": 9}
    return sqs.change_message_visibility_batch(QueueUrl=url, Entries=[entry])


@pytest.mark.parametrize("settle", [True, False])
@pytest.mark.parametrize("change", [deletes, extends, extends_batch])
def test_an_own_change_in_a_block_is_warned_of_unless_the_block_only_keeps_the_message(
    sqs: SQSClient, queue_url: str, send: Send, receive: Receive, caplog: pytest.LogCaptureFixture,
    change: Change, settle: bool,
) -> None:  # fmt: skip
    send()
    message = receive()
    with leasekit_sqs.lease(message, queue_url=queue_url, client=sqs, settle=settle):
        change(sqs, queue_url, message["ReceiptHandle"])
    assert caplog.text.count("its block has not ended") == settle == len(caplog.records)


@pytest.mark.parametrize("params", [{"Entries": ["x"]}, {"Entries": 7}, {"ReceiptHandle": 7}])
def test_a_malformed_deletion_is_left_to_boto3(sqs: SQSClient, queue_url: str, params: dict[str, Any]) -> None:
    leasekit_sqs.watch(sqs)
    delete: Any = sqs.delete_message_batch if "Entries" in params else sqs.delete_message
    with pytest.raises(ParamValidationError):
        delete(QueueUrl=queue_url, **params)


@pytest.mark.slow
def test_a_body_that_outlives_the_visibility_timeout_keeps_its_message(
    sqs: SQSClient, queue_url: str, send: Send, receive: Receive
) -> None:
    send()
    message = receive(6)
    with lease(leasekit_sqs.task(message, queue_url=queue_url, client=sqs, visibility_timeout=6)) as held:
        until = time.monotonic() + 7
        while time.monotonic() < until:
            held.check()
            assert receive() is None
            time.sleep(0.2)
    assert counts(sqs, queue_url) == (0, 0)


class Fail(Protocol):
    def __call__(self, attributes: Any = None, **options: Any) -> None: ...


@pytest.fixture
def fail(aws: Fake) -> Iterator[Fail]:
    """Receive a message for the fourth time, and raise in its block."""
    client = boto3.session.Session().client("sqs", endpoint_url=aws.endpoint)

    def fail(attributes: Any = None, **options: Any) -> None:
        aws.put("q", "work", attributes=attributes or {}, handles=["first", "second", "third"])
        url = client.get_queue_url(QueueName="q")["QueueUrl"]
        counted: Any = ["ApproximateReceiveCount"] if options.pop("is_counted", True) else []
        found = client.receive_message(QueueUrl=url, MessageAttributeNames=["All"], AttributeNames=counted)
        (message,) = found["Messages"]
        assert message.get("Attributes", {}) == dict.fromkeys(counted, "4")
        with pytest.raises(ZeroDivisionError), leasekit_sqs.lease(message, queue_url=url, client=client, **options):
            print(1 / 0)

    yield fail
    client.close()


def waited(aws: Fake) -> int:
    """Return for how long the last call has hidden a message."""
    seconds: int = aws.asked(EXTEND)[-1]["Entries"][0]["VisibilityTimeout"]
    return seconds


@pytest.mark.parametrize("is_counted", [True, False])
def test_after_an_exception_a_message_waits_as_long_as_without_leasekit(
    aws: Fake, fail: Fail, is_counted: bool
) -> None:
    fail(visibility_timeout=40, is_counted=is_counted)
    assert waited(aws) == 40


@pytest.mark.parametrize(
    ("retry", "seconds"), [(7.5, 8), (0, 0), (Exponential(first=3, jitter=0), 24), (FixedDelays(waits=[1, 2]), 2)]
)
def test_after_an_exception_a_message_waits_as_long_as_the_loop_says(
    aws: Fake, fail: Fail, retry: Any, seconds: int
) -> None:
    fail(retry=retry)
    assert waited(aws) == seconds


@pytest.mark.parametrize(("is_counted", "seconds"), [(True, 9), (False, 30)])
def test_a_message_that_names_its_policy_waits_by_it_if_its_receives_are_counted(
    aws: Fake, fail: Fail, is_counted: bool, seconds: int
) -> None:
    policy = '{"policy": "list", "waits": [1, 2, 3, 9]}'
    attributes = {"leasekit.retry": {"DataType": "String", "StringValue": policy}}
    fail(attributes, is_counted=is_counted)
    assert waited(aws) == seconds


@pytest.mark.parametrize("retry", [True, False, -1, 43_201, float("nan"), "soon"])
def test_a_wait_that_is_none_is_refused(sqs: SQSClient, retry: Any) -> None:
    message = {"MessageId": "m", "ReceiptHandle": "h", "Body": "b"}
    with pytest.raises(ConfigError, match="retry must be 0 to 43200 seconds or a policy"):
        leasekit_sqs.task(message, queue_url="http://x/1/a", client=sqs, retry=retry)


def test_a_policy_for_a_message_without_a_count_is_refused(sqs: SQSClient) -> None:
    """The wait would never grow."""
    message = {"MessageId": "m", "ReceiptHandle": "h", "Body": "b"}
    with pytest.raises(ConfigError, match="MessageSystemAttributeNames"):
        leasekit_sqs.task(message, queue_url="http://x/1/a", client=sqs, retry=Exponential())


def test_what_was_decided_in_the_block_is_done(sqs: SQSClient, queue_url: str, send: Send, receive: Receive) -> None:
    send()
    with lease(leasekit_sqs.task(receive(), queue_url=queue_url, client=sqs)) as held:
        held.release()
    assert counts(sqs, queue_url) == (1, 0)


def test_without_settle_the_block_only_keeps_the_message(
    sqs: SQSClient, queue_url: str, send: Send, receive: Receive
) -> None:
    send()
    message = receive(60)
    with lease(leasekit_sqs.task(message, queue_url=queue_url, client=sqs, visibility_timeout=60, settle=False)):
        pass
    assert counts(sqs, queue_url) == (0, 1)
    sqs.delete_message(QueueUrl=queue_url, ReceiptHandle=message["ReceiptHandle"])
    assert counts(sqs, queue_url) == (0, 0)


def test_a_message_whose_time_has_run_out_is_not_begun(
    sqs: SQSClient, queue_url: str, send: Send, receive: Receive, monkeypatch: pytest.MonkeyPatch
) -> None:
    send()
    now = boot_time()
    monkeypatch.setattr("leasekit_sqs.loop.boot_time", lambda: now - 31)  # when it was handed over
    late = leasekit_sqs.task(receive(30), queue_url=queue_url, client=sqs)
    with pytest.raises(LeaseLost, match="was over before its block began"), lease(late):
        pytest.fail("its body ran")


def test_the_last_of_a_batch_whose_turn_comes_too_late_is_not_begun(
    sqs: SQSClient, queue_url: str, send: Send, receive: Receive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time counts from when it came, not from when its lease is made: another may have it by then."""
    send("first")
    with leasekit_sqs.lease(receive(), queue_url=queue_url, client=sqs):
        pass  # from here on this client is listened to
    send("last")
    with monkeypatch.context() as patch:
        earlier = boot_time() - 31
        patch.setattr("leasekit_sqs.loop.boot_time", lambda: earlier)  # when it came
        message = receive()
    with (
        pytest.raises(LeaseLost, match="was over before its block began"),
        leasekit_sqs.lease(message, queue_url=queue_url, client=sqs),
    ):
        pytest.fail("its body ran")


class Late(Protocol):
    def __call__(self, **options: Any) -> None: ...


@pytest.fixture
def late(aws: Fake, monkeypatch: pytest.MonkeyPatch) -> Late:
    """Lease a message of an unseen receive, with a client that was first seen before the message's whole time."""
    _, options = received(aws)
    with monkeypatch.context() as patch:
        patch.setattr("leasekit_sqs.loop.boot_time", lambda: boot_time() - 31)
        leasekit_sqs.watch(options["client"])
    numbers = itertools.count()

    def lease(**more: Any) -> None:
        message = {"MessageId": "m", "ReceiptHandle": f"h{next(numbers)}", "Body": "b"}
        with leasekit_sqs.lease(message, **options, **more):
            pytest.fail("another worker may have it")

    return lease


def test_a_later_message_of_a_batch_that_was_not_seen_counts_from_the_first_lease(
    late: Late, caplog: pytest.LogCaptureFixture
) -> None:
    """As the third of the batch with which a process begins: another worker may have it after a visibility timeout."""
    for _ in range(2):
        with pytest.raises(LeaseLost, match="was over before its block began"):
            late()
    assert caplog.text.count("If another client receives, call leasekit_sqs.watch with it before its") == 1


def test_more_late_messages_than_a_receive_brings_are_a_mistake(late: Late) -> None:
    """The receiving client is another one: each message would come too late, until it is in the dead-letter queue."""
    for _ in range(10):
        with pytest.raises(LeaseLost):
            late()
    with pytest.raises(ConfigError, match=r"not seen the receive .* queue q: .*, 31 s ago, and is over\. If another"):
        late()


def test_a_message_that_another_watched_client_has_received_is_known(
    sqs: SQSClient, other_client: SQSClient, queue_url: str, send: Send
) -> None:
    """As one of aioboto3's, which is not passed to `lease`."""
    leasekit_sqs.watch(other_client)
    send()
    (message,) = other_client.receive_message(QueueUrl=queue_url, VisibilityTimeout=60)["Messages"]
    with pytest.raises(ConfigError, match="received with VisibilityTimeout=60"):
        leasekit_sqs.lease(message, queue_url=queue_url, client=sqs)


@pytest.mark.parametrize(("make", "name"), [(object, "object"), (lambda: boto3.client("swf"), "swf")])
def test_what_is_no_client_of_sqs_is_not_watched(make: Callable[[], Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"watch takes a client of SQS, as of boto3.*, got {name}"):
        leasekit_sqs.watch(make())


def test_a_message_whose_answer_took_longer_than_its_time_is_not_begun(
    sqs: SQSClient, queue_url: str, send: Send, receive: Receive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow network, or a process that was stopped meanwhile: another may have it by then."""
    send("first")
    with leasekit_sqs.lease(receive(), queue_url=queue_url, client=sqs):
        pass  # from here on this client is listened to
    send("late")
    behind = [31.0]

    def answered(**_: Any) -> None:
        behind[0] = 0.0

    monkeypatch.setattr("leasekit_sqs.loop.boot_time", lambda: boot_time() - behind[0])
    sqs.meta.events.register("response-received.sqs.ReceiveMessage", answered)
    message = receive()
    with (
        pytest.raises(LeaseLost, match="was over before its block began"),
        leasekit_sqs.lease(message, queue_url=queue_url, client=sqs),
    ):
        pytest.fail("its body ran")


def test_a_receive_that_was_under_way_when_its_client_was_first_seen_counts_from_then(
    aws: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of another thread of the loop. Its answer may be late: another worker may have the message by then."""
    client = boto3.session.Session().client("sqs", endpoint_url=aws.endpoint)
    aws.put("q", "work")
    url = client.get_queue_url(QueueName="q")["QueueUrl"]
    arrived, go_on = aws.hold("ReceiveMessage")
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(client.receive_message, QueueUrl=url)
        assert arrived.wait(20)
        with monkeypatch.context() as patch:
            patch.setattr("leasekit_sqs.loop.boot_time", lambda: boot_time() - 31)
            leasekit_sqs.watch(client)
        go_on.set()
        (message,) = receiving.result()["Messages"]
    with (
        pytest.raises(LeaseLost, match="was over before its block began"),
        leasekit_sqs.lease(message, queue_url=url, client=client),
    ):
        pytest.fail("its body ran")


def test_a_message_that_was_deleted_meanwhile_is_not_begun(
    sqs: SQSClient, queue_url: str, send: Send, receive: Receive
) -> None:
    send()
    message = receive()
    sqs.delete_message(QueueUrl=queue_url, ReceiptHandle=message["ReceiptHandle"])
    with pytest.raises(LeaseLost), lease(leasekit_sqs.task(message, queue_url=queue_url, client=sqs)):
        pytest.fail("its body ran")


def test_a_message_that_a_block_has_given_back_is_not_begun_again(
    sqs: SQSClient, queue_url: str, send: Send, receive: Receive
) -> None:
    send()
    message = receive()
    with pytest.raises(RuntimeError), leasekit_sqs.lease(message, queue_url=queue_url, client=sqs):
        raise RuntimeError
    with (
        pytest.raises((LeaseLost, NotHeld), match="settled"),
        leasekit_sqs.lease(message, queue_url=queue_url, client=sqs),
    ):
        pytest.fail("another receiver may have it")


def test_a_message_that_a_block_has_given_back_is_not_begun_again_under_another_id(
    sqs: SQSClient, queue_url: str, send: Send, receive: Receive
) -> None:
    """Its first lease knows its attributes from the receive; the second knows only what it is passed."""
    leasekit_sqs.watch(sqs)
    send(MessageAttributes={"leasekit.id": {"DataType": "String", "StringValue": "nightly"}})
    message = {name: value for name, value in receive().items() if name != "MessageAttributes"}
    with leasekit_sqs.lease(message, queue_url=queue_url, client=sqs) as held:
        assert held.task.id == "nightly"
        held.release()
    with (
        pytest.raises((LeaseLost, NotHeld), match="settled"),  # by whether SQS has answered the release by now
        leasekit_sqs.lease(message, queue_url=queue_url, client=sqs),
    ):
        pytest.fail("another receiver may have it")


def test_a_message_that_is_leased_again_has_no_more_time_than_before(
    sqs: SQSClient, queue_url: str, send: Send, receive: Receive, monkeypatch: pytest.MonkeyPatch
) -> None:
    send()
    with monkeypatch.context() as patch:
        earlier = boot_time() - 31
        patch.setattr("leasekit_sqs.loop.boot_time", lambda: earlier)
        message = receive()
        leasekit_sqs.task(message, queue_url=queue_url, client=sqs)
    with (
        pytest.raises(LeaseLost, match="was over before its block began"),
        leasekit_sqs.lease(message, queue_url=queue_url, client=sqs),
    ):
        pytest.fail("another receiver may have it")


def test_a_message_that_a_block_has_only_kept_can_be_leased_again(
    sqs: SQSClient, queue_url: str, send: Send, receive: Receive
) -> None:
    send()
    message = receive(60)
    for settle in (False, False, True):
        with leasekit_sqs.lease(message, queue_url=queue_url, client=sqs, visibility_timeout=60, settle=settle) as held:
            held.check()
    assert counts(sqs, queue_url) == (0, 0)


def test_messages_of_one_batch_are_all_kept_from_when_their_leases_are_made(aws: Fake) -> None:
    client = boto3.session.Session().client("sqs", endpoint_url=aws.endpoint)
    for _ in range(3):
        aws.put("q", "work")
    url = client.get_queue_url(QueueName="q")["QueueUrl"]
    messages = client.receive_message(QueueUrl=url, MaxNumberOfMessages=10, VisibilityTimeout=30)["Messages"]
    leases = [lease(leasekit_sqs.task(message, queue_url=url, client=client)) for message in messages]
    handles = {message["ReceiptHandle"] for message in messages}
    until = time.monotonic() + 20
    while {entry["ReceiptHandle"] for call in aws.asked(EXTEND) for entry in call["Entries"]} != handles:
        assert time.monotonic() < until
        time.sleep(0.01)
    for held in leases:
        with held:
            pass
    assert all(message.deleted for message in aws.queues["q"].messages)
    client.close()


def test_the_log_says_why_a_message_cannot_be_deleted(aws: Fake, caplog: pytest.LogCaptureFixture) -> None:
    client = boto3.session.Session().client("sqs", endpoint_url=aws.endpoint)
    put = aws.put("q", "work")
    url = client.get_queue_url(QueueName="q")["QueueUrl"]
    (message,) = client.receive_message(QueueUrl=url)["Messages"]
    aws.error("DeleteMessageBatch", 403, "AccessDenied", "You may not perform sqs:deletemessage")
    with leasekit_sqs.lease(message, queue_url=url, client=client):
        pass
    client.close()
    assert put.deleted
    assert "AWS refuses this call: DeleteMessageBatch: AccessDenied: You may not perform" in caplog.text


def test_the_log_says_that_a_message_could_not_be_deleted_and_that_it_was(
    aws: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    message, options = received(aws)
    aws.error("DeleteMessageBatch", 500, "InternalFailure")
    with leasekit_sqs.lease(message, **options):
        pass
    until(lambda: "reported again" in caplog.text)
    first, last = [record.getMessage() for record in caplog.records]
    assert f"tried again ({message['MessageId']}): the message could not be deleted yet: " in first
    assert last == "how tasks ended is reported again"


def test_a_message_that_is_deleted_in_its_block_is_lost_with_a_question(aws: Fake) -> None:
    message, options = received(aws)

    def deletes_too_early() -> None:
        with leasekit_sqs.lease(message, visibility_timeout=9, **options) as held:
            options["client"].delete_message(QueueUrl=options["queue_url"], ReceiptHandle=message["ReceiptHandle"])
            until(lambda: held.lost)
            held.check()

    with pytest.raises(LeaseLost, match=r"was it deleted inside the block, or has another .* Is queue_url the") as lost:
        deletes_too_early()
    assert lost.value.reason == "unknown"


def test_a_queue_that_does_not_exist_is_a_mistake_that_is_said_at_the_first_heartbeat(aws: Fake) -> None:
    message, options = received(aws)
    aws.error("ChangeMessageVisibilityBatch", 400, "QueueDoesNotExist", "The specified queue does not exist.")
    with (
        pytest.raises(ConfigError, match=r"the queue does not exist in this region.* is queue_url the queue that"),
        leasekit_sqs.lease(message, **options),
    ):
        pytest.fail("its body ran")
    assert len(aws.asked(EXTEND)) == 1


def test_a_queue_that_is_gone_for_a_moment_ends_no_lease_that_was_kept(aws: Fake) -> None:
    message, options = received(aws)
    with leasekit_sqs.lease(message, visibility_timeout=9, **options) as held:
        aws.error("ChangeMessageVisibilityBatch", 400, "QueueDoesNotExist")
        before = len(aws.asked(EXTEND))
        until(lambda: len(aws.asked(EXTEND)) >= before + 2)
        held.check()


def test_a_client_of_another_service_is_refused() -> None:
    message = {"MessageId": "m", "ReceiptHandle": "h", "Body": "b"}
    client = boto3.session.Session().client("swf", region_name="eu-central-1")
    with pytest.raises(ConfigError, match=r"client is boto3.client\('swf'\): pass boto3.client\('sqs'\)"):
        leasekit_sqs.lease(message, queue_url="http://x/1/a", client=client)


def test_attributes_say_more_of_a_task(sqs: SQSClient, queue_url: str, send: Send, receive: Receive) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    own = {"leasekit.kind": "report", "leasekit.id": "task-1", "traceparent": trace}
    send(MessageAttributes={name: {"DataType": "String", "StringValue": text} for name, text in own.items()})
    message = receive(MessageAttributeNames=["All"], MessageSystemAttributeNames=["All"])
    task = leasekit_sqs.task(message, queue_url=queue_url, client=sqs)
    assert (task.kind, task.id, task.traceparent, task.attempt) == ("report", "task-1", trace, 1)
    assert leasekit_sqs.task(message, queue_url=queue_url, client=sqs, kind="mine").kind == "mine"


def test_there_is_one_keeper_for_who_asks_and_where(sqs: SQSClient, other_client: SQSClient) -> None:
    message = {"MessageId": "m", "ReceiptHandle": "h", "Body": "b"}
    first = leasekit_sqs.task(message, queue_url="http://x/1/a", client=sqs)
    second = leasekit_sqs.task(message, queue_url="http://x/1/b", client=sqs)
    other = leasekit_sqs.task(message, queue_url="http://x/1/a", client=other_client)
    assert reserve_of(first) == reserve_of(second)
    assert reserve_of(other) != reserve_of(first)


def test_heartbeats_verify_certificates_as_the_users_client_does(tmp_path: Path) -> None:
    message = {"MessageId": "m", "ReceiptHandle": "h", "Body": "b"}
    keepers = set()
    authorities = tmp_path / "ca.pem"
    authorities.touch()
    for verify in (None, False, str(authorities)):
        client = boto3.session.Session().client("sqs", endpoint_url="https://localhost:1", verify=verify)
        assert verify_of(BotoClients("sqs", like=client)._client(is_poll=False)) == verify_of(client)
        keepers.add(reserve_of(leasekit_sqs.task(message, queue_url="http://x/1/a", client=client)))
        client.close()
    assert verify_of(client) == str(authorities)
    assert len(keepers) == 3


def test_sessions_that_sign_alike_share_one_keeper(sqs: SQSClient, moto: str) -> None:
    """As with a session for each thread."""
    message = {"MessageId": "m", "ReceiptHandle": "h", "Body": "b"}
    keepers = set()
    for _ in range(2):
        session = boto3.session.Session(aws_access_key_id="alike", aws_secret_access_key="canary")
        client = session.client("sqs", endpoint_url=moto)
        keepers.add(reserve_of(leasekit_sqs.task(message, queue_url="http://x/1/a", client=client)))
        client.close()
    assert len(keepers) == 1


def test_a_forked_child_has_keepers_of_its_own(sqs: SQSClient) -> None:
    message = {"MessageId": "m", "ReceiptHandle": "h", "Body": "b"}
    mine = leasekit_sqs.task(message, queue_url="http://x/1/a", client=sqs)
    child = os.fork()
    if child == 0:
        theirs = leasekit_sqs.task(message, queue_url="http://x/1/a", client=sqs)
        os._exit(0 if reserve_of(theirs) != reserve_of(mine) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class AsyncClient(BaseClient):  # as aiobotocore's
    def __init__(self) -> None:
        """Make nothing: it is refused before it is used."""

    async def _make_api_call(self, *_: object) -> None: ...


@pytest.mark.parametrize("make", [AsyncClient, object])
def test_what_is_no_client_of_boto3_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=r"boto3.client\('sqs'\)"):
        leasekit_sqs.task({"MessageId": "m", "ReceiptHandle": "h", "Body": ""}, client=make(), queue_url="http://x/1/a")


@pytest.mark.parametrize("timeout", [1, 43_201, 30.5, math.nan, math.inf, "30"])
def test_a_timeout_that_cannot_be_is_refused(sqs: SQSClient, timeout: Any) -> None:
    message = {"MessageId": "m", "ReceiptHandle": "h", "Body": "b"}
    with pytest.raises(ConfigError, match="visibility_timeout must be a whole number of seconds from 2 to 43,200, got"):
        leasekit_sqs.task(message, queue_url="http://x/1/a", client=sqs, visibility_timeout=timeout)


@pytest.mark.parametrize("message", [{"MessageId": "m"}, {"MessageId": "m", "ReceiptHandle": ""}])
def test_a_message_that_is_malformed_is_refused(sqs: SQSClient, message: dict[str, str]) -> None:
    with pytest.raises(ProtocolError):
        leasekit_sqs.task(message, queue_url="http://x/1/a", client=sqs)


@pytest.mark.parametrize("message", ["work", None, [{"MessageId": "m", "ReceiptHandle": "h"}], {"Messages": []}, {}])
def test_what_is_no_message_is_refused(sqs: SQSClient, message: Any) -> None:
    with pytest.raises(ConfigError, match=r"message must be one of answer\['Messages'\]"):
        leasekit_sqs.lease(message, queue_url="http://x/1/a", client=sqs)


@pytest.mark.parametrize("url", ["books", "", None, "https://sqs.eu-west-1.amazonaws.com/1/"])
def test_a_queue_url_that_is_none_is_refused(sqs: SQSClient, url: Any) -> None:
    message = {"MessageId": "m", "ReceiptHandle": "h", "Body": "b"}
    with pytest.raises(ConfigError, match=r"queue_url must be the URL of the queue, got .*get_queue_url\(QueueName"):
        leasekit_sqs.lease(message, queue_url=url, client=sqs)


@pytest.mark.parametrize(("attributes", "attempt"), [({}, 0), ({"ApproximateReceiveCount": "3"}, 3)])
def test_the_attempt_is_known_if_the_receive_asked_for_the_count(
    aws: Fake, caplog: pytest.LogCaptureFixture, attributes: dict[str, str], attempt: int
) -> None:
    message, options = received(aws)
    message["Attributes"] = attributes
    with (
        caplog.at_level(logging.DEBUG, logger="leasekit"),
        leasekit_sqs.lease(message, **options) as held,
    ):
        assert held.attempt == attempt
    assert caplog.text.count("attempt") == caplog.text.count("attempt 3") == (2 if attempt else 0)


def test_the_capacity_is_that_of_leases_with_this_visibility_timeout(sqs: SQSClient) -> None:
    message = {"MessageId": "m", "ReceiptHandle": "h", "Body": "b"}
    leasekit_sqs.task(message, queue_url="http://x/1/a", client=sqs, visibility_timeout=30)
    ((keeper, _, _),) = loop._keepers._kept.values()
    assert keeper.heartbeats.capacity == 100_000  # 100 calls a second with 100 messages each, in a cycle of 10 s


def test_no_log_has_a_whole_handle_or_a_credential(
    sqs: SQSClient, queue_url: str, send: Send, receive: Receive, caplog: pytest.LogCaptureFixture
) -> None:
    send()
    message = receive()
    task = leasekit_sqs.task(message, queue_url=queue_url, client=sqs)
    with caplog.at_level(logging.DEBUG, logger="leasekit"):
        held = lease(task)
        held.__enter__()
        loop._keepers.close()
        with pytest.raises(LeaseLost):
            held.__exit__(None, None, None)
    assert caplog.records
    said = "\n".join(str(vars(record)) for record in caplog.records)
    assert message["ReceiptHandle"] not in said
    assert "canary" not in said


OWN = {"tenant": {"DataType": "String", "StringValue": "acme"}, "size": {"DataType": "Number", "StringValue": "7"}}


def fatal(aws: Fake, queue: str, *, watched: bool, **asked: Any) -> dict[str, Any]:
    """Receive a message, fail it for good, and return what `lease` takes beside the message."""
    leasekit_sqs.close()
    client = boto3.session.Session().client("sqs", endpoint_url=aws.endpoint)
    if watched:
        leasekit_sqs.watch(client)
    aws.queue(queue, dead_letter_queue=f"dead-{queue}")
    aws.queue(f"dead-{queue}")
    aws.put(queue, "work", attributes=OWN, group="blue")
    options = {"queue_url": client.get_queue_url(QueueName=queue)["QueueUrl"], "client": client}
    fail_next(options, **asked)
    return options


def fail_next(options: dict[str, Any], **asked: Any) -> None:
    (message,) = options["client"].receive_message(QueueUrl=options["queue_url"], **asked)["Messages"]
    # Some wrappers make a message of their own, from parts of boto3's.
    message = {name: message[name] for name in ("MessageId", "ReceiptHandle", "Body")}
    with pytest.raises(Fatal), leasekit_sqs.lease(message, **options):
        raise Fatal("never")


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"MessageAttributeNames": ["tenant"], "AttributeNames": ["SentTimestamp"]},
        {"MessageSystemAttributeNames": ["ApproximateReceiveCount"]},
    ],
)
@pytest.mark.parametrize("queue", ["q", "q.fifo"])
def test_a_dead_letter_has_all_attributes_whatever_the_receive_asked_for(
    aws: Fake, queue: str, asked: dict[str, Any]
) -> None:
    fatal(aws, queue, watched=True, **asked)
    (copy,) = aws.queues[f"dead-{queue}"].messages
    assert {name: copy.attributes[name] for name in OWN} == OWN
    assert copy.group == "blue"
    assert aws.queues[queue].messages[0].deleted


def test_a_message_whose_attributes_are_not_known_comes_again_before_it_is_a_dead_letter(
    aws: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    options = fatal(aws, "q", watched=False)
    (message,) = aws.queues["q"].messages
    assert not message.deleted
    assert aws.queues["dead-q"].messages == []
    assert "failed for good, but comes again: leasekit has not seen its receive" in caplog.text
    aws.now = message.visible_at
    fail_next(options)
    (copy,) = aws.queues["dead-q"].messages
    assert {name: copy.attributes[name] for name in OWN} == OWN
    assert message.deleted


def test_the_receive_of_an_observed_client_leaves_its_callers_arguments_alone(aws: Fake) -> None:
    asked = {"MessageAttributeNames": ["tenant"], "AttributeNames": ["SentTimestamp"]}
    fatal(aws, "q", watched=True, **asked)
    assert asked == {"MessageAttributeNames": ["tenant"], "AttributeNames": ["SentTimestamp"]}


def test_a_poll_that_leaves_too_little_time_to_begin_is_said_once(
    aws: Fake, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_long_waits", set())
    _, options = received(aws, watched=True)
    for timeout in (25, 21, 21):
        aws.put("q", "work")
        (message,) = options["client"].receive_message(
            QueueUrl=options["queue_url"], WaitTimeSeconds=20, VisibilityTimeout=timeout
        )["Messages"]
        with leasekit_sqs.lease(message, **options, visibility_timeout=timeout):
            pass
    assert re.findall(r"may wait \d+ s, and .* hidden for \d+ s", caplog.text) == [
        "may wait 20 s, and its messages are hidden for 21 s"
    ]
    assert "Set WaitTimeSeconds to 16 or less" in caplog.text


@pytest.mark.parametrize("message", [{"messageId": "m", "receiptHandle": "h", "body": "b"}, {"Records": []}])
def test_an_event_of_lambda_is_recognised(sqs: SQSClient, message: Any) -> None:
    with pytest.raises(ConfigError, match=r"of an event of AWS Lambda, .* above the function's timeout"):
        leasekit_sqs.lease(message, queue_url="http://x/1/a", client=sqs)
