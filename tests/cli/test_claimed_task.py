"""`leasekit work`: finds a worker, gives it what the options say, and exits with codes that scripts can use."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import leasekit
from leasekit import Heartbeats
from leasekit.cli.app import app
from leasekit.cli.target import load
from tests.ports import free_port
from tests.sampling import slow_after


def work(home: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "leasekit", "work", *arguments],
        cwd=home,
        env={name: value for name, value in os.environ.items() if name != "LEASEKIT_URL"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(
        """
import leasekit, os, sys
worker = leasekit.Worker(concurrency=3)
client = leasekit.connect("memory://")
owner = leasekit.Worker(client)
nothing = 1

@worker.handler("k")
@owner.handler("k")
def k(payload): ...

class Spy(leasekit.Worker):
    def run(self, **options):
        asked = {name: value for name, value in options.items() if value is not None}
        print(asked, os.environ.get("LEASEKIT_URL"), self.spool)

class names:
    spy = Spy()
    keeper = Spy(spool="kept")
"""
    )
    (tmp_path / "broken.py").write_text("import there_is_none\n")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["app"], "module:attribute"),
        (["app:"], "module:attribute"),
        (["nowhere:worker"], "no module 'nowhere'"),
        (["app.py:worker"], "without .py"),
        (["app.tasks:worker"], "no module 'app.tasks'"),
        (["app:absent"], "no 'absent' in 'app'"),
        (["app:nothing"], "not a leasekit.Worker"),
        (["app:worker"], "LEASEKIT_URL"),
        (["app:worker", "--backend", "gopher://there"], "'gopher://'"),
        (["app:worker", "--backend", "memory://", "--cycle", "200"], "ttl=300"),
        (["app:owner", "--backend", "memory://"], "client of its own"),
        (["app:worker", "--backend", "memory://", "--drain-grace", "9", "--drain-timeout", "8"], "drain_timeout=8"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(
    home: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("LEASEKIT_URL", raising=False)
    monkeypatch.setattr("leasekit.cli.work._log_to_stderr", lambda *_: None)  # it is for the whole process
    try:
        done = CliRunner().invoke(app, ["work", "--no-supervise", *arguments], prog_name="leasekit")
    finally:
        sys.modules.pop("app", None)
        os.environ.pop("LEASEKIT_URL", None)
    assert done.exit_code == 2, done
    assert says in done.stderr
    assert re.fullmatch(r"leasekit work: .*\n", done.stderr)


@pytest.mark.slow
def test_a_supervisor_passes_on_what_its_worker_says_of_wrong_usage(home: Path) -> None:
    done = work(home, "app:absent")
    assert done.returncode == 2
    assert re.fullmatch(r"leasekit work: there is no 'absent' in 'app'\n", done.stderr)


@pytest.mark.slow
def test_what_the_module_itself_lacks_is_shown_with_its_traceback(home: Path) -> None:
    done = work(home, "broken:worker")
    assert done.returncode == 1
    assert "there_is_none" in done.stderr
    assert "Traceback" in done.stderr
    assert re.search(r"^leasekit work: the module 'broken' cannot be imported: .*\n\Z", done.stderr, re.M)


@pytest.mark.parametrize("module", slow_after(1, ["broken", "misspelled"]))
def test_of_a_module_that_fails_only_its_own_frames_are_shown(home: Path, module: str) -> None:
    (home / "misspelled.py").write_text("def (:\n")
    shown = work(home, f"{module}:worker").stderr
    frames = re.findall(r'^  File "(.*?)"', shown, re.M)
    assert frames == [str(home / f"{module}.py")], shown


def test_options_are_given_to_the_worker_and_the_url_to_the_environment(home: Path) -> None:
    beats_options = ["--concurrency", "5", "--ttl", "60", "--batch", "7", "--spool", ""]
    drain_options = ["--drain-grace", "3", "--drain-timeout", "inf"]
    done = work(home, "app:names.spy", "--backend", "memory://x", *beats_options, *drain_options)
    assert done.returncode == 0, done.stderr
    heartbeats = replace(Heartbeats().for_ttl(60.0), batch=7)
    options = {
        "url": "memory://x",
        "heartbeats": heartbeats,
        "concurrency": 5,
        "drain_grace": 3.0,
        "drain_timeout": math.inf,
    }
    assert done.stdout == f"{options} memory://x None\n"


def test_what_is_not_asked_for_is_left_to_the_worker(home: Path) -> None:
    done = work(home, "app:names.keeper", LEASEKIT_URL="memory://e")
    assert done.stdout == "{} memory://e kept\n"


def test_results_are_kept_in_the_users_state_unless_told_otherwise(home: Path) -> None:
    done = work(home, "app:names.spy", XDG_STATE_HOME=str(home / "state"))
    assert done.stdout == f"{{}} None {home / 'state' / 'leasekit'}\n"
    assert (home / "state" / "leasekit").stat().st_mode & 0o777 == 0o700
    done = work(home, "app:names.keeper", "--spool", "here")
    assert done.stdout == "{} None here\n"


@pytest.mark.slow
def test_without_a_place_for_it_results_are_kept_in_memory_only(home: Path) -> None:
    (home / "file").touch()
    done = work(home, "app:names.spy", XDG_STATE_HOME=str(home / "file"))
    assert done.stdout == "{} None None\n"
    assert "in memory only" in done.stderr
    done = work(home, "app:names.spy", "--spool", "file/below")
    assert done.returncode == 2
    assert "--spool file/below" in done.stderr


@pytest.mark.parametrize("number", slow_after(1, [signal.SIGTERM, signal.SIGINT]))
def test_a_signal_stops_it_with_exit_code_0(home: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "leasekit", "work", "app:worker", "--backend", "memory://"],
        cwd=home,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    with process.stderr:
        assert "at work" in process.stderr.readline()
        process.send_signal(number)
        assert process.wait(60) == 0


def test_a_worker_is_found_by_a_dotted_path(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (home / "by_path.py").write_text("import leasekit\nclass a:\n    worker = leasekit.Worker()\n")
    found: Any = load("by_path:a.worker", leasekit.Worker)
    assert isinstance(found, leasekit.Worker)


# What it says -------------------------------------------------------------------------------------------------


def started(home: Path, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "leasekit", "work", "app:worker", *arguments]
    return subprocess.Popen(command, cwd=home, stderr=subprocess.PIPE, text=True)


def said(process: "subprocess.Popen[str]", until: str) -> list[str]:
    """The lines up to the one that holds this text."""
    assert process.stderr is not None
    lines: list[str] = []
    while not lines or until not in lines[-1]:
        lines.append(process.stderr.readline())
        assert lines[-1], f"{until!r} did not come: {lines}"
    return lines


def test_a_log_of_json_has_the_fields_of_a_task(home: Path) -> None:
    url = f"sqlite:///{home / 'tasks.db'}"
    with leasekit.connect(url) as client:
        task = client.schedule("k", {"secret": "payload-of-it"})
    with started(home, "--backend", url, "--log-format", "json") as process:
        lines = said(process, "ended")
        process.terminate()
        lines += said(process, "the worker stops")
    read = [json.loads(line) for line in lines]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in read)
    assert all(datetime.fromisoformat(line["time"]).utcoffset() == timedelta(0) for line in read)
    begins, ends = [line for line in read if line.get("task_id") == task.id]
    assert (begins["kind"], begins["attempt"], "outcome" in begins) == ("k", 1, False)
    assert (ends["level"], ends["kind"], ends["attempt"], ends["outcome"]) == ("INFO", "k", 1, "success")
    assert ends["duration"] >= 0
    assert "payload-of-it" not in "".join(lines)
    assert "token" not in "".join(lines)


@pytest.mark.slow
def test_handlers_in_processes_log_in_the_same_form(home: Path) -> None:
    (home / "app.py").write_text(
        """
