"""Sweeper: remove ended tasks from the store of an engine, beside its other work.

Rule 1: tasks are searched in a snapshot, which the writer does not wait for; the writer only removes what was found.
Rule 2: each step is a small transaction of the last class, so all requests that wait by then go before the next step.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from leasekit.errors import BackendError
from leasekit.server.clock import Clock
from leasekit.server.commit import RequestClass
from leasekit.server.roles import retention
from leasekit.server.roles.frontend import NAME_UNUSED
from leasekit.server.store import Filter, View
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import Purged, Vacuumed
from leasekit.wire import PurgeRequest

logger = logging.getLogger("leasekit.server")

_T = TypeVar("_T")

_EVERY = 60.0  # seconds between two searches for old tasks
_NAMES_KEPT = 2 * NAME_UNUSED  # seconds, however short retention is: an earlier use of a name need not be noted
_NAMES_EVERY = 3600.0  # seconds between two searches for unused names, which look at all of them
_PAUSE = 0.01  # seconds between two steps of retention, for which nobody waits
_CLAIMS_KEPT = 86_400.0  # seconds for which the answers of claims are kept, whatever clocks do between two processes
_VACUUM_STEP = 2**20  # bytes that one transaction gives back


class Sweeper:
    """The removal of ended tasks from one engine's store: after their retention, `keep` seconds, and by purges."""

    def __init__(
        self,
        read: Callable[[Callable[[View], Any]], Coroutine[Any, Any, Any]],
        commit: Callable[[RequestClass, Any, int], Coroutine[Any, Any, Any]],
        clock: Clock,
        *,
        keep: float,
    ) -> None:
        self._read = read
        self._commit = commit
        self._clock = clock
        self._keep = keep
        self._old = retention.OldTasks(keep)
        self._names_at = clock.peek()
        self._sweeps = 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_EVERY)
            try:
                await self.sweep()
            except BackendError as error:
                logger.warning("old tasks could not be removed, which is tried again: %s", error)
            except Exception:
                logger.exception("old tasks could not be removed, which is tried again")

    async def sweep(self) -> None:
        """Remove tasks and unused names whose retention is over, and answers of claims that are too old."""
        await self._read(lambda view: self._old.begin(view, now=self._clock.peek()))
        while (step := await self._read(lambda view: self._old.step(view, now=self._clock.peek()))) is not None:
            if step.removal.seqs:
                await self._commit(PURGE, step.removal, len(step.removal.seqs))
            self._old.done(step)
            await asyncio.sleep(_PAUSE)
        if self._clock.peek() - self._names_at >= _NAMES_EVERY:
            await self._remove_names()
            self._names_at = self._clock.peek()
        await self._forget_claims()

    async def _forget_claims(self) -> None:
        # The clock may have stepped between two processes: this one keeps for as long again what others have noted.
        self._sweeps += 1
        keep = retention.CLAIM_MEMORY if self._sweeps * _EVERY > retention.CLAIM_MEMORY else _CLAIMS_KEPT
        more = True
        while more:
            more = await self._commit(FORGET, keep, retention.FORGET_BATCH)
            await asyncio.sleep(_PAUSE)

    async def _remove_names(self) -> None:
        until, most = self._clock.peek() - max(self._keep, _NAMES_KEPT), retention.PURGE_BATCH
        while seqs := await self._read(lambda view: view.free_names(until=until, limit=most)):
            await self._commit(NAMES, retention.Removal(seqs, until, "retention"), len(seqs))
            await asyncio.sleep(_PAUSE)

    async def purge(self, request: PurgeRequest) -> Purged:
        """Remove up to `PURGE_BATCH` matching tasks, or count all of them (`dry_run`)."""
        wanted, until = Filter(request.kind, request.status), self._clock.peek() - request.older_than
        if request.dry_run:
            return Purged(kinds=await self._read(lambda view: view.count_ended(wanted, until=until)))
        chosen = await self._read(lambda view: retention.choose(view, wanted, until=until, cursor=request.cursor))
        if not chosen.removal.seqs:
            return Purged(kinds={})
        purged = await self._commit(PURGE, chosen.removal, len(chosen.removal.seqs))
        return Purged(kinds=purged.kinds, cursor=chosen.cursor)

    async def vacuum(self) -> Vacuumed:
        """Give back one step of the file's free space. Raises `Refused` if the store cannot."""
        before = await self._read(lambda view: view.free_space())
        if before:
            await self._commit(VACUUM, None, retention.PURGE_BATCH)
        left = await self._read(lambda view: view.free_space())
        return Vacuumed(freed=max(0, before - left), left=left)


def _forget(turn: UnitOfWork, requests: Sequence[float]) -> list[bool]:
    return [retention.forget_claims(turn, older_than=age) for age in requests]


def _vacuum(turn: UnitOfWork, requests: Sequence[None]) -> Sequence[None]:
    for _ in requests:
        turn.tx.give_back(most=_VACUUM_STEP)
    return requests


PURGE = RequestClass("purges", retention.remove, 10_000)
NAMES = RequestClass("names", retention.remove_names, 10_000)
FORGET = RequestClass("forgettings", _forget, 10_000)
VACUUM = RequestClass("vacuums", _vacuum, 10_000)
SWEEPING = (PURGE, NAMES, FORGET, VACUUM)
