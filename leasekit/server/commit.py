"""Group commit: requests that come together share one transaction, written by one thread.

Rule 1: an answer leaves only after its transaction has ended.
Rule 2: one bad request fails alone. A shared transaction that fails is undone, and its requests are applied caller by
caller. Those of one caller that fail together wait for another turn, class by class and then by halves, until the bad
ones are alone: others have their turns in between. If the store fails, requests are applied class by class, so that a
disk that is almost full still takes small ones.
Rule 3: under load, classes of requests are served in the order in which they are declared; each class has a bounded
queue, and a request that does not fit is refused at once. A class that was passed over `_PASSED` times has `_SHARE`
items in the next transaction: a flood of tasks must not keep out the revocation of the token that sends them, and one
of results that were settled long ago no tasks.
Rule 4: within a class, callers take turns by the items that they send, and share its bound: none with many requests, or
with large ones, keeps those of others out.
Rule 5: no request waits for others to join it. The requests that arrived during the last transaction make up the next.
"""

import asyncio
import logging
import random as _random
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from leasekit._log import LogThread
from leasekit.errors import Throttled, Unavailable
from leasekit.server.clock import Clock, Moment
from leasekit.server.fair_bound import CALLER, FairBound
from leasekit.server.fair_queue import FairQueue
from leasekit.server.histogram import Histogram
from leasekit.server.http.events import Feed
from leasekit.server.log_limit import LogLimit
from leasekit.server.roles.audit import Counted, Note
from leasekit.server.store import AuditRow, Contended, Locked, SharedStore, Store, Tx
from leasekit.server.store.kind_defaults import KindDefaults
from leasekit.server.tally import Tally
from leasekit.server.unit_of_work import NewlyDue, TaskEvent, UnitOfWork

logger = logging.getLogger("leasekit.server")
_fault_logger = logging.getLogger("leasekit.server.writes")
_fault_logger.addFilter(LogLimit())  # large writes may fail, and small ones succeed, again and again

_COMMIT = 1000  # items in one transaction, at most: a heartbeat may have to wait for so many before it

_SHARE = 500  # items of a class that was left out, at least one request

_PASSED = 2  # transactions in a row that may leave out a class whose requests wait

_PER_SECOND = 50_000  # items that a second of a transaction counts that has failed, and is to be repeated in parts
_LEAST, _MOST = 250, 2500  # items that a part counts: it has a commit of its own, and its caller must not wait for ever

_TRIES = 20  # of a transaction whose rows other nodes change at the same time

_ENDED_BADLY = "the writer thread has failed (the log has the error): restart the server"

