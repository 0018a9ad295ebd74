"""Try a mutant in its own copy of the tree: `python -m harness.simulation.mutants.trial NAME` in that copy's root.

The output is one line of JSON. Each trial needs a process of its own, as imported modules stay imported.
"""

import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import leasekit
from harness.simulation.mutants.stress import STRESSES
from harness.simulation.mutants.table import MUTANTS
from harness.simulation.run import simulate
from harness.simulation.scenario import Scenario

_PATIENCE = 600  # seconds of CPU time, as other processes may be busy: a mutant may loop for ever


@dataclass(slots=True)
class Trial:
    """The outcome of one mutant."""

    seeds: int = 0  # the number of histories that were run
    killed_by: list[str] = field(default_factory=list[str])  # the expected rules that were broken
    rules: dict[str, int] = field(default_factory=dict[str, int])  # all rules that were broken, and how often
    why: str = ""  # the first violation
    error: str = ""  # what went wrong in the program, which proves nothing
    seconds: float = 0.0


def tried(scenarios: Iterable[Scenario], rules: Sequence[str] | None) -> Trial:
    trial, began_at, broken = Trial(), time.monotonic(), Counter[str]()
    for scenario in scenarios:
        trial.seeds += 1
        try:
            violations = simulate(scenario).violations
        except Exception as error:  # noqa: BLE001  broken code may raise anything
            trial.error = f"seed {scenario.seed}: {error!r}"
            continue
        broken.update(violation.rule for violation in violations)
        expected = [violation for violation in violations if rules is None or violation.rule in rules]
        if expected:
            trial.killed_by = sorted({violation.rule for violation in expected})
            trial.why = str(expected[0])
            break
        if violations:
            trial.error = trial.error or f"seed {scenario.seed}: {violations[0]}"
    trial.rules = dict(broken)
    trial.seconds = time.monotonic() - began_at
    return trial


def main() -> None:
    """Try the mutant of this name; or, with a number, the unbroken code under a stress over so many seeds."""
    if not Path(leasekit.__file__).is_relative_to(Path.cwd()):
        raise SystemExit(f"leasekit is imported from {leasekit.__file__}: run this in the root of its copy")
    name, *seeds = sys.argv[1:]
    if seeds:
        clean = [Scenario(seed=seed, **STRESSES[name]) for seed in range(1, int(seeds[0]) + 1)]
        trial = tried(clean, None)
    else:
        by = MUTANTS[name].by
        assert by, f"{name} is killed by a test, not by histories"
        trial = tried(by.scenarios(), by.rules)
    print(json.dumps(asdict(trial)))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CPU, (_PATIENCE, _PATIENCE))
    main()
