"""Flight recorder: keep what recently happened to the leases of a keeper, to explain why a lease was lost.

Rule 1: no record is kept per lease. A call is one small record that shares its leases with the cycle and keeps only the
verdicts other than *renewed*; an event of the whole process is noted once for all leases.
Rule 2: a lease is looked up only when it is lost; leases that are lost together are looked up together.
Rule 3: the recorder reads no clock; callers pass the time and the readings of the clocks.

The ring is bounded by age (two ttls), and by the leases that its calls refer to: a few heartbeats of each held lease.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeVar

from leasekit._core.cycle import Lost, Send
from leasekit._core.term import Term
from leasekit._driver.explaining.loss_report import LossFacts, Note, Try, explain
from leasekit.errors import LeaseEvent
from leasekit.task import Verdict

T = TypeVar("T")

_BEATS_OF_EACH = 3  # heartbeats of each held lease that the ring has room for
_ROOM = 10_000  # leases that the ring may refer to, however few are held
_AGES = 2  # in ttls
_NOTES = 64
_EVENTS = 24  # at most, in one story
_LATE = 0.5  # seconds by which the keeper may come back late without a note (much for a ttl of 2 s)
_SUSPENDED = 0.5
_JUMPED = 1.0


class HeldUp(NamedTuple):
    """A time in which the driver's loop could not do its work, and the cause."""

    what: Literal["stopped", "starved", "blocked"]
    began_at: float
    ended_at: float


class Reading(NamedTuple):
    """The readings of all clocks at one moment, in seconds."""

    at: float  # the keeper's clock, which counts suspended time
    awake: float  # a clock that does not count suspended time
    wall: float  # since the epoch
    held_up: HeldUp | None = None  # when the driver's loop was held up last


class Story(NamedTuple):
    """The reason why a lease was lost, in one sentence, and the lease's last events, oldest first."""

    why: str
    events: tuple[LeaseEvent, ...] = ()


class Call:
    """A call with a batch of heartbeats, and its verdicts."""

    __slots__ = ("answered_at", "asked_at", "error", "odd", "send")

    def __init__(self, send: Send, asked_at: float) -> None:
        self.send = send
        self.asked_at = asked_at
        self.answered_at: float | None = None
        self.error: Verdict | None = None  # the verdict of all leases, if the call failed
        self.odd: dict[Term, Verdict] = {}  # the verdicts other than *renewed*

    def verdict(self, term: Term) -> Verdict | None:
        """Return the verdict on one lease of the call; None: renewed, or not answered yet."""
        return self.error or self.odd.get(term)