import leasekit, logging
worker = leasekit.Worker(concurrency=1)

@worker.handler("k", run="process")
def k(payload):
    logging.getLogger("mine").warning("from the executor")
"""
    )
    url = f"sqlite:///{home / 'tasks.db'}"
    with leasekit.connect(url) as client:
        client.schedule("k")
    with started(home, "--backend", url, "--log-format", "json") as process:
        line = json.loads(said(process, "from the executor")[-1])
        process.terminate()
        said(process, "the worker stops")
    assert (line["level"], line["logger"]) == ("WARNING", "mine")


@pytest.mark.slow
def test_a_log_level_leaves_out_what_is_below(home: Path) -> None:
    url = f"sqlite:///{home / 'tasks.db'}"
    with leasekit.connect(url) as client:
        task = client.schedule("k")
        with started(home, "--backend", url, "--log-level", "warning") as process:
            client.wait_tasks(task.id, timeout=60)
            process.terminate()
            assert process.stderr is not None
            assert process.stderr.read() == ""


def test_at_work_is_said_once_the_service_was_reached(home: Path) -> None:
    port = free_port()
    serve = [sys.executable, "-m", "leasekit", "serve", "--port", str(port), "--store", "memory:"]
    with started(home, "--backend", f"http://127.0.0.1:{port}") as process:
        lines = said(process, "the service does not answer")
        with subprocess.Popen(serve, stdout=subprocess.DEVNULL) as server:
            lines += said(process, "at work")
            assert sum("does not answer" in line for line in lines) == 1
            assert "the service answers again" in lines[-2]
            process.terminate()
            said(process, "the worker stops")
            process.wait(60)
            server.terminate()
