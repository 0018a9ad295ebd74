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
from dataclasses import dataclass, field

from leasekit._core.backoff import Backoff
from leasekit._core.term import Term
from leasekit.config import Heartbeats
from leasekit.task import Verdict


@dataclass(frozen=True, slots=True, eq=False)
class Send:
    """Renew `terms` in one call, and report to `Cycle.answered`. `late`: seconds by which the slot came too late."""

    terms: list[Term]
    late: float
    news: set[Term] = field(default_factory=set[Term])  # those whose news the service has not heard yet


@dataclass(frozen=True, slots=True)
class Lost:
    """The lease is lost for good: the code under it must stop."""

    term: Term
    reason: str


_Deque = OrderedDict[Term, None]  # a deque from whose middle a term can be removed in O(1)
_age = operator.attrgetter("granted_at")

# One pause for throttling is at most this part of the time that the most urgent lease has left. With nine calls in ten
# throttled a lease still gets more than a hundred tries; fewer where the service itself says when to come back.
_TRIES = 100
_TRIES_AS_ASKED = 20
_EARLY = 1.0  # seconds between two early heartbeats of a keeper


@dataclass(slots=True)
class Early:
    """The instant from which the next early heartbeat may leave, shared by all cycles of a keeper."""

    not_before: float = -math.inf


