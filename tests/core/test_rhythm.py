"""The cycle against a simulated service: how long a lease goes without an acknowledged beat, at what pace."""

import bisect
import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest

from leasekit._core.cycle import Cycle, Early, Lost, Send
from leasekit._core.term import Term
from leasekit.config import Heartbeats
from leasekit.task import Verdict
from tests.sampling import combinations, in_soak

Answer = Callable[[float, Sequence[Term]], tuple[float, Sequence[str]]]
"""(asked_at, leases) → how long the answer takes, and a verdict word for each."""


def healthy(asked_at: float, terms: Sequence[Term]) -> tuple[float, Sequence[str]]:
    return 0.05, ["renewed"] * len(terms)


def outage(start: float, length: float, *, hang: float) -> Answer:
    def answer(asked_at: float, terms: Sequence[Term]) -> tuple[float, Sequence[str]]:
        if start <= asked_at < start + length:
            return hang, ["failed"] * len(terms)
        return healthy(asked_at, terms)

    return answer


@dataclass
class Run:
    """One keeper's loop, without a keeper: step, perform, sleep until `wake_at`, on a heap of simulated time."""

    heartbeats: Heartbeats
    answer: Answer = healthy
    now: float = 1000.0
    slots: list[float] = field(default_factory=list[float])
    lost: list[Term] = field(default_factory=list[Term])
    gaps: dict[Term, float] = field(default_factory=dict[Term, float])
    renewals: dict[Term, list[float]] = field(default_factory=dict[Term, list[float]])

    def __post_init__(self) -> None:
        self.cycle = Cycle(self.heartbeats, now=self.now, random=random.Random(7).random, early=Early())
        self._turns_at = self.now
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._acked: dict[Term, float] = {}

    def at(self, when: float, do: Callable[[], object]) -> None:
        heapq.heappush(self._events, (when, next(self._order), do))

    def add(self, count: int = 1) -> list[Term]:
        terms = [Term(i, self.heartbeats, granted_at=self.now) for i in range(count)]
        for term in terms:
            self.cycle.add(term, self.now)
            self._acked[term] = self.now
            self.gaps[term] = 0.0
        return terms

    def run(self, until: float) -> None:
        while True:
            when = min(self.cycle.wake_at, self._events[0][0] if self._events else math.inf)
            if when > until:
                break
            self.now = max(self.now, when)
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            for effect in self.cycle.step(self.now):
                self._perform(effect)
        self.now = until
        for term, acked in self._acked.items():
            self.gaps[term] = max(self.gaps[term], self.now - acked)

    def _perform(self, effect: object) -> None:
        if isinstance(effect, Lost):
            self.lost.append(effect.term)
        elif isinstance(effect, Send):
            asked_at = self.now
            self.slots.append(asked_at)
            delay, words = self.answer(asked_at, effect.terms)
            self.at(asked_at + delay, lambda: self._answered(effect, words, asked_at))

    def _answered(self, send: Send, words: Sequence[str], asked_at: float) -> None:
        verdicts = [Verdict(id="", verdict=word) for word in words]  # type: ignore[arg-type]
        for term, word in zip(send.terms, words, strict=True):
            if word == "renewed" and term.place is send:
                self.gaps[term] = max(self.gaps[term], asked_at - self._acked[term])
                self._acked[term] = asked_at
                self.renewals.setdefault(term, []).append(self.now)
        for effect in self.cycle.answered(send, verdicts, asked_at=asked_at, now=self.now):
            self._perform(effect)


def crowds() -> Iterator[tuple[int, Heartbeats]]:
    yield from ((count, Heartbeats(rate=1, batch=1)) for count in (1, 10, 120))
    yield from ((count, Heartbeats(batch=500)) for count in (1_000, 10_000))


ARRIVALS = ["at once", "one by one", "in claims", "over hours"]
PHASES = [0.0, 1.0, 59.5, 113.0, 119.0, 119.99]


