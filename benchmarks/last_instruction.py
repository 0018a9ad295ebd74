"""How long after the end of trust does a handler's last instruction run?

The handlers of `_bodies.py` never end by themselves: each writes the time into shared memory again and again,
and the last entry is its last instruction. Each runs in a process with the watchdog, and in an executor under its
guard (`run="process"`), on an idle machine and beside sixteen busy processes; then stopped by SIGSTOP until its trust
is over, and continued. Below zero: the process was killed between two entries, or was not on a processor at that time.
"""

import contextlib
import os
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from _bodies import BODIES
from _common import Bench, percentile
from leasekit._core.term import Term
from leasekit._driver.clock import BOOT_CLOCK
from leasekit._driver.guarding.watchdog import Watchdog
from leasekit._worker.process.guarded_process import GuardedProcess
from leasekit._worker.process.messages import Address, LeaseState, Ready, Run, Setup
from leasekit.config import Heartbeats
from leasekit.task import Task

_TRUST = 0.25  # seconds from the first instruction to the end of trust
_HOGS = 16
_RUNS = 100  # of each case
_BEATS = Heartbeats().for_ttl(60)
now = BOOT_CLOCK.now


class Victim(Protocol):
    """A process with a handler that does not end."""

    pid: int

    def begin(self) -> float:
        """Start the handler; return the end of its trust."""
        ...

    def dead(self) -> None:
        """Wait for the end of the process."""
        ...


Start = Callable[[str, str], Victim]
Busy = Callable[[], AbstractContextManager[None]]


def main() -> None:
    bench = Bench("last_instruction")
    runs = 2 if bench.quick else _RUNS
    for hogs in (0,) if bench.quick else (0, _HOGS):
        for where, start in (("process", _Own), ("executor", _Guarded)):
            for stopped in (False, True):
                case = f"{where}, {'stopped and continued' if stopped else 'running'}, {hogs} busy"
                if bench.wants(case):
                    with _busy(hogs) as busy:
                        _measure(bench, case, start, busy, runs, stopped=stopped)
    bench.close()


def _measure(bench: Bench, case: str, start: Start, busy: Busy, runs: int, *, stopped: bool) -> None:
    late, seen = [], []
    for number in range(runs):
        body = list(BODIES)[number % len(BODIES)]
        last, dead = _run(start, busy, body, stopped=stopped)
        late.append(1e3 * last)
        seen.append(1e3 * dead)
    bench.note(
        case,
        runs=runs,
        median_ms=round(statistics.median(late), 3),
        p95_ms=round(percentile(late, 95), 3),
        max_ms=round(max(late), 3),
        over_1_ms=sum(delay > 1 for delay in late),
        over_10_ms=sum(delay > 10 for delay in late),
        seen_dead_ms=round(statistics.median(seen), 1),
    )


def _run(start: Start, busy: Busy, body: str, *, stopped: bool) -> tuple[float, float]:
    """Return the seconds from the end of trust to the last instruction, and to the end of the process as seen here."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", buffering=0) as memory:
        memory.truncate(4096)

        def last() -> float:
            return float(struct.unpack("d", os.pread(memory.fileno(), 8, 0))[0])

        victim = start(body, memory.name)
        with busy():
            ends_at = victim.begin()
            while not last() and now() < ends_at:
                time.sleep(0.001)
            if stopped:
                os.kill(victim.pid, signal.SIGSTOP)
                time.sleep(max(0.0, ends_at - now()) + 0.02)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim.pid, signal.SIGCONT)
            victim.dead()
            seen_at = now()
        if not last():  # killed before the first instruction
            return _run(start, busy, body, stopped=stopped)
        return last() - ends_at, seen_at - ends_at


class _Own:
    """The handler in the main thread of a process with the watchdog."""

    def __init__(self, body: str, memory: str) -> None:
        command = [sys.executable, __file__, "victim", body, memory]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def begin(self) -> float:
        ends_at, stdin = now() + _TRUST, self._process.stdin
        assert stdin is not None
        print(ends_at, file=stdin, flush=True)
        return ends_at

    def dead(self) -> None:
        with self._process as process:
            assert process.wait() == -signal.SIGKILL


def _be_victim(body: str, memory: str) -> None:
    watchdog = Watchdog("required", now=now)
    print("ready", flush=True)
    ends_at = float(sys.stdin.readline())
    watchdog.begins(Term(None, _BEATS, granted_at=ends_at - _BEATS.trust))
    BODIES[body](memory)


class _Guarded:
    """The handler in an executor; this process holds the lease, and the executor does not know its end."""

    def __init__(self, body: str, memory: str) -> None:
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._pair = GuardedProcess(lambda: None, self._wake, now)
        self._pair.wait_started()
        self.pid = self._pair._executor
        self._memory = memory
        address = Address(kind="k", module="_bodies", name=body)
        self._pair.send(Setup(handler=address, main={}, argv=[], accepts_work=False, max_progress=1))
        while not any(isinstance(message, Ready) for message in self._pair.step(1)):
            assert not self._pair.over

    def begin(self) -> float:
        term = Term(None, _BEATS, granted_at=now() + _TRUST - _BEATS.trust)
        self._pair.watchdog.begins(term)
        question = self._pair.ask()
        while self._pair.confirmed != question:
            self._pair.step(1)
        task = Task(id="t", kind="k", token="x", ttl=60, payload=self._memory)  # noqa: S106
        self._pair.send(Run(number=1, task=task, state=LeaseState(granted_at=now(), heartbeats=_BEATS)))
        return term.trusted_until

    def dead(self) -> None:
        while not self._pair.over:
            self._pair.step(1)
        self._pair.shutdown(0)
        assert "watchdog" in self._pair.reap()
        os.close(self._wake)


@contextmanager
def _busy(count: int) -> Generator[Busy]:
    """Run so many busy processes within a block; the handler's process can start before without them."""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]

    @contextmanager
    def busy() -> Generator[None]:
        for hog in hogs:
            hog.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            for hog in hogs:
                hog.send_signal(signal.SIGSTOP)

    try:
        yield busy
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["victim"]:
        _be_victim(*sys.argv[2:])
    else:
        main()
