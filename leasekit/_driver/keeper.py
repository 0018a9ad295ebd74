"""The keeper: all leases of one connection, in one loop (step, perform, sleep until `wake_at`).

It runs in the driver's thread; what is not marked otherwise is to be called there. Whatever a backend raises ends up as
a verdict: no error of a service, an adapter or a hook ends the loop.
"""

import asyncio
import contextlib
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from msgspec import UNSET

from leasekit import hooks as events
from leasekit._core.cycle import AtRisk, Confirmed, Cycle, Early, Effect, Lost, Ordered, Regranted, Send
from leasekit._core.term import Term, granted_at
from leasekit._driver.claims import Claims
from leasekit._driver.clock import Clock
from leasekit._driver.escalation import Escalation
from leasekit._driver.holding import Holding, Owner
from leasekit._driver.idle_watch import IdleWatch
from leasekit._driver.ledger import Ledger
from leasekit._driver.loop_monitor import LoopMonitor, take_reading
from leasekit._driver.outbox import Delivery, Outbox
from leasekit._driver.recorder import Reading, Recorder, Story
from leasekit._driver.retrying import call_once
from leasekit._driver.thread import spawn
from leasekit._driver.watchdog import UNGUARDED, Watchdog
from leasekit.backend import Backend, Scheduler
from leasekit.config import Beats
from leasekit.errors import BackendError, Cancelled, ConfigError, Refused, Throttled
from leasekit.hooks import Hooks
from leasekit.task import Beat, Claimed, Settlement, Task, Verdict

__all__ = ["Keeper"]

logger = logging.getLogger("leasekit")

_SETTLE_TIMEOUT = 10.0


