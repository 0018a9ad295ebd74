"""The soak runs lives on each service, and says what the service has of each sort."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("options", "counted", "sort"),
    [((), "rows", "task"), pytest.param(("--redis",), "entries", "task", marks=pytest.mark.slow)],
)
def test_a_soak_counts_what_there_is(options: tuple[str, ...], counted: str, sort: str) -> None:
    command = [sys.executable, "-m", "harness.soak", "--minutes", "0.05", "--rate", "100", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["submitted"] == 300
    assert line["worker_mb"] > 1
    assert 0 < line[counted][sort] <= 300
