"""Leases for a loop of the user's own: `with lease(message, queue_url=url, client=sqs):`."""

import os
import threading
from collections.abc import Mapping
from typing import Any

import leasekit
from leasekit import Beats, Client, ConfigError, Lease, Task
from leasekit_aws.clients import Clients, credentials_of
from leasekit_sqs.address import LONGEST_TTL, Address
from leasekit_sqs.backend import SqsBackend, boot_time
from leasekit_sqs.messages import Received
from leasekit_sqs.receipts import SHORTEST

__all__ = ["close", "lease", "task"]

# Where, for how long, and who asks. The credentials themselves are kept, so that no others can come to have their id.
_Key = tuple[str | None, str | None, int, int]

# Slots a second, at most. Each block waits for its first beat; all others keep the even pace, which is far below this.
_RATE = 100.0

_keepers: dict[_Key, tuple[Client, SqsBackend, Any]] = {}
_making = threading.Lock()


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

    To be called as soon as the message has come. `visibility_timeout` is what it was received with (SQS's default is
    30 s); each heartbeat hides it for as long again. The block begins when a first one was acknowledged; where the
    message's time has run out before, it raises `LeaseLost` and nothing of it runs.

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
    keeper, backend = _keeper(client, visibility_timeout)
    receipt = received.receipt(queue_url)
    receipt.hidden(boot_time(), visibility_timeout)
    receipt.settles = settle
    backend.receipts.add(receipt)
    return keeper.adopt(made)


def close() -> None:
    """Close the keepers that `task` has made, once their last reports were answered. At the end of a process it need
    not be called: a block does not end before its report was answered."""
    with _making:
        closing = [keeper for keeper, _, _ in _keepers.values()]
        _keepers.clear()
    for keeper in closing:
        keeper.close()


def _keeper(client: Any, ttl: int) -> tuple[Client, SqsBackend]:
    """One for all queues that are read with these credentials at this endpoint."""
    credentials = credentials_of(client)
    meta = client.meta
    key = (meta.region_name, meta.endpoint_url, ttl, id(credentials))
    with _making:
        if key not in _keepers:
            backend = SqsBackend(Address(queue="-", ttl=ttl), clients=Clients("sqs", like=client))
            _keepers[key] = (leasekit.connect(backend, beats=Beats(rate=_RATE)), backend, credentials)
        keeper, backend, _ = _keepers[key]
        return keeper, backend


def _forget() -> None:
    """In a forked child the lock may be held by a thread that is not here, and the keepers are the parent's."""
    global _making  # noqa: PLW0603 - one for each process
    _making = threading.Lock()
    _keepers.clear()


os.register_at_fork(after_in_child=_forget)
