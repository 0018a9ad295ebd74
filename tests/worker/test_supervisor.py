"""The supervisor by itself, with a child that does as each test says."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from typing import Protocol

import pytest

from tests.sampling import slow_after
from tests.waiting import eventually

SUPERVISOR = """
import logging, os, signal, sys
from leasekit._worker.supervisor import Supervisor

logging.basicConfig(format="%(message)s")
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored where these tests run under nohup
{before}
sys.exit(Supervisor([sys.executable, "child.py"]).run())
"""
CHILD = """
import os, signal, sys, threading, time
from pathlib import Path
from leasekit._driver.reporting.ledger import Holder
from leasekit._worker import supervisor_link
from leasekit._worker.signals import Signals

supervisor_link.attach()
supervisor_link.attached().open(Holder(worker="w"))  # it has come to work
with open("lives", "a") as file:
    file.write("x")
life = os.path.getsize("lives")
"""


class Run(Protocol):
    def __call__(self, child: str, *, before: str = "") -> "subprocess.CompletedProcess[str]": ...


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(child: str, *, before: str = "") -> "subprocess.CompletedProcess[str]":
        (tmp_path / "child.py").write_text(CHILD + dedent(child))
        (tmp_path / "supervisor.py").write_text(SUPERVISOR.format(before=dedent(before)))
        return subprocess.run(
            [sys.executable, "supervisor.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )

    return run


def test_a_worker_that_a_real_time_signal_has_ended_is_started_again(run: Run) -> None:
    """Not all of these have names."""
    done = run("os.kill(os.getpid(), 40) if life == 1 else None")
    assert done.returncode == 0, done.stderr
    assert "was ended by signal 40; it is started again" in done.stderr


def test_a_worker_that_cannot_be_started_again_is_tried_again(run: Run) -> None:
    done = run(
        "os.abort() if life == 1 else None",
        before="""
        fork, forked = os.fork, []

        def short_of_processes():
            forked.append(None)
            if len(forked) in (2, 3):
                raise BlockingIOError(11, "Resource temporarily unavailable")
            return fork()

        os.fork = short_of_processes
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no worker can be started") == 2


def test_a_worker_is_forked_while_no_other_thread_runs(run: Run) -> None:
    """Such a thread may hold a lock, which would stay held in the fork; newer Pythons warn of it."""
    done = run(
        "os.abort() if life < 3 else None",
        before="""
        import threading
        fork = os.fork

        def watched():
            print("threads:", *(thread.name for thread in threading.enumerate()), file=sys.stderr)
            return fork()

        os.fork = watched
        """,
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "threads:" in line] == ["threads: MainThread"] * 3


def test_where_not_even_the_first_can_be_started_nothing_is_tried_again(run: Run) -> None:
    done = run("", before="def none(): raise OSError(38, 'none')\nos.fork = none")
    assert done.returncode == 1
    assert "OSError: [Errno 38] none" in done.stderr


def test_a_program_that_is_not_there_cannot_be_started(run: Run) -> None:
    done = run("", before="sys.executable = '/nowhere/python'")
    assert done.returncode == 1
    assert "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/python'" in done.stderr


def state(pid: int) -> bytes:
    """Return what the kernel calls the state of a process; that of one that is there no longer is Z."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return b"Z"


def test_a_worker_that_is_stopped_before_its_first_line_ends_with_its_supervisor(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text("import os, signal\nprint(os.getpid())\nos.kill(os.getpid(), signal.SIGSTOP)\n")
    (tmp_path / "supervisor.py").write_text(SUPERVISOR.format(before=""))
    command = [sys.executable, "supervisor.py"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, env=environment) as supervisor:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        eventually(lambda: state(child) == b"T", "the worker is stopped")
        supervisor.kill()
        try:
            eventually(lambda: state(child) == b"Z", "the worker has ended")
        finally:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def test_a_signal_that_the_worker_hears_in_its_own_way_does_not_count_for_its_end(run: Run) -> None:
    """Else the first SIGTERM after it would be taken for a second one, and cut off all bodies."""
    done = run(
        """
        def reloads(number, frame):
            os.kill(os.getppid(), signal.SIGTERM)

        def stops(number):
            threading.Timer(0.5, lambda: os._exit(0)).start()  # bodies that end

        signal.signal(signal.SIGHUP, reloads)
        with Signals(stops).hearing():
            os.kill(os.getppid(), signal.SIGHUP)
            while True:
                time.sleep(0.05)  # a signal just before a sleep does not end that sleep
        """
    )
    assert done.returncode == 0, done.stderr


def test_a_signal_that_comes_while_python_ends_does_not_change_how_the_worker_ended(run: Run) -> None:
    """As one that a busy supervisor passes on late: Python has taken its handlers away by then."""
    done = run(
        """
        class Late:
            def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT):
                kill(pid, number)

        with Signals(lambda number: None).hearing():
            late = Late() if life == 1 else None
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


