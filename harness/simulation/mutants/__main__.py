"""`python -m harness.simulation.mutants`: the code as it is, then each mutant, until the checker has named its rule."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.simulation.mutants.edit import NotThere
from harness.simulation.mutants.mutant import Mutant, plant
from harness.simulation.mutants.table import MUTANTS
from harness.simulation.mutants.trial import Trial

ROOT = Path(__file__).parents[3]
_PATIENCE = 600.0  # seconds for one trial: a mutant may run in circles
_FOLDERS = ("leasekit", "harness", "adapters")
_FOR_TESTS = ("tests", "pyproject.toml")


def main() -> int:
    """The exit code: 1 where a mutant survives, or the code as it is breaks a rule."""
    parser = argparse.ArgumentParser(prog="python -m harness.simulation.mutants", description=__doc__)
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
        if not mutant.test:
            seeds[mutant.under] = max(seeds.get(mutant.under, 0), mutant.seeds)
    bad: list[str] = []
    print(f"{'the code as it is, under':<32}{'seeds':>5}{'seconds':>9}")
    for stress, trial in zip(seeds, pool.map(lambda one: tried(None, one, str(seeds[one])), seeds), strict=True):
        is_bad = bool(trial.killed_by or trial.error)
        print(f"{stress:<32}{trial.seeds:>5}{trial.seconds:>9.1f}{'  FAILED' * is_bad}", flush=True)
        if is_bad:
            bad.append(f"the code as it is, under {stress}, seed {trial.seeds}: {trial.why or trial.error}")
    tests = [mutant.test for mutant in chosen if mutant.test]
    if tests and (trial := asked_tests(None, *tests)).killed_by:
        bad.append(f"the code as it is fails a test that is to kill a mutant: {trial.why}")
    return bad


def _all(pool: ThreadPoolExecutor, chosen: Sequence[Mutant]) -> list[str]:
    """Those that survive, and why."""
    bad: list[str] = []
    print(f"\n{'mutant':<32}{'killed by':<12}{'under':<11}{'seeds':>5}{'seconds':>9}  also broken")
    for mutant, trial in zip(chosen, pool.map(_judged, chosen), strict=True):
        also = ", ".join(sorted(set(trial.rules) - set(trial.killed_by)))
        by = "a test" if mutant.test and trial.killed_by else ", ".join(trial.killed_by) or "SURVIVED"
        print(
            f"{mutant.name:<32}{by:<12}{mutant.under:<11}{trial.seeds:>5}{trial.seconds:>9.1f}  {also}".rstrip(),
            flush=True,
        )
        if not trial.killed_by:
            past = mutant.test or f"{trial.seeds} histories"
            bad.append(f"{mutant.name} survived {past}. {mutant.breaks} {trial.error}".rstrip())
    return bad


def _judged(mutant: Mutant) -> Trial:
    return asked_tests(mutant, mutant.test) if mutant.test else tried(mutant, mutant.name)


def asked_tests(mutant: Mutant | None, *tests: str) -> Trial:
    """What these tests say of this mutant, or of the code as it is."""
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    began_at = time.monotonic()
    done = _run(mutant, command, *_FOLDERS, *_FOR_TESTS)
    if isinstance(done, Trial):
        return done
    seconds = time.monotonic() - began_at
    if done.returncode not in (0, 1):  # 1: a test failed; else pytest had nothing to run, or could not
        return Trial(error=_last(done.stdout) or _last(done.stderr), seconds=seconds)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    return Trial(killed_by=list(tests) if failed else [], why=" ".join(failed), seconds=seconds)


def tried(mutant: Mutant | None, *asked: str) -> Trial:
    """What became of this mutant, or of the code as it is, in histories."""
    done = _run(mutant, ["-m", "harness.simulation.mutants.trial", *asked], *_FOLDERS)
    if isinstance(done, Trial):
        return done
    if done.returncode:
        return Trial(error=_last(done.stderr) or f"it ended with {done.returncode}")
    return Trial(**json.loads(_last(done.stdout)))


def _run(mutant: Mutant | None, command: Sequence[str], *names: str) -> "subprocess.CompletedProcess[str] | Trial":
    """Python with these arguments, in a process of its own and a copy of the tree with this mutant planted."""
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
            return Trial(error=f"it did not end within {_PATIENCE:g} s")


def _last(said: str) -> str:
    return said.strip().rpartition("\n")[2]


if __name__ == "__main__":
    sys.exit(main())
