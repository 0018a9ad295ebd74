"""A slice of the rows on Redis of `make chaos`: real workers, a real Redis, the checker on what happened."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "redis-full",
        "redis-stalls",
        "redis-foreign-key",
        "redis-failover",
        "redis-stale-failover",
        "redis-failback",
        "redis-sentinels",
        "redis-forgets",
        "redis-clock-set-back",
    ],
)
def test_what_is_promised_on_redis_holds_through(name: str, tmp_path: Path) -> None:
    (tmp_path / "harness").symlink_to(ROOT / "harness")
    ran = subprocess.run(
        [sys.executable, "-m", "harness.chaos", "--name", name],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert "1 scenarios, 0 failed" in ran.stdout, ran.stdout[-10_000:] + ran.stderr[-10_000:]
