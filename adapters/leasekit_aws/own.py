"""Keepers for loops of the user's own: a task that boto3 has brought, kept from `with lease(task)` on."""

import atexit
import os
import threading
from typing import Any

import leasekit
from leasekit import Beats, Client, Task
from leasekit_aws.backend import AwsBackend
from leasekit_aws.clients import Clients, credentials_of
from leasekit_aws.service import Service

__all__ = ["adopt", "close_all"]

# What was asked with: the service, where it is, and who asks. The credentials themselves are kept, so that no others
# can come to have their id.
Key = tuple[int, str, str | None, str | None, int]

# Each task begins with a beat that somebody waits for: one a second would be all that such a loop can begin.
_BEATS = Beats(rate=10)

_clients: dict[Key, tuple[Client, Any]] = {}
_making = threading.Lock()


def adopt(task: Task, *, service: Service, name: str, client: Any) -> Task:
    """Have `lease(task)` keep a task that the user's `client` of boto3's has received.

    There is one keeper for all clients that ask the same endpoint with the same credentials. It has clients of its own,
    made like the user's: with time-outs that suit heartbeats.
    """
    return _keeper(service, name, client).adopt(task)


def close_all() -> None:
    """Close the keepers: their last reports are waited for. It is done at the end of the process, too."""
    with _making:
        closing = [keeper for key, (keeper, _) in _clients.items() if key[0] == os.getpid()]
        _clients.clear()
    for keeper in closing:
        keeper.close()


def _keeper(service: Service, name: str, client: Any) -> Client:
    credentials = credentials_of(client)
    key = (os.getpid(), name, client.meta.region_name, client.meta.endpoint_url, id(credentials))
    with _making:
        if key not in _clients:
            keeper = leasekit.connect(AwsBackend(service, Clients(name, like=client)), beats=_BEATS)
            _clients[key] = (keeper, credentials)
        return _clients[key][0]


def _forget() -> None:
    """In a forked child the lock may be held by a thread that is not here, and the keepers are the parent's."""
    global _making  # noqa: PLW0603 - one for each process
    _making = threading.Lock()
    _clients.clear()


os.register_at_fork(after_in_child=_forget)
atexit.register(close_all)
