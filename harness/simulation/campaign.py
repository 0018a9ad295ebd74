"""Many histories in several processes, for a while: `make simulate`."""

import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import count

from harness.simulation.run import Outcome, simulate
from harness.simulation.scenario import CHANGES, FAULTS, Scenario, swarm

_ENOUGH = 200.0  # simulated hours in which every kind of fault fires
_SQL_HOURS = 1.0  # of one history over a database
_EACH = 12  # histories in one process: tasks of killed processes are never collected, and slow down later histories


@dataclass(slots=True)
class Campaign:
    """The sums over all histories."""

    hours: float = 0.0
    sql_hours: float = 0.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    histories: int = 0
    faults: int = 0
    fired: Counter[str] = field(default_factory=Counter[str])
    failed: list[Outcome] = field(default_factory=list[Outcome])

    @property
    def silent(self) -> list[str]:
        """Kinds of faults and changes that did not fire although enough hours have passed."""
        names = [*FAULTS, *CHANGES]
        return [name for name in names if not self.fired[name]] if self.hours >= _ENOUGH else []

    def add(self, outcome: Outcome) -> None:
        self.histories += 1
        self.hours += outcome.hours
        self.cpu_seconds += outcome.seconds
        self.sql_hours += outcome.hours if outcome.scenario.store == "sql" else 0.0
        self.faults += outcome.faults
        self.fired += outcome.fired
        if outcome.violations:
            self.failed.append(outcome)


def run(campaign: Campaign, *, first: int, minutes: float, processes: int, sql_hours: float) -> Iterator[Outcome]:
    """Begin histories for some minutes, from seed `first` on; add each to the campaign as it ends, and yield it.

    They use a database until those that have ended have simulated `sql_hours` hours with one.
    """
    began_at = time.monotonic()
    seeds = count(first)
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawned, max_tasks_per_child=_EACH) as pool:
        running: set[Future[Outcome]] = set()
        while True:
            is_over = time.monotonic() - began_at >= minutes * 60
            while not is_over and len(running) < processes:
                scenario = swarm(next(seeds))
                if campaign.sql_hours < sql_hours:
                    scenario = replace(scenario, store="sql", hours=_SQL_HOURS)
                running.add(pool.submit(_one, scenario))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                campaign.add(future.result())
                campaign.seconds = time.monotonic() - began_at
                yield future.result()


def _one(scenario: Scenario) -> Outcome:
    return replace(simulate(scenario), events=())
