"""The server without HTTP: a store, its writer, its consumer, and the claims that wait, in one process.

The rules are in the roles: `frontend`, `claims`, `hsc`, `consumer`. This module connects the roles to the group commit
and the long polls, runs the consumer, and opens and closes all of them.
"""

import asyncio
import logging
import random as _random
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from msgspec import Raw

from leasekit._lifecycle.states import WAITING
from leasekit.errors import BackendError, Refused, Throttled, Unavailable
from leasekit.periodic import PeriodicInfo
from leasekit.queues import TaskQueues
from leasekit.server.access import LOCAL, Access, KindPatterns
from leasekit.server.clock import Clock, DatabaseClock, StoreClock, boottime
from leasekit.server.commit import Done, GroupCommit, RequestClass
from leasekit.server.daemon_threads import DaemonThreads
from leasekit.server.end_waits import EndWaits
from leasekit.server.enqueuer import ENQUEUEING, Enqueuer
from leasekit.server.history import KEPT, Counts, Recorder
from leasekit.server.history import read as read_minutes
from leasekit.server.history import write as write_minutes
from leasekit.server.http.events import Chain, Feed
from leasekit.server.inbox import SET_ASIDE, TAKE_IN, Inbox
from leasekit.server.kind_leases import KindLeases
from leasekit.server.long_poll import LongPolls
from leasekit.server.neighbours import Neighbours
from leasekit.server.node_roles import ALL_ROLES, Role
from leasekit.server.roles import (
    audit,
    backlog,
    bulk,
    chains,
    claims,
    consumer,
    firing,
    following,
    frontend,
    gates,
    hsc,
    kinds,
    periodic,
    redrive,
    rescheduling,
    tokens,
)
from leasekit.server.roles.audit import Note
from leasekit.server.roles.cancel_hints import CancelHints
from leasekit.server.roles.directory import Directory, only_node
from leasekit.server.roles.gates import GateChange
from leasekit.server.roles.periodic import Change as PeriodicChange
from leasekit.server.roles.selection import Found, Named, Search, seq_of_cursor, split
from leasekit.server.roles.unmet import unmet
from leasekit.server.store import MinuteRow, PeriodicRow, SharedStore, Space, Store, View
from leasekit.server.store.routes import is_route, labels_of, route_of
from leasekit.server.sweeper import SWEEPING, Sweeper
from leasekit.server.token_book import TokenBook
from leasekit.server.unit_of_work import NewlyDue, TaskEvent, UnitOfWork
from leasekit.task import (
    Beat,
    ChainCancelled,
    Claimed,
    Ended,
    GateInfo,
    KindInfo,
    KindSettings,
    Matched,
    NewTask,
    NodeInfo,
    Page,
    Redriven,
    Rescheduled,
    Scheduled,
    Settlement,
    Stats,
    Status,
    TaskInfo,
    Ticket,
    Verdict,
    WorkerInfo,
)
from leasekit.tokens import AuditPage, TokenInfo
from leasekit.wire import (
    MAX_WAIT,
    CancelMatchingRequest,
    ChainRequest,
    RedriveRequest,
    RescheduleMatchingRequest,
    RescheduleRequest,
    WorkerWindow,
)

logger = logging.getLogger("leasekit.server")

_T = TypeVar("_T")
_V = TypeVar("_V")
_Time = Callable[[], float]

_NO_LABELS: Mapping[str, str] = {}
_NOT_ENQUEUED = (
    "a task with `requires` is claimed from the server itself, and this one hands tasks out by queues (--queue): leave "
    "`requires` out, or schedule the task at a server without queues, over another store"
)

_PERIOD = 1.0  # seconds between two ticks of the consumer
_STALLED = 5  # periods between two readings of the clock that count as a gap: this process has not run
_REAP_MOST = 1000  # leases that are expired in one tick, at most
_KEEP_MOST = 20_000  # tasks that gates put back or end in one tick, at most
_ENDED_TOGETHER = 20  # ended tasks that one read brings
_ENDED_BYTES = 4 * 1024 * 1024  # of values of ended tasks in one answer, about
_CHAIN = 10_000  # tasks of a chain whose events a reader follows
_READERS = 4
_READS = 200  # reads that may wait
_TOKENS = 0.5  # periods between two looks at the access tokens of a shared store
_LOOK = 2.0  # seconds that a look at the other nodes may take
_PATIENCE = 5.0  # seconds that the writer may take to answer a readiness probe
_SEEN_FOR = 600.0  # seconds for which a worker without leases is listed