class Cycle:
    """Schedule the heartbeats of all leases of one connection that were granted the same ttl.

    `step(now)` returns what to do, `answered(…)` takes the service's answers, `wake_at` is when to step again.
    """

    def __init__(self, heartbeats: Heartbeats, *, now: float, random: Callable[[], float], early: Early) -> None:
        self.heartbeats = heartbeats
        self._held = 0
        self._main: _Deque = OrderedDict()
        self._urgent: _Deque = OrderedDict()
        self._waiting: _Deque = OrderedDict()  # in the order of `not_before`
        self._backup: dict[Term, None] = {}  # all of it leaves at once, and a plain dict costs a third less
        self._rested: _Deque = OrderedDict()
        self._in_flight: list[Send] = []
        self._lost_from = math.inf  # no lease is lost before
        self._ends_at = now + heartbeats.cycle
        self._now = now  # when the cycle was last touched: no slot was due before

        self._nearest = 1 / heartbeats.rate  # seconds between two slots, at least
        self._last_slot = -math.inf  # when it came up
        self._even_from = -math.inf  # when it was due: the pace is kept from here, so that lateness does not add up
        self._eager = False  # some lease should not wait for the even pace
        self._needed_at: float | None = None  # when the next slot must be, as far as it is known
        self._early = early
        self.early_at = -math.inf  # when the latest call left that only news had asked for
        self._news: _Deque = OrderedDict()  # leases in main, backup and rested whose next heartbeat may come early
        self._late_news: _Deque = OrderedDict()  # rested ones whose next heartbeat may do so from `not_before` on

        self._paused_until = -math.inf
        self._backoff = Backoff(self._nearest, heartbeats.retry_wait, random=random)
        self._down_at = -math.inf  # when the last call left that failed; a call that left later was answered: -inf

    def __len__(self) -> int:
        return self._held

    @property
    def unused(self) -> bool:
        return not self._held and not self._in_flight

    def add(self, term: Term, now: float, *, renewed: bool = False) -> None:
        """Add a lease. A slot is due at once, so that the service soon knows that the task is being run.

        Not so for leases that another cycle has just `renewed`, for this cycle's ttl: they may come faster than this
        cycle can renew them. They go into main too, from where they are spread; a crowd that goes into backup comes
        out of backup as a crowd.
        """
        self._held += 1
        self._now = now
        if not renewed:
            self._eager = True
        elif not (self._main or self._urgent):
            self._even_from = now
        if term.confirmed:
            self._lost_from = min(self._lost_from, term.lost_at)
        self._into_main([term])

    def remove(self, term: Term) -> None:
        """Remove a lease; the verdict of a heartbeat in flight is ignored. A lease that is not held is no error."""
        if term.place is None:
            return
        if not isinstance(term.place, Send):
            del term.place[term]
            self._news.pop(term, None)
        term.place = None
        self._held -= 1

    def hasten(self, term: Term, now: float) -> None:
        """Allow the next heartbeat of `term` to leave early, because the service should soon hear its news.

        At most one early call a second carries all leases that have news, in a slot that a full cycle does not need:
        never closer to the last slot than `1 / rate`. A waiting lease is tried again soon anyway. In an outage news are
        tried every `retry_wait`: not sooner, as each failure is a strike, and not only in the next cycle.
        """
        self._now = now
        if term.not_before <= now and any(term.place is it for it in (self._main, self._backup, self._rested)):
            self._news[term] = None
            return
        term.has_news = True
        if term.place is self._rested:
            self._late_news[term] = None

    def _into_main(self, terms: Iterable[Term], *, ahead: bool = False) -> None:
        """Merge `terms` into main, by their last acknowledged heartbeat. Equals go last, or first if `ahead`."""
        ordered = sorted(terms, key=_age)
        _move([term for term in ordered if not term.confirmed], self._urgent)
        terms = [term for term in ordered if term.confirmed]
        if not terms:
            return
        self._needed_at = None
        main, oldest, youngest = self._main, terms[0].granted_at, terms[-1].granted_at
        goes_before = operator.lt if ahead else operator.le
        at_front, mingled = False, 0
        # From both ends at once: nearly always `terms` belong to one of them, and main may be long.
        for front, back in zip(main, reversed(main), strict=True):
            at_front = not goes_before(front.granted_at, youngest)
            if at_front or goes_before(back.granted_at, oldest):
                break
            mingled += 1
        near = list(itertools.islice(main if at_front else reversed(main), mingled))[:: 1 if at_front else -1]
        _move(terms, main)
        merged = sorted([*terms, *near] if ahead else [*near, *terms], key=_age)
        for term in reversed(merged) if at_front else merged:
            main.move_to_end(term, last=not at_front)

    def step(self, now: float) -> list[Send | Lost]:
        if now >= self._ends_at:
            self._turn(now)
        if ready := list(itertools.takewhile(lambda term: term.not_before <= now, self._waiting)):
            self._into_main(ready)
            self._eager = True
        for term in list(itertools.takewhile(lambda term: term.not_before <= now, self._late_news)):
            del self._late_news[term]
            if term.has_news:  # the service has not heard it yet
                self.hasten(term, now)
        effects: list[Send | Lost] = [self._lose(term, "expired") for term in self._expired(now)]
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
        ready_at = min((next(iter(it)).not_before for it in (self._waiting, self._late_news) if it), default=math.inf)
        return min(self._ends_at, self._slot_at(self._now), ready_at, self._lost_from)

    def _turn(self, now: float) -> None:
        """Begin the next cycle: move backup and rested leases into main. A late turn does not shift the next one."""
        cycle = self.heartbeats.cycle
        self._ends_at += (math.floor((now - self._ends_at) / cycle) + 1) * cycle
        for term in itertools.chain(self._main, self._waiting, *(send.terms for send in self._in_flight)):
            term.retries = 0
        self._into_main(self._rested)
        self._into_main(self._backup)

    def _expired(self, now: float) -> list[Term]:
        if now < self._lost_from:
            return []
        in_flight = (term for send in self._in_flight for term in send.terms if term.place is send)
        held = itertools.chain(self._main, self._waiting, self._backup, self._rested, in_flight)
        relied_on = [term for term in held if term.confirmed]
        self._lost_from = min((term.lost_at for term in relied_on if term.lost_at > now), default=math.inf)
        return [term for term in relied_on if term.lost_at <= now]

    def _lose(self, term: Term, reason: str) -> Lost:
        self.remove(term)
        return Lost(term, reason)

    def _slot_at(self, now: float) -> float:
        """Return when the next slot is due: infinity without a lease to renew, or without a call to spare."""
        if len(self._in_flight) >= self.heartbeats.in_flight:
            return math.inf
        at = self._regular_at(now)
        if self._news and self._early_pace < math.inf:
            at = min(at, self._early.not_before)
        return max(at, self._last_slot + self._nearest, self._paused_until, self._now)

    @property
    def _slots(self) -> int:
        return math.ceil(self._held / self.heartbeats.batch)

    @property
    def _early_pace(self) -> float:
        """Seconds between two early heartbeats, which use the slots of a cycle that its leases do not need."""
        spare = self.heartbeats.capacity // self.heartbeats.batch - self._slots
        if spare <= 0:
            return math.inf
        pace = max(_EARLY, self.heartbeats.cycle / spare)
        # In an outage, no more often than a failed heartbeat is tried again.
        return pace if self._down_at == -math.inf else max(pace, self.heartbeats.retry_wait)

    def _regular_at(self, now: float) -> float:
        """Return when the next slot is due, early ones apart."""
        if not (self._main or self._urgent):
            return math.inf
        if self._urgent or self._paused_until > self._last_slot:  # throttled since: the pause is the pace
            return self._even_from + self._nearest
        cycle = self.heartbeats.cycle
        even = max(self._nearest, cycle / self._slots)
        # Few leases make the even pace so slow that a failed heartbeat would wait for long: `retry_wait` bounds it.
        hurried = self._even_from + max(self._nearest, min(even / self.heartbeats.burst, self.heartbeats.retry_wait))
        due = next(iter(self._main)).granted_at + cycle
        if due < now - min(even, cycle / 20):  # far behind, after a stall or an outage: do not make it all up at once
            due = hurried
        return min(hurried if self._eager else self._even_from + even, due, self._in_time_at(now))

    def _in_time_at(self, now: float) -> float:
        """Return the latest instant for the next slot with which slots at the same distance renew main in time.

        In time: within a cycle after the last heartbeat; where that has passed already, before the lease is lost.
        """
        if self._needed_at is None:
            cycle, batch = self.heartbeats.cycle, self.heartbeats.batch
            on_time = next(iter(self._main)).granted_at + cycle >= now
            within = cycle if on_time else self.heartbeats.slack - self.heartbeats.call_timeout
            before = math.ceil(len(self._waiting) / batch)
            heads = itertools.islice(self._main, 0, None, batch)  # the oldest of each slot
            self._needed_at = now + min(
                (head.granted_at + within - now) / slots for slots, head in enumerate(heads, 1 + before)
            )
        return self._needed_at

    def _slot(self, now: float, due: float) -> Send:
        """Take a batch from main, and fill the room that is left with leases that have news."""
        cycle, batch = self.heartbeats.cycle, self.heartbeats.batch
        send = Send([], now - due)
        was_due = self._regular_at(now) <= now  # what is gathered may be so late that no slot is due any more
        self._gather(now + self._nearest)
        if was_due or self._regular_at(now) < now + self._nearest:  # the next slot would come too late
            places = [self._urgent, self._main]
            if self._main and next(iter(self._main)).granted_at + cycle <= now:
                places.reverse()  # once it is due, a task that runs goes before one that has not begun
            self._put_in_flight(itertools.islice(itertools.chain(*places), batch), send)
            self._even_from = due if now - due < self._nearest else now
            self._eager = False
        if self._news and len(send.terms) < batch and now >= self._early.not_before:
            if not send.terms:
                self._early.not_before = now + self._early_pace
                self.early_at = now
            self._put_in_flight(itertools.islice(self._news, batch - len(send.terms)), send)
        self._in_flight.append(send)
        self._last_slot = now
        self._needed_at = None
        return send

    def _gather(self, soon: float) -> None:
        """Move into main the leases that cannot wait for the next slot, which is at `soon`."""
        last, cycle = soon + self.heartbeats.call_timeout, self.heartbeats.cycle
        self._into_main(term for term in self._waiting if term.lost_at <= last)
        if soon > self._ends_at:
            self._into_main(term for term in self._backup if term.granted_at + cycle < soon)

    def _put_in_flight(self, terms: Iterable[Term], send: Send) -> None:
        for term in list(terms):
            del term.place[term]
            if term in self._news or term.has_news:
                send.news.add(term)
                self._news.pop(term, None)
            term.place = send
            term.has_news = False
            send.terms.append(term)

    def answered(self, send: Send, verdicts: Sequence[Verdict], *, asked_at: float, now: float) -> list[Lost]:
        """Apply a verdict for each lease of `send`, which left at `asked_at`; a failed call is *failed* for each."""
        self._in_flight.remove(send)
        self._now = now
        lost: list[Lost] = []
        throttled: list[Term] = []
        renewed, retry_after = False, 0.0
        for term, verdict in zip(send.terms, verdicts, strict=True):
            if term.place is not send:  # removed or lost meanwhile: never renew after settle
                continue
            match verdict.verdict:
                case "renewed":
                    renewed = True
                    self._renewed(term, asked_at, now)
                case "throttled":
                    throttled.append(term)
                    retry_after = max(retry_after, verdict.retry_after or 0.0)
                case "gone":
                    lost.append(self._lose(term, verdict.reason or "unknown"))
                case _ if term.failed(asked_at):
                    lost.append(self._lose(term, "strikes"))
                case _:
                    term.has_news |= term in send.news
                    self._failed(term, now)
        if renewed:
            self._backoff.reset()
            if asked_at > self._down_at > -math.inf:  # the first sign that the service is back
                self._into_main(self._rested)
                self._down_at = -math.inf
        elif not throttled:
            self._down_at = max(self._down_at, asked_at)
        if throttled:
            self._throttled(throttled, retry_after, now)
        return lost

    def _renewed(self, term: Term, asked_at: float, now: float) -> None:
        if not term.confirmed:
            lost_at = asked_at + self.heartbeats.slack
            if lost_at <= now:  # over again before any code could rely on it
                self._into_main([term])
                return
            self._lost_from = min(self._lost_from, lost_at)
        term.renewed(asked_at)
        if term.granted_at + self.heartbeats.cycle >= self._ends_at:
            _move([term], self._backup)
        else:  # a late answer: the next heartbeat is due before the turn
            self._into_main([term])
        if term.has_news:  # the news came while this heartbeat was on its way
            self._news[term] = None

    def _throttled(self, terms: Sequence[Term], retry_after: float, now: float) -> None:
        """Retry the same leases after a pause that is short beside the trust that they have left."""
        self._into_main(terms, ahead=True)
        left = min((term.lost_at - now for term in terms if term.confirmed), default=math.inf)
        if retry_after > 0:
            wait = min(retry_after, self.heartbeats.cycle / 2, left / _TRIES_AS_ASKED)
        else:
            wait = min(self._backoff.wait(), left / _TRIES)
        # A later answer does not shorten the pause that an earlier one asked for.
        self._paused_until = min(max(self._paused_until, now + wait), now + left / _TRIES_AS_ASKED)

    def _failed(self, term: Term, now: float) -> None:
        """Retry the lease after `retry_wait`; after several tries, in the next cycle or once the service is back."""
        term.not_before = now + self.heartbeats.retry_wait
        # The turn ends a rest. All rested leases come back at once: their last slot is this much later.
        later = self._slots / self.heartbeats.rate + self.heartbeats.call_timeout + self.heartbeats.retry_wait
        can_wait = term.not_before <= self._ends_at < term.lost_at - later
        rests = term.retries > self.heartbeats.retries_per_cycle and can_wait and term.confirmed
        if rests:
            term.retries = 0
            if term.has_news:
                self._late_news[term] = None
        _move([term], self._rested if rests else self._waiting)


def in_turn(cycles: Iterable[Cycle]) -> list[Cycle]:
    """Return the cycles of a keeper in the order in which they are to step.

    The cycle whose last early call is the longest ago goes first. Else a cycle that has news all the time would take
    each early call, and the news of the others would wait for their regular heartbeats.
    """
    return sorted(cycles, key=operator.attrgetter("early_at"))


def _move(terms: Iterable[Term], place: dict[Term, None]) -> None:
    for term in terms:
        if not isinstance(term.place, Send | None):
            del term.place[term]
        place[term] = None
        term.place = place
