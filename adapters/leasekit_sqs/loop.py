"""Leases for a loop of the user's own: `with lease(message, queue_url=url, client=sqs):`."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import leasekit
from leasekit import Beats, ConfigError, Lease, Task
from leasekit_aws.clients import Clients
from leasekit_aws.keepers import Keepers
from leasekit_sqs.address import LONGEST_TTL, Address
from leasekit_sqs.arrivals import Arrivals
from leasekit_sqs.backend import SqsBackend, boot_time
from leasekit_sqs.messages import Received
from leasekit_sqs.receipts import SHORTEST

__all__ = ["close", "lease", "task"]

# Slots a second, at most. Each block waits for its first beat; all others keep the even pace, which is far below this.
_RATE = 100.0

_keepers: Keepers[SqsBackend] = Keepers(Beats(rate=_RATE))
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
    """`leasekit.lease` of a message that boto3's `receive_message` has returned: see `task`."""
    made = task(
        message, queue_url=queue_url, client=client, kind=kind, visibility_timeout=visibility_timeout, settle=settle
    )
    return leasekit.lease(made, idle_timeout=idle_timeout)


def task(
    message: Mapping[str, Any],
    *,
    queue_url: str,
    client: Any,
    kind: str | None = None,
    visibility_timeout: int = 30,
    settle: bool = True,
) -> Task:
    """A message that boto3's `receive_message` has returned, as a task for `leasekit.lease`.

    To be called as soon as the message has come: of what this client received before its first call here, nobody knows
    when it did. `visibility_timeout` is what it was received with (SQS's default is 30 s); each heartbeat hides it for
    as long again. The block begins when a first one was acknowledged; where the message's time has run out before, it
    raises `LeaseLost` and nothing of it runs.

    Leaving the block deletes the message; an exception gives it back, after the wait of a retry. With `settle=False`
    neither is done: the block only keeps it, and your own code goes on deleting what it has processed, after the block.

    Heartbeats have clients of their own, with the credentials and settings of `client`, without its retries.

    Raises `ConfigError`, and `ProtocolError` where that is no message.
    """
    if visibility_timeout != int(visibility_timeout) or not SHORTEST <= visibility_timeout <= LONGEST_TTL:
        raise ConfigError(f"visibility_timeout={visibility_timeout!r}: whole seconds, {SHORTEST} to {LONGEST_TTL}")
    received = Received.of(message)
    name = queue_url.rpartition("/")[2]
    made = received.task(kind=kind or received.kind or name, ttl=visibility_timeout)
    keeper, backend = _keepers.of(client, "sqs", partial(_backend, visibility_timeout), visibility_timeout)
    receipt = received.receipt(queue_url)
    receipt.hidden(_arrivals.at(client, received.handle), visibility_timeout)
    receipt.settles = settle
    backend.receipts.add(receipt)
    return keeper.adopt(made)


def close() -> None:
    """Close the keepers that `task` has made, once their last reports were answered. At the end of a process it need
    not be called: a block does not end before its report was answered."""
    _keepers.close()


def _backend(ttl: int, clients: Clients) -> SqsBackend:
    """For all queues that are read with these clients."""
    return SqsBackend(Address(queue="-", ttl=ttl), clients=clients)
