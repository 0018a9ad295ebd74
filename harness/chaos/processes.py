"""Processes, and a watch that logs the end of each as soon as the kernel reports it."""

import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from harness.history import Began, Ended, Fault, Log, Paused, Resumed, boottime

Role = Literal["worker", "server", "scheduler"]

PATIENCE = 120.0  # seconds to wait for facts that take a few
_LOOK = 0.02  # seconds


class Watch:
    """Log the end of every process that was added or that writes a log, also of grandchildren."""

    def __init__(self, log: Log, folder: Path) -> None:
        self._log = log
        self._folder = folder
        self._known: set[str] = {"harness"}
        self._selector = selectors.DefaultSelector()
        self._wake, self._ring = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="chaos-watch", daemon=True)
        self._thread.start()

    def add(self, who: str, pid: int, ended: Callable[[], Literal["killed", "exited"]]) -> None:
        """Watch a process; `ended` is called at its end and returns how it ended."""
        self._known.add(who)
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            self._log.add(Ended, who=who, how=ended())
            return
        self._selector.register(handle, selectors.EVENT_READ, (who, ended))
        os.write(self._ring, b"x")  # so that a selector that is waiting sees the new handle

    def _run(self) -> None:
        while True:
            self._find()
            for key, _ in self._selector.select(_LOOK):
                if key.data is None:
                    if not os.read(self._wake, 100):
                        return
                    continue
                at = boottime()
                self._selector.unregister(key.fileobj)
                os.close(key.fd)
                who, ended = key.data
                self._log.add(Ended, who=who, at=at, how=ended())

    def _find(self) -> None:
        """Watch each process that writes a log, such as the children of a supervisor."""
        for path in self._folder.glob("*.jsonl"):
            if path.stem not in self._known:
                self.add(path.stem, int(path.stem.rpartition(".")[2]), lambda: "killed")

    def close(self) -> None:
        os.close(self._ring)
        self._thread.join()
        os.close(self._wake)
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                os.close(key.fd)
        self._selector.close()


class Process:
    """A command, with its output in a file and its end in the log."""

    def __init__(
        self,
        name: str,
        command: list[str],
        *,
        home: Path,
        environment: Mapping[str, str],
        log: Log,
        watch: Watch,
        role: Role,
        slots: int = 0,
    ) -> None:
        self.name = name
        self.role = role
        self.slots = slots
        self.output = home / f"{name}.out"
        self._log = log
        with self.output.open("ab") as output:
            self.popen = subprocess.Popen(
                [sys.executable, *command],
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                process_group=0,  # Ctrl-C reaches only the harness, which ends all processes
            )
        self.pid = self.popen.pid
        self.who = f"{name}.{self.pid}"
        if role != "worker":  # a worker logs its start itself
            log.add(Began, who=self.who, role=role)
        watch.add(self.who, self.pid, self._how)

    def _how(self) -> Literal["killed", "exited"]:
        return "exited" if self.popen.wait() == 0 else "killed"

    @property
    def children(self) -> list[int]:
        return children(self.pid)

    @property
    def is_alive(self) -> bool:
        return self.popen.poll() is None

    @property
    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def kill(self, fault: str = "kill") -> None:
        self.popen.kill()
        self._log.add(Fault, name=fault, target=self.who)
        self.popen.wait()

    def kill_child(self, fault: str = "kill") -> float:
        """Kill the only child, which is the worker of a supervisor; return when."""
        (child,) = self.children
        os.kill(child, signal.SIGKILL)
        return self._log.add(Fault, name=fault, target=f"{self.name}.{child}").at

    def send(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def pause(self) -> None:
        """Send SIGSTOP, and return once the process stands still."""
        self.send(signal.SIGSTOP)
        wait_for(lambda: state(self.pid) in "TXZ", what=f"{self.name} to stand still")
        self._log.add(Paused, who=self.who)
        self._log.add(Fault, name="pause", target=self.who)

    def resume(self) -> None:
        self._log.add(Resumed, who=self.who)
        self.send(signal.SIGCONT)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.is_alive:
            self.send(number)
        return self.popen.wait(PATIENCE)


def state(pid: int) -> str:
    """The state of a process as one letter, as in /proc; X: the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def children(pid: int) -> list[int]:
    """The pids of a process's children, whichever thread started them."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, path.read_text().split())
    return found


def wait_for(fact: Callable[[], object], *, what: str, within: float = PATIENCE) -> None:
    until = time.monotonic() + within
    while not fact():
        if time.monotonic() > until:
            raise TimeoutError(f"waited {within:g} s for {what}")
        time.sleep(_LOOK)
