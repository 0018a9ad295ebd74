"""Waits for the ends of tasks: requests that are answered once a task has ended.

Rule 1: a request is noted before the store is looked at, so that no end falls between the two.
Rule 2: what the store is asked does not depend on the number of requests: one look, and one read, serve all that wait
for a task; one look serves all tasks that requests wait for.
Rule 3: news of an end may get lost (of another node, or of a commit whose result is unknown). So the store is looked at
in each period too.
Rule 4: news only wakes. What is answered is read from the store afterwards.

Everything in this module runs in the event loop.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field
from itertools import islice

from leasekit.errors import BackendError, Throttled
from leasekit.server.commit import resolve
from leasekit.server.fair_bound import CALLER, FairBound
from leasekit.task import TaskInfo

logger = logging.getLogger("leasekit.server")

TOLD_FOR = 120.0
"""Seconds for which other nodes remember that a task is waited for: twice the longest wait, so that not each tells."""

_MOST = 20_000  # tasks for which requests may wait, each counted for each request
_PERIOD = 1.5  # seconds between two looks: an end is seen after two, also if the look is slow
_TOGETHER = 20  # tasks that are read at once
_PAUSE = 1.0  # seconds until a refused request may be repeated

Look = Callable[[Collection[str]], Awaitable[Iterable[str]]]
Read = Callable[[Collection[str]], Awaitable[Mapping[str, TaskInfo]]]


@dataclass(slots=True, eq=False)
class _Awaited:
    """A task that requests wait for."""

    waits: "set[asyncio.Future[None]]" = field(default_factory=set["asyncio.Future[None]"])
    told_until: float = 0.0  # by when other nodes have forgotten that the task is waited for


class EndWaits:
    """The requests of one engine that wait for ends; its length is the number of tasks that they wait for.

    `look` returns those of some ids whose tasks have ended, or are unknown; `read` returns the tasks that exist.
    `tell` lets other nodes know of tasks whose ends are waited for here.
    """

    def __init__(self, look: Look, read: Read, *, tell: Callable[[Sequence[str]], None]) -> None:
        self._look = look
        self._read = read
        self._tell = tell
        self._waiting = FairBound()  # the tasks that requests wait for, each counted for each request
        self._awaited: dict[str, _Awaited] = {}
        self._new: set[str] = set()  # tasks that were not looked at since a request began to wait for them
        self._has_new = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._wanted: dict[str, asyncio.Future[TaskInfo | None]] = {}  # what the next reads must bring
        self._reading: asyncio.Task[None] | None = None
        self._has_ended = False

    def __len__(self) -> int:
        return self._waiting.total

    async def get(self, task_id: str, seconds: float) -> TaskInfo | None:
        """Return a task once it has ended, or as it is after `seconds`; None if there is no such task.

        Raises `Throttled` if too many requests wait already, also of this caller.
        """
        time = asyncio.get_running_loop().time
        until = time() + seconds
        while True:
            await self._wait([task_id], until)
            info = await self._read_soon(task_id)
            # A dead task that was redriven meanwhile has not ended: the wait goes on.
            if info is None or info.status.ended or self._has_ended or time() >= until:
                return info

    async def ended_of(self, ids: Sequence[str], seconds: float) -> list[str]:
        """Return those of these tasks that have ended or are unknown, once there is one, or after `seconds`."""
        until = asyncio.get_running_loop().time() + seconds
        found = list(await self._look(ids))
        if not found and seconds > 0 and not self._has_ended:
            await self._wait(ids, until)
            found = list(await self._look(ids))
        return found

    def over(self, ids: Iterable[str]) -> None:
        """Wake the requests that wait for these tasks, which have ended."""
        for task_id in ids if self._awaited else ():
            if (awaited := self._awaited.pop(task_id, None)) is not None:
                self._new.discard(task_id)
                for wait in awaited.waits:
                    resolve(wait, None)

    def end(self) -> None:
        """Answer all requests now, and later ones at once."""
        self._has_ended = True
        self.over(list(self._awaited))

    async def close(self) -> None:
        """End all waits, and wait for the reads that were begun for them."""
        self.end()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        if self._reading is not None:
            await asyncio.wait([self._reading])

    async def _wait(self, ids: Sequence[str], until: float) -> None:
        """Wait until one of these tasks has perhaps ended."""
        if self._has_ended:
            return
        caller = CALLER.get()
        if self._waiting.is_reached(caller, _MOST):
            raise Throttled(
                f"requests wait for the ends of {_MOST:,} tasks already: ask without `wait`, or try again later",
                retry_after=_PAUSE,
            )
        ids = list(dict.fromkeys(ids))
        self._waiting.add(caller, len(ids))
        wait: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entered = self._enter(ids, wait, until)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await wait
        finally:
            self._waiting.add(caller, -len(ids))
            for task_id, awaited in entered.items():
                awaited.waits.discard(wait)
                if not awaited.waits and self._awaited.get(task_id) is awaited:
                    del self._awaited[task_id]
                    self._new.discard(task_id)

    def _enter(self, ids: Sequence[str], wait: "asyncio.Future[None]", until: float) -> dict[str, _Awaited]:
        entered: dict[str, _Awaited] = {}
        untold: list[str] = []
        for task_id in ids:
            awaited = entered[task_id] = self._awaited.setdefault(task_id, _Awaited())
            if not awaited.waits:
                self._new.add(task_id)
            awaited.waits.add(wait)
            if awaited.told_until < until:
                awaited.told_until = asyncio.get_running_loop().time() + TOLD_FOR
                untold.append(task_id)
        self._has_new.set()
        if untold:
            self._tell(untold)
        if self._looking is None:
            self._looking = asyncio.create_task(self._keep_looking(), context=Context())
        return entered

    async def _keep_looking(self) -> None:
        """Look at new tasks at once, and at all in each period, for as long as requests wait."""
        time = asyncio.get_running_loop().time
        look_at = time() + _PERIOD
        try:
            while self._awaited:
                ids = self._new
                if time() >= look_at:
                    ids, look_at = set(self._awaited), time() + _PERIOD
                self._new = set()
                self._has_new.clear()
                await self._look_once(ids)
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(look_at):
                        await self._has_new.wait()
        finally:
            self._looking = None

    async def _look_once(self, ids: Collection[str]) -> None:
        try:
            if ids:
                self.over(await self._look(ids))
        except BackendError as error:  # the next look is for all tasks
            logger.debug("no look at the tasks whose ends are waited for: %s", error)

    async def _read_soon(self, task_id: str) -> TaskInfo | None:
        """Return a task, or None, by a read that begins from now on."""
        wanted = self._wanted.get(task_id)
        if wanted is None:
            wanted = self._wanted[task_id] = asyncio.get_running_loop().create_future()
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_wanted(), context=Context())
        return await asyncio.shield(wanted)

    async def _read_wanted(self) -> None:
        try:
            while self._wanted:
                wanted = dict(islice(self._wanted.items(), _TOGETHER))
                for task_id in wanted:
                    del self._wanted[task_id]
                await self._read_once(wanted)
        finally:
            self._reading = None

    async def _read_once(self, wanted: "Mapping[str, asyncio.Future[TaskInfo | None]]") -> None:
        try:
            found = await self._read(list(wanted))
        except Exception as error:  # noqa: BLE001 - each request has it as its answer
            for answer in wanted.values():
                resolve(answer, error)
        else:
            for task_id, answer in wanted.items():
                resolve(answer, found.get(task_id))
