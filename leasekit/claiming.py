"""Client.tasks(): a loop over tasks as they become ready, one at a time, with two doors (`for`, `async for`)."""

import copy
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING

from leasekit._driver.connection import Connection
from leasekit._driver.holding import Holding
from leasekit.errors import Closed
from leasekit.task import Task

if TYPE_CHECKING:
    from leasekit.client import Client

__all__ = ["Tasks"]

_POLL = 20.0  # seconds of one long poll


class Tasks:
    """A loop over tasks as they become ready; `Client.tasks` makes it, and closing the client ends it."""

    def __init__(self, client: "Client", kinds: Sequence[str], *, until_idle: float | None) -> None:
        self._client = client
        self._kinds = kinds
        self._until_idle = until_idle
        self._connection: Connection | None = None
        self._last: Holding | None = None

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
        """The connection of this loop; None once its client was closed."""
        if self._connection is None or self._connection.forked:
            self._connection, self._last = self._client.connection(), None
        return None if self._connection.closed else self._connection

    def _interrupted(self) -> None:
        """A task may have come at this very moment: nobody will see it."""
        if self._connection is not None:
            self._connection.driver.call_soon(self._give_back, self._connection)

    def _give_back(self, connection: Connection) -> None:
        """In the driver's loop: the last task, if nobody has made a lease of it."""
        if self._last is not None and not self._last.reserved:
            connection.keeper.unless_begun(self._last)
        self._last = None

    async def _next(self, connection: Connection) -> Task | None:
        """In the driver's loop: the next task, or None when it has been quiet for long enough."""
        keeper, clock = connection.keeper, connection.clock
        self._give_back(connection)
        quiet_since = clock.now()
        while True:
            left = _POLL if self._until_idle is None else self._until_idle - (clock.now() - quiet_since)
            holdings = await keeper.claim(self._kinds, limit=1, wait=max(0.0, min(_POLL, left)), started=True)
            if holdings:
                self._last = holdings[0]
                # A copy of its own: when that is garbage, and no lease was made of it, nobody can begin it any more.
                task = copy.copy(self._last.task).bind(self._client)
                self._last.wanted_by = connection.owner(self._last, task)
                return task
            if self._until_idle is not None and clock.now() - quiet_since >= self._until_idle:
                return None
