"""Leases for a receive loop of the user's own: `with lease(message, queue_url=url, client=sqs):`."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import leasekit
from leasekit import ConfigError, Exponential, FixedDelays, Heartbeats, Lease, Polynomial, RetryPolicy, Task
from leasekit.config import check_number
from leasekit_aws.boto_clients import BotoClients
from leasekit_aws.shared_keepers import SharedKeepers
from leasekit_sqs.address import LONGEST_TTL, Address
from leasekit_sqs.arrivals import Arrival, Arrivals
from leasekit_sqs.backend import SqsBackend, boot_time
from leasekit_sqs.messages import Received
from leasekit_sqs.receipts import SHORTEST

_USUAL = 30  # seconds: `visibility_timeout` if it is not passed
_TO_BEGIN = 5  # seconds of a message's time that a long poll should leave for the answer and the first heartbeat

# Heartbeat calls a second, at most. Each block waits for its first heartbeat; later ones keep an even, far slower pace.
_RATE = 100.0

_keepers: SharedKeepers[SqsBackend] = SharedKeepers(Heartbeats(rate=_RATE))
_arrivals = Arrivals(lambda: boot_time())  # noqa: PLW0108 - looked up when it is called


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

    Call this as soon as the message has arrived: the time counts from when the receive was sent, which is unknown for
    messages that this client received before its first call here. `visibility_timeout` is that of the receive (30 s by
    default in SQS); each heartbeat hides the message for as long again. The code in the `with` block begins when the
    first heartbeat was acknowledged. If the message became visible before, or another block has settled it, the `with`
    statement raises `LeaseLost` and the code does not run.

    Leaving the block deletes the message. After an exception it becomes visible again: when its `visibility_timeout` is
    over, as without leasekit, or after `retry`: seconds, or a policy such as `leasekit.Exponential()`, which counts the
    receives. With `settle=False` the block does neither: it only keeps the lease, and your own code deletes the message
    after the block.

    Heartbeats use clients of their own, with the credentials and settings of `client`, without its retries.

    Raises `ConfigError`, also if the receive named another `VisibilityTimeout`, or a `WaitTimeSeconds` that is not
    shorter, and `ProtocolError` for a malformed message.
    """
    check_number("visibility_timeout", visibility_timeout, least=SHORTEST, most=LONGEST_TTL, whole=True)
    _refuse_other_than_message(message)
    received = Received.of(message)
    policy = _policy(retry, received, visibility_timeout)
    name = queue_url.rpartition("/")[2]
    leased = received.task(kind=kind or received.kind or name, ttl=visibility_timeout)
    keeper, backend = _keepers.of(client, "sqs", partial(_backend, visibility_timeout), visibility_timeout)
    arrival = _arrivals.of(client, received.handle)
    _refuse_contradiction(arrival, visibility_timeout)
    receipt = received.receipt(queue_url, policy)
    receipt.hidden(arrival.asked_at, visibility_timeout)
    # Of an unknown receive it is assumed with the default alone: a loop that names another time here names it there.
    receipt.has_queues_timeout = arrival.timeout is None and (arrival.is_known or visibility_timeout == _USUAL)
    backend.receipts.adopt(receipt, settles=settle)
    return keeper.adopt(leased)


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
        what = "an answer" if isinstance(message, Mapping) else type(message).__name__
        raise ConfigError(f"message must be one of answer['Messages'], as boto3 returns them, got {what}")


def _refuse_contradiction(arrival: Arrival, visibility_timeout: int) -> None:
    """Raise `ConfigError` if the receive of a message does not go with the time of its lease."""
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
