"""A slice of `make chaos`: scenarios that are short, and hold on any machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from leasekit._driver.guarding.kill_timer import obstacle

pytestmark = pytest.mark.skipif(obstacle() is not None, reason=obstacle() or "")

ROOT = Path(__file__).parents[2]


def chaos(folder: Path, *arguments: str) -> str:
    """What it prints. The package that is tested is the one that is installed: only `harness` comes from here."""
    (folder / "harness").symlink_to(ROOT / "harness")
    ran = subprocess.run(
        [sys.executable, "-m", "harness.chaos", *arguments],
        cwd=folder,
        env=os.environ | {"TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-10_000:] + ran.stderr[-10_000:]
    return ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gil-held", "claim-answer-lost", "schedule-answer-lost"])
def test_what_is_promised_holds_through(name: str, tmp_path: Path) -> None:
    assert "1 scenarios, 0 failed" in chaos(tmp_path, "--name", name)


@pytest.mark.slow
def test_a_promise_that_is_broken_is_found_out(tmp_path: Path) -> None:
    assert "1 scenarios, 0 failed" in chaos(tmp_path, "--name", "gil-held-unguarded")


def test_every_row_that_can_be_broken_on_any_machine_has_a_scenario(tmp_path: Path) -> None:
    rows = {line.split()[0] for line in chaos(tmp_path, "--list").splitlines()}
    # Not 3, 25, 27 (they need root or another file system), 9, 12, 37 (simulated), 30, 31 (other stores).
    assert rows == {"big", *map(str, {*range(1, 37)} - {3, 9, 12, 25, 27, 30, 31})}
