"""The two-deque cycle: who beats next, and when.

Rule 1: every decision about who beats next is made here.
Rule 2: this file never learns what time it is; callers say.
Rule 3: a lease is in exactly one place.

    add ──▶ MAIN ──slot──▶ IN FLIGHT ──renewed──▶ BACKUP ──next cycle──▶ MAIN
              ▲ ▲              │  │                  ▲
              │ └──throttled───┘  └──────failed──────┤ tried often enough in this cycle, and it can wait
              └────────failed, after retry_wait──────┘

*Main* holds those that still have to beat in this cycle, oldest acknowledged beat first: in an outage plain
first-in-first-out loses hundreds of leases that this order keeps. Two parts of it are apart: *urgent* terms, which
nobody may rely on before their first acknowledged beat, and *waiting* ones, which failed and may not be tried yet.
*Backup* holds those that have beaten, and, apart, the *rested*: they failed, and wait for the next cycle or for
the first sign that the service is back.

A cycle needs `ceil(held / batch)` slots. They are spread evenly over it, but no lease waits longer than one cycle after
its last beat; what was missed in a stall is made up at no more than `burst` times the even pace, and faster only where
a lease would be lost otherwise (`_in_time_at`).
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
from leasekit.config import Beats
from leasekit.task import Verdict

__all__ = ["AtRisk", "Confirmed", "Cycle", "Early", "Effect", "Lost", "Ordered", "Regranted", "Send"]


@dataclass(frozen=True, slots=True, eq=False)
class Send:
    """Renew these, in one call, and report to `Cycle.answered`. `late` is how long after its time the slot came up."""

    terms: Sequence[Term]
    late: float


@dataclass(frozen=True, slots=True)
class AtRisk:
    """The first strike."""

    term: Term
    why: str


@dataclass(frozen=True, slots=True)
class Lost:
    """Out for good: its body must stop."""

    term: Term
    reason: str
    why: str


@dataclass(frozen=True, slots=True)
class Ordered:
    """The service wants the body to wind down; the lease is kept meanwhile."""

    term: Term
    order: str


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The first acknowledged beat of a term that nobody could rely on before."""

    term: Term


@dataclass(frozen=True, slots=True)
class Regranted:
    """Renewed, but for another ttl: it has left this cycle and belongs into that ttl's."""

    term: Term
    ttl: float


Effect = Send | AtRisk | Lost | Ordered | Confirmed | Regranted
_Deque = OrderedDict[Term, None]  # a deque out of whose middle a term can be taken at once
_age = operator.attrgetter("granted_at")

# One pause for throttling is at most this part of the time that the most urgent lease has left. With nine calls in ten
# throttled that leaves a lease more than a hundred tries; fewer where the service itself says when to come back.
_TRIES = 100
_EARLY = 1.0  # seconds between two early beats of a keeper
_TRIES_AS_ASKED = 20


@dataclass(slots=True)
class Early:
    """When the next early beat may leave: one for all cycles of a keeper."""

    not_before: float = -math.inf


