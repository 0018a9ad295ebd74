"""Two-deque heartbeat cycle: decide which leases are renewed next, and when.

Rule 1: every decision about the order of heartbeats is made here.
Rule 2: this module never reads a clock; callers pass `now`.
Rule 3: a lease is in exactly one place.

    add ──▶ MAIN ──slot──▶ IN FLIGHT ──renewed──▶ BACKUP ──next cycle──▶ MAIN
              ▲ ▲              │  │                  ▲
              │ └──throttled───┘  └──────failed──────┤ tried often enough in this cycle, and it can wait
              └────────failed, after retry_wait──────┘

*Main* holds the leases that still need a heartbeat in this cycle, oldest acknowledged heartbeat first: in an outage
plain first-in-first-out loses hundreds of leases that this order keeps. Two parts of main are kept apart: *urgent*
leases, which must not be relied on before their first acknowledged heartbeat, and *waiting* leases, whose heartbeat
failed and must not be tried again yet. *Backup* holds the leases that were renewed in this cycle, and, apart, the
*rested* ones: their heartbeats failed, and they wait for the next cycle or for the first sign that the service is back.

A cycle needs `ceil(held / batch)` slots. Slots are spread evenly over the cycle, but no lease waits longer than one
cycle after its last heartbeat. Slots that were missed in a stall are made up at no more than `burst` times the even
pace, and faster only where a lease would be lost otherwise (`_in_time_at`).
"""

import itertools
import math
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from leasekit._core.backoff import Backoff
from leasekit._core.term import Term
from leasekit.config import Heartbeats
from leasekit.task import Verdict

__all__ = ["AtRisk", "CancelRequested", "Confirmed", "Cycle", "Early", "Effect", "Lost", "Regranted", "Send"]


@dataclass(frozen=True, slots=True, eq=False)
class Send:
    """Renew `terms` in one call, and report to `Cycle.answered`. `late`: seconds by which the slot came too late."""

    terms: Sequence[Term]
    late: float


@dataclass(frozen=True, slots=True)
class AtRisk:
    """The first heartbeat of a lease failed."""

    term: Term
    why: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The lease is lost for good: the code under it must stop."""

    term: Term
    reason: str
    why: str


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """The service asks the code under the lease to wind down; the lease is kept meanwhile."""

    term: Term
    order: str


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The first heartbeat of a lease was acknowledged: from now on code may rely on the lease."""

    term: Term


@dataclass(frozen=True, slots=True)
class Regranted:
    """The lease was renewed with another `ttl`: it has left this cycle and belongs into the cycle of that ttl."""

    term: Term
    ttl: float


Effect = Send | AtRisk | Lost | CancelRequested | Confirmed | Regranted
_Deque = OrderedDict[Term, None]  # a deque from whose middle a term can be removed in O(1)
_age = operator.attrgetter("granted_at")

# One pause for throttling is at most this part of the time that the most urgent lease has left. With nine calls in ten
# throttled a lease still gets more than a hundred tries; fewer where the service itself says when to come back.
_TRIES = 100
_EARLY = 1.0  # seconds between two early heartbeats of a keeper
_TRIES_AS_ASKED = 20


@dataclass(slots=True)
class Early:
    """The instant from which the next early heartbeat may leave, shared by all cycles of a keeper."""

    not_before: float = -math.inf


