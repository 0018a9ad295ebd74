"""The server without HTTP: a store, its writer, its consumer, and the claims that wait, in one process.

The rules are in the roles: `frontend`, `claims`, `hsc`, `consumer`. This module connects the roles to the group commit
and the long polls, runs the consumer, and opens and closes all of them.
"""

import asyncio
import logging
import random as _random
import uuid
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from itertools import accumulate
from typing import Any

from leasekit._lifecycle.states import WAITING
from leasekit.backend import cancel_all
from leasekit.errors import BackendError, Refused
from leasekit.queues import TaskQueues
from leasekit.server import marks
from leasekit.server.access import KindPatterns
from leasekit.server.clock import Clock, DatabaseClock, StoreClock, boottime
from leasekit.server.commit import Done, GroupCommit, RequestClass
from leasekit.server.consumers_work import ConsumersWork
from leasekit.server.drains import Drains
from leasekit.server.end_waits import EndWaits
from leasekit.server.enqueuer import Enqueuer
from leasekit.server.fair_bound import caller_of
from leasekit.server.fleet import Fleet
from leasekit.server.history import Recorder
from leasekit.server.http.events import Feed
from leasekit.server.inbox import Inbox
from leasekit.server.kind_leases import KindLeases
from leasekit.server.long_poll import LongPolls
from leasekit.server.marks import Marks
from leasekit.server.neighbours import Neighbours
from leasekit.server.node_roles import ALL_ROLES, Role
from leasekit.server.operations import Operations
from leasekit.server.queries import Queries
from leasekit.server.readers import Readers
from leasekit.server.request_classes import (
    CANCEL,
    CANCEL_CHAIN,
    CLAIM,
    HEARTBEAT,
    KINDS_OF_A_TASK,
    MINUTES,
    PROBE,
    RELEASE,
    RESULTS,
    SCHEDULE,
    SURVIVAL,
    lane_of,
    work_of_beat,
    work_of_settlement,
    work_of_task,
)
from leasekit.server.roles import (
    chains,
    claims,
    consumer,
    following,
)
from leasekit.server.roles.audit import Note
from leasekit.server.roles.cancel_hints import CancelHints
from leasekit.server.roles.directory import Directory
from leasekit.server.roles.frontend import Cancel
from leasekit.server.roles.selection import seq_of_cursor
from leasekit.server.store import MinuteRow, SharedStore, Store
from leasekit.server.store.routes import is_route, labels_of
from leasekit.server.store_room import StoreRoom
from leasekit.server.sweeper import Sweeper
from leasekit.server.token_book import TokenBook
from leasekit.server.token_watch import TokenWatch
from leasekit.server.unit_of_work import NewlyDue
from leasekit.task import (
    Beat,
    ChainCancelled,
    Claimed,
    NewTask,
    Scheduled,
    Settlement,
    Status,
    Ticket,
    Verdict,
)
from leasekit.wire import MAX_WAIT, ChainRequest

logger = logging.getLogger("leasekit.server")

_Time = Callable[[], float]

_NO_LABELS: Mapping[str, str] = {}
_NOT_ENQUEUED = (
    "a task with `requires` or `prefers` is claimed from the server itself, and this one hands tasks out by queues "
    "(--queue): leave these out, or schedule the task at a server without queues, over another store"
)

