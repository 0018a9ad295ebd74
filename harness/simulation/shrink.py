"""Shrink a failing history: fewer kinds of faults, fewer faults, less time."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from harness.simulation.faults import planned
from harness.simulation.run import QUIET, Outcome, simulate
from harness.simulation.scenario import Scenario
from harness.simulation.world import World

T = TypeVar("T")
_SHORTEST = 0.25  # hours


def shrink(outcome: Outcome, *, tries: int = 80, say: Callable[[str], None] = lambda _: None) -> Outcome:
    """Return the smallest history found in `tries` runs that breaks one of the same rules."""
    return _Shrinking(outcome, tries, say).run()


class _Shrinking:
    def __init__(self, outcome: Outcome, tries: int, say: Callable[[str], None]) -> None:
        self._best = outcome
        self._rules = {violation.rule for violation in outcome.violations}
        self._tries = tries
        self._say = say

    def run(self) -> Outcome:
        while self._best.scenario.hours > _SHORTEST and self._still_fails(hours=self._best.scenario.hours / 2):
            pass
        self._drop_kinds()
        self._drop_faults()
        return self._best

    def _still_fails(self, **changes: object) -> bool:
        if self._tries <= 0:
            return False
        self._tries -= 1
        tried = simulate(replace(self._best.scenario, **changes))  # type: ignore[arg-type]
        fails = any(violation.rule in self._rules for violation in tried.violations)
        if fails:
            self._best = tried
            scenario = tried.scenario
            kinds = sum(rate > 0 for rate in scenario.rates.values())
            self._say(f"{scenario.hours:g} h, {kinds} kinds, {len(_left(scenario))} faults: {tried.violations[0].rule}")
        return fails

    def _drop_kinds(self) -> None:
        for share in (2, 4, 8):
            kinds = [name for name, rate in self._best.scenario.rates.items() if rate]
            for part in _parts(kinds, share):
                self._without(part)
        for name in [name for name, rate in self._best.scenario.rates.items() if rate]:
            self._without([name])

    def _without(self, names: Iterable[str]) -> None:
        self._still_fails(rates={**self._best.scenario.rates, **dict.fromkeys(names, 0.0)}, skip=frozenset())

    def _drop_faults(self) -> None:
        share = 2
        while self._tries > 0 and (left := _left(self._best.scenario)) and share <= 2 * len(left):
            for part in _parts(left, share):
                self._still_fails(skip=self._best.scenario.skip | set(part))
            share *= 2


def _parts(whole: Sequence[T], share: int) -> list[Sequence[T]]:
    size = max(1, -(-len(whole) // share))
    return [whole[at : at + size] for at in range(0, len(whole), size)]


def _left(scenario: Scenario) -> list[int]:
    until = scenario.hours * 3600 * (1 - QUIET)
    return [fault.number for fault in planned(World(scenario), until=until) if fault.number not in scenario.skip]
