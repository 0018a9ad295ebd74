"""Leases for a receive loop of the user's own: `with lease(message, queue_url=url, client=sqs):`."""

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from msgspec import structs

import leasekit
from leasekit import ConfigError, Exponential, FixedDelays, Heartbeats, Lease, Polynomial, RetryPolicy, Task
from leasekit.config import DRIFT, check_number
from leasekit.hooks import log_fields
from leasekit_aws.boto_clients import BotoClients
from leasekit_aws.shared_keepers import SharedKeepers
from leasekit_sqs.address import LONGEST_TTL, Address
from leasekit_sqs.arrivals import Arrival, Arrivals
from leasekit_sqs.backend import SqsBackend, boot_time
from leasekit_sqs.messages import Received
from leasekit_sqs.receipts import SHORTEST

logger = logging.getLogger("leasekit")

_USUAL = 30  # seconds: `visibility_timeout` if it is not passed
_TO_BEGIN = 5  # seconds of a message's time that a long poll should leave for the answer and the first heartbeat
_MOST_LATE = 10  # messages of one receive

# Heartbeat calls a second, at most. Each block waits for its first heartbeat; later ones keep an even, far slower pace.
_RATE = 100.0

_keepers: SharedKeepers[SqsBackend] = SharedKeepers(Heartbeats(rate=_RATE))
# Functions that are defined below, or replaced by tests: each is looked up when it is called.
_arrivals = Arrivals(lambda: boot_time(), lambda operation, handle: _warn_of_own(operation, handle))  # noqa: PLW0108
_long_waits: set[tuple[int, int]] = set()  # `WaitTimeSeconds` and visibility timeouts that were warned of
_late: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # client → its unobserved messages whose time was over


def lease(
    message: Mapping[str, Any],
    *,
    queue_url: str,
    client: Any,
    kind: str | None = None,
    visibility_timeout: int = _USUAL,
    retry: RetryPolicy | float | None = None,
    settle: bool = True,
    idle_timeout: float | None = None,
) -> Lease:
    """Return `leasekit.lease(task(message, …))` for a message that boto3's `receive_message` has returned."""
    leased = task(
        message,
        queue_url=queue_url,
        client=client,
        kind=kind,
        visibility_timeout=visibility_timeout,
        retry=retry,
        settle=settle,
    )
    return leasekit.lease(leased, idle_timeout=idle_timeout)


def task(
    message: Mapping[str, Any],
    *,
    queue_url: str,
    client: Any,
    kind: str | None = None,
    visibility_timeout: int = _USUAL,
    retry: RetryPolicy | float | None = None,
    settle: bool = True,
) -> Task:
    """Return a message that boto3's `receive_message` has returned as a task for `leasekit.lease`.

    The time counts from when the receive was sent; for messages that this client received before its first call here,
    from that call or `watch`. `visibility_timeout` is that of the receive (30 s by default in SQS); each heartbeat
    hides the message for as long again. The code in the `with` block begins when the
    first heartbeat was acknowledged. If the message became visible before, or another block has settled it, the `with`
    statement raises `LeaseLost` and the code does not run.

    Leaving the block deletes the message. After an exception it becomes visible again: when its `visibility_timeout` is
    over, as without leasekit, or after `retry`: seconds, or a policy such as `leasekit.Exponential()`, which counts the
    receives. With `settle=False` the block does neither: it only keeps the lease, and your own code deletes the message
    after the block.

    Heartbeats use clients of their own, with the credentials and settings of `client`, without its retries.

    Raises `ConfigError`, also if the receive named another `VisibilityTimeout`, or a `WaitTimeSeconds` that is not
    shorter, and for the eleventh message that came too late from a client that is not observed; `ProtocolError` for a
    malformed message.
    """
    check_number("visibility_timeout", visibility_timeout, least=SHORTEST, most=LONGEST_TTL, whole=True)
    _refuse_other_than_message(message)
    name = _queue_name(queue_url)
    received = Received.of(message)
    keeper, backend = _keepers.of(client, "sqs", partial(_backend, visibility_timeout), ttl=visibility_timeout)
    arrival = _arrivals.of(client, received.handle)
    received = Received.of({**message, **arrival.parts})
    policy = _policy(retry, received, visibility_timeout)
    leased = received.task(kind=kind or received.kind or name, ttl=visibility_timeout)
    is_unseen = not arrival.is_known and received.handle not in backend.receipts
    if is_unseen:
        _check_age(arrival, client, name, visibility_timeout)
    _refuse_contradiction(arrival, visibility_timeout)
    receipt = received.receipt(queue_url, policy)
    receipt.hidden(arrival.asked_at, visibility_timeout)
    receipt.has_all_attributes = arrival.is_known
    receipt.has_queues_timeout = None if is_unseen else arrival.is_known and arrival.timeout is None
    known = backend.receipts.adopt(receipt, settles=settle)
    return keeper.adopt(structs.replace(leased, id=known.id))


def watch(client: Any) -> None:
    """Observe the receives of a client of boto3 or aioboto3: call this at start-up, before the first receive.

    `lease` observes the client that is passed to it. Messages that were received before that count from then. Call
    `watch` if the first lease does not follow the first receive at once, and for a client that receives but is not
    passed to `lease`, as a client of aioboto3.

    Raises `ConfigError` for what is no client of SQS.
    """
    try:
        name = client.meta.service_model.service_name
    except AttributeError:
        name = type(client).__name__
    if name != "sqs":
        raise ConfigError(f"watch takes a client of SQS, as of boto3.client('sqs'), got {name}")
    _arrivals.watch(client)


