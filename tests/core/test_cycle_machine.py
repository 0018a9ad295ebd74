"""The cycle under any history: a model that knows only what went in and came out checks every rule after every event.

Time passes with and without steps, calls are answered in any order, late, in part, or not at all.
"""

# That a lease is in exactly one place (rule 3 of the cycle) can be seen from inside only.
# pyright: reportPrivateUsage=false

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from leasekit._core.cycle import Cycle, Early, Lost, Send
from leasekit._core.term import Term
from leasekit.config import Heartbeats
from leasekit.task import Verdict, VerdictWord

# Each has a limit of its own that is reached within a few events.
RHYTHMS = (
    Heartbeats(rate=1, batch=1, in_flight=2),
    Heartbeats(batch=3, in_flight=2),
    Heartbeats(batch=3, in_flight=3, strike_after=0, retries_per_cycle=1),
    Heartbeats(batch=2, strike_after=150, max_failures=2, retries_per_cycle=0),
    Heartbeats(batch=2, in_flight=3).for_ttl(6),
)
ANSWERS = (
    Verdict(id="", verdict="renewed"),
    Verdict(id="", verdict="renewed", ttl=47.0),
    Verdict(id="", verdict="throttled"),
    Verdict(id="", verdict="throttled", retry_after=7.0),
    Verdict(id="", verdict="throttled", retry_after=1e9),
    Verdict(id="", verdict="throttled", retry_after=-1.0),
    Verdict(id="", verdict="gone", reason="taken"),
    Verdict(id="", verdict="gone"),
    Verdict(id="", verdict="failed", reason="500"),
    Verdict(id="", verdict="failed"),
)
WEATHER: tuple[VerdictWord, ...] = ("renewed", "failed", "throttled")
EPSILON = 1e-6

moments = st.one_of(st.sampled_from([0.0, 0.01, 0.3, 1.0, 5.0, 10.0]), st.floats(0, 20))
freezes = st.one_of(st.sampled_from([100.0, 119.9, 120.0, 150.0, 264.5, 274.3, 274.5, 500.0]), st.floats(0, 1000))
ages = st.one_of(st.just(0.0), st.floats(0, 30), st.floats(0, 400))


