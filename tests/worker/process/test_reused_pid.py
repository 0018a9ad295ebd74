"""An executor that has died is not mistaken for a process that has its pid now: nothing kills that one."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from leasekit._driver.clock import BOOT_CLOCK
from leasekit._worker import linux
from leasekit._worker.process import guarded_process
from leasekit._worker.process.guarded_process import GuardedProcess
from tests.waiting import eventually

now = BOOT_CLOCK.now
ROOT = Path(__file__).parents[3]
LAST_PID = Path("/proc/sys/kernel/ns_last_pid")


class Guarded:
    """An executor under its guard, which has no task."""

    def __init__(self) -> None:
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self.guarded = GuardedProcess(lambda: None, self._wake, now)
        self.guarded.wait_started()
        self.executor = self.guarded._executor
        self.guard = self.guarded._guard

    def dies_and_is_reaped_by_its_guard(self) -> None:
        os.kill(self.executor, signal.SIGKILL)
        eventually(lambda: not Path(f"/proc/{self.executor}").exists())

    def dies_with_its_guard_and_is_reaped_here(self) -> None:
        """As where the worker, or its supervisor, waits for orphans."""
        self.guard.kill()
        os.waitid(os.P_PID, self.guard.pid, os.WEXITED | os.WNOWAIT)  # until then it is the guard's child
        os.waitpid(self.executor, 0)

    def close(self) -> None:
        self.guarded.shutdown(0)
        self.guarded.reap()
        os.close(self._wake)


DEATHS: dict[str, Callable[[Guarded], None]] = {
    "with its guard": Guarded.dies_with_its_guard_and_is_reaped_here,
    "before its guard": Guarded.dies_and_is_reaped_by_its_guard,
}


def may_be_killed(guarded: Guarded) -> Iterator[str]:
    """Have all that kills an executor take its turn, after its death."""
    until = now() + 0.5
    with contextlib.suppress(OSError):  # its guard is dead
        guarded.guarded.arm(until)
    yield "the worker, by itself"
    guarded.guarded.kill()
    yield "the worker, on request"
    eventually(lambda: now() > until + 0.1)  # a guard, or its timer, would have acted
    yield "the guard at its deadline"
    guarded.close()
    yield "the worker, at the end"


class Bystander:
    """A process of another program, in a process group of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self.pid = self._process.pid

    def lives(self) -> bool:
        """Whether it still answers: nothing of a process runs that was killed, even if that takes a while."""
        assert self._process.stdin
        assert self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        return self._process.stdout.readline() == b"\n"

    def close(self) -> None:
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()


@contextlib.contextmanager
def bystander() -> Iterator[Bystander]:
    other = Bystander()
    try:
        yield other
    finally:
        other.close()


@pytest.fixture
def adopting() -> Iterator[None]:
    """Orphans come to this process."""
    linux.adopt_orphans()
    yield
    linux._prctl(linux._PR_SET_CHILD_SUBREAPER, 0)


@pytest.fixture(params=["this kernel", "a kernel before 6.9"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "this kernel":
        monkeypatch.setattr(guarded_process, "_PROCESS_GROUP", 1 << 20, raising=False)  # refused as unknown


@pytest.mark.parametrize("death", DEATHS)
def test_a_process_whose_pid_is_taken_for_that_of_a_dead_executor_lives_on(
    death: str, adopting: None, kernel: None
) -> None:
    guarded = Guarded()
    DEATHS[death](guarded)
    with bystander() as other:
        guarded.guarded._executor = other.pid  # as if the kernel had given it the same number
        for killer in may_be_killed(guarded):
            assert other.lives(), killer


def test_the_pid_of_an_executor_is_its_own_until_its_guard_has_reaped_it(adopting: None) -> None:
    """Its guard may kill it by its pid, therefore."""
    guarded = Guarded()
    os.kill(guarded.guard.pid, signal.SIGSTOP)
    os.kill(guarded.executor, signal.SIGKILL)
    stat = Path(f"/proc/{guarded.executor}/stat")
    eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
    guarded.guarded.kill()
    assert int(stat.read_text().rpartition(")")[2].split()[1]) == guarded.guard.pid
    os.kill(guarded.guard.pid, signal.SIGCONT)
    guarded.close()
    assert not stat.exists()


def reuse(death: str) -> None:
    """Have a bystander get the pid of a dead executor. Runs as the first process of a pid namespace."""
    guarded = Guarded()
    DEATHS[death](guarded)
    LAST_PID.write_text(str(guarded.executor - 1))
    with bystander() as other:
        assert other.pid == guarded.executor, f"{other.pid} instead of {guarded.executor}"
        for killer in may_be_killed(guarded):
            assert other.lives(), killer
    print("lives")


NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc"]


def obstacle() -> str | None:
    """Why no pid can be chosen here; None: it can."""
    try:
        subprocess.run([*NAMESPACE, "sh", "-c", f"echo 1000 > {LAST_PID}"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"needs root, unshare and {LAST_PID}: {error}"
    return None


@pytest.mark.parametrize("death", DEATHS)
def test_a_process_that_has_got_the_pid_of_a_dead_executor_lives_on(death: str) -> None:
    if (why := obstacle()) is not None:
        pytest.skip(why)
    path = os.pathsep.join([str(ROOT), *sys.path])
    code = f"from {__name__} import reuse; reuse({death!r})"
    command = [*NAMESPACE, sys.executable, "-c", code]
    ran = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.stdout == "lives\n", ran.stderr
