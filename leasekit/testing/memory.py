"""`memory://`: the server's rules over its store in memory, in this process, for tests.

Rule 1: a request is one transaction in the thread that makes it, under one lock; any thread and any loop may call.
Rule 2: time is that of the clock, but never steps back. Leases are expired by the next request, which also removes
        tasks after their retention; a waiting claim looks again when the next task is due or the next lease ends.
"""

import asyncio
import itertools
import math
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from random import Random, SystemRandom
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from leasekit.errors import ConfigError
from leasekit.periodic import PeriodicInfo
from leasekit.server.embedded import DirectBackend, plain, plain_info
from leasekit.server.roles import (
    bulk,
    chains,
    claims,
    consumer,
    drains,
    firing,
    following,
    frontend,
    gates,
    hsc,
    kinds,
    periodic,
    redrive,
    rescheduling,
    retention,
    start_deadlines,
    task_infos,
)
from leasekit.server.roles.audit import together
from leasekit.server.roles.cancel_hints import CancelHints
from leasekit.server.roles.directory import Directory, only_node
from leasekit.server.roles.gates import GateChange
from leasekit.server.roles.listing import Listing
from leasekit.server.roles.periodic import Change as PeriodicChange
from leasekit.server.roles.selection import seq_of_cursor, split
from leasekit.server.roles.unmet import unmet, waiting
from leasekit.server.store import RETENTION, PeriodicRow, Tx, View
from leasekit.server.store.kind_defaults import KindDefaults
from leasekit.server.store.memory import MemoryStore
from leasekit.server.store.routes import hold_back, labels_of
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import (
    Beat,
    ChainCancelled,
    Claimed,
    GateInfo,
    KindInfo,
    KindSettings,
    Matched,
    NewTask,
    NodeInfo,
    Page,
    Purged,
    Redriven,
    Rescheduled,
    Scheduled,
    Settlement,
    Stats,
    Task,
    TaskInfo,
    Ticket,
    Vacuumed,
    Verdict,
    WorkerInfo,
)
from leasekit.testing._notify import Notifier
from leasekit.testing.clock import FakeClock
from leasekit.wire import (
    MAX_WAIT,
    CancelMatchingRequest,
    ChainRequest,
    PurgeRequest,
    RedriveRequest,
    RescheduleMatchingRequest,
    RescheduleRequest,
    WorkerWindow,
)

__all__ = ["MemoryBackend", "MemoryService", "connect", "shared"]

_STARTED_AT = time.time() - time.monotonic()

_NO_LABELS: Mapping[str, str] = {}
_ALL = sys.maxsize - 1  # tasks: nothing is left for a later request

Wait = Callable[[asyncio.Event, float], Awaitable[None]]


def _unix_now() -> float:
    """Return Unix time without steps: the wall clock is read once, at import."""
    return _STARTED_AT + time.monotonic()


def connect(url: str, *, worker: str) -> "MemoryBackend":
    """Open `memory://`, a service for this connection alone, or `memory://name`, which this process shares by name.

    Raises `ConfigError` if the URL has more than a name.
    """
    parts = urlsplit(url)
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError("a memory URL is memory:// or memory://name: nothing may follow the name")
    name = parts.netloc
    # setdefault is atomic: two threads that open one name at once get one service.
    return MemoryBackend(_shared.setdefault(name, MemoryService()) if name else MemoryService(), worker=worker)


@contextmanager
def shared(service: "MemoryService") -> Generator[str]:
    """Yield a URL, `memory://…`, under which this process shares a service for as long as the block lasts."""
    name = uuid4().hex
    _shared[name] = service
    try:
        yield f"memory://{name}"
    finally:
        del _shared[name]


@dataclass(slots=True)
class _Poll:
    """A claim that is under way: when it arrived, and how many calls wait for its answer."""

    arrived_at: float
    callers: int = 0


