"""The server without HTTP: a store, its writer, its consumer, and the claims that wait, in one process.

The rules are in the roles: `frontend`, `claims`, `hsc`, `consumer`. This module connects the roles to the group commit
and the long polls, runs the consumer, and opens and closes all of them.
"""

import asyncio
import logging
import random as _random
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from msgspec import Raw

from leasekit.errors import BackendError, Throttled, Unavailable
from leasekit.server.clock import Clock, DatabaseClock, StoreClock, boottime
from leasekit.server.commit import Done, GroupCommit, RequestClass
from leasekit.server.daemon_threads import DaemonThreads
from leasekit.server.http.events import Feed
from leasekit.server.long_poll import LongPolls
from leasekit.server.neighbours import Neighbours
from leasekit.server.roles import backlog, chains, claims, consumer, following, frontend, gates, hsc, kinds, redrive
from leasekit.server.roles.cancel_hints import CancelHints
from leasekit.server.roles.directory import Directory, only_node
from leasekit.server.roles.gates import GateChange
from leasekit.server.store import Filter, SharedStore, Space, Store, View
from leasekit.server.sweeper import SWEEPING, Sweeper
from leasekit.server.unit_of_work import NewlyDue, TaskEvent, UnitOfWork
from leasekit.task import (
    Beat,
    ChainCancelled,
    Claimed,
    GateInfo,
    KindInfo,
    KindSettings,
    NewTask,
    NodeInfo,
    Page,
    Redriven,
    Scheduled,
    Settlement,
    Stats,
    Status,
    TaskInfo,
    Verdict,
    WorkerInfo,
)
from leasekit.wire import MAX_WAIT, ChainRequest, RedriveRequest

logger = logging.getLogger("leasekit.server")

_T = TypeVar("_T")
_V = TypeVar("_V")
_Time = Callable[[], float]

_PERIOD = 1.0  # seconds between two ticks of the consumer
_STALLED = 5  # periods between two readings of the clock that count as a gap: this process has not run
_REAP_MOST = 1000  # leases that are expired in one tick, at most
_KEEP_MOST = 20_000  # tasks that gates put back or end in one tick, at most
_READERS = 4
_READS = 200  # reads that may wait
_LOOK = 2.0  # seconds that a look at the other nodes may take
_PATIENCE = 5.0  # seconds that the writer may take to answer a readiness probe
_SEEN_FOR = 600.0  # seconds for which a worker without leases is listed


