"""Leases for tasks that a poller of the user's own has received: kept from `with lease(task)` on."""

from typing import Any

from leasekit import Heartbeats, Task
from leasekit.errors import ProtocolError
from leasekit_aws.backend import AwsBackend
from leasekit_aws.service import Service
from leasekit_aws.shared_keepers import SharedKeepers

# Each task begins with a heartbeat that the loop waits for: at one heartbeat a second it could begin one task a second.
_keepers: SharedKeepers[AwsBackend] = SharedKeepers(Heartbeats(rate=10))


def adopt(task: Task | None, *, service: Service, name: str, client: Any) -> Task:
    """Return a task that the user's `client` has received, for `lease(task)`. Raises `ProtocolError` if it is none."""
    if task is None:
        raise ProtocolError("the answer of this poll has no task: check its taskToken first")
    keeper, _ = _keepers.of(client, name, lambda clients: AwsBackend(service, clients))
    return keeper.adopt(task)


def close_all() -> None:
    """Close the keepers, and wait for their last reports. The end of the process does so too."""
    _keepers.close()
