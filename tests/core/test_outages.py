"""An outage as long as `Heartbeats.outage_survived` loses no lease: with settings that are all drawn independently.

What is drawn is in `Case`: the numbers of the rhythm, how many leases there are and when they came, how long answers
take, whether calls of the outage are refused or hang, whether the service grants other ttls on the way, and how often
progress is reported, which brings early beats. The real cycles run in simulated time, one for each ttl, as the keeper
has them.
"""

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from leasekit._core.cycle import Cycle, Early, Lost, Send
from leasekit._core.term import Term
from leasekit.config import Heartbeats
from leasekit.errors import ConfigError
from leasekit.task import Verdict
from tests.sampling import in_soak

CASES = in_soak(3200, by_default=160)
"""How many settings are drawn; each run draws the same ones."""

_BLOCKS = 8
_MOST_SLOTS = 4000  # of one case: what would take longer is drawn again


@dataclass(frozen=True)
class Case:
    """One set of settings, and what happens under them."""

    seed: int
    heartbeats: Heartbeats
    count: int
    arrival: str
    spread: float
    """Seconds in which the leases arrive."""
    ttls: tuple[float, ...]
    """What each beat grants, by turns."""
    began: float
    """Seconds from the start to the outage."""
    hang: float
    """How long a call of the outage takes to fail, at most."""
    hangs_alike: bool
    slow_before: float
    slow_after: float
    news_every: float = 0.0
    """Seconds between two reports of progress, each of a lease at random; 0: none."""

    @property
    def rhythms(self) -> list[Heartbeats]:
        return [self.heartbeats.for_ttl(ttl) for ttl in self.ttls]

    @property
    def length(self) -> float:
        """Of the outage. The time that the first answer after it takes belongs to it."""
        return min(heartbeats.outage_survived for heartbeats in self.rhythms) - self.slow_after


def drawn(seed: int) -> Case:
    """A case in which an outage can be survived. The same for the same seed."""
    chance = random.Random(seed)
    while True:
        try:
            case = _drawn(chance, seed)
        except ConfigError:
            continue
        slots = (
            sum(3 * heartbeats.outage_survived + 4 * heartbeats.cycle for heartbeats in case.rhythms)
            * case.heartbeats.rate
        )
        if case.length > 0 and min(slots, case.count * 30) <= _MOST_SLOTS:
            return case


def _drawn(chance: random.Random, seed: int) -> Case:
    ttl = 10 ** chance.uniform(math.log10(2), 3.5)
    cycle = ttl * chance.choice([chance.uniform(0.01, 0.5), 0.4, 1 / 3])
    heartbeats = Heartbeats(
        ttl=ttl,
        cycle=cycle,
        rate=max(1 / cycle, min(20.0, 10 ** chance.uniform(-1, 2.5) / cycle)),
        batch=chance.choice([1, 1, 2, 3, 10, 100]),
        in_flight=chance.choice([1, 1, 2, 4, 8]),
        margin=ttl * chance.choice([0.0, chance.uniform(0, 0.3)]),
        grace=ttl * chance.choice([0.0, chance.uniform(0, 0.3)]),
        call_timeout=ttl * 10 ** chance.uniform(-3, -0.7),
        retry_wait=chance.choice([0.0, ttl * 10 ** chance.uniform(-3.5, -0.7)]),
        retries_per_cycle=chance.choice([0, 1, 3, 10]),
        max_failures=chance.choice([1, 2, 3, 5, 10]),
        strike_after=chance.choice([None, None, 0.0, ttl * chance.random()]),
        burst=chance.choice([1.0, 3.0, chance.uniform(1, 10)]),
    )
    ttls: tuple[float, ...] = (ttl,)
    if chance.random() < 0.3:
        ttls = tuple(max(2.0, ttl * chance.choice([0.3, 0.5, 1.0, 2.0, 3.0])) for _ in range(chance.randint(2, 5)))
    rhythms = [heartbeats.for_ttl(other) for other in ttls]
    most = min(400, *(rhythm.capacity for rhythm in rhythms))
    prompt = min(min(rhythm.call_timeout, rhythm.in_flight / rhythm.rate) for rhythm in rhythms)
    least = min(rhythm.outage_survived for rhythm in rhythms)
    longest = max(rhythm.cycle for rhythm in rhythms)
    spread = longest * chance.choice([0.0, chance.random(), chance.uniform(0, 2)])
    return Case(
        seed=seed,
        heartbeats=heartbeats,
        count=chance.choice([1, 2, most, chance.randint(1, most)]) if most > 1 else 1,
        arrival=chance.choice(["at once", "one by one", "in claims"]),
        spread=spread,
        ttls=ttls,
        began=spread + longest * chance.choice([chance.uniform(0, 0.2), chance.uniform(0, 4)]),
        hang=chance.choice([0.0, heartbeats.call_timeout, chance.uniform(0, heartbeats.call_timeout)]),
        hangs_alike=chance.random() < 0.7,
        slow_before=chance.choice([0.0, chance.uniform(0, prompt)]),
        slow_after=chance.choice([0.0, chance.uniform(0, min(prompt, least))]),
        news_every=chance.choice([0.0, max(longest * 10 ** chance.uniform(-3, 0), 0.02)]),
    )


