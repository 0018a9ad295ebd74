"""One mutant in its own copy of the tree: `python -m harness.simulation.mutants.trial NAME` in that copy's root.

It writes one line of JSON. It is a program of its own because what is imported stays imported.
"""

import json
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

__all__ = ["Trial"]


@dataclass(slots=True)
class Trial:
    """What became of it."""

    seeds: int = 0  # that were tried
    killed_by: list[str] = field(default_factory=list[str])  # of those that were asked for
    rules: dict[str, int] = field(default_factory=dict[str, int])  # all that were broken, and how often
    why: str = ""  # the first of what was found
    error: str = ""  # of the program; that is no proof
    seconds: float = 0.0


def tried(scenarios: Iterable[Scenario], rules: Sequence[str] | None) -> Trial:
    """Histories until one breaks one of these rules; None: any."""
    trial, began_at, broken = Trial(), time.monotonic(), Counter[str]()
    for scenario in scenarios:
        trial.seeds += 1
        try:
            violations = simulate(scenario).violations
        except Exception as error:  # noqa: BLE001  what is broken may break anything
            trial.error = f"seed {scenario.seed}: {error!r}"
            continue
        broken.update(violation.rule for violation in violations)
        found = [violation for violation in violations if rules is None or violation.rule in rules]
        if found:
            trial.killed_by = sorted({violation.rule for violation in found})
            trial.why = str(found[0])
            break
        if violations:
            trial.error = trial.error or f"seed {scenario.seed}: {violations[0]}"
    trial.rules = dict(broken)
    trial.seconds = time.monotonic() - began_at
    return trial


def main() -> None:
    """A mutant by its name; or a stress, and over how many seeds, with the code as it is."""
    if not Path(leasekit.__file__).is_relative_to(Path.cwd()):
        raise SystemExit(f"this is not the copy in {Path.cwd()}, but {leasekit.__file__}")
    name, *seeds = sys.argv[1:]
    if seeds:
        clean = [Scenario(seed=seed, **STRESSES[name]) for seed in range(1, int(seeds[0]) + 1)]
        trial = tried(clean, None)
    else:
        mutant = next(one for one in MUTANTS if one.name == name)
        trial = tried(mutant.scenarios(), mutant.killed_by)
    print(json.dumps(asdict(trial)))


if __name__ == "__main__":
    main()
