"""Sweeper: remove ended tasks from the store of an engine, beside its other work.

Rule 1: tasks are searched in a snapshot, which the writer does not wait for; the writer only removes what was found.
Rule 2: each step is a small transaction of the last class, so all requests that wait by then go before the next step.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from leasekit.errors import BackendError
from leasekit.server.access import KindPatterns
from leasekit.server.clock import Clock
from leasekit.server.commit import RequestClass
from leasekit.server.roles import audit, retention, tokens
from leasekit.server.roles.audit import Counted, Note
from leasekit.server.roles.frontend import NAME_UNUSED
from leasekit.server.roles.retention import Chosen, Removal
from leasekit.server.roles.selection import Found, Named, Search
from leasekit.server.store import View
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
        find: Callable[[Search | Named], Coroutine[Any, Any, Found]],
        commit: Callable[..., Coroutine[Any, Any, Any]],
        clock: Clock,
        *,
        keep: float,
    ) -> None:
        self._read = read
        self._found = find
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
        await self._forget_all(FORGET_ACTS, None)

    async def _forget_claims(self) -> None:
        # The clock may have stepped between two processes: this one keeps for as long again what others have noted.
        self._sweeps += 1
        keep = retention.CLAIM_MEMORY if self._sweeps * _EVERY > retention.CLAIM_MEMORY else _CLAIMS_KEPT
        await self._forget_all(FORGET, keep)

    async def _forget_all(self, rank: RequestClass, request: Any) -> None:
        more = True
        while more:
            more = await self._commit(rank, request, retention.FORGET_BATCH)
            await asyncio.sleep(_PAUSE)

    async def _remove_names(self) -> None:
        until, most = self._clock.peek() - max(self._keep, _NAMES_KEPT), retention.PURGE_BATCH
        while seqs := await self._read(lambda view: view.free_names(until=until, limit=most)):
            await self._commit(NAMES, retention.Removal(seqs, until, "retention"), len(seqs))
            await asyncio.sleep(_PAUSE)

    async def purge(
        self, request: PurgeRequest, *, kinds: KindPatterns | None = None, note: Note | None = None
    ) -> Purged:
        """Remove up to `PURGE_BATCH` matching tasks, or count all of them (`dry_run`).

        Only tasks of these `kinds` (None: of all) match.
        """
        until = self._clock.peek() - request.older_than
        chosen = await self._chosen(request, kinds, until=until)
        if request.dry_run or not (chosen.removal.seqs or note):
            return Purged(kinds=chosen.kinds, cursor=chosen.cursor)
        purged = await self._commit(PURGE, chosen.removal, len(chosen.removal.seqs), note)
        return Purged(kinds=purged.kinds, cursor=chosen.cursor)

    async def _chosen(self, request: PurgeRequest, kinds: KindPatterns | None, *, until: float) -> Chosen:
        wanted, search = retention.wanted(request), retention.search(request, kinds)
        if search is not None:
            return retention.chosen(await self._found(search), until=until)
        if request.dry_run:
            counts = await self._read(lambda view: view.count_ended(wanted, until=until))
            return Chosen(retention.Removal((), until), None, counts)
        chosen: Chosen = await self._read(
            lambda view: retention.choose(view, wanted, until=until, cursor=request.cursor)
        )
        return chosen

    async def vacuum(self, *, note: Note | None = None) -> Vacuumed:
        """Give back one step of the file's free space. Raises `Refused` if the store cannot."""
        before = await self._read(lambda view: view.free_space())
        if before or note:
            await self._commit(VACUUM, before, retention.PURGE_BATCH, note)
        left = await self._read(lambda view: view.free_space())
        return Vacuumed(freed=max(0, before - left), left=left)


def _forget(turn: UnitOfWork, requests: Sequence[float]) -> list[bool]:
    return [retention.forget_claims(turn, older_than=age) for age in requests]


def _vacuum(turn: UnitOfWork, requests: Sequence[int]) -> list[Counted[None]]:
    for free in requests:
        if free:
            turn.tx.give_back(most=_VACUUM_STEP)
    return [Counted(None, int(free > 0)) for free in requests]


def _forget_acts(turn: UnitOfWork, requests: Sequence[None]) -> list[bool]:
    tokens.forget(turn)
    return [audit.forget(turn, limit=retention.FORGET_BATCH) for _ in requests]


def _purge(turn: UnitOfWork, requests: Sequence[Removal]) -> list[Counted[Purged]]:
    answers = retention.remove(turn, requests)
    return [Counted(answer, sum(sum(of_kind.values()) for of_kind in answer.kinds.values())) for answer in answers]


PURGE = RequestClass("purges", _purge, 10_000, is_act=True)
NAMES = RequestClass("names", retention.remove_names, 10_000)
FORGET = RequestClass("forgettings", _forget, 10_000)
VACUUM = RequestClass("vacuums", _vacuum, 10_000, is_act=True)
FORGET_ACTS = RequestClass("forgettings of acts", _forget_acts, 10_000, is_last=True)  # last: `begin_change`
SWEEPING = (PURGE, NAMES, FORGET, FORGET_ACTS, VACUUM)
