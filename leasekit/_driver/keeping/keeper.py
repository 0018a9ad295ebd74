"""Keeper: renew all leases of one connection, in one loop (step, perform, sleep until `wake_at`).

The keeper runs in the driver's thread; methods must be called there unless their docstring says "any thread". An error
of a backend becomes a verdict: no error of a service, an adapter or a hook ends the loop.
"""

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from leasekit import hooks as events
from leasekit._core.cycle import Lost
from leasekit._core.term import Term, granted_at
from leasekit._driver.clock import Clock
from leasekit._driver.context import ClaimCall, Context
from leasekit._driver.explaining.loop_monitor import LoopMonitor, take_reading
from leasekit._driver.explaining.recorder import Reading, Story
from leasekit._driver.guarding.escalation import Escalation
from leasekit._driver.guarding.idle_watch import IdleWatch
from leasekit._driver.guarding.watchdog import UNGUARDED, Watchdog
from leasekit._driver.keeping.held_lease import HeldLease, Owner, loss_reason
from leasekit._driver.keeping.pending_claims import Claims
from leasekit._driver.keeping.renewal import Renewal
from leasekit._driver.reporting import encoding
from leasekit._driver.reporting.ledger import Ledger
from leasekit._driver.reporting.outbox import Delivery, Outbox
from leasekit._driver.retrying import call_once
from leasekit._driver.thread import spawn
from leasekit.backend import Backend, CancelSource, NameSource, Scheduler, cancel_all
from leasekit.config import Heartbeats
from leasekit.errors import BackendError, Cancelled, ConfigError, LeasekitError, LossReason, Refused
from leasekit.hooks import Hooks
from leasekit.task import Claimed, NewTask, Settlement, Status, Task, Verdict

_NO_LABELS: Mapping[str, str] = {}
logger = logging.getLogger("leasekit")

_SETTLE_TIMEOUT = 10.0
_CANCELS_WAIT = 20.0  # seconds for which one call waits for cancel requests …
_CANCELS_PAUSE = 1.0  # … until the next call; hints that come meanwhile are kept …
_CANCELS_RETRY = 10.0  # … and after a call that failed


class Drained(LeasekitError):
    """An operator drains this worker: its claims are granted nothing."""


class NameClaim(NamedTuple):
    """The lease of a name, if it was granted, and the status of its task before."""

    leases: list[HeldLease]
    status: Status | None


