"""Shared keepers for poll loops of the user's own: one for all boto3 clients with the same endpoint and credentials.

A keeper has clients of its own, made like the user's client but with timeouts that suit heartbeats.
"""

import atexit
import hashlib
import inspect
import os
import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from botocore.client import BaseClient
from botocore.credentials import Credentials

import leasekit
from leasekit import Client, Heartbeats, Task
from leasekit.backend import Backend
from leasekit.config import check_number
from leasekit.errors import ConfigError, ProtocolError
from leasekit_aws.addresses import LONGEST_TTL, SHORTEST_TTL
from leasekit_aws.backend import AwsBackend
from leasekit_aws.boto_clients import BotoClients, credentials_of, verify_of
from leasekit_aws.service import Service

B = TypeVar("B", bound=Backend)


class SharedKeepers(Generic[B]):
    """The keepers of one adapter. They are closed at the end of the process; a forked child begins without keepers."""

    def __init__(self, heartbeats: Heartbeats) -> None:
        self._heartbeats = heartbeats
        self.forget()
        os.register_at_fork(after_in_child=self.forget)
        atexit.register(self.close)

    def of(
        self, client: Any, service: str, make: Callable[[BotoClients], B], *, ttl: float | None = None
    ) -> tuple[Client, B]:
        """Return the keeper for this client of a service, and its backend, which `make` makes at the first call.

        With `ttl`, the keeper is for leases of this ttl alone. Raises `ConfigError` if it is no client of boto3, or one
        of another service.
        """
        if not isinstance(client, BaseClient) or inspect.iscoroutinefunction(getattr(client, "_make_api_call", None)):
            raise ConfigError(
                f"client is of {type(client).__module__.partition('.')[0]}, {type(client).__name__}: pass "
                f"boto3.client({service!r}), or the .meta.client of a resource; heartbeats are sent by threads"
            )
        if (other := client.meta.service_model.service_name) != service:
            raise ConfigError(f"client is boto3.client({other!r}): pass boto3.client({service!r})")
        credentials = credentials_of(client)
        key = (service, client.meta.region_name, client.meta.endpoint_url, verify_of(client), _who(credentials), ttl)
        with self._making:
            if key not in self._kept:
                backend = make(BotoClients(service, like=client))
                # The credentials are kept too, so that no other object can get their `id()`.
                heartbeats = self._heartbeats if ttl is None else self._heartbeats.for_ttl(ttl)
                self._kept[key] = leasekit.connect(backend, heartbeats=heartbeats), backend, credentials
            keeper, backend, _ = self._kept[key]
            return keeper, backend

    def backends(self) -> list[B]:
        with self._making:
            return [backend for _, backend, _ in self._kept.values()]

    def close(self) -> None:
        with self._making:
            closing = [keeper for keeper, _, _ in self._kept.values()]
            self._kept.clear()
        for keeper in closing:
            keeper.close()

    def forget(self) -> None:
        """Begin anew in a forked child: a missing thread may hold the lock, and the keepers belong to the parent."""
        self._making = threading.Lock()
        self._kept: dict[Hashable, tuple[Client, B, Any]] = {}


def _who(credentials: Any) -> Hashable:
    """Return a key for credentials: equal ones share a keeper, those that can change are told apart by their object."""
    if type(credentials) is not Credentials:
        return id(credentials)
    said = repr((credentials.access_key, credentials.secret_key, credentials.token))
    return hashlib.sha256(said.encode()).digest()


# Each task begins with a heartbeat that the loop waits for: at one heartbeat a second it could begin one task a second.
_keepers: SharedKeepers[AwsBackend] = SharedKeepers(Heartbeats(rate=10))


def adopt(task: Task | None, *, service: Service, name: str, client: Any) -> Task:
    """Return a task that the user's `client` has received, for `lease(task)`. Raises `ProtocolError` if it is none."""
    if task is None:
        raise ProtocolError("the answer of this poll has no task: check its taskToken first")
    check_number("ttl", task.ttl, least=SHORTEST_TTL, most=LONGEST_TTL)
    keeper, _ = _keepers.of(client, name, lambda clients: AwsBackend(service, clients))
    return keeper.adopt(task)


def close_all() -> None:
    """Close the keepers, and wait for their last reports. The end of the process does so too."""
    _keepers.close()
