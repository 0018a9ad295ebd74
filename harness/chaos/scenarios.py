"""The table of scenarios; run one and check its history."""

import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.chaos.world import Service, World
from harness.history import Effect, Fault, Started

Act = Callable[[World], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A fault to test: `act` starts workers, injects the fault, asserts that it fired, and returns."""

    row: int  # of the fault matrix; 0: the big run
    name: str
    what: str
    faults: tuple[str, ...]  # names of faults that must be in the log
    ttl: float = 3.0
    cycle: float | None = None  # instead of the default for the ttl
    rules: Mapping[str, Any]
    breaks: str = ""  # the rule that is broken on purpose: the checker must report it, and no other
    service: Service = "http"
    serve: bool = True  # the service is started before `act`
    alone: bool = False  # no other scenario runs meanwhile
    long: bool = False  # takes minutes, and little of the machine
    act: Act


@dataclass(slots=True, kw_only=True)
class Report:
    """The outcome of one scenario."""

    scenario: Scenario
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    broken: Counter[str] = field(default_factory=Counter)  # violations of each rule
    counts: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    figures: list[str] = field(default_factory=list)
    home: Path | None = None  # the folder, where it is kept

    @property
    def sum(self) -> str:
        lost, twice, double = (
            sum(self.broken[rule] for rule in rules) for rules in (("S5", "L4", "queue"), ("S1", "S2"), ("S4", "S7"))
        )
        return f"{lost} lost, {twice} concurrent, {double} double results"

    @property
    def line(self) -> str:
        done = self.counts
        fired = ", ".join(f"{name} {number}" for name, number in sorted(self.faults.items()))
        verdict = "ok  " if not self.problems else "FAIL"
        entry = self.scenario
        return (
            f"{verdict} {entry.row:>3} {entry.name:<28} {self.seconds:6.1f} s  {done.get('tasks', 0):>6,} tasks"
            f" {done.get('runs', 0):>6,} runs {done.get('effects', 0):>8,} effects  {self.sum}  fired: {fired}"
        )


SCENARIOS: list[Scenario] = []


def scenario(row: int, name: str, *, what: str = "", **options: Any) -> Callable[[Act], Act]:
    """Add a function to the table; `what`, or else the first line of its docstring, describes the scenario.

    `options` are fields of `Scenario`, and of `Rules`.
    """
    own = {field: options.pop(field) for field in list(options) if field in Scenario.__dataclass_fields__}

    def register(act: Act) -> Act:
        described = what or (act.__doc__ or "").partition("\n")[0]
        SCENARIOS.append(Scenario(row=row, name=name, what=described, rules=options, act=act, **own))
        SCENARIOS.sort(key=lambda entry: (entry.row or 1000, entry.name))
        return act

    return register


def run(entry: Scenario, *, keep: bool = False) -> Report:
    """Run a scenario in a folder of its own, which is kept where it failed."""
    report = Report(scenario=entry)
    began_at = time.monotonic()
    home = Path(tempfile.mkdtemp(prefix=f"chaos-{entry.name}-"))
    with World(home, ttl=entry.ttl, cycle=entry.cycle, service=entry.service) as world:
        try:
            if entry.serve:
                world.start()
            entry.act(world)
            for name in world.proxy.fired.keys() & set(entry.faults):
                world.fault(name)
            world.drain()
            world.stop()
            violations = world.verdict(faults=entry.faults, rules=dict(entry.rules))
            report.broken.update(violation.rule for violation in violations)
            report.problems += [str(violation) for violation in violations if violation.rule != entry.breaks]
            if entry.breaks and not report.broken[entry.breaks]:
                report.problems.append(f"{entry.breaks} was broken on purpose, and the checker did not report it")
        except Exception:  # noqa: BLE001 - any error is reported
            report.problems.append(traceback.format_exc())
        _count(report, world)
    report.seconds = time.monotonic() - began_at
    if report.problems or keep:
        report.home = home
    else:
        shutil.rmtree(home, ignore_errors=True)
    return report


def _count(report: Report, world: World) -> None:
    report.figures = world.figures
    events = world.events()
    # A fault is logged once, however many requests it hit in the proxy.
    report.faults = dict(Counter(event.name for event in events if isinstance(event, Fault)) | world.proxy.fired)
    report.counts = {
        "tasks": len(world.ids),
        "runs": sum(isinstance(event, Started) for event in events),
        "effects": sum(isinstance(event, Effect) for event in events),
    }
