"""The drains of workers at one node: an operator's acts, and the end of marks whose processes have gone."""

import logging
import math
from collections.abc import Callable, Sequence

from leasekit.server.clock import Clock
from leasekit.server.commit import GroupCommit
from leasekit.server.fleet import Fleet
from leasekit.server.readers import Readers
from leasekit.server.request_classes import NOTE, SET_DRAIN
from leasekit.server.roles.audit import Note
from leasekit.server.roles.directory import SEEN_FOR
from leasekit.server.roles.drains import DrainChange
from leasekit.server.store import DrainRow
from leasekit.task import WorkerInfo

logger = logging.getLogger("leasekit.server")

_LOOK = 60.0  # seconds between two looks for workers that have gone


class Drains:
    """The drains of the workers of one engine; for its event loop. `wake` answers the claims of workers that wait."""

    def __init__(
        self,
        commit: GroupCommit,
        readers: Readers,
        clock: Clock,
        fleet: Fleet,
        *,
        wake: Callable[[Sequence[str]], None],
    ) -> None:
        self._commit = commit
        self._readers = readers
        self._clock = clock
        self._fleet = fleet
        self._wake = wake
        self._look_at = math.inf
        self._early_until = math.inf

    async def drain(self, worker: str, *, by: str | None, note: Note | None = None) -> WorkerInfo | None:
        """Have a worker finish what it holds, take nothing new, and stop; None: no such worker is known."""
        if await self._fleet.worker(worker) is None:
            if note is not None:
                await self._commit.ask(NOTE, None, size=1, note=note)
            return None
        await self._commit.ask(SET_DRAIN, DrainChange(worker, by), size=1, note=note)
        self._wake([worker])
        logger.info("%s drains the worker %r", by or "a client", worker)
        return await self._fleet.worker(worker)

    async def undrain(self, worker: str, *, by: str | None, note: Note | None = None) -> None:
        """Take a drain back, if there is one. A worker that has stopped already stays stopped."""
        if await self._commit.ask(SET_DRAIN, DrainChange(worker, by, is_draining=False), size=1, note=note):
            logger.info("%s no longer drains the worker %r", by or "a client", worker)

    async def tick(self, *, is_consumer: bool) -> None:
        """Remove the marks of workers that have started anew; a consumer also those of workers that have gone."""
        now = self._clock.instant()
        if self._look_at == math.inf:  # until then, workers may not have called since this node started
            self._look_at = self._early_until = now + SEEN_FOR
        marks = list(self._commit.kinds.drains.values())
        await self._remove(await self._fleet.restarted(marks, is_early=now < self._early_until))
        if is_consumer and now >= self._look_at:
            self._look_at = now + _LOOK
            await self._remove(await self._gone())

    async def _gone(self) -> list[DrainRow]:
        since = self._clock.peek() - SEEN_FOR
        marks = [mark for mark in await self._readers.read(lambda view: view.drains()) if mark.at < since]
        return await self._fleet.gone(marks) if marks else []

    async def _remove(self, marks: Sequence[DrainRow]) -> None:
        for mark in marks:
            change = DrainChange(mark.worker, None, is_draining=False, marked_at=mark.at)
            await self._commit.ask(SET_DRAIN, change, size=1)
