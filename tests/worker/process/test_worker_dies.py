"""Worker, guards and executors as the processes of a script: whoever dies or is stopped, no body is left behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.waiting import eventually
from tests.worker.process.conftest import Runs

IsDead = Callable[[int], bool]

PREAMBLE = """
import mmap, os, struct, sys, threading, time
import leasekit
from leasekit.testing.memory import MemoryBackend, MemoryService

service = MemoryService()
worker = leasekit.Worker(MemoryBackend(service, worker="worker"), concurrency=1)
submitter = leasekit.Client(MemoryBackend(service, worker="submitter"))

def now():
    return time.clock_gettime(time.CLOCK_BOOTTIME)

@worker.handler("spins", run="process")
def spins(payload):
    until = now() + 2  # at least so long as its trust: the grant was before
    with open("runs", "a") as file:
        file.write(f"{os.getpid()} {os.getppid()}\\n")
    with open("until", "w") as file:
        file.write(str(until))
    with open("memory", "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    while True:
        struct.pack_into("d", memory, 0, now())

@worker.handler("main", run="process")
def in_main(payload):
    return [__name__, payload]
"""

SPIN = """
if __name__ == "__main__":
    submitter.schedule("spins", claim_timeout=2, heartbeat_timeout=2)
    worker.run()
"""


class Script:
    """A worker's process; what it says goes to a file."""

    def __init__(self, home: Path, code: str) -> None:
        (home / "script.py").write_text(PREAMBLE + dedent(code))
        (home / "memory").write_bytes(bytes(4096))
        self._errors = home / "errors"
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen([sys.executable, "script.py"], cwd=home, stdout=errors, stderr=errors)

        self._home = home

    @property
    def said(self) -> str:
        return self._errors.read_text()

    def read(self, name: str) -> str:
        """What it has written into this file; nothing where there is none yet."""
        file = self._home / name
        return file.read_text() if file.exists() else ""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Script]]:
    started: list[Script] = []

    def start(code: str) -> Script:
        started.append(Script(tmp_path, code))
        return started[-1]

    yield start
    for script in started:
        script.process.kill()
        script.process.wait()


def test_guard_and_executor_die_with_their_worker(start: Callable[[str], Script], runs: Runs, is_dead: IsDead) -> None:
    script = start(SPIN)
    pids = runs.nth(1)
    script.process.kill()
    eventually(lambda: all(map(is_dead, pids)))


def test_they_do_so_while_a_fork_of_their_worker_lives_on(
    start: Callable[[str], Script], runs: Runs, is_dead: IsDead
) -> None:
    """It holds all ends that the worker held."""
    script = start(
        """
        def fork():
            while not os.path.exists("runs"):
                time.sleep(0.001)
            if child := os.fork():
                with open("forked", "w") as file:
                    file.write(str(child))
            else:
                time.sleep(60)

        if __name__ == "__main__":
            submitter.schedule("spins")
            threading.Thread(target=fork, daemon=True).start()
            worker.run()
        """
    )
    pids = runs.nth(1)
    forked = int(eventually(lambda: script.read("forked")))
    script.process.kill()
    eventually(lambda: all(map(is_dead, pids)))
    assert not is_dead(forked)
    os.kill(forked, signal.SIGKILL)


@pytest.mark.parametrize("stopped", ["executor", "guard"])
def test_a_stopped_one_of_them_dies_with_its_worker_too(
    stopped: str, start: Callable[[str], Script], runs: Runs, is_dead: IsDead
) -> None:
    """A stopped guard at the latest when trust ends."""
    script = start(SPIN)
    pids = runs.nth(1)
    os.kill(pids[stopped == "guard"], signal.SIGSTOP)
    script.process.kill()
    eventually(lambda: all(map(is_dead, pids)))


def test_a_worker_that_is_stopped_past_the_trust_of_its_leases_leaves_no_body_running(
    start: Callable[[str], Script], runs: Runs, is_dead: IsDead
) -> None:
    script = start(SPIN)
    pids = runs.nth(1)
    script.process.send_signal(signal.SIGSTOP)
    eventually(lambda: is_dead(pids[0]))
    assert script.process.poll() is None  # and had no part in it


def test_handlers_of_the_main_module_are_found(start: Callable[[str], Script]) -> None:
    script = start(
        """
        if __name__ == "__main__":
            task_id = submitter.schedule("main", 7).id

            def end():
                while submitter.get(task_id).status != "success":
                    time.sleep(0.005)
                worker.stop()

            threading.Thread(target=end, daemon=True).start()
            worker.run()
            print(submitter.get(task_id).result)
            submitter.close()
        """
    )
    assert script.process.wait(60) == 0, script.said
    assert "['__mp_main__', 7]" in script.said


def test_a_script_that_runs_its_worker_wherever_it_is_imported_is_told_so(start: Callable[[str], Script]) -> None:
    script = start("worker.run()")
    assert script.process.wait(60) == 1
    assert 'run the worker under `if __name__ == "__main__":`' in script.said


def test_a_main_module_without_a_file_is_refused() -> None:
    code = PREAMBLE + "\nworker.run()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "put them into a module" in done.stderr