class MemoryService:
    """A lease service whose time is `now()`, in seconds and taken for Unix time.

    A waiting claim calls `wait(wake, until)` to sleep until `wake` is set or `now()` reaches `until`; the default for a
    `FakeClock` is the method of that clock. `random` makes tokens, ids and jitter: a seeded one repeats a history.
    """

    def __init__(
        self, *, now: Callable[[], float] = _unix_now, wait: Wait | None = None, random: Random | None = None
    ) -> None:
        self._clock = now
        self._wait = wait or (now.wait if isinstance(now, FakeClock) else self._wait_in_real_time)
        self._random = random or SystemRandom()
        self._store = MemoryStore()
        self._lock = threading.Lock()
        self._latest = -math.inf
        self._bell = Notifier()  # rung when a task may have become ready, or something is due earlier
        self._polls: dict[tuple[str, str], _Poll] = {}
        self._numbers = itertools.count()
        self._directory = Directory()
        self._id, self._started_at = uuid4().hex, math.inf  # at the first request
        self._cancel_hints = CancelHints()
        self._kinds = KindDefaults()
        # The parts of an `Engine`, in whose place this one is used.
        self.queries = self.operations = self.fleet = self.clock = self

    def peek(self) -> float:
        """Return the time."""
        return self._clock()

    async def schedule(self, tasks: Sequence[NewTask]) -> list[Scheduled]:
        """Accept tasks: one answer for each, in order."""
        with self._turn() as turn:
            answers = frontend.schedule(turn, tasks)
        self._bell.ring()
        return answers

    async def cancel(self, ids: Sequence[str]) -> list[Verdict]:
        """Cancel tasks: one verdict for each, in order."""
        with self._turn() as turn:
            verdicts = together(frontend.cancel(turn, [*map(frontend.Cancel, ids)]))
        return self._cancel_hints.tell(verdicts.answer)

    async def cancel_chain(self, request: ChainRequest) -> ChainCancelled:
        """Cancel the tasks of a chain that have not ended, and those that come later."""
        with self._turn() as turn:
            chains.mark(turn, [request.id])
            part = chains.part(turn.tx, request.id, after=seq_of_cursor(request.cursor))
        cursor = None if part.after is None else str(part.after)
        return ChainCancelled(root=part.root, tasks=await self.cancel(part.ids), cursor=cursor)

    async def cancels(self, *, worker: str, wait: float) -> list[str]:
        """Return the tasks of a worker whose cancel was requested since its last call; wait for the first of them."""
        return await self._cancel_hints.wait(worker, wait)

    async def redrive(self, request: RedriveRequest) -> Redriven:
        """Begin a new life of dead tasks: these, or a page of those that match."""
        with self._turn() as turn:
            search = redrive.search(request)
            plan = redrive.plan(turn.tx, request, None if search is None else search.whole(turn.tx))
            if request.dry_run:
                return redrive.look(turn.tx, plan, now=turn.now)
            answer = redrive.redrive(turn, plan).answer
        self._bell.ring()
        return answer

    async def reschedule(self, task_id: str, wanted: RescheduleRequest, *, by: str | None) -> Rescheduled | None:
        """Give a waiting task another due time or priority; None: unknown. Raises `Refused` if it does not wait."""
        with self._turn() as turn:
            (done,) = rescheduling.reschedule(turn, [rescheduling.Reschedule(task_id, wanted, by)])
        self._bell.ring()
        return rescheduling.told(done.answer)

    async def cancel_matching(self, request: CancelMatchingRequest) -> Matched:
        """Do a step of the cancel of all tasks that match, or of its dry run."""
        with self._turn() as turn:
            act = bulk.begin(turn.tx, request, now=turn.now)
            found = act.search.whole(turn.tx)
            cancelled = [] if act.is_dry else bulk.cancel(turn, [bulk.Change(found.rows)])[0].answer
        return act.answer(found, {verdict.id for verdict in self._cancel_hints.tell(cancelled)})

    async def reschedule_matching(self, request: RescheduleMatchingRequest, *, by: str | None) -> Matched:
        """Do a step of the reschedule of all tasks that match, or of its dry run."""
        with self._turn() as turn:
            act = bulk.begin(turn.tx, request, now=turn.now)
            found = act.search.whole(turn.tx)
            change = bulk.Change(found.rows, request.change, by)
            changed = [] if act.is_dry else bulk.reschedule(turn, [change])[0].answer
        self._bell.ring()
        return act.answer(found, changed)

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
        since: float | None = None,
    ) -> Claimed:
        """Grant up to `limit` tasks of these kinds; wait up to `wait` seconds for the first. Or those of tickets."""
        kinds, of_worker = tuple(dict.fromkeys(kinds)), labels_of(labels)
        with self._bell.listen() as rung, self._asking((worker, claim_id)) as (arrived_at, now):
            self._directory.hear(worker, now)
            self._directory.claims(worker, kinds, labels, since=since)
            number = next(self._numbers)
            request = claims.WaitingClaim(
                *(number, worker, claim_id, kinds, limit, arrived_at), tickets=tickets, labels=of_worker, since=since
            )
            deadline = now + min(wait, MAX_WAIT)
            while True:
                rung.clear()
                with self._turn(of_claim=True) as turn:
                    (answer,) = claims.claim(turn, [request])
                    until = min(deadline, _next_due(turn, kinds, of_worker))
                if answer.claimed is not None:
                    self._bell.ring()  # the granted lease may end before anything that other claims wait for
                    return answer.claimed
                if turn.now >= deadline and not answer.again:
                    return Claimed(tasks=[], waited=turn.now - arrived_at)
                await self._wait(rung, until)

    def steal(self, task_id: str, *, token: str | None = None, thief: str = "thief") -> Task | None:
        """Expire the lease of a task now, grant the task to another worker at once, and return that grant.

        Return None and change nothing if the task is not leased (under `token`). Return None if expiry ends the task.
        """
        with self._turn() as turn:
            row = turn.tx.triggers([task_id]).get(task_id)
            if row is None or row.owner is None or token not in (None, row.token):
                return None
            lapsed = consumer.lapse(turn, [row])
            turn.tx.save(lapsed)
            if lapsed[0].status.ended:  # this was one crash or attempt too many
                return None
            stolen = claims.grant_all(turn, lapsed, thief)
            turn.tx.save(stolen)
            return plain(claims.tasks_of(stolen, turn.tx.contents([row.seq]))[0])

    async def heartbeat(self, worker: str, beats: Sequence[Beat]) -> list[Verdict]:
        """Renew leases: one verdict for each, in order."""
        with self._turn() as turn:
            self._directory.hear(worker, turn.now)
            return hsc.heartbeat(turn, beats)

    async def results(self, worker: str, settlements: Sequence[Settlement]) -> list[Verdict]:
        """End leases: one verdict for each, in order."""
        with self._turn() as turn:
            self._directory.hear(worker, turn.now)
            verdicts = hsc.results(turn, settlements)
        self._bell.ring()
        return verdicts

    def get(self, task_id: str) -> TaskInfo | None:
        """Return everything about one task; None if no task has that id."""
        with self._view() as view:
            info = task_infos.infos(view, [task_id], now=self._latest).get(task_id)
        return None if info is None else plain_info(info)

    async def stats(self) -> Stats:
        """Count the tasks of each kind in each status."""
        with self._view() as view:
            counts, workers = view.counts(), self._directory.roster({}).claims()
            return Stats(kinds=counts, unmet=unmet(view, waiting(counts), workers, now=self._latest))

    def note_window(self, worker: str, window: WorkerWindow) -> None:
        """Note the window of a worker, for the list of workers."""
        self._directory.note_window(worker, window)

    async def workers(self) -> list[WorkerInfo]:
        """List the workers that have called so far."""
        with self._view() as view:
            marks = [row for row in view.drains() if self._directory.start_of(row.worker).at <= row.at]
            found, _ = self._directory.roster(view.holders(), drains=marks).page()
            return found

    async def drain(self, worker: str, *, by: str | None) -> WorkerInfo | None:
        """Have a worker take nothing new; None: none of this name has called."""
        if all(known.name != worker for known in await self.workers()):
            return None
        with self._turn() as turn:
            drains.change(turn, [drains.DrainChange(worker, by)])
        self._bell.ring()
        return next(known for known in await self.workers() if known.name == worker)

    async def undrain(self, worker: str, *, by: str | None) -> None:
        """Take a drain back."""
        with self._turn() as turn:
            drains.change(turn, [drains.DrainChange(worker, by, is_draining=False)])

    async def nodes(self) -> list[NodeInfo]:
        """Return this service, the only node."""
        with self._turn() as turn:
            return only_node(self._id, started_at=self._started_at, now=turn.now)

    async def kinds(self) -> list[KindInfo]:
        """Return the kinds that have settings, sorted by name."""
        with self._view() as view:
            return kinds.listed(view)

    async def set_kind(
        self,
        kind: str,
        settings: KindSettings | None,
        *,
        by: str | None,
        is_declared: bool = False,
        was: KindSettings | None = None,
    ) -> KindInfo | None:
        """Replace the settings of a kind, or remove them (None), for all tasks that are scheduled from now on."""
        kinds.check_kind(kind)
        with self._turn() as turn:
            (done,) = kinds.change(turn, [kinds.KindChange(kind, settings, by, is_declared, was)])
        return done.answer

    async def gates(self) -> list[GateInfo]:
        """Return the closed gates: those of kinds, then those of collections, sorted by name."""
        with self._view() as view:
            return gates.listed(view, now=self._latest)

    async def set_gate(self, change: GateChange) -> GateInfo | None:
        """Close or open a gate."""
        with self._turn() as turn:
            (done,) = gates.change(turn, [change])
        with self._turn() as turn:
            turn.kinds.read(turn.tx)  # for `_keep_gates`
        self._bell.ring()
        return done.answer

    async def periodics(self, *, after: str = "", limit: int = 100) -> list[PeriodicInfo]:
        """Return the first periodic tasks whose names come after `after`, each with its next firing."""
        with self._view() as view:
            return periodic.listed(view, after=after, limit=limit)

    async def periodic(self, name: str, *, count: int = 5) -> PeriodicInfo | None:
        """Return a periodic task with its next `count` firings; None: there is none of this name."""
        with self._view() as view:
            row = view.periodic(name)
        return None if row is None else periodic.info(row, count=count)

    async def change_periodic(self, change: PeriodicChange) -> PeriodicInfo | Scheduled | None:
        """Change a periodic task, or trigger it; None: there is none of this name (any longer)."""
        if isinstance(change, periodic.Put):
            periodic.check(change.name, change.task)
        with self._turn() as turn:
            answer = periodic.change(turn, [change])[0].answer
        self._bell.ring()
        return periodic.info(answer, count=1) if isinstance(answer, PeriodicRow) else answer

    @contextmanager
    def _turn(self, *, of_claim: bool = False) -> Generator[UnitOfWork]:
        """Open a transaction, after all leases that have ended by now are expired in it, and gates are kept.

        Then others are woken for what it made ready. What a claim leaves was ready before, and is kept for others.
        """
        with self._lock:
            now = self._latest = max(self._latest, self._clock())
            self._started_at = min(self._started_at, now)
            self._keep_gates(now)
            with self._store.transaction() as tx:
                turn = self._begin(tx, now)
                following.keep(turn)
                while names := tx.names_due(now=now, limit=firing.STEP):
                    firing.fire(turn, names)
                consumer.reap(turn, limit=sys.maxsize)
                while start_deadlines.tend(turn):
                    pass
                tx.tend_shares(limit=100)
                following.follow(turn, most=_ALL)
                retention.remove_old(turn, keep=RETENTION)
                retention.forget_claims(turn)
                has_due = of_claim and _has_due(turn)
                yield turn
                following.follow(turn, most=_ALL)
        if has_due or (not of_claim and _has_due(turn)):
            self._bell.ring()

    def _keep_gates(self, now: float) -> None:
        """Do what gates have to do by now, in a transaction of its own: a later one knows what this one commits."""
        if self._kinds.gates.rows:
            with self._store.transaction() as tx:
                turn = self._begin(tx, now)
                gates.keep(turn, most=sys.maxsize)
                following.follow(turn, most=_ALL)

    def _begin(self, tx: Tx, now: float) -> UnitOfWork:
        return UnitOfWork(tx, now=now, instant=now, random=self._random, kinds=self._kinds)

    @contextmanager
    def _view(self) -> Generator[View]:
        with self._turn():
            pass
        with self._store.view() as view:
            yield view

    @contextmanager
    def _asking(self, key: tuple[str, str]) -> Generator[tuple[float, float]]:
        """Yield when the first of the calls under way with this claim arrived, and when this call did."""
        with self._turn() as turn:
            poll = self._polls.setdefault(key, _Poll(turn.now))
            poll.callers += 1
        try:
            yield poll.arrived_at, turn.now
        finally:
            with self._lock:
                poll.callers -= 1
                if not poll.callers:
                    del self._polls[key]

    async def _wait_in_real_time(self, wake: asyncio.Event, until: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(until - self._clock()):
                await wake.wait()

    async def purge(self, request: PurgeRequest) -> Purged:
        """Remove a step's ended tasks that match, or count all of them."""
        with self._turn() as turn:
            until = turn.now - request.older_than
            if (search := retention.search(request)) is not None:
                chosen = retention.chosen(search.whole(turn.tx), until=until)
                if request.dry_run:
                    return Purged(kinds=chosen.kinds, cursor=chosen.cursor)
            elif request.dry_run:
                return Purged(kinds=turn.tx.count_ended(retention.wanted(request), until=until))
            else:
                chosen = retention.choose(turn.tx, retention.wanted(request), until=until, cursor=request.cursor)
            (purged,) = retention.remove(turn, [chosen.removal])
        return Purged(kinds=purged.kinds, cursor=chosen.cursor)

    async def vacuum(self) -> Vacuumed:
        """Raise `Refused`: there is no file."""
        with self._view() as view:
            return Vacuumed(freed=0, left=view.free_space())

    async def list_tasks(self, *, cursor: str | None = None, limit: int, **wanted: Any) -> Page:
        """Return a page of the tasks that match all given filters, in the order that the filters ask for."""
        listing, page = Listing(*split(wanted), cursor=cursor, limit=limit), None
        with self._view() as view:
            while page is None:
                page = listing.look(view, now=self._latest)
        return page


def _has_due(turn: UnitOfWork) -> bool:
    return any(due.number for due in turn.readied().values())


def _next_due(turn: UnitOfWork, kinds: Sequence[str], labels: frozenset[str]) -> float:
    """Return when the next task of these kinds is due and may start, a gate opens, or the next lease ends."""
    full = {kind: due.next_at for kind, due in turn.readied().items() if due.is_full}
    lanes = [full.get(lane.name) or lane.due_at + hold_back(lane.name, labels) for lane in turn.lanes(kinds, [labels])]
    opens = [gate.until for gate in turn.gates.rows if gate.until is not None]
    fires = [at for at in [turn.tx.next_firing()] if at is not None]
    ends = [row.next_trigger_at or math.inf for row in turn.tx.expired(now=math.inf, limit=1)]
    return min([*lanes, *opens, *fires, *ends], default=math.inf)


class MemoryBackend(DirectBackend):
    """A worker's connection to a `MemoryService`: a `Backend` and a `Scheduler`."""

    def __init__(self, service: MemoryService, *, worker: str) -> None:
        super().__init__(worker=worker)
        self.service = service

    async def _engine(self) -> Any:
        return self.service

    async def get(self, task_id: str) -> TaskInfo | None:
        return self.service.get(task_id)

    def steal(self, task_id: str, token: str) -> None:
        """Expire this lease and grant the task to another worker, by `MemoryService.steal`."""
        self.service.steal(task_id, token=token)

    async def aclose(self) -> None:
        """Do nothing: there is no connection to close."""


_shared: dict[str, MemoryService] = {}
