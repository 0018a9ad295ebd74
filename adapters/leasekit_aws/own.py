"""A task that boto3 has brought to a poller of the user's own, kept from `with lease(task)` on."""

from typing import Any

from leasekit import Beats, Task
from leasekit_aws.backend import AwsBackend
from leasekit_aws.keepers import Keepers
from leasekit_aws.service import Service

__all__ = ["adopt", "close_all"]

# Each task begins with a beat that somebody waits for: one a second would be all that such a loop can begin.
_keepers: Keepers[AwsBackend] = Keepers(Beats(rate=10))


def adopt(task: Task, *, service: Service, name: str, client: Any) -> Task:
    """Have `lease(task)` keep a task that the user's `client` of boto3's has received."""
    keeper, _ = _keepers.of(client, name, lambda clients: AwsBackend(service, clients))
    return keeper.adopt(task)


def close_all() -> None:
    """Close the keepers: their last reports are waited for. It is done at the end of the process, too."""
    _keepers.close()
