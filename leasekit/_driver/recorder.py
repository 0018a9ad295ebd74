"""The flight recorder: what happened to the leases of a keeper lately, so that a lost one can say why.

Rule 1: nothing is kept for each lease. A call is one small record that shares its leases with the cycle, and says of
them only what was not *renewed*; what befell the process is noted once for all.
Rule 2: nobody is looked up before he is lost; those that are lost together are looked up together.
Rule 3: it reads no clock; callers say what time it is, and what the clocks showed.

The ring is bounded by age (two ttls), and by the leases that its calls refer to: a few beats of each that is held.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeVar

from leasekit._core.cycle import Lost, Send
from leasekit._core.term import Term
from leasekit._driver.loss_report import LossFacts, Note, Try, explain
from leasekit.errors import LeaseEvent
from leasekit.task import Verdict

__all__ = ["HeldUp", "Reading", "Recorder", "Story"]

T = TypeVar("T")

_BEATS_OF_EACH = 3  # that the ring has room for
_ROOM = 10_000  # leases that it may refer to, however few are held
_AGES = 2  # ttls
_NOTES = 64
_EVENTS = 24  # of one story, at most
_LATE = 0.5  # seconds after its time that the keeper may come back without a word (in a ttl of 2 s that is much)
_SUSPENDED = 0.5
_JUMPED = 1.0


class HeldUp(NamedTuple):
    """The driver's loop could not do its work: by what, from when, to when."""

    what: Literal["stopped", "starved", "blocked"]
    began_at: float
    ended_at: float


class Reading(NamedTuple):
    """What all clocks showed at one moment, in seconds."""

    at: float  # the keeper's clock, which counts suspended time
    awake: float  # one that does not
    wall: float  # since the epoch
    held_up: HeldUp | None = None  # when the driver's loop last was


class Story(NamedTuple):
    """Why a lease was lost, in one sentence, and its last events, the oldest first."""

    why: str
    events: tuple[LeaseEvent, ...] = ()


class Call:
    """One batch of beats."""

    __slots__ = ("answered_at", "asked_at", "error", "odd", "send")

    def __init__(self, send: Send, asked_at: float) -> None:
        self.send = send
        self.asked_at = asked_at
        self.answered_at: float | None = None
        self.error: Verdict | None = None  # of all of them
        self.odd: dict[Term, Verdict] = {}  # of those that were not renewed

    def verdict(self, term: Term) -> Verdict | None:
        """What it said of one of its leases; None: renewed, or no answer yet."""
        return self.error or self.odd.get(term)


