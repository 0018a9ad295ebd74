"""`Client.tasks()`: iterate over tasks as they become ready, one at a time, with `for` or `async for`."""

import copy
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

from leasekit._binding import Reserve, bind
from leasekit._descriptors import lack_of_descriptors
from leasekit._driver.connection import Connection
from leasekit._driver.keeping.held_lease import HeldLease
from leasekit._driver.keeping.keeper import Drained
from leasekit.errors import CannotDecode, Closed, LeasekitError
from leasekit.lease import lease
from leasekit.task import Task

__all__ = ["Tasks"]

logger = logging.getLogger("leasekit")

_POLL = 20.0  # seconds of one long poll
_PAUSE = 1.0  # seconds until a task comes again that was not leased, so that a loop that leases none is not busy


class Tasks:
    """An iterator over tasks as they become ready, made by `Client.tasks`.

    It ends when the client is closed, and when an operator drains the worker.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        reserve: Reserve,
        kinds: Sequence[str],
        *,
        until_idle: float | None,
        labels: Mapping[str, str],
    ) -> None:
        self._connect = connect
        self._reserve = reserve
        self._kinds = kinds
        self._until_idle = until_idle
        self._labels = labels
        self._connection: Connection | None = None
        self._last: HeldLease | None = None
        self._has_warned = False

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
        if task is None or connection is None:
            raise StopIteration
        try:
            connection.coding.open_here(task)
        except CannotDecode:
            with lease(task):  # raises the same, and settles the task by it
                raise
        except BaseException:
            self._interrupted()
            raise
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
        if task is None or connection is None:
            raise StopAsyncIteration
        try:
            connection.coding.open_here(task)
        except CannotDecode:
            async with lease(task):  # raises the same, and settles the task by it
                raise
        except BaseException:
            self._interrupted()
            raise
        return task

    def _connected(self) -> Connection | None:
        """Return the connection of this iterator; None once its client was closed."""
        if self._connection is None or self._connection.forked:
            self._connection, self._last = self._connect(), None
            self._connection.check_labels(self._labels)
        return None if self._connection.closed else self._connection

    def _interrupted(self) -> None:
        """Give back a task that may have been granted at this very moment, because the caller will not get it."""
        if self._connection is not None:
            self._connection.driver.call_soon(self._give_back, self._connection)

    def _give_back(self, connection: Connection, *, after: float | None = None) -> None:
        """Give back the last task, in the driver's loop, unless a lease was made of it; ready again `after` seconds."""
        last, self._last = self._last, None
        if last is None or last.reserved or not connection.keeper.release_if_unstarted(last, after=after):
            return
        if after is not None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "task %s was not leased before the loop went on, so it was given back, and comes again: "
                "write `with leasekit.lease(task):` in the loop",
                last.task.id,
            )

    async def _next(self, connection: Connection) -> Task | None:
        """Return the next task, in the driver's loop, or None when none has come for long enough."""
        keeper, clock = connection.keeper, connection.clock
        self._give_back(connection, after=_PAUSE)
        quiet_since = clock.now()
        while True:
            left = _POLL if self._until_idle is None else self._until_idle - (clock.now() - quiet_since)
            wait = max(0.0, min(_POLL, left))
            if (lack := lack_of_descriptors()) is not None:
                raise LeasekitError(f"no task is claimed: {lack}")
            try:
                leases = await keeper.claim(self._kinds, limit=1, wait=wait, started=True, labels=self._labels)
            except Drained:
                logger.info("an operator drains this worker: its loop over tasks of %s ends", ", ".join(self._kinds))
                return None
            if leases:
                self._last = leases[0]
                # A copy of its own: when that is garbage, and no lease was made of it, nobody can begin it any more.
                task = bind(copy.copy(self._last.task), self._reserve, held=self._last)
                self._last.wanted_by = connection.owner(self._last, weakref.ref(task))
                return task
            if self._until_idle is not None and clock.now() - quiet_since >= self._until_idle:
                return None
