"""The demo: it passes on real files, and would not pass if something had gone wrong."""

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from leasekit.cli.demo_check import Entry, Finding, check, measured
from leasekit.task import HistoryEntry, Status, TaskInfo

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_the_demo_digests_a_directory_and_survives_a_killed_worker(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    for number in range(60):
        (files / f"{number}.txt").write_text(f"file {number} " * 100)
    done = subprocess.run(
        [sys.executable, "-m", "leasekit", "demo", str(files)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "was killed (SIGKILL)" in done.stdout
    assert "nothing was lost" in done.stdout
    assert not done.stderr


def test_an_empty_directory_is_refused_in_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "leasekit", "demo", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "no files" in done.stderr


# What it checks ---------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("a")
    return path


def task(path: Path, **changes: Any) -> TaskInfo:
    run = HistoryEntry(fence=2, attempt=2, outcome="success", at=NOW)
    whole = TaskInfo(
        id="t",
        kind="digest",
        status=Status.SUCCESS,
        priority=2,
        attempt=2,
        crashes=1,
        fence=2,
        at=NOW,
        payload={"path": str(path)},
        result=measured(path.read_bytes()),
        history=[run],
    )
    return replace(whole, **changes)


def run(fence: int, start: float, end: float | None, *, pid: int = 1) -> list[Entry]:
    entries = [Entry(task="t", fence=fence, event="start", at=start, pid=pid)]
    return entries if end is None else [*entries, Entry(task="t", fence=fence, event="end", at=end, pid=pid)]


TAKEN_OVER = [*run(1, 0, None, pid=7), *run(2, 6, 8)]


def wrong(findings: list[Finding]) -> list[str]:
    return [finding.what for finding in findings if finding.wrong]


def test_a_run_that_was_taken_over_after_its_process_was_killed_is_as_it_should_be(file: Path) -> None:
    assert not wrong(check([task(file)], TAKEN_OVER, killed_at={7: 3.0}))


def test_a_wrong_digest_is_found(file: Path) -> None:
    done = task(file)
    file.write_text("b")
    assert "digests" in wrong(check([done], TAKEN_OVER, killed_at={7: 3.0}))[0]


def test_a_task_that_was_settled_twice_is_found(file: Path) -> None:
    done = task(file)
    assert "once" in wrong(check([replace(done, history=done.history * 2)], TAKEN_OVER, killed_at={7: 3.0}))[0]


def test_two_runs_beside_one_another_are_found(file: Path) -> None:
    assert "beside" in wrong(check([task(file)], [*run(1, 0, 7), *run(2, 6, 8)], killed_at={}))[0]


def test_a_run_that_began_before_the_killed_process_was_gone_is_found(file: Path) -> None:
    assert "beside" in wrong(check([task(file)], TAKEN_OVER, killed_at={7: 6.5}))[0]


def test_a_demo_in_which_nothing_was_taken_over_has_shown_nothing(file: Path) -> None:
    assert "taken over" in wrong(check([task(file)], run(1, 0, 1), killed_at={}))[0]