Done = Callable[[Any], None]
"""A callback for the answer to a request, or for the exception in its place; called in the event loop."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestClass:
    """A class of requests: how a batch of them is applied, and how many items may wait."""

    name: str
    apply: Callable[[UnitOfWork, Sequence[Any]], Sequence[Any]]  # maps requests to answers, by position
    capacity: int  # items that may wait in the queue of this class
    is_last: bool = False  # requests are applied after all others of their transaction; Rule 3 does not depend on this
    is_act: bool = False  # the audit log tells of requests with a `Note`: what is applied gives `Counted` answers
    weight: float = 1.0  # how much of a transaction an item counts


@dataclass(slots=True, eq=False)
class _Job:
    rank: RequestClass
    request: Any
    size: int
    done: Done
    note: Note | None  # what the audit log is to say of the request
    caller: str
    apart: int = 0  # the items that it counts if it has failed together with others, and is applied without them …
    rest: "Sequence[_Job]" = ()  # … but with these

    @property
    def items(self) -> int:
        """The items of the request, and of those that go with it."""
        return self.size + sum(job.size for job in self.rest)

    @property
    def work(self) -> int:
        """The items that count in the turn of the request."""
        return max(self.items, self.apart)


class _Outcome(NamedTuple):
    answered: list[tuple[_Job, Any]]
    readied: dict[str, NewlyDue]
    happened: Sequence[TaskEvent] = ()
    ends: Sequence[str] = ()


class GroupCommit:
    """The writer of one store: a thread, and the queues before it.

    A group commit belongs to the event loop in which it is started. `on_ready` is called there after a transaction has
    been answered, with the kinds that have newly ready tasks: claims that wait are tried again. `on_over` is called
    there with the ids of the tasks that have ended for good. `on_end` is called in a transaction in which tasks have
    ended, before claims are served. `on_gap` is called in the first transaction after a time without heartbeats: after
    the start, a stall of this process, or an outage of the store. It gets the transaction, and the seconds by which the
    clock of leases has gained on the clock by which the store was last written to (None: unknown).
    """

    def __init__(
        self,
        store: Store,
        ranks: Sequence[RequestClass],
        *,
        clock: Clock,
        random: _random.Random,
        on_ready: Callable[[Mapping[str, NewlyDue]], None],
        on_gap: Callable[[UnitOfWork, float | None], None],
        on_end: Callable[[UnitOfWork], None] = lambda turn: turn.over.clear(),
        on_over: Callable[[Sequence[str]], None] = lambda _: None,
        feed: Feed | None = None,
    ) -> None:
        self._store = store
        self._is_shared = isinstance(store, SharedStore)
        self._queues: dict[RequestClass, FairQueue[_Job]] = {rank: FairQueue() for rank in ranks}
        self._applied = sorted(ranks, key=lambda rank: rank.is_last)
        self._waiting = {rank: FairBound() for rank in ranks}  # items
        self._passed = dict.fromkeys(ranks, 0)  # transactions that have left out a class, since its last one
        self._clock = clock
        self._random = random
        self._on_ready = on_ready
        self._on_gap = on_gap
        self._on_end = on_end
        self._on_over = on_over
        self._feed = feed
        self.kinds = KindDefaults()  # written by the writer's thread
        self.tally = Tally()
        self.last_at: float | None = None  # of the last transaction, by the clock of leases
        self.sizes = Histogram([1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000])  # items in a transaction
        self.seconds = Histogram([0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5])  # of one
        self.retries = 0  # transactions that were repeated because other nodes had changed the same rows
        self._is_repeated = False  # the requests may have been applied already: the result of a commit is unknown
        self._wake = threading.Condition()
        self._is_open = False
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread
        self.fault: str | None = None  # why the last transaction could not be written

    @property
    def backlog(self) -> dict[str, int]:
        return {rank.name: waiting.total for rank, waiting in self._waiting.items()}

    async def start(self) -> None:
        """Start the writer's thread, and open the store in it. Raises the errors of `Store.open`."""
        self._loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="leasekit-writer", daemon=True)
        self._is_open = True
        self._thread.start()
        try:
            await asyncio.shield(opened)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Write the accepted requests, close the store, and end the thread."""
        with self._wake:
            self._is_open = False
            self._wake.notify()
        await asyncio.shield(self._ended)
        self._thread.join()

    def room(self, rank: RequestClass, caller: str | None = None) -> float:
        """Return how many more items of a caller (None: the current one) fit into a queue now.

        If nothing of it waits there, a request of any size fits.
        """
        with self._wake:  # the writer may take the last of them at this moment
            return self._waiting[rank].room(CALLER.get() if caller is None else caller, rank.capacity)

    def later(self) -> float:
        """Return the seconds after which a refused request may be repeated: random, so that repeats are spread."""
        return 0.5 + self._random.random()

    def submit(
        self,
        rank: RequestClass,
        request: Any,
        *,
        size: int,
        done: Done,
        note: Note | None = None,
        caller: str | None = None,
    ) -> None:
        """Queue a request of `size` items; `done` gets its answer. With a `note`, the audit log gets an entry.

        It is that of `caller`, or (None) of the current one.

        Raises `Throttled` if the queue of its class is full, and `Unavailable` if the writer has ended.
        """
        assert note is None or rank.is_act, f"nothing counts what {rank.name} change"  # noqa: S101 - as it says
        with self._wake:
            if not self._is_open:
                raise Unavailable(self.fault or "the engine is closed")
            caller = CALLER.get() if caller is None else caller
            if size > self.room(rank, caller):
                raise Throttled(f"too many {rank.name} wait to be written: try again later", retry_after=self.later())
            self._add(_Job(rank, request, size, done, note, caller))
            self._wake.notify()

    async def ask(self, rank: RequestClass, request: Any, *, size: int, note: Note | None = None) -> Any:
        """Queue a request of `size` items and wait for its answer. Raises like `submit`."""
        return await self.begin(rank, request, size=size, note=note)

    def begin(self, rank: RequestClass, request: Any, *, size: int, note: Note | None = None) -> "asyncio.Future[Any]":
        """Queue a request of `size` items and return a future of its answer. Raises like `submit`."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.submit(rank, request, size=size, done=lambda result: resolve(answer, result), note=note)
        return answer

    @contextmanager
    def together(self) -> Generator[None]:
        """Put all requests that are submitted in this block into one transaction, as far as they fit."""
        with self._wake:  # the writer needs this lock to take requests; `submit` acquires it again
            yield

    # In the writer's thread

    def _run(self, opened: "asyncio.Future[None]") -> None:
        try:
            with LogThread():
                self._store.open()
                self._call_in_loop(resolve, opened, None)
                self._serve()
        except BaseException as error:  # noqa: BLE001  `start` raises it
            self._is_open = False
            self._call_in_loop(resolve, opened, error)
        finally:
            self._call_in_loop(resolve, self._ended, None)

    def _serve(self) -> None:
        jobs: list[_Job] = []
        try:
            while jobs := self._next():
                while jobs:
                    shared = sum(not job.apart for job in jobs)
                    batch = jobs[:shared] or [jobs[0], *jobs[0].rest]
                    began_at = time.perf_counter()
                    self._is_repeated = not shared
                    outcome = self._apply(batch)
                    self.seconds.add(time.perf_counter() - began_at)
                    self.sizes.add(sum(job.size for job in batch))
                    self._call_in_loop(self._deliver, outcome)
                    jobs = jobs[shared or 1 :]
            self._store.close()
        except BaseException:  # also SystemExit: later requests would wait for a thread that has ended
            logger.exception("the writer thread has failed: nothing is written until the server is restarted")
            self._abandon(jobs)

    def _abandon(self, jobs: Sequence[_Job]) -> None:
        """Fail the given requests, the requests that wait, and all later requests."""
        with self._wake:
            self._is_open = False
            self.fault = _ENDED_BADLY
            waiting = [*jobs, *(self._take(rank) for rank, queue in self._queues.items() for _ in range(len(queue)))]
            waiting = [each for job in waiting for each in (job, *job.rest)]
        self._call_in_loop(self._deliver, _Outcome([(job, Unavailable(_ENDED_BADLY)) for job in waiting], {}))

    def _next(self) -> list[_Job]:
        """Wait for the next requests, by class (Rule 3), those to be applied apart last; none: the writer must end."""
        jobs: list[_Job] = []
        with self._wake:
            while self._is_open and not any(self._queues.values()):
                self._wake.wait()
            room: float = _COMMIT
            for rank, queue in self._queues.items():
                taken = self._take_some(rank, room, at_least=0 if jobs else 1)
                room -= rank.weight * sum(job.work for job in taken)
                jobs += taken
                if queue:
                    break
            jobs += self._passed_over({job.rank for job in jobs})
            return sorted(jobs, key=lambda job: job.apart > 0)

    def _passed_over(self, served: Collection[RequestClass]) -> list[_Job]:
        """Take requests of each class that was left out of too many transactions (Rule 3)."""
        left_out = [rank for rank, queue in self._queues.items() if queue and rank not in served]
        self._passed = {rank: self._passed[rank] + 1 if rank in left_out else 0 for rank in self._passed}
        due = [rank for rank in left_out if self._passed[rank] > _PASSED]
        self._passed.update(dict.fromkeys(due, 0))
        return [job for rank in due for job in self._take_some(rank, _SHARE, at_least=1)]

    def _take_some(self, rank: RequestClass, room: float, *, at_least: int) -> list[_Job]:
        """Take the next requests of a class that have room for so many items, and so many in any case."""
        queue, jobs = self._queues[rank], list[_Job]()
        while queue and (len(jobs) < at_least or room >= rank.weight * queue.first().work):
            jobs.append(self._take(rank))
            room -= rank.weight * jobs[-1].work
        return jobs

    def _add(self, job: _Job) -> None:
        self._queues[job.rank].add(job.caller, job, work=job.work)
        self._waiting[job.rank].add(job.caller, job.items)

    def _take(self, rank: RequestClass) -> _Job:
        job = self._queues[rank].take()
        self._waiting[rank].add(job.caller, -job.items)
        return job

    def _apply(self, jobs: Sequence[_Job]) -> "_Outcome":
        """Apply these requests in one transaction, or after a failure in smaller ones (Rule 2)."""
        began_at = time.perf_counter()
        try:
            return self._transact(jobs)
        except Unavailable as error:
            groups = [[job for job in jobs if job.rank is rank] for rank in dict.fromkeys(job.rank for job in jobs)]
            if len(groups) == 1:
                return _Outcome([(job, error) for job in jobs], {})
        except Exception as error:  # noqa: BLE001  each request gets its own error
            if len(jobs) == 1:
                return _Outcome([(jobs[0], error)], {})
            callers = dict.fromkeys(job.caller for job in jobs)
            groups = [[job for job in jobs if job.caller == caller] for caller in callers]
            if len(groups) == 1:
                return self._put_back(jobs, seconds=time.perf_counter() - began_at)
        was, self._is_repeated = self._is_repeated, True
        try:
            return _merged([self._apply(group) for group in groups])
        finally:
            self._is_repeated = was

    def _put_back(self, jobs: Sequence[_Job], *, seconds: float) -> "_Outcome":
        """Give these requests, which have failed after so many seconds, other turns: each class, or each half of one.

        A turn counts by these seconds: who sends what is dear to refuse has fewer.
        """
        parts = [[job for job in jobs if job.rank is rank] for rank in dict.fromkeys(job.rank for job in jobs)]
        if len(parts) == 1:
            half = len(jobs) // 2
            parts = [[*jobs[:half]], [*jobs[half:]]]
        with self._wake:
            for first, *rest in parts:
                first.apart, first.rest = round(min(max(_LEAST, seconds * _PER_SECOND), _MOST)), rest
                self._add(first)
        return _Outcome([], {})

    def _transact(self, jobs: Sequence[_Job]) -> "_Outcome":
        for _ in range(_TRIES):
            try:
                return self._try(jobs)
            except Locked as error:  # other requests must not wait for that lock once more
                raise Unavailable(f"rows are locked by another session: try again later ({error})") from error
            except Contended:
                self.retries += 1  # it was undone, and now sees what the other nodes have written
        raise Unavailable("other nodes change the same tasks all the time: try again later")

    def _try(self, jobs: Sequence[_Job]) -> "_Outcome":
        moment = self._clock.read()
        answered: list[tuple[_Job, Any]] = []
        try:
            with self._store.transaction() as tx:
                if self.fault is not None:
                    tx.probe_write()
                turn = self._begin_turn(tx, *self._clock.begin(tx, moment))
                for rank in self._applied:
                    batch = [job for job in jobs if job.rank is rank]
                    if batch:
                        answers = rank.apply(turn, [job.request for job in batch])
                        answered += zip(batch, _noted(turn, batch, answers) if rank.is_act else answers, strict=True)
                    if turn.over:
                        self._on_end(turn)
        except Unavailable as error:
            self._note_fault(str(error))
            self._clock.failed(moment)
            self.kinds.clear()
            raise
        self._clock.succeeded()
        self._note_fault(None)
        self.tally.add(turn)
        self.last_at = turn.instant
        return _Outcome(answered, turn.readied(), turn.happened or (), turn.ends)

    def _note_fault(self, fault: str | None) -> None:
        """Note why the last transaction failed, or that it succeeded; the log has a line when that changes."""
        was, self.fault = self.fault, fault
        if fault is not None and fault != was:
            _fault_logger.error("writes fail, and no restart is needed once they succeed again: %s", fault)
        elif fault is None and was is not None:
            _fault_logger.warning("writes succeed again")

    def _begin_turn(self, tx: Tx, moment: Moment, shift: float | None) -> UnitOfWork:
        turn = UnitOfWork(
            tx,
            now=moment.now,
            instant=moment.instant,
            random=self._random,
            is_repeated=self._is_repeated or self._is_shared,
            kinds=self.kinds,
        )
        if self._feed is not None and self._feed.wanted:
            turn.happened = []
        if moment.after_gap:
            self._on_gap(turn, shift)
        return turn

    def _call_in_loop(self, callback: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: no caller is left
            self._loop.call_soon_threadsafe(callback, *args)

    # In the event loop

    def _deliver(self, outcome: "_Outcome") -> None:
        for job, answer in outcome.answered:
            job.done(answer)
        if outcome.readied:
            self._on_ready(outcome.readied)
        if outcome.ends:
            self._on_over(outcome.ends)
        if outcome.happened and self._feed is not None:
            self._feed.publish(outcome.happened)


def _merged(outcomes: Sequence[_Outcome]) -> _Outcome:
    readied: dict[str, NewlyDue] = {}
    for outcome in outcomes:
        for kind, more in outcome.readied.items():
            readied[kind] = readied[kind] + more if kind in readied else more
    happened = [event for outcome in outcomes for event in outcome.happened]
    answered = [answer for outcome in outcomes for answer in outcome.answered]
    return _Outcome(answered, readied, happened, [task_id for outcome in outcomes for task_id in outcome.ends])


def _noted(turn: UnitOfWork, batch: Sequence[_Job], counted: Sequence[Counted[Any]]) -> list[Any]:
    """Write the entries of the audit log for requests that were applied; return their answers."""
    rows: list[AuditRow] = []
    for job, done in zip(batch, counted, strict=True):
        if job.note is not None and done.changed is not None:
            rows.append(job.note.row(turn, done.changed, done.fields))
    if rows:
        turn.tx.add_audit(rows)
    return [done.answer for done in counted]


def resolve(future: "asyncio.Future[Any]", result: Any) -> None:
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
