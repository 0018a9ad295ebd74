"""Operations: what operators change in an engine: kinds, gates, drains, periodic tasks, tokens, and many tasks at once.

Each writes its entry of the audit log, a `Note`, in the transaction of its change.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence

from leasekit.periodic import PeriodicInfo
from leasekit.server.access import KindPatterns
from leasekit.server.clock import Clock
from leasekit.server.commit import GroupCommit
from leasekit.server.drains import Drains
from leasekit.server.marks import Marks
from leasekit.server.readers import Readers
from leasekit.server.request_classes import (
    CANCEL_MATCHING,
    NOTE,
    REDRIVE,
    RESCHEDULE,
    RESCHEDULE_MATCHING,
    SESSION,
    SET_GATE,
    SET_KIND,
    SET_PERIODIC,
    SET_TOKEN,
)
from leasekit.server.roles import bulk, gates, kinds, periodic, redrive, rescheduling, tokens
from leasekit.server.roles.audit import Note
from leasekit.server.roles.gates import GateChange
from leasekit.server.roles.periodic import Change as PeriodicChange
from leasekit.server.roles.selection import Found
from leasekit.server.store import PeriodicRow, SessionRow
from leasekit.server.store_room import StoreRoom
from leasekit.server.sweeper import Sweeper
from leasekit.task import GateInfo, KindInfo, KindSettings, Matched, Purged, Redriven, Rescheduled, Scheduled, Verdict
from leasekit.tokens import TokenInfo
from leasekit.wire import (
    CancelMatchingRequest,
    PurgeRequest,
    RedriveRequest,
    RescheduleMatchingRequest,
    RescheduleRequest,
)

logger = logging.getLogger("leasekit.server")


class Operations:
    """The acts of operators on one engine; for its event loop. Errors are those of `Engine`.

    `tell_cancelled` has workers hear which of their tasks are to stop, and returns the verdicts; `on_new_tokens` has
    all nodes read the access tokens.
    """

    def __init__(
        self,
        commit: GroupCommit,
        readers: Readers,
        clock: Clock,
        *,
        marks: Marks,
        room: StoreRoom,
        sweeper: Sweeper,
        drains: Drains,
        tell_cancelled: Callable[[Sequence[tuple[Verdict, str | None]]], Sequence[Verdict]],
        on_new_tokens: Callable[[], Awaitable[None]],
    ) -> None:
        self._commit = commit
        self._readers = readers
        self._clock = clock
        self._marks = marks
        self._room = room
        self._tell_cancelled = tell_cancelled
        self._on_new_tokens = on_new_tokens
        self._sweeper, self.vacuum = sweeper, sweeper.vacuum
        self.drain, self.undrain = drains.drain, drains.undrain

    async def redrive(
        self, request: RedriveRequest, *, kinds: KindPatterns | None = None, note: Note | None = None
    ) -> Redriven:
        """Begin a new life of dead tasks: these, or a page of those that match. Refused while the disk is full.

        Tasks that are not of these `kinds` (None: of all) are unknown.
        """
        if not request.dry_run:
            self._room.check()
        request = self._marks.opened(request)
        search = redrive.search(request, kinds)
        found = None if search is None else await self._readers.find(search)
        plan = await self._readers.read(lambda view: redrive.plan(view, request, found, kinds))
        if request.dry_run:
            looked = await self._readers.read(lambda view: redrive.look(view, plan, now=self._clock.peek()))
            return self._marks.sealed(looked)
        answer: Redriven = await self._commit.ask(REDRIVE, plan, size=len(plan.ids), note=note)
        return self._marks.sealed(answer)

    async def purge(
        self, request: PurgeRequest, *, kinds: KindPatterns | None = None, note: Note | None = None
    ) -> Purged:
        """Do a step of the removal of ended tasks of these kinds (None: of all) that match, or count them all."""
        return self._marks.sealed(await self._sweeper.purge(self._marks.opened(request), kinds=kinds, note=note))

    async def reschedule(
        self,
        task_id: str,
        wanted: RescheduleRequest,
        *,
        by: str | None,
        kinds: KindPatterns | None = None,
        note: Note | None = None,
    ) -> Rescheduled | None:
        """Give a waiting task of these kinds (None: of all) another due time or priority; None: it is unknown.

        Raises `Refused` if it does not wait.
        """
        request = rescheduling.Reschedule(task_id, wanted, by, kinds)
        answer = await self._commit.ask(RESCHEDULE, request, size=1, note=note)
        return rescheduling.told(answer)

    async def cancel_matching(
        self, request: CancelMatchingRequest, *, kinds: KindPatterns | None = None, note: Note | None = None
    ) -> Matched:
        """Do a step of the cancel of all tasks of these kinds (None: of all) that match, or of its dry run."""
        act, found = await self._matching(request, kinds)
        if act.is_dry:
            return self._marks.sealed(act.answer(found, ()))
        cancelled = await self._commit.ask(CANCEL_MATCHING, bulk.Change(found.rows), size=len(found.rows), note=note)
        return self._marks.sealed(act.answer(found, {verdict.id for verdict in self._tell_cancelled(cancelled)}))

    async def reschedule_matching(
        self,
        request: RescheduleMatchingRequest,
        *,
        by: str | None,
        kinds: KindPatterns | None = None,
        note: Note | None = None,
    ) -> Matched:
        """Do a step of the reschedule of all tasks of these kinds (None: of all) that match, or of its dry run."""
        act, found = await self._matching(request, kinds)
        if act.is_dry:
            return self._marks.sealed(act.answer(found, ()))
        change = bulk.Change(found.rows, request.change, by)
        changed = await self._commit.ask(RESCHEDULE_MATCHING, change, size=len(found.rows), note=note)
        return self._marks.sealed(act.answer(found, changed))

    async def _matching(self, request: CancelMatchingRequest, kinds: KindPatterns | None) -> tuple[bulk.Act, Found]:
        opened = self._marks.opened(request)
        act = await self._readers.read(lambda view: bulk.begin(view, opened, kinds, now=self._clock.peek()))
        return act, await self._readers.find(act.search)

    async def set_kind(
        self,
        kind: str,
        settings: KindSettings | None,
        *,
        by: str | None,
        is_declared: bool = False,
        was: KindSettings | None = None,
        note: Note | None = None,
    ) -> KindInfo | None:
        """Replace the settings of a kind, or remove them (None), for all tasks that are scheduled from now on.

        With `is_declared`, the code of a worker says so. Raises `Conflict` if the kind has not the settings that it
        `was` seen to have.
        """
        kinds.check_kind(kind)
        change = kinds.KindChange(kind, settings, by, is_declared, was)
        info: KindInfo | None = await self._commit.ask(SET_KIND, change, size=1, note=note)
        if not is_declared:  # it is a repeat as a rule: the event tells of changes
            logger.info("%s has %s", by or "a client", kinds.described(kind, settings))
        return info

    async def set_gate(self, change: GateChange, *, note: Note | None = None) -> GateInfo | None:
        """Close or open a gate, for all claims that are judged from now on."""
        info: GateInfo | None = await self._commit.ask(SET_GATE, change, size=1, note=note)
        logger.info("%s has %s", change.by or "a client", gates.described(change))
        return info

    async def change_periodic(
        self, change: PeriodicChange, *, note: Note | None = None
    ) -> PeriodicInfo | Scheduled | None:
        """Change a periodic task, or trigger it; None: there is none of this name (any longer)."""
        if isinstance(change, periodic.Put):
            periodic.check(change.name, change.task)
        if not isinstance(change, periodic.Pause | periodic.Remove):
            self._room.check()
        answer: PeriodicRow | Scheduled | None = await self._commit.ask(SET_PERIODIC, change, size=1, note=note)
        is_repeat = isinstance(change, periodic.Put) and change.is_declared  # as a rule: the event tells of changes
        if not is_repeat and answer is not None:
            logger.info("%s has %s", change.by or "a client", periodic.described(change))
        return periodic.info(answer, count=1) if isinstance(answer, PeriodicRow) else answer

    async def change_token(self, change: tokens.Change, *, note: Note | None = None) -> TokenInfo | None:
        """Make, revoke or rotate an access token; None: there is none of this id or name that the caller may see."""
        info: TokenInfo | None = await self._commit.ask(SET_TOKEN, change, size=1, note=note)
        await self._on_new_tokens()
        return info

    async def begin_session(self, row: SessionRow) -> None:
        """Begin a session of the console, at all nodes of the store."""
        await self._commit.ask(SESSION, row, size=1)

    async def end_session(self, digest: bytes) -> None:
        """End a session of the console; an unknown one is ignored."""
        await self._commit.ask(SESSION, digest, size=1)

    async def note(self, note: Note | None) -> None:
        """Write an entry of the audit log for a request that has found nothing to change."""
        if note is not None:
            await self._commit.ask(NOTE, None, size=1, note=note)
