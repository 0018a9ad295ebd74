"""`Client.tasks()`: iterate over tasks as they become ready, one at a time, with `for` or `async for`."""

import copy
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from leasekit._binding import Reserve, bind
from leasekit._driver.connection import Connection
from leasekit._driver.keeping.held_lease import HeldLease
from leasekit.errors import Closed
from leasekit.task import Task

__all__ = ["Tasks"]

_POLL = 20.0  # seconds of one long poll


class Tasks:
    """An iterator over tasks as they become ready, made by `Client.tasks`. Closing the client ends it."""

    def __init__(
        self, connect: Callable[[], Connection], reserve: Reserve, kinds: Sequence[str], *, until_idle: float | None
    ) -> None:
        self._connect = connect
        self._reserve = reserve
        self._kinds = kinds
        self._until_idle = until_idle
        self._connection: Connection | None = None
        self._last: HeldLease | None = None

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        connection = self._connected()
        try:
            task = connection.run(self._next(connection)) if connection is not None else None
        except Closed:
            task = None
        except BaseException:
            self._interrupted()
            raise
        if task is None:
            raise StopIteration
        return task

    def __aiter__(self) -> AsyncIterator[Task]:
        return self

    async def __anext__(self) -> Task:
        connection = self._connected()
        try:
            task = await connection.arun(self._next(connection)) if connection is not None else None
        except Closed:
            task = None
        except BaseException:
            self._interrupted()
            raise
        if task is None:
            raise StopAsyncIteration
        return task

    def _connected(self) -> Connection | None:
        """Return the connection of this iterator; None once its client was closed."""
        if self._connection is None or self._connection.forked:
            self._connection, self._last = self._connect(), None
        return None if self._connection.closed else self._connection

    def _interrupted(self) -> None:
        """Give back a task that may have been granted at this very moment, because the caller will not get it."""
        if self._connection is not None:
            self._connection.driver.call_soon(self._give_back, self._connection)

    def _give_back(self, connection: Connection) -> None:
        """Give back the last task, in the driver's loop, unless a lease was made of it."""
        if self._last is not None and not self._last.reserved:
            connection.keeper.release_if_unstarted(self._last)
        self._last = None

    async def _next(self, connection: Connection) -> Task | None:
        """Return the next task, in the driver's loop, or None when none has come for long enough."""
        keeper, clock = connection.keeper, connection.clock
        self._give_back(connection)
        quiet_since = clock.now()
        while True:
            left = _POLL if self._until_idle is None else self._until_idle - (clock.now() - quiet_since)
            leases = await keeper.claim(self._kinds, limit=1, wait=max(0.0, min(_POLL, left)), started=True)
            if leases:
                self._last = leases[0]
                # A copy of its own: when that is garbage, and no lease was made of it, nobody can begin it any more.
                task = bind(copy.copy(self._last.task), self._reserve)
                self._last.wanted_by = connection.owner(self._last, weakref.ref(task))
                return task
            if self._until_idle is not None and clock.now() - quiet_since >= self._until_idle:
                return None