class Engine:
    """A task server in this process; an async context manager.

    `clock` is the wall clock in seconds since the epoch, by which tasks are due; also in place of a shared database's.
    Leases end by `boot`, a clock without steps; without `boot`, `clock` serves for both. `boot_id` names the start of
    `boot`, and changes when `boot` starts anew. `period` is the seconds between two ticks of the consumer; `writer` is
    the class that applies requests; `address` says where a server serves this engine. `queues` get a message for each
    task that is due. Without the role of the consumer, an engine leaves the consumer's work to others of its store.

    Methods raise `Throttled` if too many requests wait already, and `Unavailable` if the store fails: whether the
    request was applied is then unknown, and it may be repeated.
    """

    def __init__(
        self,
        store: Store,
        *,
        clock: _Time | None = None,
        random: _random.Random | None = None,
        boot: _Time | None = None,
        boot_id: str = "by hand",
        period: float | None = None,
        writer: type[GroupCommit] = GroupCommit,
        address: str | None = None,
        queues: TaskQueues | None = None,
        roles: frozenset[Role] = ALL_ROLES,
    ) -> None:
        self.roles = roles
        self._period = _PERIOD if period is None else period
        stall = None if period is None else _STALLED * period
        self._clock = _clock_of(store, clock, boot, boot_id=boot_id, stall=stall)
        self._random = random or _random.SystemRandom()
        self._store = store
        self._long_polls = LongPolls(self._attempt, self._clock)
        self._end_waits = EndWaits(self._over_of, self._infos, tell=lambda ids: self._tell_others(awaited=ids))
        self.feed = Feed(pass_on=lambda events: self._tell_others(events=events))
        self.check_room: Callable[[], None] = lambda: None
        """Called before tasks are granted; raises `Throttled` if there is no room for an answer."""
        self.cramped: str | None = None
        """Why no new tasks are accepted; None: they are."""
        self.commit = writer(
            store,
            _SURVIVAL,
            clock=self._clock,
            random=self._random,
            on_ready=self._on_ready,
            on_gap=consumer.restart_leases,
            on_end=following.follow,
            on_over=self._on_over,
            feed=self.feed,
        )
        self.tokens = TokenBook(self._clock.peek, self._clock.instant, is_shared=isinstance(store, SharedStore))
        """The access tokens, as far as this node knows."""
        self._readers: DaemonThreads
        self._reads = 0
        self._directory = Directory()
        self._cancel_hints = CancelHints()
        self._address = address
        self._id, self._started_at = uuid.uuid4().hex, 0.0
        self._recorder = Recorder(self.commit.tally, self._id)
        self._inbox = Inbox(self.commit)
        self.neighbours = self._neighbours_at(store) if isinstance(store, SharedStore) else None
        self.sweeper = Sweeper(self._read, self._found, self._commit, self._clock, keep=store.retention)
        self.purge, self.vacuum = self.sweeper.purge, self.sweeper.vacuum
        self.enqueuer = None if queues is None else self._enqueuer_to(queues)
        """What moves due tasks to queues; None: there are no queues."""
        self._enqueueing: asyncio.Task[None] | None = None
        self._consumer: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._new_tokens = asyncio.Event()

    def _neighbours_at(self, store: SharedStore) -> Neighbours:
        return Neighbours(
            *(store, self._clock),
            polls=self._long_polls,
            waits=self._end_waits,
            cancels=self._cancel_hints,
            feed=self.feed,
            directory=self._directory,
            ring=self._ring,
            ring_inbox=self._inbox.ring,
            run=self._in_reader,
            on_new_tokens=self._hear_of_tokens,
        )

    def _enqueuer_to(self, queues: TaskQueues) -> Enqueuer:
        is_shared = isinstance(self._store, SharedStore)
        leases = KindLeases(self, consumer_id=self._id[:12], holders=self._holders) if is_shared else None
        return Enqueuer(queues, self._commit, kinds=self._waiting_kinds, random=self._random, leases=leases)

    async def _holders(self) -> Collection[str]:
        return (await self._read(lambda view: view.holders())).keys()

    def _hear_of_tokens(self) -> None:
        if self._following is not None:
            self._new_tokens.set()

    def _ring(self, kinds: Collection[str]) -> None:
        if self.enqueuer is not None:
            self.enqueuer.ring(kinds)

    async def _waiting_kinds(self) -> list[str]:
        counts = (await self.stats()).kinds
        return [kind for kind, statuses in counts.items() if not WAITING.isdisjoint(map(Status, statuses))]

    async def __aenter__(self) -> "Engine":
        await self.commit.start()
        if self.neighbours is not None:
            self.neighbours.introduce(address=self._address)
        self._started_at = self._clock.peek()
        try:
            await self.tick()
            if self.neighbours is not None:
                self.neighbours.start()  # fails if the system has no thread to give
        except BaseException:
            await self.commit.stop()
            raise
        self._readers = DaemonThreads(_READERS, name="leasekit-reader")
        self._consumer = asyncio.create_task(self._consume(), name="leasekit-consumer")
        await self._begin_tokens()
        if Role.CONSUMER in self.roles:
            self._sweeping = asyncio.create_task(self.sweeper.run(), name="leasekit-sweeper")
        if self.enqueuer is not None:
            self._enqueueing = asyncio.create_task(self.enqueuer.run(self._period), name="leasekit-enqueuer")
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in (self._enqueueing, self._consumer, self._sweeping, self._following):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        with suppress(BackendError):
            await self._write_minutes(self._recorder.rest())
        if self.neighbours is not None:
            await self.neighbours.stop()
        await self._inbox.stop()
        self._consumer = self._sweeping = self._enqueueing = self._following = None
        self._long_polls.close()
        await self._end_waits.close()
        self._cancel_hints.end()
        self.feed.close()
        self._readers.shutdown()
        await self.commit.stop()

    async def schedule(self, tasks: Sequence[NewTask]) -> list[Scheduled]:
        if not tasks:
            return []
        if self.cramped is not None:
            raise Unavailable(self.cramped)
        if self.enqueuer is not None and any(task.requires for task in tasks):
            raise Refused(_NOT_ENQUEUED)
        with self.commit.together():  # one commit makes a task durable and grants it to a waiting claim
            due = Counter(lane_of(task) for task in tasks if task.at is None and not (task.delay or task.after))
            self._long_polls.expect(self.commit.kinds.gates.passing(due, self._clock.peek()))
            scheduled = self.commit.begin(_SCHEDULE, tasks, size=sum(map(_work_of_task, tasks)))
        answer: list[Scheduled] = await scheduled
        return answer

    async def cancel(self, ids: Sequence[str], *, note: Note | None = None) -> list[Verdict]:
        cancelled = await self._write(_CANCEL, ids, note=note)
        self._tell_others(cancelled=cancelled)
        return self._cancel_hints.tell(cancelled)

    async def cancel_chain(self, request: ChainRequest, *, note: Note | None = None) -> ChainCancelled:
        """Cancel the next tasks of a chain that have not ended; the first step keeps the chain from growing."""
        if request.cursor is None:
            await self.commit.ask(_CANCEL_CHAIN, request.id, size=1)
        after = seq_of_cursor(request.cursor)
        part = await self._read(lambda view: chains.part(view, request.id, after=after))
        cursor = None if part.after is None else str(part.after)
        return ChainCancelled(root=part.root, tasks=await self.cancel(part.ids, note=note), cursor=cursor)

    async def cancels(self, *, worker: str, wait: float) -> list[str]:
        """Return the tasks of a worker whose cancel was requested since its last call; wait for the first of them."""
        self._hear_of(worker)
        return await self._cancel_hints.wait(worker, wait)

    async def redrive(
        self, request: RedriveRequest, *, kinds: KindPatterns | None = None, note: Note | None = None
    ) -> Redriven:
        """Begin a new life of dead tasks: these, or a page of those that match. Refused while the disk is full.

        Filters select tasks of these `kinds` only (None: of all).
        """
        if self.cramped is not None and not request.dry_run:
            raise Unavailable(self.cramped)
        search = redrive.search(request, kinds)
        found = None if search is None else await self._found(search)
        plan = await self._read(lambda view: redrive.plan(view, request, found))
        if request.dry_run:
            return await self._read(lambda view: redrive.look(view, plan, now=self._clock.peek()))
        answer: Redriven = await self.commit.ask(_REDRIVE, plan, size=len(plan.ids), note=note)
        return answer

    async def reschedule(
        self, task_id: str, wanted: RescheduleRequest, *, by: str | None, note: Note | None = None
    ) -> Rescheduled | None:
        """Give a waiting task another due time or priority; None: unknown. Raises `Refused` if it does not wait."""
        answer = await self.commit.ask(_RESCHEDULE, rescheduling.Reschedule(task_id, wanted, by), size=1, note=note)
        return rescheduling.told(answer)

    async def cancel_matching(
        self, request: CancelMatchingRequest, *, kinds: KindPatterns | None = None, note: Note | None = None
    ) -> Matched:
        """Do a step of the cancel of all tasks of these kinds (None: of all) that match, or of its dry run."""
        act, found = await self._matching(request, kinds)
        if act.is_dry:
            return act.answer(found, ())
        cancelled = await self.commit.ask(_CANCEL_MATCHING, bulk.Change(found.rows), size=len(found.rows), note=note)
        self._tell_others(cancelled=cancelled)
        verdicts = self._cancel_hints.tell(cancelled)
        return act.answer(found, {verdict.id for verdict in verdicts})

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
            return act.answer(found, ())
        change = bulk.Change(found.rows, request.change, by)
        return act.answer(found, await self.commit.ask(_RESCHEDULE_MATCHING, change, size=len(found.rows), note=note))

    async def _matching(self, request: CancelMatchingRequest, kinds: KindPatterns | None) -> tuple[bulk.Act, Found]:
        act = await self._read(lambda view: bulk.begin(view, request, kinds, now=self._clock.peek()))
        return act, await self._found(act.search)

    async def get(self, task_id: str, *, wait: float = 0) -> TaskInfo | None:
        """Return everything about one task, with users' JSON values as `Raw`; None if no task has this id.

        With `wait`, return once the task has ended, or after so many seconds (60 at most).
        """
        if wait > 0:
            return await self._end_waits.get(task_id, min(wait, MAX_WAIT))
        return (await self._infos([task_id])).get(task_id)

    async def ended(self, ids: Sequence[str], *, wait: float = 0) -> Ended:
        """Return those of these tasks that have ended, once one has, or after `wait` seconds (60 at most).

        Users' JSON values are `Raw`. Of many large tasks, some are left to the next call.
        """
        over = await self._end_waits.ended_of(ids, min(wait, MAX_WAIT))
        tasks: list[TaskInfo] = []
        unknown: list[str] = []
        for start in range(0, len(over), _ENDED_TOGETHER):
            part = over[start : start + _ENDED_TOGETHER]
            infos = await self._infos(part)
            unknown += [task_id for task_id in part if task_id not in infos]
            tasks += [infos[name] for name in part if name in infos and infos[name].status.ended]
            if (
                sum(len(bytes(it)) for task in tasks for it in (task.payload, task.progress, task.result))
                > _ENDED_BYTES
            ):
                break
        return Ended(tasks=tasks, unknown=unknown)

    async def know_chain(self, chain: Chain) -> None:
        """Add the latest tasks of a chain to those that a reader of events knows."""
        cursor: str | None = None
        while len(chain.ids) < _CHAIN:
            page = await self.list_tasks(root=chain.root, newest=True, cursor=cursor, limit=1000)
            chain.ids.update(task.id for task in page.tasks)
            if (cursor := page.cursor) is None:
                break

    async def claim(
        self,
        *,
        worker: str,
        kinds: Sequence[str],
        limit: int,
        wait: float,
        claim_id: str,
        tickets: Sequence[Ticket] = (),
        labels: Mapping[str, str] = _NO_LABELS,
    ) -> Claimed:
        """Claim up to `limit` tasks; wait up to `wait` seconds (60 at most) for the first. Users' values are `Raw`.

        With tickets, only their tasks are claimed, and the claim does not wait. `labels` are those of the worker.
        """
        self._hear_of(worker)
        self._directory.claims(worker, kinds, labels)
        return await self._long_polls.claim(
            worker=worker,
            claim_id=claim_id,
            kinds=kinds,
            limit=limit,
            wait=0.0 if tickets else min(wait, MAX_WAIT),
            tickets=tickets,
            labels=labels_of(labels),
        )

    def note_window(self, worker: str, window: WorkerWindow | None) -> None:
        """Note the window of a worker, if its request tells of one, for the list of workers."""
        if window is not None:
            self._directory.note_window(worker, window)

    def end_waits(self) -> None:
        """Answer what waits now, and later requests at once, which are granted nothing: the server is about to stop."""
        self._long_polls.end()
        self._end_waits.end()
        self._cancel_hints.end()

    async def heartbeat(self, worker: str, beats: Sequence[Beat]) -> list[Verdict]:
        """Renew leases: `renewed`, `gone` or `throttled` for each, in order.

        If only some of them fit into the queue, the first ones do: a keeper sends the most urgent beats first.
        """
        self._hear_of(worker)
        fitting = max(1, int(min(self.commit.room(_HEARTBEAT), len(beats))))  # no room: refused as a whole
        verdicts = await self._write(_HEARTBEAT, beats[:fitting])
        retry_after = self.commit.later()
        late = beats[fitting:]
        return verdicts + [Verdict(id=beat.id, verdict="throttled", retry_after=retry_after) for beat in late]

    async def results(self, worker: str, settlements: Sequence[Settlement]) -> list[Verdict]:
        """End runs: `settled` or `gone` for each, in order.

        While no new tasks are accepted, a settlement with successors is `failed`: its lease goes on, and the settlement
        may be repeated.
        """
        self._hear_of(worker)
        why = self.cramped
        if why is None or not any(item.then for item in settlements):
            return await self._end(settlements)
        verdicts = iter(await self._end([item for item in settlements if not item.then]))
        return [Verdict(id=i.id, verdict="failed", reason=why) if i.then else next(verdicts) for i in settlements]

    async def stats(self) -> Stats:
        counts = await self._in_reader(self._store.counts)
        workers = self._directory.workers({}, await self._heard_elsewhere())
        found = await self._read(lambda view: unmet(view, counts, workers, now=self._clock.peek()))
        return Stats(kinds=counts, unmet=found)

    async def backlogs(self, waiting: Mapping[str, int]) -> dict[str, backlog.Backlog]:
        """Return what waits of each of these kinds, given how many tasks of each wait."""
        return await self._read(lambda view: backlog.backlogs(view, waiting, now=self._clock.peek()))

    @property
    def store_id(self) -> str:
        """The identity of the store, known once it is open."""
        return self._store.id

    def space(self) -> Space | None:
        """Return the space that the store takes, if it has a file."""
        return self._store.space()

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def since_commit(self) -> float | None:
        """Seconds since the last transaction; None: there was none."""
        at = self.commit.last_at
        return None if at is None else max(0.0, self._clock.instant() - at)

    async def workers(self) -> list[WorkerInfo]:
        """List the workers that hold leases or sent a request in the last ten minutes, to any node that is alive."""
        running = await self._read(lambda view: view.holders())
        return self._directory.workers(running, await self._heard_elsewhere())

    async def _heard_elsewhere(self) -> Iterable[bytes]:
        return [] if self.neighbours is None else await self.neighbours.workers()

    async def kinds(self) -> list[KindInfo]:
        """Return the kinds that have settings, sorted by name."""
        return await self._read(kinds.listed)

    async def set_kind(
        self, kind: str, settings: KindSettings | None, *, by: str | None, note: Note | None = None
    ) -> KindInfo | None:
        """Replace the settings of a kind, or remove them (None), for all tasks that are scheduled from now on."""
        kinds.check_kind(kind)
        info: KindInfo | None = await self.commit.ask(
            _SET_KIND, kinds.KindChange(kind, settings, by), size=1, note=note
        )
        logger.info("%s has %s", by or "a client", kinds.described(kind, settings))
        return info

    async def gates(self) -> list[GateInfo]:
        """Return the closed gates: those of kinds, then those of collections, sorted by name."""
        return await self._read(lambda view: gates.listed(view, now=self._clock.peek()))

    async def set_gate(self, change: GateChange, *, note: Note | None = None) -> GateInfo | None:
        """Close or open a gate, for all claims that are judged from now on."""
        info: GateInfo | None = await self.commit.ask(_SET_GATE, change, size=1, note=note)
        logger.info("%s has %s", change.by or "a client", gates.described(change))
        return info

    async def periodics(self, *, after: str = "", limit: int = 100) -> list[PeriodicInfo]:
        """Return the first periodic tasks whose names come after `after`, each with its next firing."""
        return await self._read(lambda view: periodic.listed(view, after=after, limit=limit))

    async def periodic(self, name: str, *, count: int = 5) -> PeriodicInfo | None:
        """Return a periodic task with its next `count` firings; None: there is none of this name."""
        row = await self._read(lambda view: view.periodic(name))
        return None if row is None else periodic.info(row, count=count)

    async def change_periodic(
        self, change: PeriodicChange, *, note: Note | None = None
    ) -> PeriodicInfo | Scheduled | None:
        """Change a periodic task, or trigger it; None: there is none of this name (any longer)."""
        if isinstance(change, periodic.Put):
            periodic.check(change.task)
        if self.cramped is not None and not isinstance(change, periodic.Pause | periodic.Remove):
            raise Unavailable(self.cramped)
        answer: PeriodicRow | Scheduled | None = await self.commit.ask(_SET_PERIODIC, change, size=1, note=note)
        is_repeat = isinstance(change, periodic.Put) and change.is_declared  # as a rule: the event tells of changes
        if not is_repeat and (answer is not None or isinstance(change, periodic.Remove)):
            logger.info("%s has %s", change.by or "a client", periodic.described(change))
        return periodic.info(answer, count=1) if isinstance(answer, PeriodicRow) else answer

    async def change_token(self, change: tokens.Change, *, note: Note | None = None) -> TokenInfo | None:
        """Make, revoke or rotate an access token; None: there is none of this id or name that the caller may see."""
        info: TokenInfo | None = await self.commit.ask(_SET_TOKEN, change, size=1, note=note)
        self._tell_others(has_new_tokens=True)
        await self.read_tokens()
        return info

    async def list_tokens(self, by: Access = LOCAL) -> list[TokenInfo]:
        """Return the access tokens that a caller may see, the oldest first."""
        return await self._read(lambda view: tokens.listed(view, by))

    async def get_token(self, token: str, by: Access = LOCAL) -> TokenInfo | None:
        """Return an access token by its id or name."""
        return await self._read(lambda view: tokens.one(view, token, by=by, now=self._clock.peek()))

    async def read_tokens(self) -> None:
        """Read the access tokens: what was changed by then holds from now on."""
        self.tokens.learn(await self._in_reader(lambda: self._look(lambda view: view.tokens())))

    async def audit(self, *, cursor: str | None = None, limit: int = 100) -> AuditPage:
        """Return a page of the audit log, the latest entry first."""
        return await self._read(lambda view: audit.page(view, cursor=cursor, limit=limit))

    async def note(self, note: Note | None) -> None:
        """Write an entry of the audit log for a request that has found nothing to change."""
        if note is not None:
            await self.commit.ask(_NOTE, None, size=1, note=note)

    async def kinds_of(self, ids: Collection[str]) -> dict[str, str]:
        """Return the kinds of these tasks; unknown ids are left out."""
        return await self._read(lambda view: {row.id: row.kind for row in view.triggers(ids).values()})

    @property
    def gates_here(self) -> list[GateInfo]:
        """The closed gates, as of the last transaction of this node."""
        now = self._clock.peek()
        return [frontend.gate_info(row) for row in self.commit.kinds.gates.rows if row.holds(now)]

    async def nodes(self) -> list[NodeInfo]:
        """List the nodes that share the store, also those that have left lately; this process alone, if none do."""
        if self.neighbours is not None:
            return await self.neighbours.nodes()
        return only_node(self._id, address=self._address, started_at=self._started_at, now=self._clock.peek())

    @property
    def claims_waiting(self) -> int:
        return len(self._long_polls)

    @property
    def ends_awaited(self) -> int:
        """The number of requests that wait until a task has ended."""
        return len(self._end_waits)

    @property
    def workers_heard(self) -> int:
        """The number of workers that sent a request to this node in the last ten minutes."""
        return len(self._directory)

    async def ready(self) -> str | None:
        """Return None while requests can be served, else a sentence that says why not.

        The store is written to, because a store that nobody writes to does not show that it takes no writes. Damage
        counts until the store is opened again, because other pages can still be read and written.
        A disk that is almost full is no reason: only new tasks are refused then, and a proxy that sends requests only
        to a server that is ready must not cut off the heartbeats.
        """
        if self._consumer is None:
            return "the engine is not open"
        try:
            async with asyncio.timeout(_PATIENCE):
                await self.commit.ask(_PROBE, None, size=1)
        except TimeoutError:
            return f"the store has not answered for {_PATIENCE:g} s"
        except BackendError as error:
            return str(error)
        tables = None if self.neighbours is None else self.neighbours.company.fault
        return self._store.damage or self.commit.fault or tables

    async def tick(self) -> None:
        """Do what is due in each period: the consumer's work, forget old workers, see other nodes, wake claims."""
        self._check_store_space()
        if Role.CONSUMER in self.roles:
            await self._do_consumers_work()
        else:
            await self.commit.ask(_PROBE, None, size=1)  # a sign for the other nodes
        await self._write_minutes(self._recorder.due(self._clock.peek()))
        await self._look_at_tokens()
        self._forget_workers()
        self._long_polls.look()
        if self.neighbours is not None and self._consumer is not None:
            with suppress(TimeoutError):  # slow reads must not keep leases from their end
                async with asyncio.timeout(_LOOK):
                    await self.neighbours.look()
        self.feed.look()

    async def _do_consumers_work(self) -> None:
        """Expire leases, end or put back what gates hold, tell tasks that wait for others, fire periodic tasks."""
        taken = consumer.REAP_BATCH
        for _ in range(_REAP_MOST // consumer.REAP_BATCH):
            if taken < consumer.REAP_BATCH:
                break
            taken = await self.commit.ask(_REAP, None, size=1)
            if taken:
                logger.info("%d leases have expired", taken)
        await self._keep_gates()
        await self._keep_followers()
        await self._fire()
        if self.commit.kinds.has_inbox and self.cramped is None:
            await self._inbox.take_in()

    async def _keep_gates(self) -> None:
        for _ in range(_KEEP_MOST // gates.STEP if self.commit.kinds.gates.rows else 0):
            if not await self.commit.ask(_KEEP_GATES, None, size=gates.STEP):
                break

    async def _keep_followers(self) -> None:
        """Tell the tasks that wait for others what was left to be told, if this store has such tasks."""
        for _ in range(_KEEP_MOST // following.STEP if self.commit.kinds.has_waits else 0):
            if not await self.commit.ask(_KEEP_FOLLOWERS, None, size=following.STEP):
                break

    async def _fire(self) -> None:
        """Make the firings of periodic tasks that are due; they wait while no new tasks are accepted."""
        fires_at = self.commit.kinds.fires_at
        if fires_at is None or fires_at > self._clock.peek() or self.cramped is not None:
            return
        for _ in range(_KEEP_MOST // firing.STEP):
            if not await self.commit.ask(_FIRE, None, size=firing.STEP):
                break

    async def _write_minutes(self, rows: Sequence[MinuteRow]) -> None:
        if rows:
            await self.commit.ask(_MINUTES, rows, size=len(rows))
            self._recorder.written(rows)

    def _on_ready(self, readied: Mapping[str, NewlyDue]) -> None:
        self._long_polls.ready(readied)
        self._tell_others(due=readied)
        if due := [name for name, newly in readied.items() if newly.number and not is_route(name)]:
            self._ring(due)

    def _on_over(self, ids: Sequence[str]) -> None:
        self._end_waits.over(ids)
        self._tell_others(ended=ids)

    def _tell_others(self, **hints: Any) -> None:
        if self.neighbours is not None:
            self.neighbours.tell(**hints)

    def _check_store_space(self) -> None:
        was, self.cramped = self.cramped, self._store.cramped()
        if self.cramped is not None and was is None:
            logger.error("no new tasks are accepted, existing tasks go on: %s", self.cramped)
        elif was is not None and self.cramped is None:
            logger.warning("there is room again: new tasks are accepted")

    async def _consume(self) -> None:
        fault: str | None = None
        while True:
            await asyncio.sleep(self._period)
            was, fault = fault, None
            try:
                await self.tick()
            except BackendError as error:
                fault = str(error)
                if fault not in (was, self.commit.fault):  # else it has been said: an outage is one line
                    logger.warning("the consumer has failed and tries again: %s", fault)
            except Exception:
                logger.exception("the consumer has failed and tries again")

    async def _begin_tokens(self) -> None:
        await self.read_tokens()
        if self.neighbours is not None:
            self._following = asyncio.create_task(self._follow_tokens(), name="leasekit-tokens")

    async def _follow_tokens(self) -> None:
        """Read the access tokens again and again: other nodes change them too, and their hints may be lost."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_TOKENS * self._period):
                    await self._new_tokens.wait()
            self._new_tokens.clear()
            with suppress(BackendError):  # what is remembered counts for some time; then requests are refused
                await self.read_tokens()

    async def _look_at_tokens(self) -> None:
        """End what waits for tokens that have expired, and note which tokens are in use."""
        self.tokens.look()
        if used := self.tokens.to_note():
            await self.commit.ask(_USE_TOKENS, used, size=1)

    async def _write(
        self, rank: RequestClass, items: Sequence[Any], *, size: int | None = None, note: Note | None = None
    ) -> list[Any]:
        if not (items or note):
            return []
        return list(await self.commit.ask(rank, items, size=len(items) if size is None else size, note=note))

    async def _commit(self, rank: RequestClass, request: Any, size: int, note: Note | None = None) -> Any:
        return await self.commit.ask(rank, request, size=size, note=note)

    async def _end(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        """Have the writer settle these runs, and wait; a batch of releases alone goes before other results."""
        gives_back = all(settlement.outcome == "release" for settlement in settlements)
        size = sum(map(_work_of_settlement, settlements))
        return await self._write(_RELEASE if gives_back else _RESULTS, settlements, size=size)

    def _attempt(self, request: claims.WaitingClaim, done: Done) -> None:
        """Queue a claim for the writer, which tries it once and calls `done`. Raises `Throttled`."""
        if request.limit:
            self.check_room()
        self.commit.submit(_CLAIM, request, size=1 + len(request.kinds) // _KINDS, done=done)

    async def _over_of(self, ids: Collection[str]) -> list[str]:
        return await self._read(lambda view: frontend.over_of(view, ids))

    async def _infos(self, ids: Collection[str]) -> dict[str, TaskInfo]:
        return await self._read(
            lambda view: frontend.infos(view, ids, now=self._clock.peek(), gained=self._clock.gained)
        )

    async def _read(self, look: Callable[[View], _T]) -> _T:
        return await self._in_reader(lambda: self._look(look))

    async def _in_reader(self, read: Callable[[], _T]) -> _T:
        if self._consumer is None:
            raise Unavailable("the engine is not open")
        if self._reads >= _READS:
            raise Throttled("too many reads wait: try again later", retry_after=0.5 + self._random.random())
        self._reads += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._readers, read)
        finally:
            self._reads -= 1

    def _look(self, look: Callable[[View], _T]) -> _T:
        with self._store.view() as view:
            return look(view)

    def _hear_of(self, worker: str) -> None:
        if self._directory.hear(worker, self._clock.peek()):
            self._tell_of(worker, "joined")

    def _tell_of(self, worker: str, event: str) -> None:
        if self.feed.wanted:
            self.feed.publish([TaskEvent(event=event, at=frontend.moment(self._clock.peek()), worker=worker)])

    def _forget_workers(self) -> None:
        for worker in self._directory.forget(before=self._clock.peek() - _SEEN_FOR):
            self._cancel_hints.forget(worker)
            self._tell_of(worker, "left")

    async def _found(self, search: Search | Named) -> Found:
        """Return the page of a search, a step at a time."""
        while (found := await self._read(search.look)) is None:
            pass
        return found

    async def history(self, *, minutes: int = 60, kind: str | None = None) -> dict[str, dict[int, Counts]]:
        """Return what happened in each of the last minutes, by kind; that under way is only of this node."""
        now = int(self._clock.peek() // 60)
        found = await self._read(lambda view: read_minutes(view, since=now - min(minutes, KEPT) + 1, kind=kind))
        for name, counts in self._recorder.current().items():
            if kind in (None, name):
                of_kind = found.setdefault(name, {})
                of_kind[now] = of_kind.get(now, Counts()) + counts
        return found

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
        listing = frontend.Listing(*split(wanted), cursor=cursor, limit=limit, kinds=kinds)
        until = None if patience is None else asyncio.get_running_loop().time() + patience
        gained, page = self._clock.gained, None
        while page is None:
            page = await self._read(lambda view: listing.look(view, now=self._clock.peek(), gained=gained))
            if page is None and until is not None and asyncio.get_running_loop().time() >= until:
                return listing.so_far
        return page


# The size of a request, which the bounds of the group commit count ---------------------------------------------

_BLOCK = 1024  # bytes of a value that cost about as much as a task
_KINDS = 8  # kinds of a claim that cost about as much as a task


def _clock_of(store: Store, wall: _Time | None, boot: _Time | None, *, boot_id: str, stall: float | None) -> Clock:
    if not isinstance(store, SharedStore):
        return StoreClock(wall, boot, boot_id=boot_id, stall=stall)
    store.wall, store.boot = wall, boot or wall or boottime
    return DatabaseClock(store.boot, boot_id=boot_id, stall=stall)


def _work_of_task(task: NewTask) -> int:
    return 1 + _blocks(task.payload)


def _work_of_settlement(settlement: Settlement) -> int:
    return 1 + _blocks(settlement.result) + sum(map(_work_of_task, settlement.then))


def lane_of(task: NewTask) -> str:
    """Return the name of the lanes of a task: its kind, or its route."""
    return route_of(task.kind, task.requires) if task.requires else task.kind


def _blocks(value: Any) -> int:
    return memoryview(value).nbytes // _BLOCK if type(value) is Raw else 0


def _itemwise(
    role: Callable[[UnitOfWork, Sequence[_T]], list[_V]],
) -> Callable[[UnitOfWork, Sequence[Any]], Sequence[Any]]:
    def apply(turn: UnitOfWork, requests: Sequence[Sequence[_T]]) -> list[list[_V]]:
        if len(requests) == 1:
            return [role(turn, requests[0])]
        answers = iter(role(turn, [item for request in requests for item in request]))
        return [[next(answers) for _ in request] for request in requests]

    return apply


def _each(role: Callable[[UnitOfWork], _V]) -> Callable[[UnitOfWork, Sequence[Any]], Sequence[Any]]:
    """Make a role without a batch run once for each request."""
    return lambda turn, requests: [role(turn) for _ in requests]


def _cancelled(turn: UnitOfWork, request: Any, answer: Sequence[tuple[Verdict, str | None]]) -> int:
    return sum(verdict.verdict in ("cancelled", "cancel_requested") for verdict, _ in answer)


def _redriven(turn: UnitOfWork, request: Any, answer: Redriven) -> int:
    return sum(verdict.verdict == "redriven" for verdict in answer.tasks)


def _periodic_changed(turn: UnitOfWork, change: PeriodicChange, answer: Any) -> int | None:
    """Return 1, 0 if there was nothing to change, or None for code that declares what is there already."""
    if answer is None:
        return int(isinstance(change, periodic.Remove))
    return None if isinstance(change, periodic.Put) and change.is_declared and answer.changed_at != turn.now else 1


def _whether(turn: UnitOfWork, request: Any, answer: Any) -> int:
    return int(answer is not None)


_HEARTBEAT = RequestClass("heartbeats", _itemwise(hsc.heartbeat), 100_000)
_RELEASE = RequestClass("releases", _itemwise(hsc.results), 100_000)
_RESULTS = RequestClass("results", _itemwise(hsc.results), 50_000)
_REAP = RequestClass("reapings", _each(consumer.look), 10)
_CANCEL = RequestClass("cancels", _itemwise(frontend.cancel), 10_000, count=_cancelled)
_CLAIM = RequestClass("claims", claims.claim, 20_000, is_last=True)  # last: claims get what the others make ready
_SCHEDULE = RequestClass("schedules", _itemwise(frontend.schedule), 20_000)
_REDRIVE = RequestClass(
    "redrives", lambda turn, plans: [redrive.redrive(turn, plan) for plan in plans], 10_000, count=_redriven
)
_RESCHEDULE = RequestClass("reschedules", rescheduling.reschedule, 10_000)
_CANCEL_MATCHING = RequestClass("bulk cancels", bulk.cancel, 1000, count=_cancelled)
_RESCHEDULE_MATCHING = RequestClass(
    "bulk reschedules", bulk.reschedule, 1000, count=lambda turn, request, answer: len(answer)
)
_SET_KIND = RequestClass("kinds", kinds.change, 1000, is_last=True)  # last: see `KindDefaults`
_SET_GATE = RequestClass("gates", gates.change, 1000, is_last=True)  # last: see `KindDefaults`
_KEEP_GATES = RequestClass(
    "gatekeepings", lambda turn, asked: [gates.keep(turn, most=gates.STEP)] * len(asked), 10_000, is_last=True
)
_CANCEL_CHAIN = RequestClass("chains", chains.mark, 1000, is_last=True)  # last: it waits for the other writers
_KEEP_FOLLOWERS = RequestClass("followings", _each(following.keep), 10_000)
_FIRE = RequestClass("firings", _each(firing.fire), 10_000)
_MINUTES = RequestClass("minutes", write_minutes, 50_000)
_SET_PERIODIC = RequestClass("periodic tasks", periodic.change, 1000, count=_periodic_changed)
_SET_TOKEN = RequestClass("access tokens", tokens.change, 1000, is_last=True, count=_whether)  # last: as above
_USE_TOKENS = RequestClass("uses of access tokens", tokens.use, 1000)
_NOTE = RequestClass("entries of the audit log", _each(lambda turn: None), 1000, count=lambda turn, request, answer: 0)
_PROBE = RequestClass("probes", _each(lambda turn: turn.tx.probe_write()), 100)

_SURVIVAL = (
    _HEARTBEAT,
    _RELEASE,
    _RESULTS,
    _REAP,
    _CANCEL,
    _CLAIM,
    *ENQUEUEING,
    _SCHEDULE,
    _RESCHEDULE,
    _CANCEL_MATCHING,
    _RESCHEDULE_MATCHING,
    _REDRIVE,
    _KEEP_GATES,
    _KEEP_FOLLOWERS,
    _FIRE,
    TAKE_IN,
    SET_ASIDE,
    _SET_PERIODIC,
    _CANCEL_CHAIN,
    _SET_KIND,
    _SET_GATE,
    _SET_TOKEN,
    _USE_TOKENS,
    _NOTE,
    *SWEEPING,
    _MINUTES,
    _PROBE,
)
"""The order in which classes are served under load: heartbeats first."""
