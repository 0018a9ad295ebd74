"""Leases for a receive loop of the user's own: `with lease(message, queue_url=url, client=sqs):`."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import leasekit
from leasekit import Heartbeats, Lease, Task
from leasekit.config import check_number
from leasekit_aws.boto_clients import BotoClients
from leasekit_aws.shared_keepers import SharedKeepers
from leasekit_sqs.address import LONGEST_TTL, Address
from leasekit_sqs.arrivals import Arrivals
from leasekit_sqs.backend import SqsBackend, boot_time
from leasekit_sqs.messages import Received
from leasekit_sqs.receipts import SHORTEST

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
    visibility_timeout: int = 30,
    settle: bool = True,
    idle_timeout: float | None = None,
) -> Lease:
    """Return `leasekit.lease(task(message, …))` for a message that boto3's `receive_message` has returned."""
    leased = task(
        message, queue_url=queue_url, client=client, kind=kind, visibility_timeout=visibility_timeout, settle=settle
    )
    return leasekit.lease(leased, idle_timeout=idle_timeout)


def task(
    message: Mapping[str, Any],
    *,
    queue_url: str,
    client: Any,
    kind: str | None = None,
    visibility_timeout: int = 30,
    settle: bool = True,
) -> Task:
    """Return a message that boto3's `receive_message` has returned as a task for `leasekit.lease`.

    Call this as soon as the message has arrived: the time counts from when the receive was sent, which is unknown for
    messages that this client received before its first call here. `visibility_timeout` is that of the receive (30 s by
    default in SQS); each heartbeat hides the message for as long again. The code in the `with` block begins when the
    first heartbeat was acknowledged. If the message became visible before, or another block has settled it, the `with`
    statement raises `LeaseLost` and the code does not run.

    Leaving the block deletes the message; after an exception it becomes visible again, after the wait of a retry. With
    `settle=False` the block does neither: it only keeps the lease, and your own code deletes the message after the
    block.

    Heartbeats use clients of their own, with the credentials and settings of `client`, without its retries.

    Raises `ConfigError`, and `ProtocolError` for a malformed message.
    """
    check_number("visibility_timeout", visibility_timeout, least=SHORTEST, most=LONGEST_TTL, whole=True)
    received = Received.of(message)
    name = queue_url.rpartition("/")[2]
    leased = received.task(kind=kind or received.kind or name, ttl=visibility_timeout)
    keeper, backend = _keepers.of(client, "sqs", partial(_backend, visibility_timeout), visibility_timeout)
    receipt = received.receipt(queue_url)
    receipt.hidden(_arrivals.asked_at(client, received.handle), visibility_timeout)
    backend.receipts.adopt(receipt, settles=settle)
    return keeper.adopt(leased)


def close() -> None:
    """Close the keepers that `task` has made, once their last reports were answered.

    A process need not call this at its end: a `with` block does not end before its report was answered.
    """
    _keepers.close()


def _backend(ttl: int, clients: BotoClients) -> SqsBackend:
    return SqsBackend(Address(queue="-", ttl=ttl), clients=clients, receives=False)