class Engine:
    """A task server in this process; an async context manager.

    `clock` is the wall clock in seconds since the epoch, by which tasks are due; also in place of a shared database's.
    Leases end by `boot`, a clock without steps; without `boot`, `clock` serves for both. `boot_id` names the start of
    `boot`, and changes when `boot` starts anew. `period` is the seconds between two ticks of the consumer; `writer` is
    the class that applies requests; `address` says where a server serves this engine.

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
    ) -> None:
        self._period = _PERIOD if period is None else period
        stall = None if period is None else _STALLED * period
        self._clock = _clock_of(store, clock, boot, boot_id=boot_id, stall=stall)
        self._random = random or _random.SystemRandom()
        self._store = store
        self._long_polls = LongPolls(self._attempt, self._clock)
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
            feed=self.feed,
        )
        self._readers: DaemonThreads
        self._reads = 0
        self._directory = Directory()
        self._cancel_hints = CancelHints()
        self._address = address
        self._id, self._started_at = uuid.uuid4().hex, 0.0
        self.neighbours = self._neighbours_at(store) if isinstance(store, SharedStore) else None
        self.sweeper = Sweeper(self._read, self._commit, self._clock, keep=store.retention)
        self.purge, self.vacuum = self.sweeper.purge, self.sweeper.vacuum
        self._consumer: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None

    def _neighbours_at(self, store: SharedStore) -> Neighbours:
        return Neighbours(
            *(store, self._clock),
            polls=self._long_polls,
            cancels=self._cancel_hints,
            feed=self.feed,
            directory=self._directory,
            run=self._in_reader,
        )

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
        self._sweeping = asyncio.create_task(self.sweeper.run(), name="leasekit-sweeper")
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in (self._consumer, self._sweeping):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        if self.neighbours is not None:
            await self.neighbours.stop()
        self._consumer = self._sweeping = None
        self._long_polls.close()
        self._cancel_hints.end()
        self.feed.close()
        self._readers.shutdown()
        await self.commit.stop()

    async def schedule(self, tasks: Sequence[NewTask]) -> list[Scheduled]:
        if not tasks:
            return []
        if self.cramped is not None:
            raise Unavailable(self.cramped)
        with self.commit.together():  # one commit makes a task durable and grants it to a waiting claim
            due = Counter(task.kind for task in tasks if task.at is None and not (task.delay or task.after))
            self._long_polls.expect(self.commit.kinds.gates.passing(due, self._clock.peek()))
            scheduled = self.commit.begin(_SCHEDULE, tasks, size=sum(map(_work_of_task, tasks)))
        answer: list[Scheduled] = await scheduled
        return answer

    async def cancel(self, ids: Sequence[str]) -> list[Verdict]:
        cancelled = await self._write(_CANCEL, ids)
        self._tell_others(cancelled=cancelled)
        return self._cancel_hints.tell(cancelled)

    async def cancel_chain(self, request: ChainRequest) -> ChainCancelled:
        """Cancel the next tasks of a chain that have not ended; the first step keeps the chain from growing."""
        if request.cursor is None:
            await self.commit.ask(_CANCEL_CHAIN, request.id, size=1)
        after = frontend.seq_of_cursor(request.cursor)
        part = await self._read(lambda view: chains.part(view, request.id, after=after))
        cursor = None if part.after is None else str(part.after)
        return ChainCancelled(root=part.root, tasks=await self.cancel(part.ids), cursor=cursor)

    async def cancels(self, *, worker: str, wait: float) -> list[str]:
        """Return the tasks of a worker whose cancel was requested since its last call; wait for the first of them."""
        self._hear_of(worker)
        return await self._cancel_hints.wait(worker, wait)

    async def redrive(self, request: RedriveRequest) -> Redriven:
        """Begin a new life of dead tasks: these, or a page of those that match. Refused while the disk is full."""
        if self.cramped is not None and not request.dry_run:
            raise Unavailable(self.cramped)
        plan = await self._read(lambda view: redrive.plan(view, request))
        if request.dry_run or not plan.ids:
            return await self._read(lambda view: redrive.look(view, plan, now=self._clock.peek()))
        answer: Redriven = await self.commit.ask(_REDRIVE, plan, size=len(plan.ids))
        return answer

    async def get(self, task_id: str) -> TaskInfo | None:
        """Return everything about one task, with users' JSON values as `Raw`; None if no task has this id."""
        return await self._read(
            lambda view: frontend.get(view, task_id, now=self._clock.peek(), gained=self._clock.gained)
        )

    async def claim(self, *, worker: str, kinds: Sequence[str], limit: int, wait: float, claim_id: str) -> Claimed:
        """Claim up to `limit` tasks; wait up to `wait` seconds (60 at most) for the first. Users' values are `Raw`."""
        self._hear_of(worker)
        self._directory.claims(worker, kinds)
        wait = min(wait, MAX_WAIT)
        return await self._long_polls.claim(worker=worker, claim_id=claim_id, kinds=kinds, limit=limit, wait=wait)

    def end_waits(self) -> None:
        """Answer waiting claims now, later ones at once, and grant these nothing: the server is about to stop."""
        self._long_polls.end()
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
        return Stats(kinds=await self._in_reader(self._store.counts))

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
        return self._directory.workers(running, [] if self.neighbours is None else await self.neighbours.workers())

    async def kinds(self) -> list[KindInfo]:
        """Return the kinds that have settings, sorted by name."""
        return await self._read(kinds.listed)

    async def set_kind(self, kind: str, settings: KindSettings | None, *, by: str | None) -> KindInfo | None:
        """Replace the settings of a kind, or remove them (None), for all tasks that are scheduled from now on."""
        kinds.check_kind(kind)
        info: KindInfo | None = await self.commit.ask(_SET_KIND, kinds.KindChange(kind, settings, by), size=1)
        logger.info("%s has %s", by or "a client", kinds.described(kind, settings))
        return info

    async def gates(self) -> list[GateInfo]:
        """Return the closed gates: those of kinds, then those of collections, sorted by name."""
        return await self._read(lambda view: gates.listed(view, now=self._clock.peek()))

    async def set_gate(self, change: GateChange) -> GateInfo | None:
        """Close or open a gate, for all claims that are judged from now on."""
        info: GateInfo | None = await self.commit.ask(_SET_GATE, change, size=1)
        logger.info("%s has %s", change.by or "a client", gates.described(change))
        return info

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
        """Do the consumer's work once: expire leases, forget old workers, see other nodes, wake claims of due tasks."""
        self._check_store_space()
        taken = consumer.REAP_BATCH
        for _ in range(_REAP_MOST // consumer.REAP_BATCH):
            if taken < consumer.REAP_BATCH:
                break
            taken = await self.commit.ask(_REAP, None, size=1)
            if taken:
                logger.info("%d leases have expired", taken)
        await self._keep_gates()
        await self._keep_followers()
        self._forget_workers()
        self._long_polls.look()
        if self.neighbours is not None and self._consumer is not None:
            with suppress(TimeoutError):  # slow reads must not keep leases from their end
                async with asyncio.timeout(_LOOK):
                    await self.neighbours.look()
        self.feed.look()

    async def _keep_gates(self) -> None:
        for _ in range(_KEEP_MOST // gates.STEP if self.commit.kinds.gates.rows else 0):
            if not await self.commit.ask(_KEEP_GATES, None, size=gates.STEP):
                break

    async def _keep_followers(self) -> None:
        """Tell the tasks that wait for others what was left to be told, if this store has such tasks."""
        for _ in range(_KEEP_MOST // following.STEP if self.commit.kinds.has_waits else 0):
            if not await self.commit.ask(_KEEP_FOLLOWERS, None, size=following.STEP):
                break

    def _on_ready(self, readied: Mapping[str, NewlyDue]) -> None:
        self._long_polls.ready(readied)
        self._tell_others(due=readied)

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

    async def _write(self, rank: RequestClass, items: Sequence[Any], *, size: int | None = None) -> list[Any]:
        return await self.commit.ask(rank, items, size=len(items) if size is None else size) if items else []

    async def _commit(self, rank: RequestClass, request: Any, size: int) -> Any:
        return await self.commit.ask(rank, request, size=size)

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

    async def list_tasks(
        self,
        *,
        kind: str | None = None,
        status: Status | None = None,
        collection: str | None = None,
        worker: str | None = None,
        root: str | None = None,
        newest: bool = False,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page:
        listing = frontend.Listing(Filter(kind, status, collection, worker, newest, root), cursor=cursor, limit=limit)
        gained, page = self._clock.gained, None
        while page is None:
            page = await self._read(lambda view: listing.look(view, now=self._clock.peek(), gained=gained))
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


_HEARTBEAT = RequestClass("heartbeats", _itemwise(hsc.heartbeat), 100_000)
_RELEASE = RequestClass("releases", _itemwise(hsc.results), 100_000)
_RESULTS = RequestClass("results", _itemwise(hsc.results), 50_000)
_REAP = RequestClass("reapings", _each(consumer.look), 10)
_CANCEL = RequestClass("cancels", _itemwise(frontend.cancel), 10_000)
_CLAIM = RequestClass("claims", claims.claim, 20_000, is_last=True)  # last: claims get what the others make ready
_SCHEDULE = RequestClass("schedules", _itemwise(frontend.schedule), 20_000)
_REDRIVE = RequestClass("redrives", lambda turn, plans: [redrive.redrive(turn, plan) for plan in plans], 10_000)
_SET_KIND = RequestClass("kinds", kinds.change, 1000, is_last=True)  # last: see `KindDefaults`
_SET_GATE = RequestClass("gates", gates.change, 1000, is_last=True)  # last: see `KindDefaults`
_KEEP_GATES = RequestClass(
    "gatekeepings", lambda turn, asked: [gates.keep(turn, most=gates.STEP)] * len(asked), 10_000, is_last=True
)
_CANCEL_CHAIN = RequestClass("chains", chains.mark, 1000, is_last=True)  # last: it waits for the other writers
_KEEP_FOLLOWERS = RequestClass("followings", _each(following.keep), 10_000)
_PROBE = RequestClass("probes", _each(lambda turn: turn.tx.probe_write()), 100)

_SURVIVAL = (
    _HEARTBEAT,
    _RELEASE,
    _RESULTS,
    _REAP,
    _CANCEL,
    _CLAIM,
    _SCHEDULE,
    _REDRIVE,
    _KEEP_GATES,
    _KEEP_FOLLOWERS,
    _CANCEL_CHAIN,
    _SET_KIND,
    _SET_GATE,
    *SWEEPING,
    _PROBE,
)
"""The order in which classes are served under load: heartbeats first."""
