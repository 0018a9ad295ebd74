"""`leasekit dev`: server and worker in one tree of processes; the worker follows the code."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

import leasekit
from leasekit.cli.dev_sources import Sources

PATIENCE = 60.0


def handlers(home: Path, answer: str) -> None:
    (home / "app.py").write_text(
        f"""
import leasekit, os, time
worker = leasekit.Worker(concurrency=2)

@worker.handler("ask")
def ask(payload): return {{"answer": {answer!r}, "pid": os.getpid()}}

@worker.handler("long")
def long(payload, held):
    open("begun", "w").close()
    while not os.path.exists("go"):
        held.check()
        time.sleep(0.02)
    return {answer!r}
"""
    )


class Dev:
    """The command, and what it says."""

    def __init__(self, home: Path, *options: str) -> None:
        self.home = home
        self.log = home / "dev.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "leasekit", "dev", "app:worker", "--port", "0", "--interval", "0.05", *options],
                cwd=home,
                stdout=log,
                stderr=log,
            )

    def until(self, pattern: str, *, times: int = 1) -> str:
        """Wait until it has said this so many times; the last."""
        end = time.monotonic() + PATIENCE
        while len(found := re.findall(pattern, self.log.read_text())) < times:
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)
        return str(found[-1])

    @property
    def url(self) -> str:
        return self.until(r"the server is at (\S+) \(tasks are in memory; --store sqlite:///dev.db keeps them\)\n")

    def pids(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"the worker is process (\d+)", self.log.read_text())]

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)


class Start(Protocol):
    def __call__(self, *options: str) -> Dev: ...


@pytest.fixture
def dev(tmp_path: Path) -> Iterator[Start]:
    started: list[Dev] = []

    def start(*options: str) -> Dev:
        started.append(Dev(tmp_path, *options))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.stop()
        print(one.log.read_text()[-4000:])


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def asked(client: leasekit.Client) -> Any:
    """The first answer to a question that is asked once a second."""
    end = time.monotonic() + PATIENCE
    questions: list[str] = []
    while time.monotonic() < end:
        # A question may have been given to a worker at the moment when it went; it is answered when that lease ends.
        questions.append(client.schedule("ask").id)
        again_at = time.monotonic() + 1
        while time.monotonic() < again_at:
            for question in questions:
                if (task := client.get(question)) is not None and task.status.ended:
                    return task.result
            time.sleep(0.02)
    raise AssertionError("nobody answers")


def result(client: leasekit.Client, task_id: str) -> Any:
    end = time.monotonic() + PATIENCE
    while (task := client.get(task_id)) is None or not task.status.ended:
        assert time.monotonic() < end, task
        time.sleep(0.02)
    return task.result


@pytest.mark.slow
def test_new_code_answers_after_a_change_and_the_server_stays(tmp_path: Path, dev: Start) -> None:
    handlers(tmp_path, "first")
    running = dev()
    with leasekit.connect(running.url) as client:
        before = asked(client)
        assert before["answer"] == "first"
        handlers(tmp_path, "the second")
        running.until("app.py changed")
        running.until("at work on", times=2)
        after = asked(client)
    assert after["answer"] == "the second"
    assert before["pid"] != after["pid"]
    assert running.stop() == 0


@pytest.mark.slow
def test_what_runs_at_a_change_is_ended_by_the_code_that_began_it(tmp_path: Path, dev: Start) -> None:
    handlers(tmp_path, "old")
    running = dev()
    with leasekit.connect(running.url) as client:
        task_id = client.schedule("long").id
        while not (tmp_path / "begun").exists():
            time.sleep(0.02)
        handlers(tmp_path, "the new one")
        running.until("SIGTERM: the worker stops")
        (tmp_path / "go").touch()
        assert result(client, task_id) == "old"
        task = client.get(task_id)
    assert task is not None
    assert (task.attempt, task.crashes) == (1, 0)


def test_it_says_that_the_url_of_the_environment_is_not_used(
    tmp_path: Path, dev: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers(tmp_path, "one")
    monkeypatch.setenv("LEASEKIT_URL", "sqlite:///other.db")
    one = dev()
    assert one.until(r"LEASEKIT_URL is not used here: .* --backend (\S+)\n") == one.url


@pytest.mark.slow
def test_code_that_does_not_compile_is_waited_out(tmp_path: Path, dev: Start) -> None:
    (tmp_path / "app.py").write_text("def broken(:\n")
    running = dev()
    running.until("SyntaxError")
    running.until("the worker has ended with exit code 1")
    handlers(tmp_path, "mended")
    with leasekit.connect(running.url) as client:
        assert asked(client)["answer"] == "mended"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_whole_tree_with_exit_code_0(tmp_path: Path, dev: Start, number: signal.Signals) -> None:
    handlers(tmp_path, "x")
    running = dev()
    running.until("at work on")
    assert running.stop(number) == 0
    assert [pid for pid in running.pids() if is_there(pid)] == []
    with leasekit.connect(running.url, retry_for=0) as client, pytest.raises(leasekit.Unavailable):
        client.stats()


@pytest.mark.slow
def test_a_second_signal_does_not_wait_for_what_runs(tmp_path: Path, dev: Start) -> None:
    handlers(tmp_path, "x")
    running = dev("--grace", "1000")
    with leasekit.connect(running.url) as client:
        client.schedule("long")
        while not (tmp_path / "begun").exists():
            time.sleep(0.02)
    running.process.send_signal(signal.SIGINT)
    running.until("until Ctrl-C is pressed twice")
    assert running.stop() == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_nothing_is_left_when_it_is_killed(tmp_path: Path, dev: Start) -> None:
    handlers(tmp_path, "x")
    running = dev()
    running.until("at work on")
    running.process.kill()
    running.process.wait()
    end = time.monotonic() + PATIENCE
    while any(map(is_there, running.pids())):
        assert time.monotonic() < end, "the worker goes on"
        time.sleep(0.02)


def test_a_server_that_cannot_start_is_exit_code_1(tmp_path: Path, dev: Start) -> None:
    handlers(tmp_path, "x")
    running = dev("--store", "nowhere://")
    assert running.process.wait(PATIENCE) == 1
    assert "names no store" in running.log.read_text()
    assert "the server did not start" in running.log.read_text()


def test_what_names_no_worker_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "leasekit", "dev", "app", "--port", "0"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 2
    assert re.fullmatch(r"leasekit dev: 'app' does not name a worker: .*\n", done.stderr)


# Which files --------------------------------------------------------------------------------------------------


def test_changed_added_and_removed_files_are_told_once(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "a.py").write_text("1")
    (tmp_path / "gone.py").write_text("1")
    sources = Sources(tmp_path)
    assert sources.changed() == []
    (tmp_path / "pack" / "a.py").write_text("22")
    (tmp_path / "b.py").touch()
    (tmp_path / "gone.py").unlink()
    assert sources.changed() == ["b.py", "gone.py", "pack/a.py"]
    assert sources.changed() == []


@pytest.mark.parametrize("place", [".hidden/a.py", "venv/lib/a.py", "pack/__pycache__/a.py", "a.txt"])
def test_what_is_no_code_of_ours_is_not_watched(tmp_path: Path, place: str) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    sources = Sources(tmp_path)
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).touch()
    assert sources.changed() == []
    assert len(sources) == 0


def test_links_to_nothing_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / ".#a.py").symlink_to("nowhere")
    (tmp_path / "b.py").symlink_to("nowhere")
    assert len(Sources(tmp_path)) == 0
