"""Session: the connection of a client in this process, made on first use; a forked child gets one of its own."""

import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from leasekit._arguments import checked_codecs
from leasekit._binding import bind
from leasekit._driver.clock import Clock
from leasekit._driver.coding import CLEAR, Coding
from leasekit._driver.connection import Connection
from leasekit._driver.guarding.watchdog import Mode, check_mode
from leasekit._driver.keeping.held_lease import HeldLease, Owner
from leasekit._driver.locks import taken
from leasekit._driver.thread import check_process
from leasekit.backend import Backend, TicketSource
from leasekit.codecs import Codecs
from leasekit.config import Heartbeats
from leasekit.errors import Closed, ConfigError
from leasekit.hooks import Hooks
from leasekit.queues import TaskQueues
from leasekit.registry import open_backend, open_queues
from leasekit.task import Task

# Two threads that use a client at once get one connection. Reentrant: signal handlers may close clients.
_connecting = threading.RLock()


def _forget() -> None:
    """Replace the lock in a forked child, where it may be held by a thread that does not exist there."""
    global _connecting  # noqa: PLW0603 - one for each process
    _connecting = threading.RLock()


os.register_at_fork(after_in_child=_forget)


class Session:
    """Open, hand out and close the connection of one client, and reserve the leases that it keeps."""

    def __init__(
        self,
        url_or_backend: str | Backend,
        *,
        heartbeats: Heartbeats,
        hooks: Hooks,
        worker: str | None,
        clock: Clock,
        last_resort: Callable[[], None] | None,
        watchdog: Mode,
        options: Mapping[str, Any],
        codecs: Codecs = None,
    ) -> None:
        check_mode(watchdog)
        self.worker = worker or _incarnation()
        self.coding = Coding(given) if (given := checked_codecs(codecs)) else CLEAR
        """What the client does with users' values on their way out and in."""
        self._heartbeats = heartbeats
        self._hooks = hooks
        self._clock = clock
        self._last_resort = last_resort
        self._watchdog: Mode = watchdog
        self._queue: str | TaskQueues | None = options.get("queue")
        self.options = {name: value for name, value in options.items() if value is not None and name != "queue"}
        """What the backend of the URL was given."""
        if self.options and not isinstance(url_or_backend, str):
            raise ConfigError(f"a backend object takes no option {next(iter(self.options))!r}: give it to the backend")
        self.url = url_or_backend if isinstance(url_or_backend, str) else None
        # Opened here, so that an unknown URL is refused here.
        self._backend: Backend | None = self._open() if isinstance(url_or_backend, str) else url_or_backend
        if self.url is not None:
            self.url = getattr(self._backend, "url", None) or self.url  # relative paths mean this directory
        self._queues = self._open_queues()  # here for the same reason
        self._made_in = os.getpid()
        self._connection: Connection | None = None
        self._is_closed = False

    def _open(self) -> Backend:
        assert self.url is not None  # noqa: S101 - for the type checker
        return open_backend(self.url, worker=self.worker, options=self.options)

    def _open_queues(self) -> TaskQueues | None:
        if self._queue is None:
            return None
        backend: object = self._backend
        if not isinstance(backend, TicketSource):
            raise ConfigError(
                f"{type(backend).__name__} has no queues: they are filled by `leasekit serve --queue`, and "
                "need the backend of such a server"
            )
        return open_queues(self._queue) if isinstance(self._queue, str) else self._queue

    @property
    def backend(self) -> Backend | None:
        """The backend of this session, whether it is connected yet or not; None once the session was closed."""
        return self._backend if self._connection is None else self._connection.backend

    @property
    def current(self) -> Connection | None:
        """This process's connection; None before its first use, and once it is closed."""
        connection = self._connection
        return None if connection is None or connection.forked else connection

    def connection(self) -> Connection:
        """Return this process's connection, made on first use. Raises `Closed`; `ConfigError` if gevent patched it."""
        check_process()
        connection = self._connection
        if connection is not None and not connection.forked:
            return connection
        lock = _connecting
        for _ in taken(lock):
            try:
                return self._connected()
            finally:
                lock.release()
        raise AssertionError  # it was taken

    def _connected(self) -> Connection:
        if self._is_closed:
            raise Closed
        if self._connection is not None and not self._connection.forked:  # another thread was first
            return self._connection
        backend = self._backend
        if backend is None or self._made_in != os.getpid():
            if self.url is None:
                raise ConfigError("a backend object is not carried over a fork: connect() by URL, or in the child")
            if self._made_in != os.getpid():
                self.worker, self._made_in = _incarnation(), os.getpid()
            backend = self._backend = self._open()
            self._queues = self._open_queues()
        self._connection = Connection(
            backend,
            self._heartbeats,
            queues=self._queues,
            clock=self._clock,
            hooks=self._hooks,
            last_resort=self._last_resort,
            watchdog=self._watchdog,
            coding=self.coding,
        )
        self._backend = None
        return self._connection

    def close(self) -> Connection | None:
        """Refuse further connections. Return the open one, which the caller closes, or None if there is none.

        Raises `LeasekitError` if a hook calls this.
        """
        lock = _connecting
        for _ in taken(lock):
            try:
                connection = self._connection
                if connection is not None and not connection.forked:
                    connection.refuse_hooks()
                    self._connection = None
                self._is_closed = True
                return None if connection is None or connection.forked else connection
            finally:
                lock.release()
        raise AssertionError  # it was taken

    def reserve(self, task: Task, owner: Owner | None) -> tuple[Connection, HeldLease] | None:
        """Keep the lease of a claimed task for `owner`. Return None if this process does not hold the task.

        The task is given back once the owner is dead, or at once if `owner` is None. A later call replaces the owner,
        as long as the code has not begun.
        """
        connection = self._connection
        if connection is None or connection.forked or (held := connection.keeper.get(task)) is None:
            return None
        if owner is None:
            connection.driver.call_soon(connection.keeper.release_if_unstarted, held)
        elif not held.begun:
            held.wanted_by = connection.owner(held, owner)  # first: an interrupted thread has reserved nothing
            held.awaits_block = True
        held.reserved = True
        return connection, held

    def reserve_adopted(self, task: Task, owner: Owner | None) -> tuple[Connection, HeldLease] | None:
        """Hold and reserve a task that other code has claimed; a task is adopted for one lease."""
        bind(task, self.reserve)
        if owner is None:
            return None
        connection = self.connection()
        held = None if connection.keeper.get(task) else connection.keeper.adopt(task)
        reserved = self.reserve(task, owner)
        if held is not None:
            connection.driver.call_soon(connection.keeper.start_renewing, held)
        return reserved


def _incarnation() -> str:
    host = re.sub(r"[^!-.0-~]", "-", socket.gethostname())[:80] or "host"
    return f"{host}:{os.getpid()}:{secrets.token_hex(4)}"