class Keeper:
    """The leases of one connection, and the calls that begin and end them.

    `last_resort` is called just before the end of a lease's trust when its handler still runs, after its stack was
    logged: a worker's process ends itself there.
    """

    def __init__(
        self,
        backend: Backend,
        heartbeats: Heartbeats,
        *,
        clock: Clock,
        hooks: Hooks,
        chance: random.Random,
        last_resort: Callable[[], None] | None = None,
        watchdog: Watchdog = UNGUARDED,
        claim: ClaimCall | None = None,
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._hooks = hooks
        self._watchdog = watchdog
        self._heartbeats = replace(heartbeats, batch=min(heartbeats.batch, backend.capabilities.max_batch))
        self._shows_status = isinstance(backend, Scheduler)
        self.call_soon: Callable[..., object] = _at_once  # schedules a call in the keeper's loop, from any thread
        self.loop_monitor: LoopMonitor | None = None  # of the loop in which the keeper runs
        self._ledger: Ledger | None = None  # where a supervisor reads what is held
        self._leases: dict[tuple[str, str], HeldLease] = {}
        self._make_lease = partial(  # with the same bound methods for all leases
            HeldLease, clock=clock, watchdog=watchdog, expired=self._tell_expired, on_news=self._hear_news
        )
        self._overloaded = False
        self._cancel_source = backend if isinstance(backend, CancelSource) else None
        self._hearing: set[asyncio.Task[None]] = set()  # of cancel requests, while leases are held
        self._news: deque[HeldLease] = deque()  # leases whose news have not been read …
        self._rung = False  # … and whether they are about to be
        self._escalation = Escalation(last_resort)
        self._idle_watch = IdleWatch()
        context = Context(backend, clock=clock, hooks=hooks, chance=chance, watchdog=watchdog, claim=claim)
        self._context = context
        self._wake, self._recorder, self.reachability = context.wake, context.recorder, context.reachability
        self.outbox = Outbox(context, call_timeout=_SETTLE_TIMEOUT)
        self._renewal = Renewal(
            context, self._heartbeats, look_after=self._look_after, on_lost=self._lose, on_cancel=self._cancel_requested
        )
        self._claims = Claims(context, self.outbox, patience=heartbeats.cycle)

    def note_in(self, ledger: Ledger) -> None:
        self._ledger = self._claims.ledger = ledger

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def capacity(self) -> int:
        return self._heartbeats.capacity

    @property
    def held(self) -> list[HeldLease]:
        """The leases that are held now. Any thread."""
        return list(self._leases.copy().values())

    def get(self, task: Task) -> HeldLease | None:
        """Return the held lease of `task`, or None. Any thread."""
        return self._leases.get((task.id, task.token))

    async def claim(
        self,
        kinds: Sequence[str],
        *,
        limit: int,
        wait: float,
        started: bool,
        repeat_for: float | None = None,
        failing: Callable[[BaseException], None] | None = None,
        labels: Mapping[str, str] = _NO_LABELS,
    ) -> list[HeldLease]:
        """Claim up to `limit` tasks, and renew their leases from now on.

        `started`: their handlers are about to begin; otherwise tasks wait in a buffer, heartbeats say so until they
        begin, and the claim does not wait for a task while the service is not known to answer. `labels` are those of
        the worker. `failing` is called with the error of each failed try that is repeated. `Claims.claim` says what
        happens to granted tasks when this call is cancelled. Raises `Drained`.
        """
        claimed, asked_at = await self._claims.claim(
            kinds, limit=limit, wait=wait, repeat_for=repeat_for, failing=failing, probes=not started, labels=labels
        )
        if claimed.draining and not claimed.tasks:
            raise Drained
        return self._granted(claimed, asked_at, started=started)

    async def claim_name(self, source: NameSource, task: NewTask, *, repeat_for: float, within: float) -> NameClaim:
        """Make and claim the task of a name, whose code is about to begin."""
        claimed, asked_at = await self._claims.claim_name(source, task, repeat_for=repeat_for, within=within)
        return NameClaim(self._granted(claimed, asked_at, started=True), claimed.status)

    def _granted(self, claimed: Claimed, asked_at: float, *, started: bool) -> list[HeldLease]:
        now = self._clock.now()
        took = now - asked_at
        granted = granted_at(asked_at, claimed.waited, answered_at=now)
        leases: list[HeldLease] = []
        for task in claimed.tasks:
            try:
                heartbeats = self._heartbeats.for_ttl(task.ttl)
            except ConfigError as error:
                logger.error("task %s is not run: %s", task.id, error, extra=events.log_fields(task.id, task.token))
                continue
            # With too little trust left to rely on, the first heartbeat decides whether the task is begun.
            fresh = claimed.waited is not None and granted + heartbeats.slack - now >= heartbeats.cycle
            leases.append(self.get(task) or self._keep(task, heartbeats, granted, confirmed=fresh, started=started))
        self._renewal.wake()
        if self._hooks.active and leases:
            tasks = [held.task for held in leases]
            ids = [task.id for task in tasks]
            self._hooks(events.Claimed(at=now, task_ids=ids, waited=claimed.waited, took=took, tasks=tasks))
        return leases

    def adopt(self, task: Task) -> HeldLease:
        """Hold a task that was claimed by other code; `start_renewing` then renews its lease. Any thread.

        The time of the grant is unknown, so the first acknowledged heartbeat decides whether the task is begun.

        Raises `ConfigError` if the ttl leaves no room for heartbeats.
        """
        heartbeats, now = self._heartbeats.for_ttl(task.ttl), self._clock.now()
        held = self._make_lease(task, heartbeats, granted_at=now, confirmed=False, started=True, claimed=False)
        return self._leases.setdefault((task.id, task.token), held)

    def _keep(self, task: Task, heartbeats: Heartbeats, granted: float, *, confirmed: bool, started: bool) -> HeldLease:
        """Register a claimed task, note it in the ledger, and renew its lease from now on."""
        held = self._make_lease(task, heartbeats, granted_at=granted, confirmed=confirmed, started=started)
        self._leases[task.id, task.token] = held
        if self._ledger is not None:
            held.enter(self._ledger)
        self._add(held)
        return held

    def start_renewing(self, held: HeldLease) -> None:
        self._add(held)
        self._renewal.wake()

    def _add(self, held: HeldLease) -> None:
        self._renewal.add(held)
        self._check_capacity()
        if self._cancel_source is not None and not self._hearing:
            spawn(self._hear_cancels(self._cancel_source), self._hearing)

    async def _hear_cancels(self, source: CancelSource) -> None:
        """Have an early heartbeat leave for each task whose cancel is requested: its answer brings the request.

        Ends when no lease is held. An error costs a pause only: regular heartbeats bring cancel requests too.
        """
        while self._leases:
            pause, ids = _CANCELS_PAUSE, set[str]()
            try:
                call = partial(source.cancels, wait=_CANCELS_WAIT)
                ids.update(await call_once(call, within=_CANCELS_WAIT + _SETTLE_TIMEOUT))
            except BackendError:
                pause = _CANCELS_RETRY
            for held in self.held if ids else ():
                if held.task.id in ids and held.term.place is not None and held.stop is None and not held.settling:
                    self._renewal.hasten(held)
            await asyncio.sleep(pause)

    def _check_capacity(self) -> None:
        """Tell hooks and recorder if more leases are held than a cycle can renew; the recorder also when that ends."""
        overloaded = len(self._leases) > self.capacity
        if overloaded and not self._overloaded:
            self._hooks(events.CapacityExceeded(at=self._clock.now(), held=len(self._leases), capacity=self.capacity))
        if overloaded or self._overloaded:
            self._recorder.crowded(len(self._leases), self.capacity, self._clock.now())
        self._overloaded = overloaded

    def watch(self, held: HeldLease) -> None:
        self._idle_watch.watch(held, total=len(self._leases))
        self._wake.set()

    def _hear_news(self, held: HeldLease) -> None:
        """Have the news of a lease read in the keeper's loop. Any thread."""
        self._news.append(held)
        if not self._rung:  # one call for all that come until it is made: each wakes the loop
            self._rung = True
            self.call_soon(self._read_news)

    def _read_news(self) -> None:
        self._rung = False  # first: whoever appends from here on rings again
        while self._news:
            self._take_news(self._news.popleft())

    def _take_news(self, held: HeldLease) -> None:
        """Note for the supervisor that the handler has begun or progressed, and have the service hear of it soon."""
        held.announced = False  # first: news that are written from here on are announced again
        unsent = held.unsent
        if held.settling or held.term.place is None:
            return
        if unsent is None:
            if self._shows_status:
                self._renewal.hasten(held)
        elif self._backend.capabilities.progress:
            held.note_progress(unsent)
            self._renewal.hasten(held)

    def drop(self, held: HeldLease) -> None:
        self._leases.pop((held.task.id, held.task.token), None)
        self._check_capacity()
        held.hand_over(None)  # or the reference's callback would form a reference cycle
        held.leave_ledger()
        self._renewal.remove(held)
        held.term.key = None  # or the two would keep task and payload until the garbage collector runs

    def ended(self, held: HeldLease) -> None:
        """Record that the handler has ended: from here on, none of its code runs."""
        held.handler_runs = False
        held.hand_over(None)  # the keeper does the rest: the owner of the block may die
        held.unguard()
        self._escalation.ended(held)

    def release_if_unstarted(self, held: HeldLease, *, after: float | None = None) -> bool:
        """Release the task if its handler has not begun, and return whether it has not; ready again `after` seconds."""
        if held.reason is not None or not held.withdraw():
            return False
        task = held.task
        self.settle(held, Delivery(Settlement(id=task.id, token=task.token, outcome="release", retry_after=after)))
        return True

    def abandoned(self, held: HeldLease, owner: Owner | None) -> None:
        """End a lease whose owner has died: its block was left without an end, or can no longer begin.

        The settlement that the block had decided is reported. Else the task is released: an interrupt is no failure.
        """
        if owner is None or held.owner is not owner:
            return
        task = held.task
        if not held.begun:
            if self.release_if_unstarted(held) and held.awaits_block:
                text = "the block of task %s was never entered: it is given back; enter every block that you made"
                logger.warning(text, task.id, extra=events.log_fields(task.id, task.token))
        elif not held.settling:
            release = Settlement(id=task.id, token=task.token, outcome="release", progress=held.progress)
            # A lost lease cannot be given back; but the result that its block had decided is still worth a report.
            if held.reportable(self._backend.capabilities) and (held.report_due or not held.lost):
                self.settle(held, held.report_due or Delivery(release))
            else:
                self.finish(held)

    def _look_after(self, held: HeldLease) -> None:
        """Call `abandoned` if that is due: the callback that would have called it may have been interrupted."""
        owner = held.owner
        if owner is not None and owner() is None:
            self.abandoned(held, owner)

    def settle(self, held: HeldLease, report: Delivery, *, is_replacement: bool = False) -> None:
        """Report how the run ended. The lease is renewed until that is answered, and then dropped. Does not wait.

        If the service refuses the report, a failure is reported in its place; the lease is kept until that replacement
        is answered, and a replacement (`is_replacement`) is not replaced again. If the service obeys stale heartbeats,
        a lease that is given back is no longer renewed.
        """
        self.ended(held)
        held.settling = True
        if not self._backend.capabilities.refuses_stale:
            held.leave_ledger()  # no timer proves to a supervisor any more that this lease has not expired
            if report.settlement.outcome in ("retry", "release"):
                self._renewal.remove(held)  # a later heartbeat would take the task back again
        settlement = report.settlement
        report.heard = lambda answer: self._settled(held, settlement, answer, is_replacement=is_replacement)
        self.outbox.put(report)

    def finish(self, held: HeldLease) -> None:
        """Drop a lost lease whose handler has ended, and settle nothing, except that its `max_runtime` was over."""
        self.ended(held)
        if held.reason is None and held.lost:  # the handler noticed the end of trust before this thread had its turn
            self._lose([Lost(held.term, "expired")], self._clock.now())
        if held.reason == "overdue" and self._backend.capabilities.refuses_stale and not held.settling:
            # The service keeps the lease to its end, for a handler that goes on: the next run need not wait for that.
            task, error = held.task, encoding.described(held.loss())
            crash = Settlement(id=task.id, token=task.token, outcome="crash", error=error, progress=held.progress)
            self.settle(held, Delivery(crash))
        else:
            self.drop(held)

    def _settled(
        self, held: HeldLease, settlement: Settlement, answer: Verdict | Refused | None, *, is_replacement: bool
    ) -> None:
        """Drop the lease and tell hooks, once its settlement is answered; replace a refused settlement by a failure."""
        task = held.task
        if isinstance(answer, Refused) and not is_replacement:
            # The service refuses the user's report, and would refuse it after another run too: end the task as failed.
            error = {"type": type(answer).__qualname__, "message": f"the settlement was refused: {answer}"[:2000]}
            instead = Delivery(Settlement(id=task.id, token=task.token, outcome="fatal", error=error))
            self.settle(held, instead, is_replacement=True)
            return
        if answer is None:
            held.ledger = None  # the ledger keeps the entry: the supervisor hands the lease back when this process ends
        self.drop(held)
        if self._hooks.active and isinstance(answer, Verdict):
            self._hooks(
                events.Settled(
                    at=self._clock.now(),
                    task_id=task.id,
                    token=task.token,
                    outcome=settlement.outcome,
                    verdict=answer.verdict,
                    reason=answer.reason,
                    task=task,
                )
            )

    async def run(self) -> None:
        while True:
            self._wake.clear()
            self._recorder.woke(self._reading())
            try:
                wake_at = self._once(self._clock.now())
            except Exception:
                # No call above should raise. If one does, leases must not suffer: trust goes on counting by itself.
                logger.exception("error in the keeper's loop; the loop goes on")
                wake_at = self._clock.now() + 1.0
            self._recorder.waits(wake_at)
            self._context.wakes_at = wake_at
            await self._clock.wait(self._wake, wake_at)

    def _once(self, now: float) -> float:
        """Do what is due at `now`; return the instant at which the next work is due."""
        self._read_news()  # of a thread that was interrupted before it could have them read
        renew_at = self._renewal.step(now)
        for held in self._idle_watch.step(now):  # a hung task must not heartbeat for ever
            self._renewal.remove(held)
            why = f"its handler reported no progress for {held.idle_timeout:g} s, and did not end when told to"
            self._lost(held, "idle", Story(why), now)
        self._escalation.step(now)
        return min(renew_at, self._idle_watch.wake_at, self._escalation.wake_at)

    def _cancel_requested(self, held: HeldLease, now: float) -> None:
        if held.stop is None:
            self._hooks(events.CancelRequested(at=now, task_id=held.task.id, token=held.task.token))
        held.tell(Cancelled)

    def _reading(self) -> Reading:
        return take_reading(self._clock, self.loop_monitor)

    def _tell_expired(self, term: Term) -> Story:
        """Return why a lease is over that the keeper has not found lost yet. Any thread."""
        return self._recorder.expired(term, self._reading())

    def _lose(self, lost: Sequence[Lost], now: float) -> None:
        """Find out why each of these leases was lost, and call `_lost` for it."""
        if lost:
            self._recorder.woke(self._reading())  # an answer may have woken the loop before the keeper did
            for loss, story in zip(lost, self._recorder.explain(lost, now), strict=True):
                self._lost(loss.term.key, loss.reason, story, now)

    def _lost(self, held: HeldLease, reason: str, story: Story, now: float) -> None:
        """Tell handler and hooks that a lease is lost, unless it is being settled; drop it if no handler runs."""
        self._look_after(held)
        # A heartbeat that crosses its settlement is answered *gone*, which is no loss: the settlement's answer counts.
        if held.settling:
            return
        held.lose(reason, story, now)  # first: a handler that begins at this moment sees the loss, or is seen below
        if not self._backend.capabilities.refuses_stale:
            held.leave_ledger()  # another process may hold the task when this process ends
        if held.handler_runs:
            if held.watchdog is self._watchdog:  # handlers in other processes end without this one
                self._escalation.add(held)
            held.watchdog.lost(held.term, held.ends_at)
        else:
            self.drop(held)
        self._tell_hooks_of_loss(held, loss_reason(reason), story)

    def told_lost(self, held: HeldLease, report: Delivery, reason: LossReason, story: Story) -> None:
        """Tell hooks of a loss that the code learned at its end, because its result was refused or not answered.

        The result is withdrawn from a service that obeys stale writes: it could end the run of another worker, and the
        code was told that its own run does not count.
        """
        if not self._backend.capabilities.refuses_stale:
            self.outbox.withdraw(report)
        if held.reason is None:  # else hooks were told before
            self._tell_hooks_of_loss(held, reason, story)

    def _tell_hooks_of_loss(self, held: HeldLease, reason: LossReason, story: Story) -> None:
        task, now = held.task, self._clock.now()
        self._hooks(
            events.Lost(at=now, task_id=task.id, token=task.token, reason=reason, why=story.why, events=story.events)
        )

    def lose_all(self, why: str) -> None:
        """Tell all handlers that their leases are lost: no heartbeat can be sent any more.

        What had not begun stays in the ledger, so that a supervisor gives it back.
        """
        now = self._clock.now()
        for held in list(self._leases.values()):
            if not held.handler_runs and self._backend.capabilities.refuses_stale:
                held.ledger = None
            self._lost(held, "closed", Story(why), now)

    async def aclose(self) -> None:
        """Release tasks that were not begun, wait up to `_SETTLE_TIMEOUT` for answers, and close the backend."""
        now = self._clock.now()
        for held in list(self._leases.values()):
            self._look_after(held)
            self.release_if_unstarted(held)
            if held.handler_runs:
                self._renewal.remove(held)
                self._lost(held, "closed", Story("its client was closed while the code under it ran"), now)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_TIMEOUT):
                    await self._claims.abandon()
                    await self.outbox.empty()
            await self._claims.aclose()
            await self.outbox.aclose()
            await self._renewal.aclose()
            await cancel_all(self._hearing)
        finally:
            self._watchdog.close()  # handlers that still run stay guarded
            await self._backend.aclose()


def _at_once(call: Callable[..., object], *args: Any) -> None:
    call(*args)
