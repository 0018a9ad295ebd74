"""Controller: claim tasks ahead for one executor, and settle tasks whose handlers have ended, in the driver's loop.

    claim ──▶ (confirmed) ──▶ buffer ──▶ executor ──▶ ended ──▶ the keeper's outbox
                                 │  ▲       └─ NotYet: waits until it is due ─┐
                                 │  └─────────────────────────────────────────┘
                                 └─ too long in the buffer, or the worker stops: given back

Rule 1: no error of a service or an adapter ends the controller: it waits, logs once, and tries again.
Rule 2: every delivery that it accepted ends in exactly one of: settled, given back, lost, joined to a run.
Rule 3: for each task, one handler runs in this process, however often the task is delivered. Where a service may hold
several tasks of one id, an id does not name a task, and each delivery is run.
"""

import asyncio
import logging
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from msgspec import structs

from leasekit._core.backoff import Backoff
from leasekit._driver.answer import Answer
from leasekit._driver.connection import Connection
from leasekit._driver.keeping.held_lease import HeldLease
from leasekit._driver.keeping.keeper import Drained
from leasekit._driver.reporting.outbox import Delivery
from leasekit._worker.claimed_task import ClaimedTask
from leasekit._worker.descriptors import Descriptors
from leasekit._worker.executor import Executor
from leasekit._worker.handlers import Handler
from leasekit._worker.waiting import WaitingRuns
from leasekit._worker.window import Calls, Window, WindowSize
from leasekit.errors import Closed, Draining, Unavailable
from leasekit.hooks import log_fields
from leasekit.task import Settlement, Task

logger = logging.getLogger("leasekit")

_POLL = 20.0  # seconds of one long poll
_LOOK = 1.0  # seconds: check at least this often
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 5.0  # seconds between claims that fail


