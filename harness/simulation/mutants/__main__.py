"""`python -m harness.simulation.mutants`: run the unbroken code, then each mutant until the checker names its rule."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.simulation.mutants.edit import NotThere
from harness.simulation.mutants.mutant import Mutant, plant
from harness.simulation.mutants.table import MUTANTS
from harness.simulation.mutants.trial import Trial

ROOT = Path(__file__).parents[3]
_PATIENCE = 3600.0  # seconds for one trial, which may wait for other processes
_FOLDERS = ("leasekit", "harness", "adapters")
_FOR_TESTS = ("tests", "pyproject.toml")


def main() -> int:
    """Run the mutants that the arguments name; return 1 where one survives, or the unbroken code breaks a rule."""
    parser = argparse.ArgumentParser(prog="python -m harness.simulation.mutants", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="run this mutant; repeat for more")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once (default: 2)")
    options = parser.parse_args()
    if unknown := sorted(set(options.only or ()) - MUTANTS.keys()):
        parser.error(f"no such mutant: {', '.join(unknown)}")
    chosen = {name: mutant for name, mutant in MUTANTS.items() if not options.only or name in options.only}
    began_at = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        failures = _clean(pool, chosen.values()) + _all(pool, chosen)
    print(f"{time.monotonic() - began_at:.0f} s")
    for line in failures:
        print(f"FAILED: {line}")
    return bool(failures)


def _clean(pool: ThreadPoolExecutor, chosen: Collection[Mutant]) -> list[str]:
    """Run the unbroken code in the histories and tests that kill mutants; return what fails."""
    seeds: dict[str, int] = {}
    for by in (mutant.by for mutant in chosen if mutant.by):
        seeds[by.under] = max(seeds.get(by.under, 0), by.seeds)
    failures: list[str] = []
    print(f"{'the code as it is, under':<32}{'seeds':>5}{'seconds':>9}")
    for stress, trial in zip(seeds, pool.map(lambda name: tried(None, name, str(seeds[name])), seeds), strict=True):
        is_bad = bool(trial.killed_by or trial.error)
        print(f"{stress:<32}{trial.seeds:>5}{trial.seconds:>9.1f}{'  FAILED' * is_bad}", flush=True)
        if is_bad:
            failures.append(f"the code as it is, under {stress}, seed {trial.seeds}: {trial.why or trial.error}")
    tests = [mutant.test for mutant in chosen if mutant.test]
    if tests and (trial := run_tests(None, *tests)).killed_by:
        failures.append(f"the code as it is fails a test that should kill a mutant: {trial.why}")
    return failures


def _all(pool: ThreadPoolExecutor, chosen: Mapping[str, Mutant]) -> list[str]:
    failures: list[str] = []
    print(f"\n{'mutant':<32}{'killed by':<12}{'under':<11}{'seeds':>5}{'seconds':>9}  also broken")
    for (name, mutant), trial in zip(chosen.items(), pool.map(_judged, chosen), strict=True):
        also = ", ".join(sorted(set(trial.rules) - set(trial.killed_by)))
        killer = "a test" if mutant.test and trial.killed_by else ", ".join(trial.killed_by) or "SURVIVED"
        under = mutant.by.under if mutant.by else ""
        line = f"{name:<32}{killer:<12}{under:<11}{trial.seeds:>5}{trial.seconds:>9.1f}  {also}"
        print(line.rstrip(), flush=True)
        if not trial.killed_by:
            past = mutant.test or f"{trial.seeds} histories"
            failures.append(f"{name} survived {past}. {mutant.breaks} {trial.error}".rstrip())
    return failures


def _judged(name: str) -> Trial:
    mutant = MUTANTS[name]
    return run_tests(mutant, mutant.test) if mutant.test else tried(mutant, name)


def run_tests(mutant: Mutant | None, *tests: str) -> Trial:
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    began_at = time.monotonic()
    done = _run(mutant, command, *_FOLDERS, *_FOR_TESTS)
    if isinstance(done, Trial):
        return done
    seconds = time.monotonic() - began_at
    if done.returncode not in (0, 1):  # 1: a test failed; other codes: pytest could not run any
        return Trial(error=_last(done.stdout) or _last(done.stderr), seconds=seconds)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    return Trial(killed_by=list(tests) if failed else [], why=" ".join(failed), seconds=seconds)


def tried(mutant: Mutant | None, *arguments: str) -> Trial:
    done = _run(mutant, ["-m", "harness.simulation.mutants.trial", *arguments], *_FOLDERS)
    if isinstance(done, Trial):
        return done
    if done.returncode:
        return Trial(error=_last(done.stderr) or f"the trial ended with exit code {done.returncode}")
    return Trial(**json.loads(_last(done.stdout)))


def _run(mutant: Mutant | None, command: Sequence[str], *names: str) -> "subprocess.CompletedProcess[str] | Trial":
    """Run Python with these arguments, in a copy of the tree in which this mutant is planted."""
    with tempfile.TemporaryDirectory(prefix="leasekit-mutant-") as folder:
        copy = Path(folder)
        for name in names:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, copy)
        try:
            if mutant is not None:
                plant(mutant, copy)
            return subprocess.run(
                [sys.executable, *command],
                cwd=copy,
                env={**os.environ, "PYTHONPATH": str(copy / "adapters")},  # the tree itself is where it runs
                capture_output=True,
                text=True,
                timeout=_PATIENCE,
                check=False,
            )
        except NotThere as error:
            return Trial(error=str(error))
        except subprocess.TimeoutExpired:
            return Trial(error=f"the trial did not end within {_PATIENCE:g} s")


def _last(output: str) -> str:
    return output.strip().rpartition("\n")[2]


if __name__ == "__main__":
    sys.exit(main())