class Cycle:
    """Schedule the heartbeats of all leases of one connection that were granted the same ttl.

    `step(now)` returns what to do, `answered(…)` takes the service's answers, `wake_at` is when to step again.
    `random` gives numbers in [0, 1).
    """

    def __init__(
        self, heartbeats: Heartbeats, *, now: float, random: Callable[[], float], early: Early | None = None
    ) -> None:
        self.heartbeats, self._early = heartbeats, early or Early()
        self._news: _Deque = OrderedDict()  # leases in main and backup whose next heartbeat may come early
        self._slack, self._held = heartbeats.slack, 0  # slack is a sum, and asked for at each renewal
        self._nearest = 1 / heartbeats.rate  # seconds between two slots, at least
        self._main: _Deque = OrderedDict()
        self._urgent: _Deque = OrderedDict()
        self._waiting: _Deque = OrderedDict()  # in the order of `not_before`
        self._backup: dict[Term, None] = {}  # all of it leaves at once, and a plain dict costs a third less
        self._rested: _Deque = OrderedDict()
        self._aside_until = math.inf  # no waiting or rested lease is lost before
        self._calls: dict[Send, float] = {}  # in flight, with the moment at which the first of its leases is lost
        self._ends_at = now + heartbeats.cycle
        self._now = now  # when the cycle was last touched: no slot was due before
        self._last_slot = -math.inf  # when it came up
        self._even_from = -math.inf  # when it was due: the pace is kept from here, so that lateness does not add up
        self._paused_until = -math.inf
        self._down_at = -math.inf  # when the last call left that failed; a call that left later was answered: -inf
        self._eager = False  # some lease should not wait for the even pace
        self._needed_at: float | None = None  # when the next slot must be, as far as it is known
        self._backoff = Backoff(1 / heartbeats.rate, heartbeats.retry_wait, random=random)

    def __len__(self) -> int:
        """How many leases are held."""
        return self._held

    @property
    def unused(self) -> bool:
        """True where nothing is held and no answer is awaited."""
        return not self._held and not self._calls

    # Coming and going ---------------------------------------------------------------------------------------------

    def add(self, term: Term, now: float) -> None:
        """Add a lease. A slot is due at once, so that the service soon knows that the task is being run."""
        self._held += 1
        self._now = now
        self._eager = True
        self._into_main([term])

    def restore(self, term: Term, now: float) -> None:
        """Add a lease that another cycle has just renewed for this cycle's ttl.

        Leases may come faster than this cycle can renew them. So they go into main, from where they are spread; a crowd
        that goes into backup comes out of backup as a crowd.
        """
        self._held += 1
        self._now = now
        if not (self._main or self._urgent):
            self._even_from = now
        self._into_main([term])

    def remove(self, term: Term) -> None:
        """Remove a lease; the verdict of a heartbeat in flight is ignored. A lease that is not held is no error."""
        if term.place is None:
            return
        self._news.pop(term, None)
        if not isinstance(term.place, Send):
            del cast("dict[Term, None]", term.place)[term]
        term.place = None
        self._held -= 1

    def hasten(self, term: Term, now: float) -> None:
        """Allow the next heartbeat of `term` to leave early, because the service should soon hear its news.

        At most one early call a second carries all leases that have news, in a slot that a full cycle does not need:
        never closer to the last slot than `1 / rate`. A lease whose heartbeat failed is tried again soon anyway.
        """
        self._now = now
        if term.place is self._main or term.place is self._backup:
            self._news[term] = None
        else:
            term.has_news = isinstance(term.place, Send)

    def _into_main(self, terms: Sequence[Term], *, ahead: bool = False) -> None:
        """Merge `terms` into main, both ordered by last acknowledged heartbeat. Equals go last, or first if `ahead`."""
        self._needed_at = None
        main = self._main
        if urgent := [term for term in terms if not term.confirmed]:
            _put(self._urgent, urgent)
            terms = [term for term in terms if term.confirmed]
        if not terms:
            return
        goes_before = operator.lt if ahead else operator.le
        in_front, mingled = False, 0
        # From both ends at once: nearly always `terms` belong to one of them, and main may be long.
        for front, back in zip(main, reversed(main), strict=True):
            if goes_before(back.granted_at, terms[0].granted_at):
                break
            if not goes_before(front.granted_at, terms[-1].granted_at):
                in_front = True
                break
            mingled += 1
        if not (in_front or mingled):  # the usual case; at each turn it is that of all leases
            _put(main, terms)
            return
        others = list(itertools.islice(main if in_front else reversed(main), mingled))
        if not in_front:
            others.reverse()
        order = sorted([*terms, *others] if ahead else [*others, *terms], key=_age)
        _put(main, terms)
        for term in reversed(order) if in_front else order:
            main.move_to_end(term, last=not in_front)

    def _back_to_main(self, place: dict[Term, None], terms: Iterable[Term]) -> None:
        terms = sorted(terms, key=_age)
        for term in terms:
            del place[term]
        self._into_main(terms)

    # Time passes --------------------------------------------------------------------------------------------------

    def step(self, now: float) -> list[Effect]:
        """Return what is to be done at `now`."""
        if now >= self._ends_at:
            self._turn(now)
        if ready := list(itertools.takewhile(lambda term: term.not_before <= now, self._waiting)):
            self._back_to_main(self._waiting, ready)
            self._eager = True
        effects: list[Effect] = [self._lose(term, "expired", _silence(term, now)) for term in self._expired(now)]
        due = self._slot_at(now)
        if now >= due:
            effects.append(self._slot(now, due))
        self._now = now
        return effects

    @property
    def wake_at(self) -> float:
        """When `step` has something to do next, if nothing else happens before."""
        if not self._held:
            return math.inf
        return min(
            self._ends_at,
            self._slot_at(self._now),
            next(iter(self._waiting)).not_before if self._waiting else math.inf,
            next(iter(self._main)).lost_at if self._main else math.inf,
            min(self._calls.values(), default=math.inf),
            self._aside_until,
        )

    def _turn(self, now: float) -> None:
        """Begin the next cycle: move backup into main. Ends are absolute: a late turn does not shift the next one."""
        cycle = self.heartbeats.cycle
        self._ends_at += (math.floor((now - self._ends_at) / cycle) + 1) * cycle
        for term in itertools.chain(self._main, self._waiting, *(send.terms for send in self._calls)):
            term.retries = 0
        self._recover()
        self._back_to_main(self._backup, self._backup)

    def _recover(self) -> None:
        """Move the rested leases back into main."""
        for term in self._rested:
            term.retries = 0
        self._back_to_main(self._rested, self._rested)

    def _expired(self, now: float) -> list[Term]:
        """Return the leases that are lost by `now`, so that their code is told. None is in backup (`_has_beaten`)."""
        expired = list(itertools.takewhile(lambda term: term.lost_at <= now, self._main))
        for send, lost_at in self._calls.items():
            if lost_at <= now:
                left = [term for term in send.terms if term.place is send]
                expired += _over(left, now)
                self._calls[send] = _first_end(left, after=now)
        if self._aside_until <= now:
            aside = [*self._waiting, *self._rested]
            expired += _over(aside, now)
            self._aside_until = _first_end(aside, after=now)
        return expired

    def _lose(self, term: Term, reason: str, why: str) -> Lost:
        self.remove(term)
        return Lost(term, reason, why)

    # Slots --------------------------------------------------------------------------------------------------------

    def _slot_at(self, now: float) -> float:
        """Return when the next slot is due: infinity without a lease to renew, or without a call to spare."""
        if len(self._calls) >= self.heartbeats.in_flight:
            return math.inf
        at = self._regular_at(now)
        if self._news and self._early_pace < math.inf:
            at = min(at, self._early.not_before)
        return max(at, self._last_slot + self._nearest, self._paused_until, self._now)

    @property
    def _early_pace(self) -> float:
        """Seconds between two early heartbeats, which use the slots of a cycle that its leases do not need."""
        heartbeats = self.heartbeats
        spare = int(heartbeats.rate * heartbeats.cycle + 1e-6) - math.ceil(self._held / heartbeats.batch)
        if spare <= 0:
            return math.inf
        pace = max(_EARLY, heartbeats.cycle / spare)
        # In an outage, no more often than a failed heartbeat is tried again.
        return pace if self._down_at == -math.inf else max(pace, heartbeats.retry_wait)

    def _regular_at(self, now: float) -> float:
        """Return when the next slot is due, early ones apart."""
        if not (self._main or self._urgent):
            return math.inf
        even = max(self._nearest, self.heartbeats.cycle / math.ceil(self._held / self.heartbeats.batch))
        # Few leases make the even pace so slow that a failed heartbeat would wait for long: `retry_wait` bounds it.
        hurried = max(self._nearest, min(even / self.heartbeats.burst, self.heartbeats.retry_wait))
        if self._urgent or self._paused_until > self._last_slot:  # throttled since: the pause is the pace
            at = self._even_from + self._nearest
        else:
            at = self._even_from + (hurried if self._eager else even)
            due = next(iter(self._main)).granted_at + self.heartbeats.cycle
            # Far behind, after a stall or an outage: do not make it all up at once.
            on_time = due >= now - min(even, self.heartbeats.cycle / 20)
            at = min(at, due if on_time else self._even_from + hurried, self._in_time_at(now))
        return at

    def _in_time_at(self, now: float) -> float:
        """Return the latest instant for the next slot with which slots at the same distance renew main in time.

        In time: within a cycle after the last heartbeat; where that has passed already, before the lease is lost.
        """
        if self._needed_at is None:
            cycle, batch = self.heartbeats.cycle, self.heartbeats.batch
            first = next(iter(self._main))
            within = cycle if first.granted_at + cycle >= now else self._slack - self.heartbeats.call_timeout
            before = math.ceil(len(self._waiting) / batch)
            heads = itertools.islice(self._main, 0, None, batch)  # the oldest of each slot
            self._needed_at = now + min(
                (head.granted_at + within - now) / slots for slots, head in enumerate(heads, 1 + before)
            )
        return self._needed_at

    def _gather(self, soon: float) -> None:
        """Move into main the leases that cannot wait for the next slot, which is at `soon`."""
        last, cycle = soon + self.heartbeats.call_timeout, self.heartbeats.cycle
        if self._aside_until <= last:
            self._back_to_main(self._waiting, (term for term in self._waiting if term.lost_at <= last))
        if soon > self._ends_at:
            self._back_to_main(self._backup, (term for term in self._backup if term.granted_at + cycle < soon))

    def _slot(self, now: float, due: float) -> Send:
        was_due = self._regular_at(now) <= now  # what is gathered may be so late that no slot is due any more
        self._gather(now + self._nearest)
        terms: list[Term] = []
        if was_due or self._regular_at(now) < now + self._nearest:  # the next slot would come too late
            self._take_due(terms, now)
            self._even_from = due if now - due < self._nearest else now
            self._eager = False
        self._take_news(terms, now)
        send = Send(terms, now - due)
        for term in terms:
            term.place = send
            term.has_news = False
        self._calls[send] = _first_end(terms)
        self._last_slot = now
        self._needed_at = None
        return send

    def _take_due(self, terms: list[Term], now: float) -> None:
        places = [self._urgent, self._main]
        if self._main and next(iter(self._main)).granted_at + self.heartbeats.cycle <= now:
            places.reverse()  # once it is due, a task that runs goes before one that has not begun
        for place in places:
            take = place.popitem
            terms += [take(last=False)[0] for _ in range(min(len(place), self.heartbeats.batch - len(terms)))]
        if self._news:
            for term in terms:
                self._news.pop(term, None)

    def _take_news(self, terms: list[Term], now: float) -> None:
        """Fill what is left of a slot with leases that have news, if an early heartbeat may leave."""
        room = min(len(self._news), self.heartbeats.batch - len(terms))
        if not room or now < self._early.not_before:
            return
        if not terms:
            self._early.not_before = now + self._early_pace
        for _ in range(room):
            term, _ = self._news.popitem(last=False)
            del cast("dict[Term, None]", term.place)[term]
            terms.append(term)

    # Answers ------------------------------------------------------------------------------------------------------

    def answered(self, send: Send, verdicts: Sequence[Verdict], *, asked_at: float, now: float) -> list[Effect]:
        """Apply a verdict for each lease of `send`, which left at `asked_at`; a failed call is *failed* for each."""
        del self._calls[send]
        self._now = now
        effects: list[Effect] = []
        throttled: list[tuple[Term, Verdict]] = []
        renewed = False
        for term, verdict in zip(send.terms, verdicts, strict=True):
            if term.place is not send:  # removed or lost meanwhile: never renew after settle
                continue
            match verdict.verdict:
                case "renewed":
                    renewed = True
                    self._renewed(term, verdict, asked_at, now, effects)
                case "throttled":
                    throttled.append((term, verdict))
                case "gone":
                    reason = verdict.reason or "unknown"
                    effects.append(self._lose(term, reason, f"the service answered that the lease is gone: {reason}"))
                case _:
                    self._failed(term, verdict.reason or "no reason given", asked_at, now, effects)
        if renewed:
            self._backoff.reset()
            if asked_at > self._down_at > -math.inf:  # the first sign that the service is back
                self._recover()
                self._down_at = -math.inf
        elif not throttled:
            self._down_at = max(self._down_at, asked_at)
        if throttled:
            self._throttled(throttled, now)
        return effects

    def _renewed(self, term: Term, verdict: Verdict, asked_at: float, now: float, effects: list[Effect]) -> None:
        if not term.confirmed:
            if asked_at + self._slack <= now:  # over again before any code could rely on it
                self._into_main([term])
                return
            effects.append(Confirmed(term))
        term.renewed(asked_at)
        self._has_beaten(term)
        if term.has_news:  # the news came while this heartbeat was on its way
            self._news[term] = None
        if verdict.order is not None:
            effects.append(CancelRequested(term, verdict.order))
        if verdict.ttl is not None and verdict.ttl != self.heartbeats.ttl:
            self.remove(term)
            effects.append(Regranted(term, verdict.ttl))

    def _has_beaten(self, term: Term) -> None:
        """Put `term` into backup until the turn, or into main if its next heartbeat is due before (late answer)."""
        if term.granted_at + self.heartbeats.cycle >= self._ends_at:
            self._backup[term] = None
            term.place = self._backup
        else:
            self._into_main([term])

    def _throttled(self, throttled: Sequence[tuple[Term, Verdict]], now: float) -> None:
        """Retry the same leases after a pause that is short beside the trust that they have left."""
        self._into_main(sorted((term for term, _ in throttled), key=_age), ahead=True)
        left = _first_end(term for term, _ in throttled) - now
        asked = max((verdict.retry_after or 0.0 for _, verdict in throttled), default=0.0)
        if asked > 0:
            wait = min(asked, self.heartbeats.cycle / 2, left / _TRIES_AS_ASKED)
        else:
            wait = min(self._backoff.wait(), left / _TRIES)
        # A later answer does not shorten the pause that an earlier one asked for.
        self._paused_until = min(max(self._paused_until, now + wait), now + left / _TRIES_AS_ASKED)

    def _failed(self, term: Term, why: str, asked_at: float, now: float, effects: list[Effect]) -> None:
        if term.failed(asked_at):
            why = f"{term.strikes} beats in a row failed, {now - term.granted_at:.0f} s after the last grant: {why}"
            effects.append(self._lose(term, "strikes", why))
            return
        if term.strikes == 1:
            effects.append(AtRisk(term, why))
        term.not_before = now + self.heartbeats.retry_wait
        # All rested leases come back at once: their last slot is this much later.
        turns = math.ceil(self._held / self.heartbeats.batch) / self.heartbeats.rate
        can_wait = term.lost_at > self._ends_at + turns + self.heartbeats.call_timeout + self.heartbeats.retry_wait
        # The turn ends a rest: if the turn comes before `retry_wait` is over, there is no rest.
        can_wait = can_wait and term.not_before <= self._ends_at
        rests = term.retries > self.heartbeats.retries_per_cycle and can_wait and term.confirmed
        _put(self._rested if rests else self._waiting, [term])
        if term.confirmed:
            self._aside_until = min(self._aside_until, term.lost_at)


def _put(place: _Deque, terms: Iterable[Term]) -> None:
    for term in terms:
        place[term] = None
        term.place = place


def _over(terms: Iterable[Term], now: float) -> list[Term]:
    """Return the terms that are lost; a term that is not confirmed cannot be."""
    return [term for term in terms if term.confirmed and term.lost_at <= now]


def _first_end(terms: Iterable[Term], *, after: float = -math.inf) -> float:
    """Return when the first of `terms` is lost after `after`."""
    return min((term.lost_at for term in terms if term.confirmed and term.lost_at > after), default=math.inf)


def _silence(term: Term, now: float) -> str:
    failed = f", {term.strikes} failed since" if term.strikes else ""
    return f"no beat was acknowledged for {now - term.granted_at:.1f} s of a ttl of {term.heartbeats.ttl:g} s{failed}"
