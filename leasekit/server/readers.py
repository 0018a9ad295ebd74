"""Reads of the store beside its writer: in threads of their own, few at a time, and bounded in number.

Rule 1: callers take turns: one with hundreds of reads holds up no other by more than one of them.
Rule 2: of one caller, vital reads come first, and have no bound: without these, leases end and revoked tokens go on.
Rule 3: a search of many reads takes a turn for each, but is not refused once it has begun.
"""

import asyncio
import random as _random
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVar

from leasekit.errors import Throttled, Unavailable
from leasekit.server.clock import Clock
from leasekit.server.commit import resolve
from leasekit.server.daemon_threads import DaemonThreads
from leasekit.server.fair_bound import CALLER, FairBound
from leasekit.server.fair_queue import FairQueue
from leasekit.server.roles import task_infos
from leasekit.server.roles.selection import Found, Named, Search
from leasekit.server.store import Store, View
from leasekit.task import TaskInfo

_T = TypeVar("_T")

_THREADS = 4
_WAITING = 200  # reads that may wait, of all callers together
_CLOSED = "the engine is not open"


class _Read:
    """A read that waits for a thread."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()


class Readers:
    """The threads that read the store of one engine; for its event loop.

    Reads raise `Throttled` if too many of them wait, and `Unavailable` if the engine is not open.
    """

    def __init__(self, store: Store, clock: Clock, random: _random.Random) -> None:
        self._store = store
        self._clock = clock
        self._random = random
        self._threads: DaemonThreads | None = None
        self._under_way: set[asyncio.Future[Any]] = set()  # in threads
        self._waiting: FairQueue[_Read] = FairQueue()
        self._of_callers = FairBound()  # the reads that wait or are under way

    @property
    def are_open(self) -> bool:
        return self._threads is not None

    def open(self) -> None:
        self._threads = DaemonThreads(_THREADS, name="leasekit-reader")
        self._under_way = set()  # what earlier threads have not ended takes no place

    def abandon(self) -> None:
        """Refuse further reads, and those that wait; those that are under way end by themselves."""
        if (threads := self._shut()) is not None:
            threads.shutdown(wait=False)

    async def close(self) -> None:
        """Refuse further reads, and those that wait; let those end that are under way.

        A database may answer late: the loop goes on.
        """
        if (threads := self._shut()) is None:
            return
        waiting = DaemonThreads(1, name="leasekit-reader")
        ended = asyncio.get_running_loop().run_in_executor(waiting, threads.shutdown)
        waiting.shutdown(wait=False)
        await asyncio.shield(ended)  # a cancel must not keep the threads from their end

    def _shut(self) -> DaemonThreads | None:
        threads, self._threads = self._threads, None
        while self._waiting:
            resolve(self._waiting.take().answer, Unavailable(_CLOSED))
        return threads

    async def run(self, call: Callable[[], _T], *, is_vital: bool = False, is_next: bool = False) -> _T:
        """Return what a function returns that runs in one of the threads.

        A vital read has no bound, nor has the next read of a search that has begun.
        """
        if self._threads is None:
            raise Unavailable(_CLOSED)
        caller = CALLER.get()
        if not (is_vital or is_next) and self._of_callers.is_reached(caller, _WAITING):
            raise Throttled("too many reads wait: try again later", retry_after=0.5 + self._random.random())
        read = _Read(call)
        self._of_callers.add(caller, 1)
        self._waiting.add(caller, read, is_urgent=is_vital)
        try:
            self._begin()
            return await read.answer  # type: ignore[no-any-return]
        finally:
            self._waiting.remove(caller, read)  # in case this request was cancelled
            self._of_callers.add(caller, -1)

    def _begin(self) -> None:
        """Begin reads as long as threads are free."""
        while self._threads is not None and self._waiting and len(self._under_way) < _THREADS:
            read = self._waiting.take()
            try:
                under_way = asyncio.get_running_loop().run_in_executor(self._threads, read.call)
            except RuntimeError as error:  # the system has no thread to give
                resolve(read.answer, error)
            else:
                self._under_way.add(under_way)
                under_way.add_done_callback(partial(self._end, read))

    def _end(self, read: _Read, under_way: "asyncio.Future[Any]") -> None:
        self._under_way.discard(under_way)
        resolve(read.answer, under_way.exception() or under_way.result())
        self._begin()

    async def read(self, look: Callable[[View], _T], *, is_vital: bool = False, is_next: bool = False) -> _T:
        """Return what a function finds in a view of the store, as `run` does."""
        return await self.run(lambda: self._look(look), is_vital=is_vital, is_next=is_next)

    async def find(self, search: Search | Named) -> Found:
        """Return the page of a search, a step at a time."""
        found = await self.read(search.look)
        while found is None:
            found = await self.read(search.look, is_next=True)
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
