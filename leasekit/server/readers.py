"""Reads of the store beside its writer: in threads of their own, few at a time, and bounded in number."""

import asyncio
import random as _random
from collections.abc import Callable, Collection
from typing import TypeVar

from leasekit.errors import Throttled, Unavailable
from leasekit.server.clock import Clock
from leasekit.server.daemon_threads import DaemonThreads
from leasekit.server.roles import task_infos
from leasekit.server.roles.selection import Found, Named, Search
from leasekit.server.store import Store, View
from leasekit.task import TaskInfo

_T = TypeVar("_T")

_THREADS = 4
_WAITING = 200  # reads that may wait


class Readers:
    """The threads that read the store of one engine; for its event loop.

    Reads raise `Throttled` if too many of them wait, and `Unavailable` if the engine is not open.
    """

    def __init__(self, store: Store, clock: Clock, random: _random.Random) -> None:
        self._store = store
        self._clock = clock
        self._random = random
        self._threads: DaemonThreads | None = None
        self._under_way = 0

    @property
    def are_open(self) -> bool:
        return self._threads is not None

    def open(self) -> None:
        self._threads = DaemonThreads(_THREADS, name="leasekit-reader")

    def abandon(self) -> None:
        """Refuse further reads; those that are under way end by themselves."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)

    async def close(self) -> None:
        """Refuse further reads, and wait for those that are under way. A database may answer late: the loop goes on."""
        threads, self._threads = self._threads, None
        if threads is None:
            return
        waiting = DaemonThreads(1, name="leasekit-reader")
        ended = asyncio.get_running_loop().run_in_executor(waiting, threads.shutdown)
        waiting.shutdown(wait=False)
        await ended

    async def run(self, read: Callable[[], _T], *, is_vital: bool = False) -> _T:
        """Return what a function returns that runs in one of the threads. A vital read has no bound."""
        if self._threads is None:
            raise Unavailable("the engine is not open")
        if self._under_way >= _WAITING and not is_vital:
            raise Throttled("too many reads wait: try again later", retry_after=0.5 + self._random.random())
        self._under_way += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, read)
        finally:
            self._under_way -= 1

    async def read(self, look: Callable[[View], _T], *, is_vital: bool = False) -> _T:
        """Return what a function finds in a view of the store. A vital read has no bound."""
        return await self.run(lambda: self._look(look), is_vital=is_vital)

    async def find(self, search: Search | Named) -> Found:
        """Return the page of a search, a step at a time."""
        while (found := await self.read(search.look)) is None:
            pass
        return found

    async def ended_of(self, ids: Collection[str]) -> list[str]:
        """Return those of these ids whose tasks have ended, or are unknown."""
        return await self.read(lambda view: task_infos.over_of(view, ids))

    async def tasks(self, ids: Collection[str]) -> dict[str, TaskInfo]:
        """Return the tasks of these ids that exist, with users' JSON values as `Raw`."""
        return await self.read(
            lambda view: task_infos.infos(view, ids, now=self._clock.peek(), gained=self._clock.gained)
        )

    def _look(self, look: Callable[[View], _T]) -> _T:
        with self._store.view() as view:
            return look(view)
