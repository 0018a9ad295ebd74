"""Benchmarks run: each once, quickly, and what they find can be shown."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
NAMES = sorted(path.stem for path in BENCHMARKS.glob("[a-z]*.py"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_it_measures_every_case_it_names(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines
    assert all(line["benchmark"] == name and line["case"] and line["cpus"] for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_shown_of_it_in_the_readme_is_what_it_measures(name: str) -> None:
    results = BENCHMARKS / "results" / f"{name}.jsonl"
    readme = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    cases = [json.loads(line)["case"] for line in results.read_text(encoding="utf-8").splitlines()]
    assert cases
    assert [case for case in cases if f"| {case} |" not in readme] == []