_PERIOD = 1.0  # seconds between two ticks of the consumer
_STALLED = 5  # periods between two readings of the clock that count as a gap: this process has not run
_TOKENS = 0.5  # periods between two looks at the access tokens of a shared store
_LOOK = 2.0  # seconds that a look at the other nodes may take
_PATIENCE = 5.0  # seconds that the writer may take to answer a readiness probe


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
        self._id = uuid.uuid4().hex
        self._long_polls = LongPolls(self._attempt, self._clock)
        self._readers = Readers(store, self._clock, self._random)
        self._end_waits = EndWaits(
            self._readers.ended_of, self._readers.tasks, tell=lambda ids: self._tell_others(awaited=ids)
        )
        self.feed = Feed(pass_on=lambda events: self._tell_others(events=events))
        self.check_room: Callable[[str], None] = lambda claim_id: None
        """Called before tasks are granted; raises `Throttled` if there is no room for an answer."""
        self.room = StoreRoom(store)
        self.commit = self._make_writer(writer)
        is_shared = isinstance(store, SharedStore)
        self.tokens = TokenBook(self._clock.peek)
        """The access tokens, as far as this node knows."""
        every = _TOKENS * self._period if is_shared else None
        self.token_watch = TokenWatch(self.tokens, self._readers, self.commit, every=every, instant=self._clock.instant)
        self._directory = Directory(self._forget)
        self._cancel_hints = CancelHints()
        self._recorder = Recorder(self.commit.tally, self._id)
        self._inbox = Inbox(self.commit)
        self._consumers_work = ConsumersWork(self.commit, self._readers, self._clock, self._inbox, self.room)
        self.neighbours = self._neighbours_at(store) if isinstance(store, SharedStore) else None
        self.fleet = self._fleet_at(address)
        self._drains = Drains(self.commit, self._readers, self._clock, self.fleet, wake=self._wake_drained)
        self.sweeper = Sweeper(self._readers.read, self._readers.find, self._commit, self._clock, keep=store.retention)
        self._marks = Marks(lambda: store.id)
        self.queries = self._make_queries()
        self.operations = self._make_operations()
        self.enqueuer = None if queues is None else self._enqueuer_to(queues)
        """What moves due tasks to queues; None: there are no queues."""
        self._enqueueing: asyncio.Task[None] | None = None
        self._consumer: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None

    def _make_writer(self, writer: type[GroupCommit]) -> GroupCommit:
        return writer(
            *(self._store, SURVIVAL),
            clock=self._clock,
            random=self._random,
            on_ready=self._on_ready,
            on_gap=consumer.restart_leases,
            on_end=following.follow,
            on_over=self._on_over,
            feed=self.feed,
        )

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
            run=self._readers.run,
            on_new_tokens=self.token_watch.hear,
        )

    def _fleet_at(self, address: str | None) -> Fleet:
        return Fleet(
            *(self._directory, self.neighbours, self._readers, self._clock, self.feed, self.tokens),
            node_id=self._id,
            address=address,
        )

    def _make_queries(self) -> Queries:
        return Queries(
            *(self._store, self._readers, self._clock),
            marks=self._marks,
            commit=self.commit,
            end_waits=self._end_waits,
            fleet=self.fleet,
            recorder=self._recorder,
        )

    def _make_operations(self) -> Operations:
        return Operations(
            *(self.commit, self._readers, self._clock),
            marks=self._marks,
            room=self.room,
            sweeper=self.sweeper,
            drains=self._drains,
            tell_cancelled=self._tell_cancelled,
            on_new_tokens=self._on_new_tokens,
        )

    def _enqueuer_to(self, queues: TaskQueues) -> Enqueuer:
        is_shared = isinstance(self._store, SharedStore)
        leases = KindLeases(self, consumer_id=self._id[:12], holders=self.fleet.holders) if is_shared else None
        return Enqueuer(queues, self._commit, kinds=self._waiting_kinds, random=self._random, leases=leases)

    def _ring(self, kinds: Collection[str]) -> None:
        if self.enqueuer is not None:
            self.enqueuer.ring(kinds)

    async def _waiting_kinds(self) -> list[str]:
        counts = await self.queries.counts()
        return [kind for kind, statuses in counts.items() if not WAITING.isdisjoint(map(Status, statuses))]

    async def __aenter__(self) -> "Engine":
        await self.commit.start()
        try:
            await self._begin()
        except BaseException:  # a writer that went on would share its connection with that of the next engine
            async with AsyncExitStack() as steps:
                steps.push_async_callback(self.commit.stop)
                steps.callback(self._readers.abandon)
                self._stop_listening(steps)
            raise
        self._consumer = asyncio.create_task(self._consume(), name="leasekit-consumer")
        if Role.CONSUMER in self.roles:
            self._sweeping = asyncio.create_task(self.sweeper.run(), name="leasekit-sweeper")
        if self.enqueuer is not None:
            self._enqueueing = asyncio.create_task(self.enqueuer.run(self._period), name="leasekit-enqueuer")
        return self

    async def _begin(self) -> None:
        """Do what may fail before this engine has tasks of its own. The caller undoes it then."""
        self.fleet.begin()
        await self.tick()
        if self.neighbours is not None:
            self.neighbours.start()  # fails if the system has no thread to give
        self._readers.open()
        await self.token_watch.start()

    async def __aexit__(self, *error: object) -> None:
        """Close all. A cancel ends one step; without the others the writer would keep the store locked for good."""
        tasks = [task for task in (self._enqueueing, self._consumer, self._sweeping) if task is not None]
        self._consumer = self._sweeping = self._enqueueing = None
        async with AsyncExitStack() as steps:  # the last one first
            steps.push_async_callback(self.commit.stop)
            steps.push_async_callback(self._readers.close)
            steps.callback(self.feed.close)
            steps.callback(self._cancel_hints.end)
            steps.push_async_callback(self._end_waits.close)
            steps.callback(self._long_polls.close)
            steps.push_async_callback(self._inbox.stop)
            self._stop_listening(steps)
            steps.push_async_callback(self._write_rest)
            steps.push_async_callback(cancel_all, tasks)

    def _stop_listening(self, steps: AsyncExitStack) -> None:
        if self.neighbours is not None:
            steps.push_async_callback(self.neighbours.stop)
        steps.push_async_callback(self.token_watch.stop)

    async def _write_rest(self) -> None:
        with suppress(BackendError):
            await self._write_minutes(self._recorder.rest())

    async def schedule(self, tasks: Sequence[NewTask]) -> list[Scheduled]:
        if not tasks:
            return []
        self.room.check()
        if self.enqueuer is not None and any(task.requires or task.prefers for task in tasks):
            raise Refused(_NOT_ENQUEUED)
        with self.commit.together():  # one commit makes a task durable and grants it to a waiting claim
            due = Counter(lane_of(task) for task in tasks if task.at is None and not (task.delay or task.after))
            self._long_polls.expect(self.commit.kinds.gates.passing(due, self._clock.peek()))
            scheduled = self.commit.begin(SCHEDULE, tasks, size=sum(map(work_of_task, tasks)))
        answer: list[Scheduled] = await scheduled
        return answer

    async def cancel(
        self, ids: Sequence[str], *, kinds: KindPatterns | None = None, note: Note | None = None
    ) -> list[Verdict]:
        """Cancel tasks of these kinds (None: of all); others are unknown."""
        cancelled = await self._write(CANCEL, [Cancel(task_id, kinds) for task_id in ids], note=note)
        return self._tell_cancelled(cancelled)

    async def cancel_chain(self, request: ChainRequest, *, note: Note | None = None) -> ChainCancelled:
        """Cancel the next tasks of a chain that have not ended; the first step keeps the chain from growing."""
        if request.cursor is None:
            await self.commit.ask(CANCEL_CHAIN, request.id, size=1)
        after = seq_of_cursor(self._marks.opened(request).cursor)
        part = await self._readers.read(lambda view: chains.part(view, request.id, after=after))
        cursor = None if part.after is None else self._marks.seal(str(part.after))
        return ChainCancelled(root=part.root, tasks=await self.cancel(part.ids, note=note), cursor=cursor)

    async def cancels(self, *, worker: str, wait: float) -> list[str]:
        """Return the tasks of a worker whose cancel was requested since its last call; wait for the first of them."""
        self.fleet.hear(worker)
        return await self._cancel_hints.wait(worker, wait)

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
        """Claim up to `limit` tasks; wait up to `wait` seconds (60 at most) for the first. Users' values are `Raw`.

        With tickets, only their tasks are claimed, and the claim does not wait. `labels` are those of the worker, and
        `since` is when its process started, by the store's time.
        """
        self.fleet.hear_claim(worker, kinds, labels, since=since)
        return await self._long_polls.claim(
            worker=worker,
            claim_id=claim_id,
            kinds=kinds,
            limit=limit,
            wait=0.0 if tickets else min(wait, MAX_WAIT),
            tickets=tickets,
            labels=labels_of(labels),
            since=since,
        )

    def end_waits(self) -> None:
        """Answer what waits now, and later requests at once, which are granted nothing: the server is about to stop."""
        self._long_polls.end()
        self._end_waits.end()
        self._cancel_hints.end()

    async def heartbeat(self, worker: str, beats: Sequence[Beat]) -> list[Verdict]:
        """Renew leases: `renewed`, `gone` or `throttled` for each, in order.

        If only some of them fit into the queue, the first ones do: a keeper sends the most urgent beats first.
        """
        self.fleet.hear(worker)
        works = list(accumulate(map(work_of_beat, beats)))
        fitting = max(1, bisect_right(works, self.commit.room(HEARTBEAT)))  # no room: refused as a whole
        verdicts = await self._write(HEARTBEAT, beats[:fitting], size=works[fitting - 1] if works else 0)
        retry_after = self.commit.later()
        late = beats[fitting:]
        return verdicts + [Verdict(id=beat.id, verdict="throttled", retry_after=retry_after) for beat in late]

    async def results(self, worker: str, settlements: Sequence[Settlement]) -> list[Verdict]:
        """End runs: `settled` or `gone` for each, in order.

        While no new tasks are accepted, a settlement with successors is `failed`: its lease goes on, and the settlement
        may be repeated.
        """
        self.fleet.hear(worker)
        why = self.room.lack
        if why is None or not any(item.then for item in settlements):
            return await self._end(settlements)
        verdicts = iter(await self._end([item for item in settlements if not item.then]))
        return [Verdict(id=i.id, verdict="failed", reason=why) if i.then else next(verdicts) for i in settlements]

    @property
    def store_id(self) -> str:
        """The identity of the store for clients, known once it is open: a hash, as the identity itself is a key."""
        return marks.hashed(self._store.id)

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def since_commit(self) -> float | None:
        """Seconds since the last transaction; None: there was none."""
        at = self.commit.last_at
        return None if at is None else max(0.0, self._clock.instant() - at)

    @property
    def claims_waiting(self) -> int:
        return len(self._long_polls)

    @property
    def ends_awaited(self) -> int:
        """The number of requests that wait until a task has ended."""
        return len(self._end_waits)

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
                await self.commit.ask(PROBE, None, size=1)
        except TimeoutError:
            return f"the store has not answered for {_PATIENCE:g} s"
        except BackendError as error:
            return str(error)
        tables = None if self.neighbours is None else self.neighbours.company.fault
        return self._store.damage or self.commit.fault or tables

    async def tick(self) -> None:
        """Do what is due in each period: the consumer's work, forget old workers, see other nodes, wake claims."""
        self.room.look()
        if Role.CONSUMER in self.roles:
            await self._consumers_work.tick()
        else:
            await self.commit.ask(PROBE, None, size=1)  # a sign for the other nodes
        await self._write_minutes(self._recorder.due(self._clock.peek()))
        await self.token_watch.look()
        self.fleet.forget_silent()
        if self._readers.are_open:
            await self._drains.tick(is_consumer=Role.CONSUMER in self.roles)
        self._long_polls.look()
        if self.neighbours is not None and self._readers.are_open:
            with suppress(TimeoutError):  # slow reads must not keep leases from their end
                async with asyncio.timeout(_LOOK):
                    await self.neighbours.look()
        self.feed.look()

    async def _write_minutes(self, rows: Sequence[MinuteRow]) -> None:
        if rows:
            await self.commit.ask(MINUTES, rows, size=len(rows))
            self._recorder.written(rows)

    def _on_ready(self, readied: Mapping[str, NewlyDue]) -> None:
        self._long_polls.ready(readied)
        self._tell_others(due=readied)
        if due := [name for name, newly in readied.items() if newly.number and not is_route(name)]:
            self._ring(due)

    def _on_over(self, ids: Sequence[str]) -> None:
        self._end_waits.over(ids)
        self._tell_others(ended=ids)

    async def _on_new_tokens(self) -> None:
        self._tell_others(has_new_tokens=True)
        await self.token_watch.read()

    def _forget(self, worker: str) -> None:
        """Forget a worker that the directory has forgotten."""
        self._cancel_hints.forget(worker)
        self.fleet.tell(worker, "left")

    def _wake_drained(self, workers: Sequence[str]) -> None:
        self._long_polls.drain(workers)
        self._tell_others(drained=workers)

    def _tell_cancelled(self, cancelled: Sequence[tuple[Verdict, str | None]]) -> list[Verdict]:
        """Have workers hear which of their tasks are to stop, here and at other nodes; return the verdicts."""
        self._tell_others(cancelled=cancelled)
        return self._cancel_hints.tell(cancelled)

    def _tell_others(self, **hints: Any) -> None:
        if self.neighbours is not None:
            self.neighbours.tell(**hints)

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

    async def _commit(self, rank: RequestClass, request: Any, size: int, note: Note | None = None) -> Any:
        return await self.commit.ask(rank, request, size=size, note=note)

    async def _write(
        self, rank: RequestClass, items: Sequence[Any], *, size: int | None = None, note: Note | None = None
    ) -> list[Any]:
        if not (items or note):
            return []
        return list(await self.commit.ask(rank, items, size=len(items) if size is None else size, note=note))

    async def _end(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        """Have the writer settle these runs, and wait; a batch of releases alone goes before other results."""
        gives_back = all(settlement.outcome == "release" for settlement in settlements)
        size = sum(map(work_of_settlement, settlements))
        return await self._write(RELEASE if gives_back else RESULTS, settlements, size=size)

    def _attempt(self, request: claims.WaitingClaim, done: Done) -> None:
        """Queue a claim for the writer, which tries it once and calls `done`. Raises `Throttled`."""
        if request.limit:
            self.check_room(request.claim_id)
        size = 1 + len(request.kinds) // KINDS_OF_A_TASK + len(request.tickets)
        self.commit.submit(CLAIM, request, size=size, done=done, caller=caller_of(request.claim_id))


def _clock_of(store: Store, wall: _Time | None, boot: _Time | None, *, boot_id: str, stall: float | None) -> Clock:
    if not isinstance(store, SharedStore):
        return StoreClock(wall, boot, boot_id=boot_id, stall=stall)
    store.wall, store.boot = wall, boot or wall or boottime
    return DatabaseClock(store.boot, boot_id=boot_id, stall=stall)