class Keeper:
    """Leases of one connection, and the calls that begin and end them.

    `last_resort` is called just before the end of a lease's trust when its body still runs (after a stack dump): a
    worker's process ends itself there.
    """

    def __init__(
        self,
        backend: Backend,
        beats: Beats,
        *,
        clock: Clock,
        hooks: Hooks,
        chance: random.Random,
        last_resort: Callable[[], None] | None = None,
        watchdog: Watchdog = UNGUARDED,
    ) -> None:
        traits = backend.traits
        self._backend = backend
        self._beats = replace(beats, batch=min(beats.batch, traits.max_batch))
        self._clock = clock
        self._hooks = hooks
        self._chance = chance
        self._watchdog = watchdog
        self.guards_elsewhere = False  # bodies may run in other processes, each holding with a watchdog of its own
        self._cycles: dict[float, Cycle] = {}
        self._early = Early()
        # How any thread has something called in the loop that the keeper runs in.
        self.call_soon: Callable[..., object] = _at_once
        self._on_news = self._hear_news  # one for all holdings
        self._shows_status = isinstance(backend, Scheduler)
        self._holdings: dict[tuple[str, str], Holding] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._escalation = Escalation(last_resort)
        self._idle_watch = IdleWatch()
        self._wake = asyncio.Event()
        self._overloaded = False
        self.loop_monitor: LoopMonitor | None = None  # of the loop that it runs in
        self._recorder = Recorder(self._reading())
        self._expired = self._tell_expired  # one for all holdings
        self._ledger: Ledger | None = None  # where a supervisor reads what is held
        self.outbox = Outbox(backend, clock=clock, hooks=hooks, random=chance.random, call_timeout=_SETTLE_TIMEOUT)
        self._claims = Claims(backend, clock=clock, outbox=self.outbox, patience=beats.cycle, chance=chance)

    def note_in(self, ledger: Ledger) -> None:
        """Note there what is asked for and held from now on."""
        self._ledger = self._claims.ledger = ledger

    # Coming and going ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._holdings)

    @property
    def capacity(self) -> int:
        """How many leases can beat in one cycle."""
        return self._beats.capacity

    def get(self, task: Task) -> Holding | None:
        """The holding of a task that is held. Any thread."""
        return self._holdings.get((task.id, task.token))

    async def claim(
        self,
        kinds: Sequence[str],
        *,
        limit: int,
        wait: float,
        started: bool,
        failing: Callable[[BaseException], None] | None = None,
    ) -> list[Holding]:
        """Claim up to `limit` tasks, and beat them from now on.

        `started`: their bodies are about to begin; otherwise they wait in a buffer, and beats say so until they begin.
        `failing` hears of each try that fails and is repeated.

        A claim whose answer was lost is repeated under the same id, so that no task lies about until its lease has
        run out. Being cancelled gives back what may have been granted meanwhile, and so does closing, which raises
        `Closed` in whoever waits.
        """
        claimed, asked_at = await self._claims.claim(kinds, limit=limit, wait=wait, failing=failing)
        return self._granted(claimed, asked_at, started=started)

    def _granted(self, claimed: Claimed, asked_at: float, *, started: bool) -> list[Holding]:
        now = self._clock.now()
        took = now - asked_at
        granted = granted_at(asked_at, claimed.waited, answered_at=now)
        holdings: list[Holding] = []
        for task in claimed.tasks:
            try:
                beats = self._beats.for_ttl(task.ttl)
            except ConfigError as error:
                logger.error("task %s is left alone: %s", task.id, error, extra=events.about(task.id, task.token))
                continue
            # Too little trust left to rely on: the first beat decides whether it is begun.
            fresh = claimed.waited is not None and granted + beats.slack - now >= beats.cycle
            holdings.append(self.get(task) or self._keep(task, granted=granted, confirmed=fresh, started=started))
        if self._hooks and holdings:
            tasks = [holding.task for holding in holdings]
            ids = [task.id for task in tasks]
            self._hooks(events.Claimed(at=now, task_ids=ids, waited=claimed.waited, took=took, tasks=tasks))
        return holdings

    def adopt(self, task: Task) -> Holding:
        """Hold a task that nobody claimed here; `take_up` then has it beaten. Any thread.

        When it was granted is unknown: its first acknowledged beat decides whether it is begun.

        Raises `ConfigError` where its ttl leaves no room for heartbeats.
        """
        holding = self._holding(task, granted=self._clock.now(), confirmed=False, started=True, claimed=False)
        return self._holdings.setdefault((task.id, task.token), holding)

    def _keep(self, task: Task, *, granted: float, confirmed: bool, started: bool) -> Holding:
        holding = self._holding(task, granted=granted, confirmed=confirmed, started=started)
        self._holdings[task.id, task.token] = holding
        if self._ledger is not None:
            holding.ledger, holding.entry = self._ledger, self._ledger.add(task.id, task.token)
        self.take_up(holding)
        return holding

    def _holding(self, task: Task, *, granted: float, confirmed: bool, started: bool, claimed: bool = True) -> Holding:
        return Holding(
            task,
            self._beats.for_ttl(task.ttl),
            self._clock,
            granted_at=granted,
            confirmed=confirmed,
            started=started,
            claimed=claimed,
            watchdog=self._watchdog,
            expired=self._expired,
            on_news=self._on_news,
        )

    def take_up(self, holding: Holding) -> None:
        """Beat it from now on."""
        self._cycle(holding.task.ttl).add(holding.term, self._clock.now())
        self._check_capacity()
        self._wake.set()

    def _cycle(self, ttl: float) -> Cycle:
        cycle = self._cycles.get(ttl)
        if cycle is None:
            beats = self._beats.for_ttl(ttl)
            cycle = self._cycles[ttl] = Cycle(
                beats, now=self._clock.now(), random=self._chance.random, early=self._early
            )
        return cycle

    def _check_capacity(self) -> None:
        overloaded = len(self._holdings) > self.capacity
        if overloaded and not self._overloaded:
            self._hooks(events.Overloaded(at=self._clock.now(), held=len(self._holdings), capacity=self.capacity))
        if overloaded or self._overloaded:
            self._recorder.crowded(len(self._holdings), self.capacity, self._clock.now())
        self._overloaded = overloaded

    def watch(self, holding: Holding) -> None:
        """Look after its idle time from now on."""
        self._idle_watch.watch(holding, held=len(self._holdings))
        self._wake.set()

    def _hear_news(self, holding: Holding) -> None:
        """Any thread."""
        self.call_soon(self._take_news, holding)

    def _take_news(self, holding: Holding) -> None:
        """The body has begun, or come further: note that for the supervisor, and have the service hear of it soon."""
        holding.announced = False  # first: what is reported from here on is announced anew
        unsent, term = holding.unsent, holding.term
        if holding.settling or term.place is None:
            return
        if unsent is None:
            if self._shows_status:
                self._hasten(holding)
        elif self._backend.traits.progress:
            if holding.ledger is not None:
                task = holding.task
                number, progress = unsent
                holding.checkpoint = holding.ledger.progress(
                    holding.checkpoint, task.id, task.token, progress, number=number or 0
                )
            self._hasten(holding)

    def _hasten(self, holding: Holding) -> None:
        self._cycle(holding.term.beats.ttl).hasten(holding.term, self._clock.now())
        self._wake.set()

    def _reported(self, holding: Holding, beat: Beat) -> None:
        """The service has this progress; where it is the latest, nobody else has to report it."""
        holding.reported(beat)
        if holding.checkpoint and holding.unsent is None and holding.ledger is not None:
            holding.ledger.remove(holding.checkpoint)
            holding.checkpoint = 0

    def forget(self, holding: Holding) -> None:
        """Stop renewing this lease and drop its bookkeeping."""
        self._holdings.pop((holding.task.id, holding.task.token), None)
        self._check_capacity()
        holding.hand_over(None)  # or the callback of the reference would make a ring
        self._strike_out(holding)
        self._drop(holding)
        holding.term.key = None  # a ring of the two would keep task and payload until the garbage collector comes by

    def _strike_out(self, holding: Holding) -> None:
        """Nobody hands it back when this process ends."""
        if holding.ledger is not None:
            holding.ledger.remove(holding.entry)
            holding.ledger.remove(holding.checkpoint)
            holding.ledger = None

    def bequeath(self, holding: Holding, settlement: Settlement) -> None:
        """Have this reported of a body that goes on, as soon as this process is seen to have ended."""
        if holding.ledger is not None:
            holding.entry = holding.ledger.say(holding.entry, settlement)

    def _drop(self, holding: Holding) -> None:
        cycle = self._cycles.get(holding.term.beats.ttl)
        if cycle is not None:
            cycle.remove(holding.term)

    def ended(self, holding: Holding) -> None:
        """The body has ended: from here nothing of it can run."""
        holding.body_runs = False
        holding.hand_over(None)  # what comes now is the keeper's: its block may go
        holding.watchdog.ended(holding.term)
        self._escalation.ended(holding)

    def unless_begun(self, holding: Holding) -> None:
        """Give a task back that nobody has begun."""
        if holding.reason is None and holding.withdraw():
            task = holding.task
            self.settle(holding, Delivery(Settlement(id=task.id, token=task.token, outcome="release")))

    def abandoned(self, holding: Holding, owner: Owner | None) -> None:
        """End a lease that `owner` had, if it still has it: its block is over, or nobody can begin one any more.

        What the block had decided is reported. Else the task is released: what interrupts says nothing of it.
        """
        if owner is None or holding.owner is not owner:
            return
        if not holding.begun:
            self.unless_begun(holding)
        elif not holding.settling:
            task = holding.task
            release = Settlement(id=task.id, token=task.token, outcome="release", progress=holding.progress)
            # A lost lease has nothing to give back; a result that its block had decided is still worth a report.
            if holding.reportable(self._backend.traits) and (holding.report_due or not holding.lost):
                self.settle(holding, holding.report_due or Delivery(release))
            else:
                self.finish(holding)

    def _look_after(self, holding: Holding) -> None:
        """Call `abandoned` if that is due: where its callback was interrupted, nobody else does."""
        owner = holding.owner
        if owner is not None and owner() is None:
            self.abandoned(holding, owner)

    def settle(self, holding: Holding, report: Delivery, *, ours: bool = False) -> None:
        """Report how it ended, beating on until that is answered: then it is over, whatever the answer.

        `ours`: it has nothing of a user in it.
        """
        self.ended(holding)
        holding.settling = True
        if report.settlement.outcome in ("retry", "release") and not self._backend.traits.refuses_stale:
            self._drop(holding)  # a beat that comes later would take the task back again
            self._strike_out(holding)  # and so would a supervisor that hands it back
        settlement = report.settlement
        report.heard = lambda answer: self._settled(holding, settlement, answer, ours=ours)
        self.outbox.put(report)

    def finish(self, holding: Holding) -> None:
        """Its body has ended, and there is nothing to report."""
        self.ended(holding)
        self.forget(holding)

    def _settled(
        self, holding: Holding, settlement: Settlement, answer: Verdict | Refused | None, *, ours: bool
    ) -> None:
        task = holding.task
        if isinstance(answer, Refused) and not ours:
            # What the user has to say of it cannot be said; running it again would end in the same.
            error = {"type": type(answer).__qualname__, "message": f"the settlement was refused: {answer}"[:2000]}
            instead = Delivery(Settlement(id=task.id, token=task.token, outcome="fatal", error=error))
            self.settle(holding, instead, ours=True)
            return
        if answer is None:
            holding.ledger = None  # it stays noted: who sees this process end hands it back
        self.forget(holding)
        if self._hooks and isinstance(answer, Verdict):
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

    # The loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._wake.clear()
            self._recorder.woke(self._reading())
            try:
                wake_at = self._once(self._clock.now())
            except Exception:
                # Nothing here should raise. If it does, leases must not die of it: trust goes on counting by itself.
                logger.exception("the keeper stumbled; it goes on")
                wake_at = self._clock.now() + 1.0
            self._recorder.waits(wake_at)
            await self._clock.wait(self._wake, wake_at)

    def _once(self, now: float) -> float:
        """What is to be done at `now`; returns when there is something to do again."""
        for ttl, cycle in list(self._cycles.items()):
            self._perform(cycle, cycle.step(now), now)
            if cycle.unused:
                del self._cycles[ttl]
        for holding in self._idle_watch.step(now):  # a hung task must not heartbeat for ever
            self._drop(holding)
            why = f"its body reported no progress for {holding.idle_timeout:g} s, and did not end when told to"
            self._lost(holding, "idle", Story(why), now)
        self._escalation.step(now)
        wake_at = min((cycle.wake_at for cycle in self._cycles.values()), default=math.inf)
        return min(wake_at, self._idle_watch.wake_at, self._escalation.wake_at)

    def _perform(self, cycle: Cycle, effects: Sequence[Effect], now: float) -> None:
        if lost := [effect for effect in effects if isinstance(effect, Lost)]:
            self._recorder.woke(self._reading())  # it may have been a call that came back first, and not the keeper
            for loss, story in zip(lost, self._recorder.explain(lost, now), strict=True):
                self._lost(loss.term.key, loss.reason, story, now)
        for effect in effects:
            self._perform_one(cycle, effect, now)

    def _perform_one(self, cycle: Cycle, effect: Effect, now: float) -> None:
        match effect:
            case Send():
                spawn(self._beat(cycle, effect, [term.key for term in effect.terms]), self._calls)
            case Lost():
                pass
            case AtRisk():
                task: Task = effect.term.key.task
                self._hooks(events.AtRisk(at=now, task_id=task.id, token=task.token, why=effect.why))
            case Ordered():
                self._ordered(effect.term.key, effect.order, now)
            case Confirmed():
                holding: Holding = effect.term.key
                if holding.confirmed is not None and not holding.confirmed.done():
                    holding.confirmed.set_result(None)
            case Regranted():
                effect.term.beats = self._beats.for_ttl(effect.ttl)
                effect.term.key.watchdog.renewed([effect.term], effect.term.trusted_until)
                self._cycle(effect.ttl).restore(effect.term, now)
                if effect.term.has_news:  # it came while the beat was on its way
                    self._take_news(effect.term.key)

    # Beats --------------------------------------------------------------------------------------------------------

    async def _beat(self, cycle: Cycle, send: Send, holdings: Sequence[Holding]) -> None:
        for holding in holdings:
            self._look_after(holding)
        beats = [holding.beat for holding in holdings]
        asked_at = self._clock.now()
        call, failure = self._recorder.sent(send, asked_at, held=len(self._holdings)), None
        if self._hooks:
            self._hooks(events.Sent(at=asked_at, task_ids=[beat.id for beat in beats], late=send.late))
        try:
            verdicts = await call_once(lambda: self._verdicts(beats), within=cycle.beats.call_timeout)
        except BackendError as error:
            failure = _no_verdict(error)
            verdicts = [failure] * len(beats)
            if isinstance(error, Refused):
                _without_progress(holdings, beats, error)
        now = self._clock.now()
        self._recorder.answered(call, verdicts, now, error=failure)
        for holding, beat, verdict in zip(holdings, beats, verdicts, strict=True):
            if beat.progress is not UNSET and verdict.verdict == "renewed":
                self._reported(holding, beat)
        if self._hooks:
            counts = Counter[str]([verdict.verdict for verdict in verdicts])
            self._hooks(events.Answered(at=now, round_trip=now - asked_at, verdicts=counts))
        if self._hooks and (renewed := [verdict.id for verdict in verdicts if verdict.verdict == "renewed"]):
            self._hooks(events.Renewed(at=now, task_ids=renewed, round_trip=now - asked_at))
        effects = cycle.answered(send, verdicts, asked_at=asked_at, now=now)
        # In the same breath: no await between trust and the timer that ends with it.
        if self._watchdog.guards or self.guards_elsewhere:
            renewed_terms = [term for term in send.terms if term.granted_at == asked_at and term.place is not None]
            self._guard(renewed_terms, asked_at + cycle.beats.trust)
        self._perform(cycle, effects, now)
        self._wake.set()

    def _guard(self, renewed: Sequence[Term], until: float) -> None:
        self._watchdog.renewed(renewed, until)
        if self.guards_elsewhere:
            for term in renewed:
                if (guard := term.key.watchdog) is not self._watchdog:
                    guard.renewed([term], until)

    async def _verdicts(self, beats: Sequence[Beat]) -> list[Verdict]:
        verdicts = await self._backend.beat(beats)
        # Nearly always all are in order, and this is the cheapest way to see that.
        if [verdict.id for verdict in verdicts] == [beat.id for beat in beats] and all(
            map(_sensible, {verdict.ttl: verdict for verdict in verdicts}.values())
        ):
            return verdicts
        return [
            verdict if verdict.id == beat.id and _sensible(verdict) else _nonsense(beat.id)
            for beat, verdict in zip(beats, verdicts, strict=True)
        ]

    def _ordered(self, holding: Holding, order: str, now: float) -> None:
        if holding.stop is None:
            task = holding.task
            self._hooks(events.Ordered(at=now, task_id=task.id, token=task.token, order=order))
        holding.tell(Cancelled)

    # Losses -------------------------------------------------------------------------------------------------------

    def _reading(self) -> Reading:
        return take_reading(self._clock, self.loop_monitor)

    def _tell_expired(self, term: Term) -> Story:
        return self._recorder.expired(term, self._reading())

    def _lost(self, holding: Holding, reason: str, story: Story, now: float) -> None:
        self._look_after(holding)
        # A beat that crosses the settlement is answered *gone*: that is no loss, the settlement's own answer says more.
        if holding.settling:
            return
        holding.lose(reason, story, now)  # first: a body that begins at this very moment sees it, or is seen
        if not self._backend.traits.refuses_stale:
            self._strike_out(holding)  # somebody else may have it when this process ends
        if holding.body_runs:
            if holding.watchdog is self._watchdog:  # others end without this process
                self._escalation.add(holding)
            holding.watchdog.lost(holding.term, holding.ends_at)
        else:
            self.forget(holding)
        task = holding.task
        self._hooks(
            events.Lost(at=now, task_id=task.id, token=task.token, reason=reason, why=story.why, events=story.events)
        )

    # The end ------------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Give back what was never begun, wait up to `_SETTLE_TIMEOUT` for answers, and let go of the connection."""
        now = self._clock.now()
        for holding in list(self._holdings.values()):
            self._look_after(holding)
            self.unless_begun(holding)
            if holding.body_runs:
                self._drop(holding)
                self._lost(holding, "closed", Story("its client was closed while the body ran"), now)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_TIMEOUT):
                    await self._claims.abandon()
                    await self.outbox.empty()
            await self._claims.aclose()
            await self.outbox.aclose()
            calls = list(self._calls)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        finally:
            self._watchdog.close()  # bodies that still run stay guarded
            await self._backend.aclose()


def _at_once(call: Callable[..., object], *args: Any) -> None:
    call(*args)


def _without_progress(holdings: Sequence[Holding], beats: Sequence[Beat], refused: Refused) -> None:
    """A batch was refused whole, and all in it that is not ours is what users reported: leave out who is to blame."""
    blamed = {error.get("item") for error in refused.errors}
    for position in [n for n in range(len(beats)) if n in blamed] or range(len(beats)):
        holdings[position].reported(beats[position])


def _sensible(verdict: Verdict) -> bool:
    return verdict.ttl is None or 2 <= verdict.ttl < math.inf


def _nonsense(task_id: str) -> Verdict:
    return Verdict(id=task_id, verdict="failed", reason="the service's verdict makes no sense")


def _no_verdict(error: BackendError) -> Verdict:
    """What a failed call means for each lease in it."""
    if isinstance(error, Throttled):
        return Verdict(id="", verdict="throttled", retry_after=error.retry_after)
    return Verdict(id="", verdict="failed", reason=f"{type(error).__name__}: {error}")