class Recorder:
    """Record the calls and interruptions of one keeper, in the driver's thread. Any thread may call `expired`."""

    def __init__(self, reading: Reading) -> None:
        self._calls: deque[Call] = deque()
        self._refers_to = 0
        self._age = 0.0
        self._notes: deque[Note] = deque(maxlen=_NOTES)
        self._last = reading
        self._due_at = float("inf")
        self._crowd = (0, 0)  # leases held and capacity, when last more were held than a cycle can renew …
        self._crowded_until = -math.inf  # … and the end of that time

    def crowded(self, held: int, capacity: int, at: float) -> None:
        """Note that `held` leases exceed `capacity`, the number that a cycle can renew, or that this has ended."""
        self._crowded_until = math.inf if held > capacity else at
        if held > capacity:
            self._crowd = held, capacity

    def sent(self, send: Send, at: float, *, held: int) -> Call:
        """Record that a batch of heartbeats leaves while `held` leases are held."""
        call = Call(send, at)
        calls, size = self._calls, len(send.terms)
        self._age = max(self._age, _AGES * send.terms[0].heartbeats.ttl)
        most = max(_ROOM, _BEATS_OF_EACH * held) - size
        while calls and (self._refers_to > most or calls[0].asked_at < at - self._age):
            self._refers_to -= len(calls.popleft().send.terms)
        calls.append(call)
        self._refers_to += size
        return call

    def answered(self, call: Call, verdicts: Sequence[Verdict], at: float, *, error: Verdict | None = None) -> None:
        """Record the answer to `call`: a verdict for each lease, or the same `error` for all."""
        call.answered_at = at
        call.error = error
        # Nearly always all leases are renewed, and this is the cheapest check for that.
        if error is None and [verdict.verdict for verdict in verdicts].count("renewed") < len(verdicts):
            pairs = zip(call.send.terms, verdicts, strict=True)
            call.odd = {term: verdict for term, verdict in pairs if verdict.verdict != "renewed"}

    def waits(self, until: float) -> None:
        self._due_at = until

    def woke(self, reading: Reading) -> None:
        """Record that the keeper is back, with a note for each reason why it is late."""
        self._notes += self._interruptions_until(reading)
        self._last = reading
        self._due_at = float("inf")

    def _interruptions_until(self, now: Reading) -> list[Note]:
        """Return a note for each clock jump, suspension and delay of the keeper since the last reading."""
        last = self._last
        passed = now.at - last.at
        notes: list[Note] = []
        if abs(jump := now.wall - last.wall - passed) > _JUMPED:
            notes.append(Note("jumped", now.at, jump))
        if (suspended := passed - (now.awake - last.awake)) > _SUSPENDED:
            notes.append(Note("suspended", now.at, suspended))
        late = now.at - max(self._due_at, last.at) - max(suspended, 0.0)
        if late > _LATE:
            notes.append(Note(_culprit(now, late), now.at, late))
        return notes

    def explain(self, lost: Sequence[Lost], now: float) -> list[Story]:
        calls = self._calls_of({effect.term for effect in lost})
        notes = _copy(self._notes)
        # Leases with common heartbeats are lost together, and nearly always have one story.
        told: dict[tuple[object, ...], Story] = {}
        stories: list[Story] = []
        for effect in lost:
            term, its = effect.term, calls[effect.term]
            verdicts = [call.verdict(term) for call in its]
            key = (effect.reason, term.granted_at, term.strikes, *map(id, its), *map(id, verdicts))
            if key not in told:
                told[key] = self._story(effect, its, notes, now)
            stories.append(told[key])
        return stories

    def expired(self, term: Term, reading: Reading) -> Story:
        """Explain a lease whose trust ended before the keeper, which may be stuck, has noticed. Any thread."""
        notes = [*_copy(self._notes), *self._interruptions_until(reading)]
        calls = self._calls_of({term})[term]
        return self._story(Lost(term, "expired"), calls, notes, reading.at)

    def _calls_of(self, terms: set[Term]) -> dict[Term, list[Call]]:
        """Return the recorded calls that had a heartbeat of each of these terms, in order."""
        found: dict[Term, list[Call]] = {term: [] for term in terms}
        for call in _copy(self._calls):
            for term in terms.intersection(call.send.terms):
                found[term].append(call)
        return found

    def _story(self, lost: Lost, calls: Sequence[Call], notes: Sequence[Note], now: float) -> Story:
        term = lost.term
        facts = LossFacts(
            reason=lost.reason,
            is_gone=any(one.verdict == "gone" for one in (_as_try(call, call.verdict(term)) for call in calls)),
            now=now,
            granted_at=term.granted_at,
            lost_at=term.lost_at,
            wall=self._last.wall - self._last.at,
            strikes=term.strikes,
            has_beaten=any(call.asked_at == term.granted_at for call in calls),
            may_begin=term.confirmed,
            tries=[_as_try(call, call.verdict(term)) for call in calls if call.asked_at > term.granted_at],
            others=self._failure_of_others(term),
            notes=[note for note in notes if note.at > term.granted_at],
            crowd=self._crowd if self._crowded_until > term.granted_at else None,
        )
        return Story(explain(facts), _events(term, calls, facts.notes))

    def _failure_of_others(self, term: Term) -> str | None:
        """Return why the latest failed call since `term` was granted failed, whichever leases it was for, or None."""
        for call in reversed(_copy(self._calls)):
            if call.asked_at <= term.granted_at:
                return None
            if call.error is not None:
                return call.error.reason or call.error.verdict
        return None


def _copy(items: deque[T]) -> list[T]:
    """Copy a deque to which the driver's thread may be writing.

    There is no lock: an interrupted thread may leave it held, and the driver's thread would wait for it. With the GIL
    the copy is one step; without the GIL a concurrent write raises an error, and the copy is made again.
    """
    while True:
        try:
            return list(items)
        except RuntimeError:
            continue


def _culprit(now: Reading, late: float) -> Literal["blocked", "starved", "stopped"]:
    """Return what held the keeper up for most of `late` seconds; *stopped* if nothing is known: no code ran at all."""
    by = now.held_up
    if by is None or min(by.ended_at, now.at) - max(by.began_at, now.at - late) < late / 2:
        return "stopped"
    return by.what


def _as_try(call: Call, verdict: Verdict | None) -> Try:
    if call.answered_at is None:
        return Try(call.asked_at, "unanswered")
    if verdict is None:  # the call renewed leases, but not this one: too late, or removed meanwhile
        return Try(call.asked_at, "renewed")
    if call.error is not None and verdict.verdict == "failed":
        return Try(call.asked_at, "unanswered", verdict.reason)
    return Try(call.asked_at, verdict.verdict, verdict.reason)


def _events(term: Term, calls: Iterable[Call], notes: Iterable[Note]) -> tuple[LeaseEvent, ...]:
    events = [LeaseEvent(note.at, note.what, note.seconds) for note in notes]
    for call in calls:
        events.append(LeaseEvent(call.asked_at, "sent", call.send.late))
        if call.answered_at is not None:
            verdict = call.verdict(term)
            word, detail = ("renewed", "") if verdict is None else (verdict.verdict, verdict.reason or "")
            events.append(LeaseEvent(call.answered_at, word, call.answered_at - call.asked_at, detail))
    return tuple(sorted(events, key=lambda event: event.at)[-_EVENTS:])
