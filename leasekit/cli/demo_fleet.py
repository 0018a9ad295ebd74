"""Processes of `leasekit demo`: a server and some workers, each started by its own command."""

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from leasekit.errors import LeasekitError

_STOP_WITHIN = 15.0


class Fleet:
    """A server with a store of its own, and workers. Leaving the block ends all of them."""

    def __init__(self, home: Path, workers: int) -> None:
        self._home = home
        self._count = workers
        self._open = ExitStack()
        self.url = ""
        self.workers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        self._open.__enter__()
        try:
            store = f"sqlite:///{self._home / 'tasks.db'}"
            server = self._start("server", "serve", "--port", "0", "--store", store, stdout=subprocess.PIPE)
            self.url = _address(server)
            for number in range(self._count):
                # Unsupervised: the leases of a killed worker expire, as when its whole machine is lost.
                command = ("work", "leasekit.cli.demo_handlers:worker", "--backend", self.url, "--no-supervise")
                self.workers.append(self._start(f"worker-{number}", *command))
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._open.close()

    def pause(self, worker: "subprocess.Popen[str]") -> bool:
        """Stop the worker (SIGSTOP), and wait until it stands still. Return False if it has ended."""
        worker.send_signal(signal.SIGSTOP)
        return worker.poll() is None and os.WIFSTOPPED(os.waitpid(worker.pid, os.WUNTRACED)[1])

    def resume(self, worker: "subprocess.Popen[str]") -> None:
        worker.send_signal(signal.SIGCONT)

    def kill(self, worker: "subprocess.Popen[str]") -> None:
        """Kill the worker (SIGKILL), and wait until it is gone: from here none of its code runs."""
        worker.kill()
        worker.wait()

    @property
    def ended(self) -> set[int]:
        """The pids of the workers that are gone, killed or not."""
        return {worker.pid for worker in self.workers if worker.poll() is not None}

    def log(self) -> str:
        """Return what every process has written, each under its name."""
        return "\n".join(f"--- {path.stem}\n{path.read_text()}" for path in sorted(self._home.glob("*.log")))

    def _start(self, name: str, *command: str, stdout: int | None = None) -> "subprocess.Popen[str]":
        log: IO[str] = self._open.enter_context((self._home / f"{name}.log").open("w"))
        process = subprocess.Popen(  # noqa: S603 - leasekit's own commands
            [sys.executable, "-m", "leasekit", *command],
            stdout=log if stdout is None else stdout,
            stderr=log,
            text=True,
        )
        self._open.callback(_stop, process)
        return process


def _address(server: "subprocess.Popen[str]") -> str:
    assert server.stdout is not None  # noqa: S101 - it is a pipe
    line = server.stdout.readline()
    found = re.search(r"https?://\S+", line)
    if found is None:
        raise LeasekitError(f"the server did not start: {line.strip() or 'it said nothing'}")
    return found[0].rstrip("/.")


def _stop(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_WITHIN)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()
