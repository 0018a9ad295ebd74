"""Renewal: send the heartbeats of one connection's leases, and do what the verdicts ask for.

Which lease is renewed when is decided by the cycles (`_core/cycle.py`), one for each ttl. All of it runs in the
driver's thread. An error of a backend becomes a verdict: no error of a service or an adapter ends a lease.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from msgspec import UNSET

from leasekit import hooks as events
from leasekit._core.cycle import Cycle, Early, Lost, Send, in_turn
from leasekit._core.term import Term
from leasekit._driver.context import Context
from leasekit._driver.keeping.held_lease import HeldLease
from leasekit._driver.retrying import call_by_task
from leasekit._driver.thread import spawn
from leasekit.backend import cancel_all
from leasekit.config import LONGEST, Heartbeats
from leasekit.errors import BackendError, Refused, Throttled
from leasekit.task import Beat, Verdict

# Seconds after the end of `max_runtime` until its heartbeat leaves. Two clocks differ by some milliseconds in a cycle,
# and a heartbeat that arrives too early is renewed.
_AFTER = 0.1


class Renewal:
    """The cycles of one connection and their calls in progress. Used in the driver's thread alone.

    `look_after` is called with each lease before its heartbeat leaves, `on_lost` with the leases that are lost,
    `on_cancel` with one that the service asks to wind down.
    """

    def __init__(
        self,
        context: Context,
        heartbeats: Heartbeats,
        *,
        look_after: Callable[[HeldLease], object],
        on_lost: Callable[[Sequence[Lost], float], object],
        on_cancel: Callable[[HeldLease, float], object],
    ) -> None:
        self._context = context
        self._heartbeats = heartbeats
        self._look_after = look_after
        self._on_lost = on_lost
        self._on_cancel = on_cancel
        self._cycles: dict[float, Cycle] = {}
        self._early = Early()
        self._calls: set[asyncio.Task[None]] = set()
        self._limited: dict[HeldLease, None] = {}  # a heartbeat is due when `max_runtime` of these is over …
        self._limited_from = math.inf  # … which is not the case before

    def add(self, held: HeldLease, *, renewed: bool = False) -> None:
        """Renew a lease from now on; `wake` follows. `renewed`: it was renewed just now, by another cycle."""
        term = held.term
        ttl = term.heartbeats.ttl
        cycle = self._cycles.get(ttl)
        if cycle is None:
            cycle = self._cycles[ttl] = Cycle(
                term.heartbeats, now=self._context.clock.now(), random=self._context.chance.random, early=self._early
            )
        cycle.add(term, self._context.clock.now(), renewed=renewed)

    def wake(self) -> None:
        """Have the keeper take its turn if something is due before it would. Once for many leases: it looks at all."""
        if any(cycle.wake_at < self._context.wakes_at for cycle in self._cycles.values()):
            self._context.wake.set()

    def remove(self, held: HeldLease) -> None:
        """Renew a lease no longer; a lease that is not renewed is no error."""
        self._limited.pop(held, None)
        cycle = self._cycles.get(held.term.heartbeats.ttl)
        if cycle is not None:
            cycle.remove(held.term)

    def hasten(self, held: HeldLease) -> None:
        """Have the next heartbeat of a lease leave soon, because it brings news."""
        self._cycles[held.term.heartbeats.ttl].hasten(held.term, self._context.clock.now())
        if self._early.not_before < self._context.wakes_at:
            self._context.wake.set()

    def step(self, now: float) -> float:
        """Start the calls that are due at `now`, and report lost leases; return when the next work is due."""
        if now >= self._limited_from:
            self._end_limited(now)
        for cycle in in_turn(self._cycles.values()):
            effects = cycle.step(now)
            self._on_lost([effect for effect in effects if isinstance(effect, Lost)], now)
            for effect in effects:
                if isinstance(effect, Send):
                    spawn(self._beat(cycle, effect, [term.key for term in effect.terms]), self._calls)
            if cycle.unused:
                del self._cycles[cycle.heartbeats.ttl]
        return min([self._limited_from, *(cycle.wake_at for cycle in self._cycles.values())])

    def _limit(self, held: HeldLease, remaining: float, now: float) -> None:
        """Note that the run may last for `remaining` seconds, counted from the answer that says so: never too short."""
        held.run_until = now + remaining
        self._limited[held] = None
        self._limited_from = min(self._limited_from, held.run_until + _AFTER)

    def _end_limited(self, now: float) -> None:
        """Send a heartbeat for each run whose `max_runtime` is over, so that the service answers *overdue*."""
        ends = {held: (held.run_until or 0.0) + _AFTER for held in self._limited}
        for held, end in ends.items():
            if end <= now:
                del self._limited[held]  # until the service says again that something is left
                if held.term.place is not None and not held.settling:
                    self.hasten(held)
        # Not more often, because each look takes time for every lease.
        self._limited_from = max(now + _AFTER, min((end for end in ends.values() if end > now), default=math.inf))

    async def aclose(self) -> None:
        await cancel_all(self._calls)

    async def _beat(self, cycle: Cycle, send: Send, leases: Sequence[HeldLease]) -> None:
        for held in leases:
            self._look_after(held)
        beats = [held.beat for held in leases]
        asked_at = self._context.clock.now()
        call, failure = self._context.recorder.sent(send, asked_at, held=sum(map(len, self._cycles.values()))), None
        if self._context.hooks.active:
            self._context.hooks(events.Sent(at=asked_at, task_ids=[beat.id for beat in beats], late=send.late))
        try:
            unique_ids = self._context.backend.capabilities.unique_ids
            sending = partial(call_by_task, self._checked_verdicts, beats, unique_ids=unique_ids)
            verdicts = await self._context.reachability.call("beat", sending, within=cycle.heartbeats.call_timeout)
        except BackendError as error:
            failure = _verdict_of_failure(error)
            verdicts = [failure] * len(beats)
            if isinstance(error, Refused):
                _forget_refused_progress(leases, beats, error)
        now = self._context.clock.now()
        self._context.recorder.answered(call, verdicts, now, error=failure)
        for held, beat, verdict in zip(leases, beats, verdicts, strict=True):
            if beat.progress is not UNSET and verdict.verdict == "renewed":
                held.reported(beat)
        if self._context.hooks.active:
            self._call_hooks(verdicts, asked_at, now)
        lost = cycle.answered(send, verdicts, asked_at=asked_at, now=now)
        # No await between the extended trust and the timer that ends with it.
        renewed = [term for term in send.terms if term.granted_at == asked_at and term.place is not None]
        self._extend_watchdogs(renewed, asked_at + cycle.heartbeats.trust)
        self._on_lost(lost, now)
        for held, verdict in zip(leases, verdicts, strict=True):
            self._follow(cycle, held, verdict, now)
        self._context.wake.set()

    async def _checked_verdicts(self, beats: Sequence[Beat]) -> list[Verdict]:
        """Send a batch of heartbeats; return a verdict for each. The caller makes verdicts of errors.

        A verdict for another lease than the heartbeat at its place, or with an impossible ttl, becomes *failed*.
        """
        verdicts = await self._context.backend.beat(beats)
        # Nearly always all verdicts are in order, and this is the cheapest check for that.
        if [verdict.id for verdict in verdicts] == [beat.id for beat in beats] and all(
            map(_is_sensible, {verdict.ttl: verdict for verdict in verdicts}.values())
        ):
            return verdicts
        nonsense = "the service's verdict makes no sense"
        return [
            verdict
            if verdict.id == beat.id and _is_sensible(verdict)
            else Verdict(id=beat.id, verdict="failed", reason=nonsense)
            for beat, verdict in zip(beats, verdicts, strict=True)
        ]

    def _call_hooks(self, verdicts: Sequence[Verdict], asked_at: float, now: float) -> None:
        counts = Counter[str]([verdict.verdict for verdict in verdicts])
        self._context.hooks(events.Answered(at=now, round_trip=now - asked_at, verdicts=counts))
        if renewed := [verdict.id for verdict in verdicts if verdict.verdict == "renewed"]:
            self._context.hooks(events.Renewed(at=now, task_ids=renewed, round_trip=now - asked_at))

    def _extend_watchdogs(self, renewed: Sequence[Term], until: float) -> None:
        self._context.watchdog.renewed(renewed, until)
        for term in renewed:
            if (guard := term.key.watchdog) is not self._context.watchdog:  # the handler runs in another process
                guard.renewed([term], until)

    def _follow(self, cycle: Cycle, held: HeldLease, verdict: Verdict, now: float) -> None:
        """Do what a verdict asks for beyond the cycle, unless the lease was settled or lost meanwhile."""
        term, task = held.term, held.task
        if term.place is None:
            return
        if verdict.verdict == "renewed" and term.confirmed:
            held.may_begin()
            if verdict.cancel_requested:
                self._on_cancel(held, now)
            if verdict.ttl is not None and verdict.ttl != cycle.heartbeats.ttl:
                self._regrant(held, verdict.ttl)
            if verdict.remaining_runtime is not None:
                self._limit(held, verdict.remaining_runtime, now)
        elif term.strikes == 1 and verdict.verdict not in ("renewed", "throttled"):
            why = verdict.reason or "no reason given"
            self._context.hooks(events.AtRisk(at=now, task_id=task.id, token=task.token, why=why))

    def _regrant(self, held: HeldLease, ttl: float) -> None:
        self.remove(held)
        held.term.heartbeats = self._heartbeats.for_ttl(ttl)
        held.watchdog.renewed([held.term], held.term.trusted_until)
        self.add(held, renewed=True)
        if held.term.has_news and not held.settling:  # the news came while the heartbeat was on its way
            self.hasten(held)


def _forget_refused_progress(leases: Sequence[HeldLease], beats: Sequence[Beat], refused: Refused) -> None:
    """Drop the progress to blame for a refused batch: apart from ids, only users' progress can be at fault."""
    blamed = {error.get("item") for error in refused.errors}
    for position in [n for n in range(len(beats)) if n in blamed] or range(len(beats)):
        leases[position].forget_progress(beats[position])


def _is_sensible(verdict: Verdict) -> bool:
    return verdict.ttl is None or 2 <= verdict.ttl <= LONGEST


def _verdict_of_failure(error: BackendError) -> Verdict:
    if isinstance(error, Throttled):
        return Verdict(id="", verdict="throttled", retry_after=error.retry_after)
    return Verdict(id="", verdict="failed", reason=f"{type(error).__name__}: {error}")