@dataclass
class World:
    """One keeper's loop, without a keeper, on a heap of simulated time."""

    case: Case
    now: float = 1000.0
    lost: list[tuple[float, Term, str]] = field(default_factory=list[tuple[float, Term, str]])
    longest: float = 0.0  # without an acknowledged beat

    def __post_init__(self) -> None:
        self.chance = random.Random(self.case.seed)
        self.cycles: dict[float, Cycle] = {}
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self.began = self.now + self.case.began
        self.over = self.began + self.case.length
        self._grants: dict[Term, int] = {}
        self._terms: list[Term] = []
        self._early = Early()

    def at(self, when: float, do: Callable[[], object]) -> None:
        heapq.heappush(self._events, (when, next(self._order), do))

    def arrive(self) -> None:
        case, start = self.case, self.now
        for i in range(case.count):
            match case.arrival:
                case "at once":
                    self.at(start + case.spread, self._add)
                case "one by one":
                    self.at(start + case.spread * (i + 1) / case.count, self._add)
                case _:
                    self.at(start + case.spread * (i * 5 // case.count) / 5, self._add)

        if case.news_every:
            self.at(start + case.news_every, self._report)

    def _add(self) -> None:
        heartbeats = self.case.rhythms[0]
        self._terms.append(term := Term(None, heartbeats, granted_at=self.now))
        self.cycle(heartbeats).add(term, self.now)

    def _report(self) -> None:
        if self._terms:
            term = self.chance.choice(self._terms)
            self.cycle(term.heartbeats).hasten(term, self.now)
        self.at(self.now + self.case.news_every, self._report)

    def cycle(self, heartbeats: Heartbeats) -> Cycle:
        if heartbeats.ttl not in self.cycles:
            self.cycles[heartbeats.ttl] = Cycle(heartbeats, now=self.now, random=self.chance.random, early=self._early)
        return self.cycles[heartbeats.ttl]

    def run(self, until: float) -> None:
        while not self.lost:
            when = min(cycle.wake_at for cycle in self.cycles.values()) if self.cycles else math.inf
            when = min(when, self._events[0][0] if self._events else math.inf)
            if when > until:
                break
            self.now = max(self.now, when)
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            for cycle in list(self.cycles.values()):
                self._perform(cycle, cycle.step(self.now))

    def _perform(self, cycle: Cycle, effects: Sequence[Send | Lost]) -> None:
        for effect in effects:
            match effect:
                case Lost():
                    self.lost.append((self.now, effect.term, effect.reason))
                case Send():
                    self._send(cycle, effect)

    def _send(self, cycle: Cycle, send: Send) -> None:
        asked_at, case = self.now, self.case
        if self.began <= asked_at < self.over:
            hang = case.hang if case.hangs_alike else case.hang * self.chance.random()
            took, word = min(hang, cycle.heartbeats.call_timeout), "failed"
        else:
            took, word = (case.slow_before if asked_at < self.began else case.slow_after), "renewed"
        self.at(asked_at + took, lambda: self._answered(cycle, send, word, asked_at))

    def _answered(self, cycle: Cycle, send: Send, word: str, asked_at: float) -> None:
        verdicts: list[Verdict] = []
        for term in send.terms:
            ttl = None
            if word == "renewed":
                number = self._grants[term] = self._grants.get(term, 0) + 1
                ttl = self.case.ttls[number % len(self.case.ttls)]
                self.longest = max(self.longest, asked_at - term.granted_at)
            verdicts.append(Verdict(id="", verdict=word, ttl=ttl))  # type: ignore[arg-type]
        self._perform(cycle, cycle.answered(send, verdicts, asked_at=asked_at, now=self.now))
        for term, verdict in zip(send.terms, verdicts, strict=True):
            if term.place is not None and verdict.ttl not in (None, cycle.heartbeats.ttl):
                cycle.remove(term)
                term.heartbeats = self.case.heartbeats.for_ttl(verdict.ttl)
                self.cycle(term.heartbeats).add(term, self.now, renewed=True)


def survive(case: Case) -> World:
    world = World(case)
    world.arrive()
    world.run(world.over + 3 * max(heartbeats.cycle for heartbeats in case.rhythms))
    assert not world.lost, f"{case}, at {world.lost[0][0] - world.began:.3f} s of {case.length:.3f} s"
    return world


@pytest.mark.soak
@pytest.mark.parametrize("block", range(_BLOCKS))
def test_an_outage_of_outage_survived_loses_no_lease_whatever_the_settings_are(block: int) -> None:
    for seed in range(block, CASES, _BLOCKS):
        survive(drawn(seed))


# Sample: a fifth of the leases.
@pytest.mark.soak
@pytest.mark.parametrize(
    ("count", "ttls"),
    [
        (in_soak(100_000, by_default=20_000), (300.0,)),
        (in_soak(10_000, by_default=2_000), (300.0, 600.0, 150.0)),
    ],
    ids=["one ttl", "regranted"],
)
def test_tens_of_thousands_of_leases_survive_it(count: int, ttls: tuple[float, ...]) -> None:
    case = Case(
        seed=1,
        heartbeats=Heartbeats(batch=2500),
        count=count,
        arrival="in claims",
        spread=100.0,
        ttls=ttls,
        began=300.0,
        hang=10.0,
        hangs_alike=True,
        slow_before=0.5,
        slow_after=0.5,
    )
    world = survive(case)
    assert sum(len(cycle) for cycle in world.cycles.values()) == count