class CycleMachine(RuleBasedStateMachine):
    """The keeper's side, as a model: what is held, what is on its way, and what was heard of each lease."""

    @initialize(heartbeats=st.sampled_from(RHYTHMS), now=st.floats(0, 1e6), seed=st.integers(0, 9))
    def begin(self, heartbeats: Heartbeats, now: float, seed: int) -> None:
        self.heartbeats, self.began, self.now = heartbeats, now, now
        self.cycle = Cycle(heartbeats, now=now, random=random.Random(seed).random, early=Early())
        self.keys = itertools.count()
        self.held: dict[Term, None] = {}
        self.open: dict[Send, float] = {}  # → asked_at
        self.ended: set[Term] = set()  # lost, removed, or of another ttl by now
        self.granted: dict[Term, float] = {}
        self.strikes: Counter[Term] = Counter()
        self.failing_from: dict[Term, float] = {}  # when the first of these was sent
        self.renewed_in: dict[Term, int] = {}  # the last cycle in which it was
        self.turns = 0  # that the cycle has been told of
        self.last_slot = -math.inf

    # What happens -------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 8), age=ages, confirmed=st.booleans())
    def add(self, count: int, age: float, confirmed: bool) -> None:
        for _ in range(count):
            term = Term(next(self.keys), self.heartbeats, granted_at=self.now - age, confirmed=confirmed)
            self.cycle.add(term, self.now)
            self.held[term] = None
            self.granted[term] = self.now - age

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        term = data.draw(st.sampled_from(list(self.held)))
        self.cycle.remove(term)
        self.forget(term)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def remove_what_is_not_held(self, data: st.DataObject) -> None:
        self.cycle.remove(data.draw(st.sampled_from(sorted(self.ended, key=lambda term: term.key))))

    @rule(seconds=moments)
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(seconds=freezes)
    def freeze(self, seconds: float) -> None:
        """The machine sleeps, or the process is stopped: nobody steps, whatever was due."""
        self.now += seconds

    @rule(seconds=moments)
    def step(self, seconds: float) -> None:
        """Sooner or later than `wake_at` said."""
        self.now += seconds
        self.perform_step()

    @precondition(lambda self: any(term.confirmed for term in self.held))
    @rule(offset=st.sampled_from([-0.1, 0.0, 0.1]))
    def freeze_until_about_the_next_end(self, offset: float) -> None:
        """Where belief and loss are a tenth of a second apart, for whatever is in flight, waiting or at rest."""
        self.now = max(self.now, offset + min(term.lost_at for term in self.held if term.confirmed))
        self.perform_step()

    @rule(times=st.integers(1, 12))
    def sleep_until_wake_at(self, times: int) -> None:
        """As a keeper does; each time there is something to do, or a later time to come back."""
        for _ in range(times):
            if self.cycle.wake_at == math.inf:
                break
            self.now = max(self.now, self.cycle.wake_at)
            self.perform_step()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        send = data.draw(st.sampled_from(list(self.open)))
        self.take(send, [data.draw(st.sampled_from(ANSWERS)) for _ in send.terms])

    @precondition(lambda self: self.open)
    @rule(data=st.data(), answer=st.sampled_from(ANSWERS))
    def answer_all_alike(self, data: st.DataObject, answer: Verdict) -> None:
        send = data.draw(st.sampled_from(list(self.open)))
        self.take(send, [answer] * len(send.terms))

    @precondition(lambda self: self.held)
    @rule(words=st.lists(st.sampled_from(WEATHER), min_size=1, max_size=3), wakes=st.integers(1, 15))
    def go_on(self, words: list[VerdictWord], wakes: int) -> None:
        """A stretch of good, bad or mixed weather: calls are answered at once, lease by lease in turn."""
        verdicts = itertools.cycle([Verdict(id="", verdict=word) for word in words])
        for _ in range(wakes):
            for send in list(self.open):
                self.take(send, [next(verdicts) for _ in send.terms])
            if self.cycle.wake_at == math.inf:
                break
            self.now = max(self.now, self.cycle.wake_at)
            self.perform_step()

    # What must follow ---------------------------------------------------------------------------------------------

    def perform_step(self) -> None:
        woken_for = self.cycle.wake_at
        effects = self.cycle.step(self.now)
        self.turns = math.floor((self.now - self.began) / self.heartbeats.cycle + 1e-9)
        for effect in effects:
            self.perform(effect)
        assert effects or self.cycle.wake_at > woken_for or self.now < woken_for, "a busy loop"
        assert not effects or self.now >= woken_for, "it had something to do, and did not say when"
        for term in self.held:
            assert not term.confirmed or term.lost_at > self.now, "believed in after its end"

    def take(self, send: Send, verdicts: Sequence[Verdict]) -> None:
        asked_at = self.open.pop(send)
        before = {term: term.confirmed for term in send.terms}
        heard = {term: verdict for term, verdict in zip(send.terms, verdicts, strict=True) if term in self.held}
        lost = {loss.term: loss for loss in self.cycle.answered(send, verdicts, asked_at=asked_at, now=self.now)}
        for term, verdict in heard.items():
            self.hear(term, verdict, asked_at, was_confirmed=before[term], is_lost=term in lost)
        for loss in lost.values():
            self.perform(loss)
        assert lost.keys() <= heard.keys(), "not its verdict"

    def hear(self, term: Term, verdict: Verdict, asked_at: float, *, was_confirmed: bool, is_lost: bool) -> None:
        """One verdict, and what it is allowed and obliged to change."""
        must_be_lost, is_confirmed = False, was_confirmed
        match verdict.verdict:
            case "renewed" if not was_confirmed and asked_at + self.heartbeats.slack <= self.now:
                pass  # over again before anybody could rely on it
            case "renewed":
                is_confirmed = True
                self.strikes[term] = 0
                self.granted[term] = max(self.granted[term], asked_at)
                self.check_once_a_cycle(term)
                if verdict.ttl is not None:  # the keeper moves it to the cycle of that ttl
                    self.cycle.remove(term)
                    self.forget(term)
            case "gone":
                must_be_lost = True
            case "failed":
                if not self.strikes[term]:
                    self.failing_from[term] = asked_at
                self.strikes[term] += 1
                since = self.granted[term] if was_confirmed else self.failing_from[term]
                silent = asked_at - since >= self.heartbeats.strikes_from
                must_be_lost = self.strikes[term] >= self.heartbeats.max_failures and silent
            case _:
                pass
        assert is_lost == must_be_lost
        assert term.confirmed == is_confirmed

    def check_once_a_cycle(self, term: Term) -> None:
        assert self.renewed_in.get(term) != self.turns, "renewed twice in one cycle"
        # Where a cycle since the beat is over before the first slot after the next turn, another beat comes before.
        cycle = self.heartbeats.cycle
        if term.granted_at + cycle > self.began + (self.turns + 1) * cycle + 1 / self.heartbeats.rate:
            self.renewed_in[term] = self.turns

    def perform(self, effect: Send | Lost) -> None:
        match effect:
            case Send(terms, late):
                assert 0 < len(terms) <= self.heartbeats.batch
                assert len(set(terms)) == len(terms), "twice in one call"
                assert all(term in self.held for term in terms), "sent for what is not held"
                assert not set(terms) & {term for send in self.open for term in send.terms if term.place is send}
                assert self.now - self.last_slot >= 1 / self.heartbeats.rate - EPSILON, "two slots too close"
                assert late >= 0
                self.last_slot = self.now
                self.open[effect] = self.now
            case Lost(term, reason):
                assert term in self.held, "lost twice, or not held"
                assert reason != "expired" or term.confirmed, "nobody relied on it yet"
                assert reason != "expired" or term.lost_at <= self.now, "lost before its time"
                self.forget(term)

    def forget(self, term: Term) -> None:
        del self.held[term]
        self.ended.add(term)

    @invariant()
    def each_is_in_exactly_one_place(self) -> None:
        cycle = self.cycle
        found: Counter[Term] = Counter()
        for place in (cycle._main, cycle._urgent, cycle._waiting, cycle._backup, cycle._rested):
            for term in place:
                assert term.place is place
                found[term] += 1
        for send in self.open:
            found.update(term for term in send.terms if term.place is send)
        assert found == Counter(list(self.held))
        assert all(term.place is None for term in self.ended)

    @invariant()
    def what_is_held_is_counted(self) -> None:
        assert len(self.cycle) == len(self.held)

    @invariant()
    def calls_are_bounded(self) -> None:
        assert len(self.open) <= self.heartbeats.in_flight
        assert set(self.cycle._in_flight) == set(self.open)

    @invariant()
    def main_is_ordered_and_only_the_unconfirmed_are_urgent(self) -> None:
        main = [term.granted_at for term in self.cycle._main]
        assert main == sorted(main)
        assert all(term.confirmed for term in self.cycle._main)
        assert not any(term.confirmed for term in self.cycle._urgent)

    @invariant()
    def waiting_is_ordered(self) -> None:
        waiting = [term.not_before for term in self.cycle._waiting]
        assert waiting == sorted(waiting)

    @invariant()
    def trust_is_what_was_heard(self) -> None:
        for term in self.held:
            assert term.granted_at == self.granted[term]
            assert term.strikes == self.strikes[term]

    @invariant()
    def the_end_of_each_is_in_time(self) -> None:
        """Whoever sleeps until `wake_at` misses nobody's end."""
        confirmed = [term.lost_at for term in self.held if term.confirmed]
        assert self.cycle.wake_at <= min(confirmed, default=math.inf)


CycleMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50)
TestCycle = CycleMachine.TestCase


def test_a_call_is_never_empty_when_it_is_joined_by_who_is_far_behind() -> None:
    """Nobody could answer it, and one of the calls that may be in flight would be lost for good."""
    state = CycleMachine()
    state.begin(heartbeats=Heartbeats(batch=2, strike_after=150, max_failures=2, retries_per_cycle=0), now=0.0, seed=0)
    state.add(age=0.0, confirmed=True, count=1)
    state.sleep_until_wake_at(times=4)
    state.take(next(iter(state.open)), [Verdict(id="", verdict="renewed")])
    state.add(age=0.0, confirmed=False, count=7)
    state.sleep_until_wake_at(times=5)
    state.go_on(wakes=5, words=["renewed", "failed", "failed"])
    state.go_on(wakes=4, words=["failed"])
    state.add(age=0.0, confirmed=True, count=3)
    state.go_on(wakes=4, words=["failed"])