class Controller:
    """Claim tasks for one executor, but only as many as it can begin soon.

    `peers` are all controllers of the connection, this one included: together they stay within its capacity. The
    controller checks its state at least every `look` seconds, and lets a claim wait for `poll` seconds. `on_drain` is
    called when an operator drains this worker; by default the controller stops. It claims while `descriptors` are free.
    """

    def __init__(
        self,
        connection: Connection,
        handlers: Mapping[str, Handler],
        executor: Executor,
        *,
        ahead: float,
        window: WindowSize = "auto",
        peers: Sequence["Controller"],
        labels: Mapping[str, str] = MappingProxyType({}),
        descriptors: Descriptors | None = None,
        chance: random.Random | None = None,
        look: float = _LOOK,
        poll: float = _POLL,
        on_drain: Callable[[], None] | None = None,
    ) -> None:
        self._on_drain = on_drain or self.stop
        self._connection = connection
        self._keeper = connection.keeper
        self._clock = connection.clock
        self._handlers = handlers
        self._executor = executor
        self._peers = peers
        self._labels = labels
        self._descriptors = descriptors
        self.window = Window(executor.slots, ahead, size=window, most=self._keeper.capacity)
        self._look = look
        self._poll = poll
        self._works: dict[str, ClaimedTask] = {}  # by their keys: buffered, running and waiting
        self._waiting = WaitingRuns()
        self._unconfirmed: dict[ClaimedTask, None] = {}  # must not begin before the service acknowledges a heartbeat
        self._ended: deque[tuple[ClaimedTask, Settlement | None]] = deque()  # written by executors' threads
        self._paused: deque[ClaimedTask] = deque()  # written by executors' threads
        self._rung = False  # `_collect` was scheduled and has not begun
        self._claim: asyncio.Task[list[HeldLease]] | None = None
        self.asked = 0  # tasks asked for by the claim in progress
        self.free = 0  # the window at the last check
        self._not_before = -math.inf
        self._backoff = Backoff(_FIRST_WAIT, _LONGEST_WAIT, random=(chance or random.SystemRandom()).random)
        self._failing = False
        self._stopping = False
        self._wake = asyncio.Event()

    def look_around(self) -> None:
        """Wake the controller after a change. Call this in the driver's thread."""
        self._wake.set()

    async def run(self) -> None:
        """Claim, give back and settle tasks until the controller was stopped and no handler runs."""
        while True:
            self._wake.clear()
            try:
                self._once(self._clock.now())
            except Exception:
                logger.exception("error in a controller; it goes on")
                self._not_before = self._clock.now() + self._backoff.wait()
            if self._stopping and self._claim is None and not self.window.out:
                return
            until = self._clock.now() + self._look
            if self._claim is None and self._not_before > self._clock.now():
                until = min(until, self._not_before)
            until = min(until, self._waiting.wake_at)
            await self._clock.wait(self._wake, until)

    def stop(self) -> None:
        """Stop claiming, and give back at once the tasks that have not begun, and those that wait."""
        self._stopping = True
        if self._claim is not None:
            self._claim.cancel()  # the keeper gives back tasks that it may have been granted
        self._give_back(self._executor.buffer.take_back(math.inf))
        for work in list(self._unconfirmed):
            self._keeper.release_if_unstarted(work.held)
        for work in (*self._waiting.take_all(), *self._executor.buffer.take_begun()):
            self._give_up(work)
        self._wake.set()

    def hurry(self) -> int:
        """Tell running handlers to end, so that their tasks are given back; return the number of these tasks."""
        if (end_all := getattr(self._executor, "end_all", None)) is not None:
            end_all(self._clock.now())
        else:
            for work in self._works.values():
                work.held.tell(Draining)
        return len(self._works)

    def report_on_exit(self) -> int:
        """Have the supervisor release the tasks whose handlers run when the process ends; return their number.

        Where stale writes are obeyed, the supervisor goes by the leases: only those that the kernel's timer guards.
        """
        refuses_stale = self._connection.backend.capabilities.refuses_stale
        for work in self._works.values() if refuses_stale else ():
            task, progress = work.held.task, work.held.progress
            work.held.report_on_exit(Settlement(id=task.id, token=task.token, outcome="release", progress=progress))
        return len(self._works)

    @property
    def running(self) -> int:
        return max(0, self.window.out - len(self._unconfirmed) - self.buffered - self.waiting)

    @property
    def waiting(self) -> int:
        """The number of runs whose handler said `NotYet`, and that are not due."""
        return len(self._waiting)

    @property
    def buffered(self) -> int:
        return len(self._executor.buffer)

    def _once(self, now: float) -> None:
        """Call runs that are due, give back tasks that waited for too long, take a claim's answer, start the next."""
        self.window.slots = self._executor.slots  # executors' processes come and go
        if due := self._waiting.due(now):
            self._executor.put(due)
        self.window.waiting = len(self._waiting)
        patience = self.window.patience
        if stale := self._executor.buffer.take_back(now - patience):
            # These tasks could run elsewhere: long runs hold all slots here, or their event loop is blocked.
            logger.debug("%d tasks are given back: no slot was free for %g s", len(stale), patience)
            self.window.stalled()
            self._give_back(stale)
        if self._claim is not None and self._claim.done():
            claim, self._claim, self.asked = self._claim, None, 0
            self._take_answer(claim, now)
        if self._stopping or not self._can_keep_more(now):
            return
        if self._claim is None and now >= self._not_before and (limit := self._limit(now)):
            self.asked = limit
            self._claim = asyncio.create_task(
                self._keeper.claim(
                    list(self._handlers),
                    limit=limit,
                    wait=self._poll,
                    started=False,
                    failing=self._log_first_failure,
                    labels=self._labels,
                )
            )
            self._claim.add_done_callback(lambda _: self._wake.set())

    def _can_keep_more(self, now: float) -> bool:
        """Return whether this process can open what more tasks need; end the claim in progress if it cannot."""
        if self._descriptors is None or self._descriptors.are_free(now):
            return True
        if self._claim is not None:
            self._claim.cancel()  # the keeper gives back tasks that it may have been granted
        return False

    def _limit(self, now: float) -> int:
        """Return how many tasks to claim: the window, within this controller's share of the keeper's capacity."""
        window = self.free = self.window.size(now)
        left = self._keeper.capacity - len(self._keeper) - sum(peer.asked for peer in self._peers)
        share = math.ceil(max(0, left) / len(self._peers))
        return min(window, share, self._connection.backend.capabilities.max_claim)

    def _take_answer(self, claim: "asyncio.Task[list[HeldLease]]", now: float) -> None:
        if claim.cancelled():
            return
        error = claim.exception()
        if isinstance(error, Closed):
            self.stop()
            return
        if isinstance(error, Drained):
            self._on_drain()
            return
        if error is not None:
            self._log_first_failure(error)
            self._not_before = now + self._backoff.wait()
            return
        if foreign := [held.task for held in claim.result() if held.task.kind not in self._handlers]:
            self._pause_for_foreign(foreign, now)
        else:
            self._backoff.reset()
        if self._failing:
            self._failing = False
            logger.info("claims of %s are answered again", self._kinds)
        self._deliver(claim.result(), now)

    def _pause_for_foreign(self, tasks: Sequence[Task], now: float) -> None:
        """Log that the service granted tasks that cannot run here, and pause before the next claim."""
        wait = self._backoff.wait()
        self._not_before = now + wait
        logger.error(
            "the service granted %d tasks of kinds that were not claimed, which are given back: task %s is of kind %r, "
            "but this claim was for %s; the next follows in %.1f s",
            len(tasks),
            tasks[0].id,
            tasks[0].kind,
            self._kinds,
            wait,
            extra=log_fields(tasks[0].id, tasks[0].token),
        )

    def _log_first_failure(self, error: BaseException) -> None:
        if isinstance(error, Unavailable):  # logged for all calls of the connection
            return
        if not self._failing and not self._stopping:
            self._failing = True
            logger.warning(
                "claims of %s fail, and are tried until the worker stops: %s: %s",
                self._kinds,
                type(error).__name__,
                error,
            )

    @property
    def _kinds(self) -> str:
        return ", ".join(map(repr, self._handlers))

    def _deliver(self, leases: Sequence[HeldLease], now: float) -> None:
        """Hand tasks to the executor, once their leases are confirmed; release tasks that cannot run here."""
        ready: list[ClaimedTask] = []
        for held in leases:
            handler = self._handlers.get(held.task.kind)
            if self._stopping or handler is None:
                self._keeper.release_if_unstarted(held)
                continue
            work = ClaimedTask(
                held, handler, self._connection, since=now, ended=self.record_end, paused=self.record_pause
            )
            self.window.out += 1
            if held.confirmed is None:
                ready += self._add_or_join(work)
            else:
                self._unconfirmed[work] = None
                held.confirmed.add_done_callback(partial(self._hand_over_if_confirmed, work))
        if ready:
            self._executor.put(ready)

    def _hand_over_if_confirmed(self, work: ClaimedTask, answer: Answer[None]) -> None:
        """Hand the task over if the service confirmed its lease; otherwise drop it, because it must not begin."""
        self._unconfirmed.pop(work, None)
        if answer.exception() is not None:
            self._count_ended(1)
            return
        work.since = self._clock.now()
        if ready := self._add_or_join(work):
            self._executor.put(ready)

    def _add_or_join(self, work: ClaimedTask) -> list[ClaimedTask]:
        """Return the task to hand over; no task if it is here already, and its new lease was joined to the first."""
        first = self._works.setdefault(work.key, work)
        if first is work:
            return [work]
        self._count_ended(1)
        self._join(first, work.held)
        return []

    def _join(self, first: ClaimedTask, held: HeldLease) -> None:
        """Join a second delivery of a task to the first, whose lease had ended at the service."""
        old = first.held
        if held in (old, first.again):
            return
        if first.again is not None and first.again.withdraw():
            self._keeper.drop(first.again)
            first.again = None
        if old.withdraw():  # it has not begun: the executor will find it withdrawn, and then `again` is run
            self._keeper.drop(old)
        elif first.run is not None and old.stop is None and not old.lost and self._may_move(first):
            self._move(first, held)
            return
        first.again = held

    def _may_move(self, work: ClaimedTask) -> bool:
        """Return whether no thread begins or ends a call of the handler just now: it runs, or waits for its next."""
        return work.run is not None and (work.run.ended_at is None or work in self._waiting)

    def _move(self, work: ClaimedTask, held: HeldLease) -> None:
        """Go on with a run under the newest lease of its task."""
        assert work.run is not None  # noqa: S101 - it has begun
        old = work.held
        work.run.move(held)
        work.held = held
        if work in self._waiting:
            held.listener = partial(self._hear_of, work)
        if held.idle_timeout is not None:
            self._keeper.watch(held)
        self._keeper.finish(old)

    def record_end(self, work: ClaimedTask, settlement: Settlement | None) -> None:
        """Record that the handler has ended, or never began (None: nothing to report). Any thread."""
        self._ended.append((work, settlement))
        self._ring()

    def record_pause(self, work: ClaimedTask) -> None:
        """Record that the run waits for the next call of its handler. Any thread."""
        self._paused.append(work)
        self._ring()

    def _ring(self) -> None:
        if not self._rung:  # one call for all runs that end until it comes
            self._rung = True
            self._connection.driver.call_soon(self._collect)

    def _collect(self) -> None:
        self._rung = False
        count, calls = 0, Calls()
        while self._paused:
            work = self._paused.popleft()
            calls.add(work.handler.kind, work.cost, work.waits)
            self._wait(work)
        while self._ended:
            work, settlement = self._ended.popleft()
            count += 1
            if not work.is_new:
                calls.add(work.handler.kind, work.cost, 0.0)
            self._settle_or_finish(work, settlement)
        calls.count_in(self.window)
        self._count_ended(count)

    def _wait(self, work: ClaimedTask) -> None:
        """Have a run wait until it is due, unless it must end now."""
        again, work.again = work.again, None
        if again is not None and not work.held.lost:
            self._move(work, again)
        if self._stopping or work.held.stop is not None or work.held.lost:
            work.again = again if work.held is not again else None
            self._give_up(work)
            return
        work.held.listener = partial(self._hear_of, work)
        self._waiting.add(work)
        self._wake.set()

    def _hear_of(self, work: ClaimedTask) -> None:
        """End a run that waits and was told to stop, in the next turn: the keeper is not done with its lease."""
        self._connection.driver.call_soon(self._end_waiting, work)

    def _end_waiting(self, work: ClaimedTask) -> None:
        if self._waiting.remove(work) or self._executor.buffer.remove(work):  # else a handler hears of it itself
            self._give_up(work)

    def _give_up(self, work: ClaimedTask) -> None:
        self._settle_or_finish(work, work.give_up())
        self._count_ended(1)

    def _count_ended(self, count: int) -> None:
        self.window.ended(count)
        if self._claim is None or self._stopping:
            self._wake.set()

    def _settle_or_finish(self, work: ClaimedTask, settlement: Settlement | None) -> None:
        del self._works[work.key]
        held, again = work.held, work.again
        if again is not None:
            self._keeper.finish(held)
            if settlement is None:  # it was stopped or never began: run the newest delivery
                self._deliver([again], self._clock.now())
                return
            again.withdraw()
            held = again
        capabilities = self._connection.backend.capabilities
        if settlement is not None and held.reportable(capabilities, crashed=settlement.outcome == "crash"):
            token = held.task.token
            if settlement.token != token:
                settlement = structs.replace(settlement, token=token)
            self._keeper.settle(held, Delivery(settlement))
        else:
            self._keeper.finish(held)

    def _give_back(self, works: Sequence[ClaimedTask]) -> None:
        for work in works:
            del self._works[work.key]
            self._keeper.release_if_unstarted(work.held)
            if work.again is not None:
                self._keeper.release_if_unstarted(work.again)
        self.window.out -= len(works)
