"""Queries: what clients, operators and the console ask of an engine, without changing anything."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from leasekit.periodic import PeriodicInfo
from leasekit.server.access import LOCAL, Access, KindPatterns
from leasekit.server.clock import Clock
from leasekit.server.commit import GroupCommit
from leasekit.server.end_waits import EndWaits
from leasekit.server.fleet import Fleet
from leasekit.server.history import KEPT, Counts, Recorder
from leasekit.server.history import read as read_minutes
from leasekit.server.http.events import Chain
from leasekit.server.marks import Marks
from leasekit.server.readers import Readers
from leasekit.server.roles import audit, backlog, gates, kinds, periodic, tokens
from leasekit.server.roles.listing import Listing
from leasekit.server.roles.selection import split
from leasekit.server.roles.task_infos import gate_info
from leasekit.server.roles.unmet import unmet, waiting
from leasekit.server.store import SessionRow, Space, Store, View
from leasekit.task import Ended, GateInfo, KindInfo, Page, Stats, TaskInfo
from leasekit.tokens import AuditPage, TokenInfo
from leasekit.wire import MAX_WAIT

_ENDED_TOGETHER = 20  # ended tasks that one read brings
_ENDED_BYTES = 4 * 1024 * 1024  # of values of ended tasks in one answer, about
_UNMET = 1000  # kinds that one read looks at: some milliseconds
_CHAIN = 10_000  # tasks of a chain whose events a reader follows


class Queries:
    """The questions that one engine answers; for its event loop. Errors are those of `Readers`."""

    def __init__(
        self,
        store: Store,
        readers: Readers,
        clock: Clock,
        *,
        marks: Marks,
        commit: GroupCommit,
        end_waits: EndWaits,
        fleet: Fleet,
        recorder: Recorder,
    ) -> None:
        self._store = store
        self._marks = marks
        self._readers = readers
        self._clock = clock
        self._commit = commit
        self._end_waits = end_waits
        self._fleet = fleet
        self._recorder = recorder
        self._counting = asyncio.Lock()
        self._next_count: asyncio.Task[dict[str, dict[str, int]]] | None = None  # that has not begun

    async def get(self, task_id: str, *, wait: float = 0) -> TaskInfo | None:
        """Return everything about one task, with users' JSON values as `Raw`; None if no task has this id.

        With `wait`, return once the task has ended, or after so many seconds (60 at most).
        """
        if wait > 0:
            return await self._end_waits.get(task_id, min(wait, MAX_WAIT))
        return (await self._readers.tasks([task_id])).get(task_id)

    async def ended(self, ids: Sequence[str], *, wait: float = 0) -> Ended:
        """Return those of these tasks that have ended, once one has, or after `wait` seconds (60 at most).

        Users' JSON values are `Raw`. Of many large tasks, some are left to the next call.
        """
        over = await self._end_waits.ended_of(ids, min(wait, MAX_WAIT))
        tasks: list[TaskInfo] = []
        unknown: list[str] = []
        for start in range(0, len(over), _ENDED_TOGETHER):
            part = over[start : start + _ENDED_TOGETHER]
            infos = await self._readers.tasks(part)
            unknown += [task_id for task_id in part if task_id not in infos]
            tasks += [infos[name] for name in part if name in infos and infos[name].status.ended]
            if (
                sum(len(bytes(it)) for task in tasks for it in (task.payload, task.progress, task.result))
                > _ENDED_BYTES
            ):
                break
        return Ended(tasks=tasks, unknown=unknown)

    async def list_tasks(
        self,
        *,
        cursor: str | None = None,
        limit: int = 100,
        patience: float | None = None,
        kinds: KindPatterns | None = None,
        **wanted: Any,
    ) -> Page:
        """Return the tasks of these kinds (None: of all) that match: fields of `Filter` and of `TaskSelection`.

        After `patience` seconds, return those that were found by then, and where the search goes on.
        """
        after = None if cursor is None else self._marks.open(cursor)
        listing = Listing(*split(wanted), cursor=after, limit=limit, kinds=kinds)
        until = None if patience is None else asyncio.get_running_loop().time() + patience
        gained = self._clock.gained

        def look(view: View) -> Page | None:
            return listing.look(view, now=self._clock.peek(), gained=gained)

        page = await self._readers.read(look)
        while page is None:
            if until is not None and asyncio.get_running_loop().time() >= until:
                page = listing.so_far
                break
            page = await self._readers.read(look, is_next=True)
        return self._marks.sealed(page)

    async def know_chain(self, chain: Chain, kinds: KindPatterns | None = None) -> None:
        """Add the latest tasks of a chain, of these kinds (None: of all), to those that a reader of events knows."""
        cursor: str | None = None
        while len(chain.ids) < _CHAIN:
            page = await self.list_tasks(root=chain.root, newest=True, kinds=kinds, cursor=cursor, limit=1000)
            chain.ids.update(task.id for task in page.tasks)
            if (cursor := page.cursor) is None:
                break

    async def kinds_of(self, ids: Collection[str], *, is_vital: bool = False) -> dict[str, str]:
        """Return the kinds of these tasks; unknown ids are left out."""
        return await self._readers.read(
            lambda view: {row.id: row.kind for row in view.triggers(ids).values()}, is_vital=is_vital
        )

    async def stats(self) -> Stats:
        """Return the counts of all kinds, and what is unmet of each."""
        counts = await self.counts()
        kinds = await self._readers.run(lambda: sorted(waiting(counts)), is_next=True)
        return Stats(kinds=counts, unmet=await self.unmet(kinds))

    async def counts(self) -> dict[str, dict[str, int]]:
        """Count the tasks of all kinds, which may be a million: who asks while that is done shares the next count."""
        if self._next_count is None:
            self._next_count = asyncio.create_task(self._count_next())
            # All who asked may have gone, and then nobody else looks at its error.
            self._next_count.add_done_callback(lambda count: count.cancelled() or count.exception())
        return await asyncio.shield(self._next_count)

    async def _count_next(self) -> dict[str, dict[str, int]]:
        async with self._counting:
            self._next_count = None
            return await self._count()

    async def _count(self) -> dict[str, dict[str, int]]:
        return await self._readers.run(self._store.counts)

    async def unmet(self, kinds: Sequence[str]) -> dict[str, list[dict[str, str]]]:
        """Return what due tasks of these kinds require and no known worker has, some kinds at a time."""
        roster, found = await self._fleet.claimants(), dict[str, list[dict[str, str]]]()
        for start in range(0, len(kinds), _UNMET):
            some = kinds[start : start + _UNMET]

            def look(view: View, some: Sequence[str] = some) -> dict[str, list[dict[str, str]]]:
                return unmet(view, some, roster.claims(), now=self._clock.peek())

            found |= await self._readers.read(look, is_next=start > 0)
        return found

    async def backlogs(self, waiting: Mapping[str, int]) -> dict[str, backlog.Backlog]:
        """Return what waits of each of these kinds, given how many tasks of each wait."""
        return await self._readers.read(lambda view: backlog.backlogs(view, waiting, now=self._clock.peek()))

    async def history(self, *, minutes: int = 60, kind: str | None = None) -> dict[str, dict[int, Counts]]:
        """Return what happened in each of the last minutes, by kind; that under way is only of this node."""
        now = int(self._clock.peek() // 60)
        found = await self._readers.read(lambda view: read_minutes(view, since=now - min(minutes, KEPT) + 1, kind=kind))
        for name, counts in self._recorder.current().items():
            if kind in (None, name):
                of_kind = found.setdefault(name, {})
                of_kind[now] = of_kind.get(now, Counts()) + counts
        return found

    def space(self) -> Space | None:
        """Return the space that the store takes, if it has a file."""
        return self._store.space()

    async def kinds(self) -> list[KindInfo]:
        """Return the kinds that have settings, sorted by name."""
        return await self._readers.read(kinds.listed)

    async def gates(self) -> list[GateInfo]:
        """Return the closed gates: those of kinds, then those of collections, sorted by name."""
        return await self._readers.read(lambda view: gates.listed(view, now=self._clock.peek()))

    @property
    def gates_here(self) -> list[GateInfo]:
        """The closed gates, as of the last transaction of this node."""
        now = self._clock.peek()
        return [gate_info(row) for row in self._commit.kinds.gates.rows if row.holds(now)]

    @property
    def draining_here(self) -> int:
        """The number of workers that drain, as of the last transaction of this node."""
        return len(self._commit.kinds.drains)

    async def periodics(self, *, after: str = "", limit: int = 100) -> list[PeriodicInfo]:
        """Return the first periodic tasks whose names come after `after`, each with its next firing."""
        return await self._readers.read(lambda view: periodic.listed(view, after=after, limit=limit))

    async def periodic(self, name: str, *, count: int = 5) -> PeriodicInfo | None:
        """Return a periodic task with its next `count` firings; None: there is none of this name."""
        row = await self._readers.read(lambda view: view.periodic(name))
        return None if row is None else periodic.info(row, count=count)

    async def list_tokens(self, by: Access = LOCAL) -> list[TokenInfo]:
        """Return the access tokens that a caller may see, the oldest first."""
        return await self._readers.read(lambda view: tokens.listed(view, by))

    async def get_token(self, token: str, by: Access = LOCAL) -> TokenInfo | None:
        """Return an access token by its id or name."""
        return await self._readers.read(lambda view: tokens.one(view, token, by=by, now=self._clock.peek()))

    async def session(self, digest: bytes) -> SessionRow | None:
        """Return a session of the console whose time is not over, by the digest of its cookie."""
        row = await self._readers.read(lambda view: view.session(digest))
        return row if row is not None and self._clock.peek() < row.until else None

    async def audit(self, *, cursor: str | None = None, limit: int = 100) -> AuditPage:
        """Return a page of the audit log, the latest entry first."""
        return await self._readers.read(lambda view: audit.page(view, cursor=cursor, limit=limit))
