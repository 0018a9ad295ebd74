"""`python -m simulation.mutants`: the code as it is, then each mutant, until the checker has named its rule."""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from simulation.mutants.mutant import Mutant, NotThere, plant
from simulation.mutants.table import MUTANTS
from simulation.mutants.trial import Trial

ROOT = Path(__file__).parents[2]
_PATIENCE = 600.0  # seconds for one trial: a mutant may run in circles
_FOLDERS = ("leasekit", "simulation")


def main() -> int:
    """The exit code: 1 where a mutant survives, or the code as it is breaks a rule."""
    parser = argparse.ArgumentParser(prog="python -m simulation.mutants", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="this one; more than once for more")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once (default: 2)")
    asked = parser.parse_args()
    if unknown := sorted(set(asked.only or ()) - {mutant.name for mutant in MUTANTS}):
        parser.error(f"no such mutant: {', '.join(unknown)}")
    chosen = [mutant for mutant in MUTANTS if not asked.only or mutant.name in asked.only]
    began_at = time.monotonic()
    with ThreadPoolExecutor(asked.jobs) as pool:
        bad = _clean(pool, chosen) + _all(pool, chosen)
    print(f"{time.monotonic() - began_at:.0f} s")
    for line in bad:
        print(f"FAILED: {line}")
    return bool(bad)


def _clean(pool: ThreadPoolExecutor, chosen: Sequence[Mutant]) -> list[str]:
    """What is wrong with the code as it is, in the very histories in which mutants are looked for."""
    seeds: dict[str, int] = {}
    for mutant in chosen:
        if not mutant.equivalent:
            seeds[mutant.under] = max(seeds.get(mutant.under, 0), mutant.seeds)
    bad: list[str] = []
    print(f"{'the code as it is, under':<32}{'seeds':>5}{'seconds':>9}")
    for stress, trial in zip(seeds, pool.map(lambda one: tried(None, one, str(seeds[one])), seeds), strict=True):
        is_bad = bool(trial.killed_by or trial.error)
        print(f"{stress:<32}{trial.seeds:>5}{trial.seconds:>9.1f}{'  FAILED' * is_bad}", flush=True)
        if is_bad:
            bad.append(f"the code as it is, under {stress}, seed {trial.seeds}: {trial.why or trial.error}")
    return bad


def _all(pool: ThreadPoolExecutor, chosen: Sequence[Mutant]) -> list[str]:
    """Those that survive, and why."""
    living = [mutant for mutant in chosen if not mutant.equivalent]
    bad: list[str] = []
    print(f"\n{'mutant':<32}{'killed by':<12}{'under':<11}{'seeds':>5}{'seconds':>9}  also broken")
    for mutant, trial in zip(living, pool.map(lambda one: tried(one, one.name), living), strict=True):
        also = ", ".join(sorted(set(trial.rules) - set(trial.killed_by)))
        by = ", ".join(trial.killed_by) or "SURVIVED"
        print(
            f"{mutant.name:<32}{by:<12}{mutant.under:<11}{trial.seeds:>5}{trial.seconds:>9.1f}  {also}".rstrip(),
            flush=True,
        )
        if not trial.killed_by:
            bad.append(f"{mutant.name} survived {trial.seeds} histories. {mutant.breaks} {trial.error}".rstrip())
    for mutant in chosen:
        if mutant.equivalent:
            print(f"{mutant.name:<32}not run: {mutant.equivalent}")
    return bad


def tried(mutant: Mutant | None, *asked: str) -> Trial:
    """What became of this mutant, or of the code as it is, in a copy of the tree and a process of its own."""
    with tempfile.TemporaryDirectory(prefix="leasekit-mutant-") as folder:
        copy = Path(folder)
        for name in _FOLDERS:
            shutil.copytree(ROOT / name, copy / name)
        try:
            if mutant is not None:
                plant(mutant, copy)
        except NotThere as error:
            return Trial(error=str(error))
        command = [sys.executable, "-m", "simulation.mutants.trial", *asked]
        try:
            done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=_PATIENCE, check=False)
        except subprocess.TimeoutExpired:
            return Trial(error=f"it did not end within {_PATIENCE:g} s")
    if done.returncode:
        return Trial(error=_last(done.stderr) or f"it ended with {done.returncode}")
    return Trial(**json.loads(_last(done.stdout)))


def _last(said: str) -> str:
    return said.strip().rpartition("\n")[2]


if __name__ == "__main__":
    sys.exit(main())