# Sample: one combination in eight.
@pytest.mark.soak
@pytest.mark.parametrize(("crowd", "arrival", "phase"), combinations(list(crowds()), ARRIVALS, PHASES, one_in=8))
def test_nobody_waits_longer_than_a_cycle_and_a_tenth(
    crowd: tuple[int, Heartbeats], arrival: str, phase: float
) -> None:
    count, heartbeats = crowd
    run = Run(heartbeats)
    start = run.now + phase
    spread = {"at once": 0.0, "one by one": 100.0 / count, "in claims": 0.0, "over hours": 1000.0 / count}[arrival]
    for i in range(count) if spread else ():
        run.at(start + i * spread, run.add)
    if arrival == "at once":
        run.at(start, lambda: run.add(count))
    if arrival == "in claims":
        for i in range(10):
            run.at(start + i, partial(run.add, count // 10 + (i < count % 10)))
    run.run(start + 1000 + 10 * heartbeats.cycle)
    assert len(run.gaps) == count
    assert max(run.gaps.values()) <= 1.1 * heartbeats.cycle
    assert not run.lost


def test_nobody_is_renewed_twice_in_a_cycle() -> None:
    run = Run(Heartbeats(batch=3))
    start = run.now
    for i in range(30):
        run.at(start + 17.0 * i, run.add)
    run.run(start + 1200)
    for renewals in run.renewals.values():
        cycles = [math.floor((at - start) / run.heartbeats.cycle) for at in renewals]
        assert len(cycles) == len(set(cycles))


OUTAGES = [
    pytest.param(*case, marks=[pytest.mark.slow] if case[0] == 10_000 else [])
    for case in combinations(
        [1, 10, 120, 1_000, 10_000],
        [0.0, 10.0],  # refused, hanging
        [*range(0, 120, 17), 119.9],
        ["at once", "over a cycle", "in claims"],
        one_in=8,
    )
]


# Sample: one combination in eight.
@pytest.mark.soak
@pytest.mark.parametrize(("count", "hang", "phase", "arrival"), OUTAGES)
def test_an_outage_of_130_s_loses_no_lease(count: int, hang: float, phase: float, arrival: str) -> None:
    heartbeats = Heartbeats()
    run = Run(heartbeats)
    start = run.now
    if arrival == "at once":
        run.at(start + 3, lambda: run.add(count))
    elif arrival == "over a cycle":
        for i in range(count):
            run.at(start + i * heartbeats.cycle / count, run.add)
    else:
        for i in range(10):
            run.at(start + 3 + i, partial(run.add, count // 10 + (i < count % 10)))
    began = start + 2 * heartbeats.cycle + phase
    run.answer = outage(began, 130, hang=hang)
    run.run(began + 130 + 4 * heartbeats.cycle)
    assert not run.lost
    assert len(run.gaps) == count
    assert max(run.gaps.values()) <= heartbeats.slack

    # The pace is that of the slots within any quarter of a cycle. A few leases make an even pace slower than the
    # retries of one: then `retry_wait` bounds it.
    even = heartbeats.cycle / math.ceil(count / heartbeats.batch)
    nearest = max(1 / heartbeats.rate, min(even / heartbeats.burst, heartbeats.retry_wait))
    window = heartbeats.cycle / 4
    after = [slot for slot in run.slots if slot >= began + 130]
    most = max((bisect.bisect_left(after, slot + window) - i for i, slot in enumerate(after)), default=0)
    assert most <= math.ceil(window / nearest) + 1


SURVIVORS = {
    "default": Heartbeats(),
    "of one's own": Heartbeats(ttl=600, cycle=150, batch=20, call_timeout=20, retry_wait=8, grace=20, margin=30),
    "6 s": Heartbeats().for_ttl(6),
    "60 s": Heartbeats().for_ttl(60),
    "strikes at once": Heartbeats(strike_after=0),
    "strikes after 60 s": Heartbeats(strike_after=60),
    "strikes after 200 s": Heartbeats(strike_after=200),
}


# Sample: one combination in three, at three phases of seven. A load of 0: one lease.
@pytest.mark.soak
@pytest.mark.parametrize(("name", "load", "hang"), combinations(list(SURVIVORS), [0.0, 0.1, 0.8], [0, 1], one_in=3))
def test_an_outage_as_long_as_outage_survived_says_loses_no_lease_at_any_phase(
    name: str, load: float, hang: int
) -> None:
    heartbeats = SURVIVORS[name]
    count = max(1, int(load * heartbeats.capacity))
    length = heartbeats.outage_survived - heartbeats.cycle / 1000
    for phase in range(0, 7, in_soak(1, by_default=3)):
        run = Run(heartbeats)
        run.at(run.now + heartbeats.cycle / 40, partial(run.add, count))
        began = run.now + heartbeats.cycle * (2 + (phase + 0.001) / 7)
        run.answer = outage(began, length, hang=hang * heartbeats.call_timeout)
        run.run(began + length + 2 * heartbeats.cycle)
        assert not run.lost, f"at phase {phase} of 7"


def test_an_outage_of_much_more_than_outage_survived_loses_a_lease() -> None:
    heartbeats = Heartbeats()
    run = Run(heartbeats)
    run.add()
    began = run.now + 2 * heartbeats.cycle - 1
    length = heartbeats.outage_survived + 2 * heartbeats.call_timeout
    run.answer = outage(began, length, hang=heartbeats.call_timeout)
    run.run(began + length + heartbeats.cycle)
    assert len(run.lost) == 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("whole", [True, False], ids=["whole calls", "single leases"])
def test_leases_are_kept_while_nine_in_ten_are_throttled_for_600_s(seed: int, whole: bool) -> None:
    chance = random.Random(seed)
    run = Run(Heartbeats())

    def answer(asked_at: float, terms: Sequence[Term]) -> tuple[float, Sequence[str]]:
        if not 1200 <= asked_at < 1800:
            return healthy(asked_at, terms)
        if whole:
            return 0.05, ["throttled" if chance.random() < 0.9 else "renewed"] * len(terms)
        return 0.05, ["throttled" if chance.random() < 0.9 else "renewed" for _ in terms]

    run.answer = answer
    run.add(100)
    run.run(2400)
    assert not run.lost
    assert len(run.cycle) == 100
