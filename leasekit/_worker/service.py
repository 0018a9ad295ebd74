"""Service: the client of a worker, which was given, or which the worker makes for each of its runs."""

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from leasekit._arguments import check_arguments, checked_codecs
from leasekit._driver.guarding.watchdog import Mode
from leasekit._worker.signals import end_lost
from leasekit.backend import Backend
from leasekit.client import Client
from leasekit.codecs import Codecs
from leasekit.config import Heartbeats
from leasekit.errors import ConfigError
from leasekit.hooks import Hook

_HAS_A_CLIENT = "this worker has a client of its own, with URL, heartbeats and options: make it without one"


class Service:
    """Where the tasks of a worker are, and how a client of the worker's own is made. A given client is never closed."""

    def __init__(
        self,
        client_or_url: Client | Backend | str | None,
        *,
        heartbeats: Heartbeats | None,
        hooks: Sequence[Hook],
        codec: Codecs,
        options: Mapping[str, Any],
    ) -> None:
        if isinstance(client_or_url, Client) and (heartbeats is not None or hooks or codec or options):
            raise ConfigError(
                "this client has its own heartbeats, hooks, codecs and options: give them to connect() instead"
            )
        service = None if isinstance(client_or_url, Client) else client_or_url
        check_arguments(service=service, heartbeats=heartbeats, hooks=hooks)
        self._given = client_or_url
        self._heartbeats = heartbeats
        self._hooks = list(hooks)
        self._codecs = checked_codecs(codec)
        self._options = options

    def has_made(self, client: Client) -> bool:
        """Return whether a client is the worker's own, and must be closed after its use."""
        return client is not self._given

    def listen(self, hook: Hook) -> None:
        """Add a hook. A client that was given calls it at once, a client of the worker's own from the next run on."""
        if isinstance(self._given, Client):
            self._given.listen(hook)
        elif hook not in self._hooks:
            self._hooks.append(hook)

    def client(
        self,
        url: str | None = None,
        heartbeats: Heartbeats | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
        *,
        watchdog: Mode = "soft",
    ) -> Client:
        """Return the client that was given, or a new one. Arguments that are given replace the worker's own."""
        options = {name: value for name, value in options.items() if value is not None}
        if isinstance(self._given, Client):
            if url is not None or heartbeats is not None or options:
                raise ConfigError(_HAS_A_CLIENT)
            return self._given
        if url is None or self._given is None:  # the worker's own options are for its own service
            options = {**self._options, **options}
        service = url or self._given or os.environ.get("LEASEKIT_URL")
        if service is None:
            raise ConfigError("which service? Give the worker a URL, or set LEASEKIT_URL")
        return Client(
            service,
            heartbeats=heartbeats or self._heartbeats,
            hooks=self._hooks,
            last_resort=end_lost if watchdog in ("auto", "required") else None,
            watchdog=watchdog,
            codec=self._codecs,
            options=options,
        )

    def client_beside(self) -> Client:
        """Return a client for calls while the worker does not run. Raises `ConfigError` for a backend object."""
        if not isinstance(self._given, Client | str | None):
            raise ConfigError(
                "a backend object belongs to the worker while it runs: give a client, handler.options(client=…)"
            )
        return self.client()