class Cycle:
    """All leases of one connection and one granted ttl.

    `step(now)` returns what to do, `answered(…)` takes what came back, `wake_at` tells when to step again.
    `random` gives numbers in [0, 1).
    """

    def __init__(self, beats: Beats, *, now: float, random: Callable[[], float], early: Early | None = None) -> None:
        self.beats = beats
        self._early = early or Early()
        self._news: _Deque = OrderedDict()  # of main and backup: those whose next beat may come early
        self._slack = beats.slack  # a sum, and asked for at each renewal
        self._nearest = 1 / beats.rate  # seconds between two slots, at least
        self._held = 0
        self._main: _Deque = OrderedDict()
        self._urgent: _Deque = OrderedDict()
        self._waiting: _Deque = OrderedDict()  # in the order of `not_before`
        self._backup: dict[Term, None] = {}  # all of it leaves at once, and a plain dict costs a third less
        self._rested: _Deque = OrderedDict()
        self._aside_until = math.inf  # nobody waiting or rested is lost before
        self._calls: dict[Send, float] = {}  # in flight, with the moment at which the first of its leases is lost
        self._ends_at = now + beats.cycle
        self._now = now  # when the cycle was last touched: no slot was due before
        self._last_slot = -math.inf  # when it came up
        self._even_from = -math.inf  # when it was due: the pace is kept from here, so that lateness does not add up
        self._paused_until = -math.inf
        self._down_at = -math.inf  # when the last call left that failed; a call that left later was answered: -inf
        self._eager = False  # someone is here who should not wait for the even pace
        self._needed_at: float | None = None  # when the next slot must be, as far as it is known
        self._backoff = Backoff(1 / beats.rate, beats.retry_wait, random=random)

    def __len__(self) -> int:
        """How many leases are held."""
        return self._held

    @property
    def unused(self) -> bool:
        """True where nothing is held and no answer is awaited."""
        return not self._held and not self._calls

    # Coming and going ---------------------------------------------------------------------------------------------

    def add(self, term: Term, now: float) -> None:
        """A slot is due at once, so that the service soon knows that the task is being run."""
        self._held += 1
        self._now = now
        self._eager = True
        self._into_main([term])

    def restore(self, term: Term, now: float) -> None:
        """Take over a lease that was just renewed for this cycle's ttl, in the cycle of another.

        Leases may come faster than this cycle can beat. So they go into main, from where they are spread; a crowd that
        goes into backup comes out of it as a crowd.
        """
        self._held += 1
        self._now = now
        if not (self._main or self._urgent):
            self._even_from = now
        self._into_main([term])

    def remove(self, term: Term) -> None:
        """Its beats end, and the verdict of one that is in flight will be ignored. What is not held is no error."""
        if term.place is None:
            return
        self._news.pop(term, None)
        if not isinstance(term.place, Send):
            del cast("dict[Term, None]", term.place)[term]
        term.place = None
        self._held -= 1

    def hasten(self, term: Term, now: float) -> None:
        """The service should soon hear from `term`: its next beat may be an early one.

        At most one early call a second carries all that have news, in a slot that others do not need: never closer to
        the last than `1 / rate`. A lease that failed is tried again soon, and needs none.
        """
        self._now = now
        if term.place is self._main or term.place is self._backup:
            self._news[term] = None
        else:
            term.has_news = isinstance(term.place, Send)

    def _into_main(self, terms: Sequence[Term], *, ahead: bool = False) -> None:
        """Main stays ordered by last acknowledged beat. `terms` are so too; among equals they go last, or `ahead`."""
        self._needed_at = None
        main = self._main
        if urgent := [term for term in terms if not term.confirmed]:
            _put(self._urgent, urgent)
            terms = [term for term in terms if term.confirmed]
        if not terms:
            return
        goes_before = operator.lt if ahead else operator.le
        in_front, mingled = False, 0
        # From both ends at once: nearly always they belong to one of them, and main may be long.
        for front, back in zip(main, reversed(main), strict=True):
            if goes_before(back.granted_at, terms[0].granted_at):
                break
            if not goes_before(front.granted_at, terms[-1].granted_at):
                in_front = True
                break
            mingled += 1
        if not (in_front or mingled):  # as it nearly always is, and at each turn for all that are held
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
        """What is to be done at `now`."""
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
        """The next cycle begins: everything in backup → main. By absolute time: a late turn does not shift the next."""
        cycle = self.beats.cycle
        self._ends_at += (math.floor((now - self._ends_at) / cycle) + 1) * cycle
        for term in itertools.chain(self._main, self._waiting, *(send.terms for send in self._calls)):
            term.retries = 0
        self._recover()
        self._back_to_main(self._backup, self._backup)

    def _recover(self) -> None:
        """The rested come back into main."""
        for term in self._rested:
            term.retries = 0
        self._back_to_main(self._rested, self._rested)

    def _expired(self, now: float) -> list[Term]:
        """Those whose bodies must be told now, so that they end in time. None is in backup (see `_has_beaten`)."""
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
        """When the next slot is due; never, where there is nobody to beat or no call to spare."""
        if len(self._calls) >= self.beats.in_flight:
            return math.inf
        at = self._regular_at(now)
        if self._news and self._early_pace < math.inf:
            at = min(at, self._early.not_before)
        return max(at, self._last_slot + self._nearest, self._paused_until, self._now)

    @property
    def _early_pace(self) -> float:
        """Seconds between two early beats: those slots of a cycle carry them that its leases do not need."""
        beats = self.beats
        spare = int(beats.rate * beats.cycle + 1e-6) - math.ceil(self._held / beats.batch)
        if spare <= 0:
            return math.inf
        pace = max(_EARLY, beats.cycle / spare)
        # In an outage no more often than a failed beat is tried again.
        return pace if self._down_at == -math.inf else max(pace, beats.retry_wait)

    def _regular_at(self, now: float) -> float:
        """When the next slot is due that is no early one."""
        if not (self._main or self._urgent):
            return math.inf
        even = max(self._nearest, self.beats.cycle / math.ceil(self._held / self.beats.batch))
        # Few leases make an even pace so slow that a failed one would wait for long: its own retry_wait bounds it.
        hurried = max(self._nearest, min(even / self.beats.burst, self.beats.retry_wait))
        if self._urgent or self._paused_until > self._last_slot:  # throttled since: the pause is the pace
            at = self._even_from + self._nearest
        else:
            at = self._even_from + (hurried if self._eager else even)
            due = next(iter(self._main)).granted_at + self.beats.cycle
            # Far behind, after a stall or an outage: do not make it all up at once.
            on_time = due >= now - min(even, self.beats.cycle / 20)
            at = min(at, due if on_time else self._even_from + hurried, self._in_time_at(now))
        return at

    def _in_time_at(self, now: float) -> float:
        """The latest moment for the next slot with which slots that follow at the same distance renew main in time.

        In time is within a cycle after the last beat; where that has passed already, before the lease is lost.
        """
        if self._needed_at is None:
            beats = self.beats
            first = next(iter(self._main))
            within = beats.cycle if first.granted_at + beats.cycle >= now else self._slack - beats.call_timeout
            before = math.ceil(len(self._waiting) / beats.batch)
            heads = itertools.islice(self._main, 0, None, beats.batch)  # the oldest of each slot
            self._needed_at = now + min(
                (head.granted_at + within - now) / slots for slots, head in enumerate(heads, 1 + before)
            )
        return self._needed_at

    def _gather(self, soon: float) -> None:
        """Move into main what cannot wait for the next slot, which is at `soon`."""
        last, cycle = soon + self.beats.call_timeout, self.beats.cycle
        if self._aside_until <= last:
            self._back_to_main(self._waiting, (term for term in self._waiting if term.lost_at <= last))
        if soon > self._ends_at:
            self._back_to_main(self._backup, (term for term in self._backup if term.granted_at + cycle < soon))

    def _slot(self, now: float, due: float) -> Send:
        was_due = self._regular_at(now) <= now  # whoever is gathered may be so far behind that it is not any more
        self._gather(now + self._nearest)
        terms: list[Term] = []
        if was_due or self._regular_at(now) < now + self._nearest:  # the next slot would come too late for it
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
        if self._main and next(iter(self._main)).granted_at + self.beats.cycle <= now:
            places.reverse()  # what runs goes before what has not begun, once it is due
        for place in places:
            take = place.popitem
            terms += [take(last=False)[0] for _ in range(min(len(place), self.beats.batch - len(terms)))]
        if self._news:
            for term in terms:
                self._news.pop(term, None)

    def _take_news(self, terms: list[Term], now: float) -> None:
        """Fill what is left of a slot with leases that have news, if an early beat may leave."""
        room = min(len(self._news), self.beats.batch - len(terms))
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
        """One verdict for each lease of `send`, whose request left at `asked_at`: *failed* for each if the call did."""
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
            if asked_at + self._slack <= now:  # over again before anybody could rely on it
                self._into_main([term])
                return
            effects.append(Confirmed(term))
        term.renewed(asked_at)
        self._has_beaten(term)
        if term.has_news:  # it came while this beat was on its way
            self._news[term] = None
        if verdict.order is not None:
            effects.append(Ordered(term, verdict.order))
        if verdict.ttl is not None and verdict.ttl != self.beats.ttl:
            self.remove(term)
            effects.append(Regranted(term, verdict.ttl))

    def _has_beaten(self, term: Term) -> None:
        """Put `term` into backup until the turn; where its next beat is due before (the answer was late), into main."""
        if term.granted_at + self.beats.cycle >= self._ends_at:
            self._backup[term] = None
            term.place = self._backup
        else:
            self._into_main([term])

    def _throttled(self, throttled: Sequence[tuple[Term, Verdict]], now: float) -> None:
        """A plain retry, by the same leases, after a pause that takes little of the trust that they have left."""
        self._into_main(sorted((term for term, _ in throttled), key=_age), ahead=True)
        left = _first_end(term for term, _ in throttled) - now
        asked = max((verdict.retry_after or 0.0 for _, verdict in throttled), default=0.0)
        if asked > 0:
            wait = min(asked, self.beats.cycle / 2, left / _TRIES_AS_ASKED)
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
        term.not_before = now + self.beats.retry_wait
        # All that rest come back at once: the last slot for them is this much later.
        turns = math.ceil(self._held / self.beats.batch) / self.beats.rate
        can_wait = term.lost_at > self._ends_at + turns + self.beats.call_timeout + self.beats.retry_wait
        # The turn ends a rest: where that comes before `retry_wait` is over, there is none.
        can_wait = can_wait and term.not_before <= self._ends_at
        rests = term.retries > self.beats.retries_per_cycle and can_wait and term.confirmed
        _put(self._rested if rests else self._waiting, [term])
        if term.confirmed:
            self._aside_until = min(self._aside_until, term.lost_at)


def _put(place: _Deque, terms: Iterable[Term]) -> None:
    for term in terms:
        place[term] = None
        term.place = place


def _over(terms: Iterable[Term], now: float) -> list[Term]:
    """Those that are lost; one that is not confirmed cannot be."""
    return [term for term in terms if term.confirmed and term.lost_at <= now]


def _first_end(terms: Iterable[Term], *, after: float = -math.inf) -> float:
    """When the first of these is lost."""
    return min((term.lost_at for term in terms if term.confirmed and term.lost_at > after), default=math.inf)


def _silence(term: Term, now: float) -> str:
    failed = f", {term.strikes} failed since" if term.strikes else ""
    return f"no beat was acknowledged for {now - term.granted_at:.1f} s of a ttl of {term.beats.ttl:g} s{failed}"