def close() -> None:
    """Close the keepers that `task` has made, once their last reports were answered.

    A process need not call this at its end: a `with` block does not end before its report was answered.
    """
    _keepers.close()


def _backend(ttl: int, clients: BotoClients) -> SqsBackend:
    return SqsBackend(Address(queue="-", ttl=ttl), clients=clients, receives=False)


def _refuse_other_than_message(message: object) -> None:
    """Raise `ConfigError` for a body, an answer, a list of messages or a message of a resource of boto3."""
    if not isinstance(message, Mapping) or not {"MessageId", "ReceiptHandle"} & message.keys():
        if isinstance(message, Mapping) and {"receiptHandle", "Records"} & message.keys():
            raise ConfigError(
                "message is of an event of AWS Lambda, whose own poller receives and deletes its messages: leasekit "
                "does not keep them. Set the queue's visibility timeout above the function's timeout"
            )
        what = "an answer" if isinstance(message, Mapping) else type(message).__name__
        raise ConfigError(f"message must be one of answer['Messages'], as boto3 returns them, got {what}")


def _queue_name(queue_url: object) -> str:
    """Return the name of the queue at this URL. Raises `ConfigError` for what is no URL."""
    name = queue_url.rpartition("/")[2] if isinstance(queue_url, str) and urlsplit(queue_url).netloc else ""
    if not name:
        raise ConfigError(
            f"queue_url must be the URL of the queue, got {queue_url!r}: a name has its URL in "
            "client.get_queue_url(QueueName=name)['QueueUrl']"
        )
    return name


def _check_age(arrival: Arrival, client: Any, queue: str, visibility_timeout: int) -> None:
    """Warn of a client's first message that was not observed and came too late; `ConfigError` if many follow."""
    age = boot_time() - arrival.asked_at
    if age < visibility_timeout * (1 - 2 * DRIFT):
        return
    late = _late[client] = _late.get(client, 0) + 1
    text = (
        f"leasekit has not seen the receive of a message of queue {queue}: its time counts from when this client was "
        f"first seen, {age:.0f} s ago, and is over. If another client receives, call leasekit_sqs.watch with it before "
        "its first receive; else make all leases of a batch before the first block"
    )
    if late > _MOST_LATE:
        raise ConfigError(text)
    if late == 1:
        logger.warning("%s", text)


def _warn_of_own(operation: str, handle: str) -> None:
    """Warn if the user's own code is about to change a message that its block still keeps, or has given back."""
    for backend in _keepers.backends():
        receipt = backend.receipts.get(handle)
        if receipt is not None and receipt.settles and receipt.outcome in (None, "retry", "release"):
            logger.warning(
                "your own code calls %s for message %s, but its block %s: remove that call, or pass settle=False",
                operation,
                receipt.id,
                "has not ended, or has lost it" if receipt.outcome is None else "has given it back",
                extra=log_fields(receipt.id, receipt.handle),
            )


def _refuse_contradiction(arrival: Arrival, visibility_timeout: int) -> None:
    """Raise `ConfigError` if the receive of a message does not go with the time of its lease; warn of a long poll."""
    if arrival.timeout not in (None, visibility_timeout):
        raise ConfigError(
            f"visibility_timeout is {visibility_timeout}, but the message was received with "
            f"VisibilityTimeout={arrival.timeout}: pass visibility_timeout={arrival.timeout} to lease, or "
            f"VisibilityTimeout={visibility_timeout} to receive_message"
        )
    if arrival.wait >= visibility_timeout:
        raise ConfigError(
            f"this receive may wait {arrival.wait} s, but its messages are hidden for {visibility_timeout} s, counted "
            f"from its request: set WaitTimeSeconds to {max(0, visibility_timeout - _TO_BEGIN)} or less, or a longer "
            "visibility timeout in both calls"
        )
    waits = (arrival.wait, visibility_timeout)
    if arrival.wait > max(0, visibility_timeout - _TO_BEGIN) and waits not in _long_waits:
        _long_waits.add(waits)
        logger.warning(
            "a receive may wait %d s, and its messages are hidden for %d s, counted from its request: a message that "
            "comes late has too little time for its first heartbeat. Set WaitTimeSeconds to %d or less, or a longer "
            "visibility timeout in both calls",
            *waits,
            max(0, visibility_timeout - _TO_BEGIN),
        )


def _policy(retry: object, received: Received, visibility_timeout: int) -> RetryPolicy:
    """Return how long a message waits after an exception. Raises `ConfigError`."""
    if retry is None:
        named = received.retry if received.attempt else None  # a policy cannot count without the count
        return named or FixedDelays(waits=[visibility_timeout])
    if isinstance(retry, (int, float)) and not isinstance(retry, bool) and 0 <= retry <= LONGEST_TTL:
        return FixedDelays(waits=[retry])
    if not isinstance(retry, (Exponential, Polynomial, FixedDelays)):
        raise ConfigError(
            f"retry must be 0 to {LONGEST_TTL} seconds or a policy such as leasekit.Exponential(), got {retry!r}: for "
            "no further try raise leasekit.Fatal in the block"
        )
    if received.attempt is None:
        raise ConfigError(
            f"retry={retry!r} counts the receives of a message, and this message has no count: pass "
            "MessageSystemAttributeNames=['ApproximateReceiveCount'] to receive_message"
        )
    return retry