HANGS = {
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "in C code": 'import re; re.match("(a+)+$", 64 * "a" + "b")',
}


ENDS = {"drain": ("0.1", 1), "second signal": ("float('inf')", 2)}


@pytest.mark.parametrize("hang", HANGS.values(), ids=HANGS)
@pytest.mark.parametrize(("timeout", "signals"), slow_after(1, ENDS.values()), ids=ENDS)
def test_a_worker_that_hangs_after_a_signal_is_killed(run: Run, hang: str, timeout: str, signals: int) -> None:
    done = run(
        f"""
        supervisor_link.note_drain({timeout})
        told = [signal.SIGTERM, signal.SIGINT][:{signals}]
        signal.pthread_sigmask(signal.SIG_BLOCK, told)  # else they could end it before it hangs
        for number in told:
            os.kill(os.getppid(), number)
        {hang}
        """,
        before="from leasekit._worker import supervisor\nsupervisor._LATE = 0.5",
    )
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert done.stderr.count("was told to stop, and hangs: it is killed") == 1


def test_a_worker_that_waits_after_a_signal_for_as_long_as_it_must_is_not_killed(run: Run) -> None:
    done = run(
        """
        supervisor_link.note_drain(0.1)
        with Signals(lambda number: None).hearing():
            os.kill(os.getppid(), signal.SIGTERM)
            supervisor_link.note_drain(float("inf"))
            time.sleep(1.5)
        """,
        before="from leasekit._worker import supervisor\nsupervisor._LATE = 0.5",
    )
    assert (done.returncode, done.stderr) == (0, "")


BECOMES_ANOTHER_PROGRAM = """
if life == 1:
    {before}
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"])
"""


@pytest.mark.parametrize("before", ["", "os.fork() or time.sleep(600)"], ids=["alone", "with a forked child"])
def test_a_program_that_a_body_has_made_of_the_worker_is_killed(run: Run, before: str) -> None:
    """No timer guards it, and nobody beats its leases."""
    done = run(BECOMES_ANOTHER_PROGRAM.format(before=before))
    assert done.returncode == 0, done.stderr
    assert "was killed by SIGKILL" in done.stderr


def test_programs_that_a_worker_starts_are_left_alone(run: Run) -> None:
    done = run(
        """
        import subprocess
        subprocess.run(["sleep", "1.5"], close_fds=False)  # longer than a look
        if not os.fork():
            os.execvp("sleep", ["sleep", "1.5"])
        os.wait()
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root")
def test_a_worker_that_may_not_be_killed_does_not_end_its_supervisor(run: Run) -> None:
    """As in a container that may change users, but not signal those of others."""
    done = run(
        """
        print("is", os.getpid())
        os.setresuid(65534, 65534, 65534)
        os.execv("/bin/sleep", ["sleep", "3"])
        """,
        before="""
        import ctypes
        CAP_KILL, version = 5, 0x20080522
        header = (ctypes.c_uint32 * 2)(version, 0)
        sets = (ctypes.c_uint32 * 6)()
        libc = ctypes.CDLL(None)
        assert libc.capget(header, sets) == 0
        for number in range(2):
            sets[number] &= ~(1 << CAP_KILL)
        assert libc.capset(header, sets) == 0
        """,
    )
    assert "Traceback" not in done.stderr
    assert done.stderr.count("may not be sent to the worker") == 1
    assert done.returncode == 0
