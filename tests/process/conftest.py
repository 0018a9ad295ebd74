"""Server and workers as processes, started by the commands that users type, and really killed."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import eventually


class Process:
    """One command; its output goes to a file."""

    def __init__(self, command: list[str], log: Path, cwd: Path, **environment: str) -> None:
        self.log = log
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                [sys.executable, *command],
                cwd=cwd,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONUNBUFFERED": ""} | environment,  # a line is one write, between those of stderr
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def kill(self) -> float:
        """SIGKILL; returns when (CLOCK_MONOTONIC) it was seen to be gone."""
        self.popen.kill()
        self.popen.wait()
        return time.monotonic()

    def stop(self, within: float = 30) -> int:
        """SIGTERM; returns the exit code."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(within)


class Fleet:
    """Processes in one folder, and the log that their handlers write."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.url = ""
        self.processes: list[Process] = []

    def start(self, name: str, *command: str, **environment: str) -> Process:
        process = Process(list(command), self.home / f"{name}.log", self.home, **environment)
        self.processes.append(process)
        return process

    def serve(self, port: int = 0) -> Process:
        """A server on the folder's store; on the same port again after a restart."""
        log = self.home / "server.log"
        begin = log.stat().st_size if log.exists() else 0
        server = self.start("server", "-m", "leasekit", "serve", "--port", str(port), "--store", "sqlite:///tasks.db")
        line = eventually(
            lambda: re.search(r"https?://[\w.:\[\]]+", log.read_text()[begin:]), what="the server's address"
        )
        self.url = line[0]
        return server

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def work(self, name: str, *options: str) -> Process:
        """A worker on `handlers.py`."""
        return self.start(name, "-m", "leasekit", "work", "handlers:worker", "--backend", self.url, *options)

    def handlers(self, code: str) -> None:
        """Write `handlers.py`: the preamble gives `worker` and `note(event, **facts)`."""
        (self.home / "handlers.py").write_text(_PREAMBLE + textwrap.dedent(code))

    def notes(self, event: str | None = None) -> list[dict[str, Any]]:
        """What the handlers have noted so far."""
        path = self.home / "notes.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        notes = [json.loads(line) for line in lines]
        return [note for note in notes if event is None or note["event"] == event]


_PREAMBLE = """
import asyncio, json, os, time
import leasekit
from leasekit import hooks

def note(event, **facts):
    with open("notes.jsonl", "ab", buffering=0) as file:
        file.write(json.dumps({"event": event, "at": time.monotonic(), "pid": os.getpid(), **facts}).encode() + b"\\n")

def hear(event):
    if isinstance(event, hooks.Renewed):
        note("renewed", tasks=list(event.task_ids), left=event.at - event.round_trip)
    if isinstance(event, hooks.Lost):
        note("lost", task=event.task_id, why=event.why)

worker = leasekit.Worker(hooks=[hear], concurrency=4)
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    for process in reversed(fleet.processes):
        if process.popen.poll() is None:
            process.kill()
    for log in sorted(tmp_path.glob("*.log")):  # shown by pytest where a test fails
        print(f"--- {log.name}\n{log.read_text()[-4000:]}")