class Recorder:
    """What one keeper did and met with. Written in the driver's thread; `expired` may be asked from any."""

    def __init__(self, reading: Reading) -> None:
        self._calls: deque[Call] = deque()
        self._refers_to = 0
        self._age = 0.0
        self._notes: deque[Note] = deque(maxlen=_NOTES)
        self._last = reading
        self._due_at = float("inf")
        self._crowd = (0, 0)  # so many leases were held at last, when fewer could beat in a cycle, …
        self._crowded_until = -math.inf  # … until then

    def crowded(self, held: int, capacity: int, at: float) -> None:
        """Note how many leases are held of those that can beat in a cycle, when that is more, or no longer is."""
        self._crowded_until = math.inf if held > capacity else at
        if held > capacity:
            self._crowd = held, capacity

    # What happens -------------------------------------------------------------------------------------------------

    def sent(self, send: Send, at: float, *, held: int) -> Call:
        """A batch of beats leaves, while so many leases are held."""
        call = Call(send, at)
        calls, size = self._calls, len(send.terms)
        self._age = max(self._age, _AGES * send.terms[0].beats.ttl)
        most = max(_ROOM, _BEATS_OF_EACH * held) - size
        while calls and (self._refers_to > most or calls[0].asked_at < at - self._age):
            self._refers_to -= len(calls.popleft().send.terms)
        calls.append(call)
        self._refers_to += size
        return call

    def answered(self, call: Call, verdicts: Sequence[Verdict], at: float, *, error: Verdict | None = None) -> None:
        """It came back: a verdict for each, or the same `error` for all."""
        call.answered_at = at
        call.error = error
        # Most of the time there is nothing to say, and this is the cheapest way to see that.
        if error is None and [verdict.verdict for verdict in verdicts].count("renewed") < len(verdicts):
            pairs = zip(call.send.terms, verdicts, strict=True)
            call.odd = {term: verdict for term, verdict in pairs if verdict.verdict != "renewed"}

    def waits(self, until: float) -> None:
        """The keeper has done what there was to do, and is to come back by then."""
        self._due_at = until

    def woke(self, reading: Reading) -> None:
        """The keeper is back: was it kept from it, and by what?"""
        self._notes += self._noticed(reading)
        self._last = reading
        self._due_at = float("inf")

    def _noticed(self, now: Reading) -> list[Note]:
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

    # What is told -------------------------------------------------------------------------------------------------

    def explain(self, lost: Sequence[Lost], now: float) -> list[Story]:
        """Why each of these was lost, by position."""
        calls = self._calls_of({effect.term for effect in lost})
        notes = _copy(self._notes)
        # Those who beat together are lost together, and nearly always have one story.
        told: dict[tuple[object, ...], Story] = {}
        stories: list[Story] = []
        for effect in lost:
            term, its = effect.term, calls[effect.term]
            verdicts = [call.verdict(term) for call in its]
            key = (effect.reason, effect.why, term.granted_at, term.strikes, *map(id, its), *map(id, verdicts))
            if key not in told:
                told[key] = self._story(effect, its, notes, now)
            stories.append(told[key])
        return stories

    def expired(self, term: Term, reading: Reading) -> Story:
        """Why a lease is over that the keeper, which may be stuck, has not found lost yet. From any thread."""
        notes = [*_copy(self._notes), *self._noticed(reading)]
        calls = self._calls_of({term})[term]
        return self._story(Lost(term, "expired", ""), calls, notes, reading.at)

    def _calls_of(self, terms: set[Term]) -> dict[Term, list[Call]]:
        found: dict[Term, list[Call]] = {term: [] for term in terms}
        for call in _copy(self._calls):
            for term in terms.intersection(call.send.terms):
                found[term].append(call)
        return found

    def _story(self, lost: Lost, calls: Sequence[Call], notes: Sequence[Note], now: float) -> Story:
        term = lost.term
        facts = LossFacts(
            reason=lost.reason,
            said=lost.why,
            is_gone=any(one.verdict == "gone" for one in (_try(call, call.verdict(term)) for call in calls)),
            now=now,
            granted_at=term.granted_at,
            lost_at=term.lost_at,
            wall=self._last.wall - self._last.at,
            strikes=term.strikes,
            has_beaten=any(call.asked_at == term.granted_at for call in calls),
            tries=[_try(call, call.verdict(term)) for call in calls if call.asked_at > term.granted_at],
            others=self._failure_of_others(term),
            notes=[note for note in notes if note.at > term.granted_at],
            crowd=self._crowd if self._crowded_until > term.granted_at else None,
        )
        return Story(explain(facts), _events(term, calls, facts.notes))

    def _failure_of_others(self, term: Term) -> str | None:
        """Why the latest call failed, where one did since this lease was granted."""
        for call in reversed(_copy(self._calls)):
            if call.asked_at <= term.granted_at:
                return None
            if call.error is not None:
                return call.error.reason or call.error.verdict
        return None


def _copy(items: deque[T]) -> list[T]:
    """A copy of what the driver's thread may be writing to.

    No lock: a thread that is interrupted may leave it held, and the driver's thread would wait for it. With the GIL the
    copy is one step; without it a write in the middle is an error, and the copy is made again.
    """
    while True:
        try:
            return list(items)
        except RuntimeError:
            continue


def _culprit(now: Reading, late: float) -> Literal["blocked", "starved", "stopped"]:
    """What kept the keeper from its work for most of this time; where nothing is known of it, no code ran at all."""
    by = now.held_up
    if by is None or min(by.ended_at, now.at) - max(by.began_at, now.at - late) < late / 2:
        return "stopped"
    return by.what


def _try(call: Call, verdict: Verdict | None) -> Try:
    if call.answered_at is None:
        return Try(call.asked_at, "unanswered")
    if verdict is None:  # renewed, but not for this one: it was too late, or taken out meanwhile
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
