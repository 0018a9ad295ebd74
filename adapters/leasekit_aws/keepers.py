"""Keepers for loops of the user's own: one for all clients of boto3's that ask the same endpoint as the same caller.

A keeper has clients of its own, made like the user's: with time-outs that suit heartbeats.
"""

import atexit
import hashlib
import os
import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from botocore.credentials import Credentials

import leasekit
from leasekit import Beats, Client
from leasekit.backend import Backend
from leasekit_aws.clients import Clients, credentials_of

__all__ = ["Keepers"]

B = TypeVar("B", bound=Backend)


class Keepers(Generic[B]):
    """The keepers of one adapter. They are closed at the end of the process; a forked child begins with none."""

    def __init__(self, beats: Beats) -> None:
        self._beats = beats
        self.forget()
        _all.add(self)

    def of(self, client: Any, service: str, make: Callable[[Clients], B], *more: Hashable) -> tuple[Client, B]:
        """The keeper for this client of a service, and its backend; `make` makes that where there is none yet.

        `more` is what else keeps two of them apart.
        """
        credentials = credentials_of(client)
        key = (service, client.meta.region_name, client.meta.endpoint_url, _who(credentials), *more)
        with self._making:
            if key not in self._kept:
                backend = make(Clients(service, like=client))
                # The credentials are kept too, so that no others can come to have their id.
                self._kept[key] = leasekit.connect(backend, beats=self._beats), backend, credentials
            keeper, backend, _ = self._kept[key]
            return keeper, backend

    def close(self) -> None:
        """Close them all: their last reports are waited for."""
        with self._making:
            closing = [keeper for keeper, _, _ in self._kept.values()]
            self._kept.clear()
        for keeper in closing:
            keeper.close()

    def forget(self) -> None:
        """In a forked child the lock may be held by a thread that is not here, and the keepers are the parent's."""
        self._making = threading.Lock()
        self._kept: dict[Hashable, tuple[Client, B, Any]] = {}


def _who(credentials: Any) -> Hashable:
    """The same for who signs alike: a session for each thread, or for each message, is no other caller.

    What can change (roles are assumed anew, files are read again) is told apart by the object.
    """
    if type(credentials) is not Credentials:
        return id(credentials)
    said = repr((credentials.access_key, credentials.secret_key, credentials.token))
    return hashlib.sha256(said.encode()).digest()


_all: "WeakSet[Keepers[Any]]" = WeakSet()


def _close_all() -> None:
    for keepers in list(_all):
        keepers.close()


def _forget_all() -> None:
    for keepers in list(_all):
        keepers.forget()


os.register_at_fork(after_in_child=_forget_all)
atexit.register(_close_all)
