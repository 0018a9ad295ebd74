"""The demo: it passes on real files, and would not pass if something had gone wrong."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import msgspec
import pytest
from msgspec.structs import replace

from leasekit.cli.demo import _kill_one
from leasekit.cli.demo_check import Entry, Finding, check, measured
from leasekit.cli.demo_fleet import Fleet
from leasekit.task import HistoryEntry, Status, TaskInfo

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_files_are_enough(tmp_path: Path, count: int) -> None:
    files = tmp_path / "files"
    files.mkdir()
    for number in range(count):
        (files / f"{number}.txt").write_text(f"file {number}")
    began_at = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "leasekit", "demo", str(files), "--workers", "2"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "was killed (SIGKILL) in the middle" in done.stdout
    assert "Watch its tasks run again elsewhere" in " ".join(done.stdout.splitlines()[:3])
    assert time.monotonic() - began_at < 60


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
    assert "beside" in wrong(check([task(file)], [*run(1, 0, 7), *run(2, 6, 8)], killed_at={}))[-1]


def test_a_run_that_began_before_the_killed_process_was_gone_is_found(file: Path) -> None:
    assert "beside" in wrong(check([task(file)], TAKEN_OVER, killed_at={7: 6.5}))[0]


def test_a_demo_in_which_nothing_was_taken_over_has_shown_nothing(file: Path) -> None:
    assert "taken over" in wrong(check([task(file)], run(1, 0, 1), killed_at={}))[0]


def test_a_run_that_ended_and_was_repeated_was_not_taken_over_from_a_killed_worker(file: Path) -> None:
    assert "taken over" in wrong(check([task(file)], [*run(1, 0, 1, pid=7), *run(2, 6, 8)], killed_at={7: 3.0}))[0]


def test_a_killed_run_that_no_other_followed_is_found(file: Path) -> None:
    assert "taken over" in wrong(check([task(file)], run(1, 0, None, pid=7), killed_at={7: 3.0}))[0]


def test_a_worker_that_ended_by_itself_is_known_by_the_last_line_of_its_run(file: Path) -> None:
    step = Entry(task="t", fence=1, event="step", at=4, pid=7)
    log = [*TAKEN_OVER[:1], step, *run(2, 6, 7, pid=8)[:1], *run(3, 9, 10)]
    assert not wrong(check([task(file)], log, killed_at={8: 7.0}, ended={7, 8}))
    assert "beside" in wrong(check([task(file)], log, killed_at={8: 7.0}))[0]
    late = replace(step, at=6.5)
    assert "beside" in wrong(check([task(file)], [*log, late], killed_at={8: 7.0}, ended={7, 8}))[0]


# Which worker it kills --------------------------------------------------------------------------------------------


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, 2)
    fleet.workers = [
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True) for _ in "12"
    ]
    try:
        yield fleet
    finally:
        for worker in fleet.workers:
            worker.kill()
            worker.communicate()


def wrote(log: Path, *entries: Entry) -> Path:
    with log.open("ab") as file:
        file.writelines(msgspec.json.encode(entry) + b"\n" for entry in entries)
    return log


def test_a_worker_in_the_middle_of_a_run_is_killed(fleet: Fleet, tmp_path: Path) -> None:
    idle, busy = fleet.workers
    log = wrote(tmp_path / "log", *run(1, 0, 1, pid=idle.pid), *run(2, 2, None, pid=busy.pid))
    assert _kill_one(fleet, log) == (busy.pid, 1)
    assert busy.returncode == -9
    assert idle.poll() is None


def test_no_worker_is_killed_before_a_run_has_begun(fleet: Fleet, tmp_path: Path) -> None:
    assert _kill_one(fleet, tmp_path / "log") is None
    assert [worker.poll() for worker in fleet.workers] == [None, None]


def test_a_worker_whose_last_run_ends_just_before_it_stands_still_goes_on(fleet: Fleet, tmp_path: Path) -> None:
    _, busy = fleet.workers
    start, end = run(1, 0, 1, pid=busy.pid)
    log = wrote(tmp_path / "log", start)
    pause = fleet.pause

    def paused(worker: "subprocess.Popen[str]") -> bool:
        wrote(log, end)
        return pause(worker)

    fleet.pause = paused  # type: ignore[method-assign]
    assert _kill_one(fleet, log) is None
    assert busy.stdin is not None
    busy.stdin.write("\n")
    busy.stdin.close()
    assert busy.wait(30) == 0  # it runs again


def test_a_worker_that_has_ended_by_itself_is_not_said_to_be_killed(fleet: Fleet, tmp_path: Path) -> None:
    worker, _ = fleet.workers
    log = wrote(tmp_path / "log", *run(1, 0, None, pid=worker.pid))
    worker.communicate("\n")
    assert _kill_one(fleet, log) is None


@pytest.mark.slow
def test_the_demo_can_be_kept_for_a_look_at_its_console(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("file")
    command = [sys.executable, "-m", "leasekit", "demo", str(tmp_path), "--workers", "2", "--keep"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            words: list[str] = []
            while "Ctrl-C" not in words:
                words += process.stdout.readline().split()
            url = next(word for word in words if word.startswith("http") and "/console" in word)
            with urlopen(f"{url.rstrip(':')}/") as answer:  # noqa: S310 - its own address
                assert "leasekit" in answer.read().decode()
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()
