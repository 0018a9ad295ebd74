"""An executor dies with its guard, and its guard when trust ends: whoever is stopped, and without any help.

The body writes the time into memory that it shares with the test, over and over: the last entry is the last moment at
which its code ran.
"""

import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from leasekit._core.term import Term
from leasekit._driver.clock import BOOT_CLOCK
from leasekit._worker import linux
from leasekit._worker.process import guard, guarded_process
from leasekit._worker.process.guarded_process import GuardedProcess
from leasekit._worker.process.messages import Address, Ended, FromExecutor, LeaseChanged, LeaseState, Ready, Run, Setup
from leasekit.config import Heartbeats
from leasekit.errors import ConfigError
from leasekit.task import Task
from tests.waiting import eventually

LATE = 1.0  # seconds; measured are 1-3 ms
BEATS = Heartbeats().for_ttl(60)
now = BOOT_CLOCK.now

IsDead = Callable[[int], bool]


class Spinner:
    """A guarded process whose body spins until it is dead."""

    def __init__(self, memory: Path, *, threads: int = 1) -> None:
        memory.write_bytes(bytes(mmap.PAGESIZE))
        self._memory = memory
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._how = ""
        self.guarded = GuardedProcess(lambda: None, self._wake, now)
        self.guarded.wait_started()
        self._runs = 0
        address = Address(kind="k", module="bodies", name="calls")
        self.guarded.send(Setup(handler=address, main={}, argv=[], accepts_work=False, max_progress=1, threads=threads))
        while not any(isinstance(message, Ready) for message in self.guarded.step(1)):
            assert not self.guarded.over

    def begin(self, after: float, body: str = "spins", processes: int = 1) -> Term:
        """Its body runs, in so many processes, and must have ended so many seconds from now."""
        term = Term(None, BEATS, granted_at=now() + after - BEATS.trust)
        self.guarded.watchdog.begins(term)
        assert self.is_guarded()
        state = LeaseState(
            granted_at=now(), heartbeats=BEATS
        )  # so that it does not know, and the guard alone sees to it
        self.run(body, state)
        while not all(self.lasts[:processes]):
            assert not self.guarded.over
            self.guarded.step(0.01)
        return term

    def is_guarded(self) -> bool:
        """Whether its guard has followed all messages; False where it has ended."""
        question = self.guarded.ask()
        while self.guarded.confirmed != question and self.guarded.usable:
            self.guarded.step(1)
        return self.guarded.confirmed == question

    def run(self, body: str, state: LeaseState) -> int:
        """Have it run this body; return the number of the run."""
        self._runs += 1
        task = Task(id="t", kind="k", token="x", ttl=60, payload=[body, str(self._memory)])
        self.guarded.send(Run(number=self._runs, task=task, state=state))
        return self._runs

    @property
    def last(self) -> float:
        """When its body ran last."""
        return self.lasts[0]

    @property
    def lasts(self) -> tuple[float, ...]:
        """When its body, the child in its process group, and that outside of it ran last."""
        return struct.unpack("3d", self._memory.read_bytes()[:24])

    @property
    def pids(self) -> list[int]:
        """Of these."""
        return [int(pid) for pid in struct.unpack("3d", self._memory.read_bytes()[24:48])]

    @property
    def executor(self) -> int:
        return self.guarded._executor

    @property
    def guard(self) -> int:
        return self.guarded._guard.pid

    def said(self) -> list[FromExecutor]:
        """What it says next."""
        while not (said := self.guarded.step(1)):
            assert not self.guarded.over
        return said

    def result(self, body: str) -> int:
        """What this body returns."""
        term = Term(None, BEATS, granted_at=now())
        self.guarded.watchdog.begins(term)
        self.run(body, LeaseState(granted_at=now(), heartbeats=BEATS))
        (ended,) = self.said()
        assert isinstance(ended, Ended)
        assert ended.settlement is not None
        self.guarded.watchdog.ended(term)
        return int(bytes(ended.settlement.result))

    def wait(self) -> None:
        """Until it is dead, of whatever."""
        while not self.guarded.over:
            self.guarded.step(1)

    def close(self) -> str:
        """How it ended."""
        if not self._how:
            self.guarded.shutdown(0)
            self._how = self.guarded.reap()
            os.close(self._wake)
        return self._how


@pytest.fixture
def spinner(tmp_path: Path, bodies: ModuleType) -> Iterator[Spinner]:
    spinner = Spinner(tmp_path / "memory")
    yield spinner
    spinner.close()


STOPPED: dict[str, Callable[[Spinner], list[int]]] = {
    "nobody": lambda spinner: [],
    "guard": lambda spinner: [spinner.guard],
    "executor": lambda spinner: [spinner.executor],
    "both": lambda spinner: [spinner.guard, spinner.executor],
}


@pytest.mark.parametrize("whom", STOPPED)
def test_no_code_of_a_body_runs_after_its_trust_whoever_is_stopped(whom: str, spinner: Spinner) -> None:
    term = spinner.begin(2)
    for pid in STOPPED[whom](spinner):
        os.kill(pid, signal.SIGSTOP)
    spinner.wait()
    assert spinner.last <= term.trusted_until + LATE
    assert "watchdog" in spinner.close()


def test_of_a_body_that_changed_its_user_nothing_runs_after_its_trust_although_its_worker_is_stopped(
    spinner: Spinner, is_dead: IsDead
) -> None:
    """The end of its guard takes no such process along, nor does the end of any process its children."""
    term = spinner.begin(3, "family_spins", processes=3)
    eventually(lambda: all(map(is_dead, spinner.pids)))  # this process, their worker, does nothing meanwhile
    assert max(spinner.lasts) <= term.trusted_until + LATE
    spinner.wait()
    assert "watchdog" in spinner.close()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_it_ends_with_its_guard_too_although_its_worker_is_stopped(
    number: signal.Signals, spinner: Spinner, is_dead: IsDead
) -> None:
    """A guard that is stopped dies when trust ends."""
    term = spinner.begin(2.5, "spins_as_another_user")
    os.kill(spinner.guard, number)
    eventually(lambda: is_dead(spinner.executor))
    assert spinner.last <= term.trusted_until + LATE


def test_a_guard_that_has_died_is_missed_by_its_worker(spinner: Spinner) -> None:
    spinner.begin(60, "spins_as_another_user")
    os.kill(spinner.executor, signal.SIGSTOP)  # so that it does not miss its guard itself
    os.kill(spinner.guard, signal.SIGKILL)
    spinner.wait()
    assert "killed with its guard" in spinner.close()


def test_the_process_group_is_killed_with_an_executor_whose_guard_is_stopped(spinner: Spinner, is_dead: IsDead) -> None:
    spinner.begin(60, "family_spins", processes=3)
    os.kill(spinner.guard, signal.SIGSTOP)
    spinner.guarded.kill()  # and no more: its worker may be stopped then
    eventually(lambda: is_dead(spinner.pids[1]))
    os.kill(spinner.pids[2], signal.SIGKILL)  # which only a guard finds


@pytest.fixture
def adopting() -> Iterator[None]:
    """This process is who waits for orphans."""
    before = linux.children(os.getpid())
    linux.adopt_orphans()
    yield
    for orphan in linux.children(os.getpid()) - before:
        os.waitpid(orphan, 0)
    linux._prctl(linux._PR_SET_CHILD_SUBREAPER, 0)


@pytest.mark.parametrize("flag", [guarded_process._PROCESS_GROUP, 1 << 20], ids=["now", "before Linux 6.9"])
def test_the_process_group_of_an_executor_is_killed_although_others_have_waited_for_that(
    flag: int, adopting: None, spinner: Spinner, is_dead: IsDead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_process, "_PROCESS_GROUP", flag)
    spinner.begin(60, "family_spins", processes=3)
    spinner.guarded._guard.kill()
    spinner.guarded._guard.wait()
    os.kill(spinner.executor, signal.SIGKILL)
    os.waitpid(spinner.executor, 0)
    spinner.wait()
    spinner.close()
    eventually(lambda: is_dead(spinner.pids[1]))
    os.kill(spinner.pids[2], signal.SIGKILL)


def test_where_a_worker_cannot_its_guard_ends_what_an_earlier_body_has_left_in_the_process_group(
    spinner: Spinner, is_dead: IsDead
) -> None:
    sleeper = spinner.result("leaves_a_sleeper")
    assert not is_dead(sleeper)
    spinner.guarded._control.shutdown(socket.SHUT_WR)  # as where it may not kill the executor itself
    eventually(lambda: is_dead(sleeper))


def test_with_an_executor_that_ends_by_itself_its_process_group_ends_and_its_daemons_do_not(
    spinner: Spinner, is_dead: IsDead
) -> None:
    sleeper, daemon = spinner.result("leaves_a_sleeper"), spinner.result("leaves_a_daemon")
    assert not is_dead(sleeper)
    spinner.guarded.shutdown(60)
    assert spinner.guarded.reap() == "exited with code 0"
    eventually(lambda: is_dead(sleeper))
    assert not is_dead(daemon)
    os.kill(daemon, signal.SIGKILL)


def test_orphans_that_end_are_waited_for_by_the_guard(spinner: Spinner) -> None:
    daemon = spinner.result("leaves_a_daemon")
    os.kill(daemon, signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{daemon}").exists())  # not even as a zombie
    assert spinner.guarded.usable


def test_with_an_executor_that_dies_in_the_middle_of_a_body_its_daemons_die(spinner: Spinner, is_dead: IsDead) -> None:
    spinner.begin(60, "family_spins", processes=3)
    os.kill(spinner.executor, signal.SIGKILL)
    spinner.wait()
    assert "SIGKILL" in spinner.close()
    assert all(map(is_dead, spinner.pids))  # before anything is settled


def test_a_renewal_moves_its_end(spinner: Spinner) -> None:
    term = spinner.begin(2)
    first = term.trusted_until
    spinner.guarded.watchdog.renewed([term], first + 1)
    spinner.wait()
    assert first + 0.5 < spinner.last


def test_a_loss_brings_its_end_nearer(spinner: Spinner) -> None:
    term = spinner.begin(60)
    until = now() + 0.3
    spinner.guarded.watchdog.lost(term, until)
    spinner.wait()
    assert spinner.last <= until + LATE


@pytest.fixture
def pair(tmp_path: Path, bodies: ModuleType) -> Iterator[Spinner]:
    """A spinner in which two bodies run at once."""
    spinner = Spinner(tmp_path / "memory", threads=2)
    yield spinner
    spinner.close()


def test_of_two_bodies_the_first_end_ends_both(pair: Spinner) -> None:
    pair.begin(60)
    first = pair.begin(2)
    pair.wait()
    assert pair.last <= first.trusted_until + LATE
    assert "watchdog" in pair.close()


def test_after_the_end_of_one_body_the_other_is_guarded(pair: Spinner) -> None:
    first, second = pair.begin(2), pair.begin(4)
    pair.guarded.watchdog.ended(first)
    pair.wait()
    assert first.trusted_until + 0.5 < pair.last <= second.trusted_until + LATE


def test_a_renewal_is_passed_on_although_another_lease_ends_before() -> None:
    wake, rings = os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)
    guarded = GuardedProcess(lambda: os.eventfd_write(rings, 1), wake, now)
    guarded.wait_started()
    first, later = (Term(None, BEATS, granted_at=now() + after) for after in (0, 60))
    for term in (first, later):
        guarded.watchdog.begins(term)
    guarded.watchdog.renewed([later], now() + 200)
    assert os.eventfd_read(rings) == 1
    guarded.shutdown(0)
    guarded.reap()
    os.close(rings)
    os.close(wake)


def test_a_trust_that_is_over_kills_before_the_body_begins(spinner: Spinner) -> None:
    term = Term(None, BEATS, granted_at=now() - BEATS.trust)
    spinner.guarded.watchdog.begins(term)
    assert not spinner.is_guarded()
    spinner.wait()
    assert not spinner.last


def test_a_body_that_has_ended_does_not_end_its_executor(spinner: Spinner) -> None:
    term = spinner.begin(2)
    spinner.guarded.watchdog.ended(term)
    assert spinner.is_guarded()
    while now() < term.trusted_until + 0.3:
        spinner.guarded.step(0.1)
    assert not spinner.guarded.over
    assert spinner.last > term.trusted_until


def test_a_guard_that_takes_in_nothing_any_more_is_killed_with_its_executor(spinner: Spinner) -> None:
    os.kill(spinner.guard, signal.SIGSTOP)
    while not spinner.guarded.over:
        spinner.guarded.arm(now() + 60)  # until no more goes in
        spinner.guarded.step(0)
    assert "killed with its guard" in spinner.close()


def test_very_many_bodies_may_begin_before_the_guard_has_its_turn(spinner: Spinner) -> None:
    os.kill(spinner.guard, signal.SIGSTOP)
    numbers = [spinner.guarded.ask() for _ in range(1000)]
    os.kill(spinner.guard, signal.SIGCONT)
    while spinner.guarded.confirmed < numbers[-1]:
        assert spinner.guarded.usable
        spinner.guarded.step(1)


def test_an_order_that_comes_before_the_body_has_begun_is_heard_by_it(spinner: Spinner) -> None:
    state = LeaseState(granted_at=now(), heartbeats=BEATS)
    os.kill(spinner.executor, signal.SIGSTOP)  # so that both come at once
    number = spinner.run("heeds", state)
    told = LeaseState(granted_at=now(), heartbeats=BEATS, stop="Cancelled")
    spinner.guarded.send(LeaseChanged(run=number, state=told))
    os.kill(spinner.executor, signal.SIGCONT)
    (ended,) = spinner.said()
    assert isinstance(ended, Ended)
    assert "was cancelled" in (ended.stopped or "")


def test_one_that_is_about_to_die_is_given_no_body(spinner: Spinner) -> None:
    os.kill(spinner.guard, signal.SIGSTOP)
    spinner.guarded.kill()
    assert not spinner.guarded.usable


def test_where_it_may_a_guard_goes_before_all_that_is_busy_and_its_executor_does_not(spinner: Spinner) -> None:
    code = "import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))"
    may = subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL, check=False).returncode == 0
    assert os.sched_getscheduler(spinner.guard) == (os.SCHED_FIFO if may else os.SCHED_OTHER)
    assert os.sched_getscheduler(spinner.executor) == os.SCHED_OTHER


def test_leases_that_another_clock_counts_are_refused() -> None:
    wake = os.eventfd(0, os.EFD_NONBLOCK)
    guarded = GuardedProcess(lambda: None, wake, lambda: now() + 10)
    with pytest.raises(ConfigError, match="CLOCK_BOOTTIME"):
        guarded.wait_started()
    guarded.shutdown(0)
    guarded.reap()
    os.close(wake)


@pytest.mark.parametrize("leaves_the_group", [False, True])
def test_a_worker_that_dies_with_an_unread_answer_leaves_no_process_of_its_handler(
    is_dead: IsDead, *, leaves_the_group: bool
) -> None:
    """The kernel closes the sockets of a dying process before it reports its end: then the guard cannot read."""
    ours, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel, theirs = socket.socketpair()
    body = f"""if True:
        import os, socket, time
        if (child := os.fork()) == 0:
            os.close(2)
            {leaves_the_group} and os.setsid()
            time.sleep(60)
        socket.socket(fileno={theirs.fileno()}).send(str(child).encode())
        time.sleep(600)"""
    passed = (control.fileno(), theirs.fileno())
    lean = [sys.executable, "-I", "-S", guard.__file__]
    command = [*lean, *map(str, passed), str(os.getpid()), sys.executable, "-c", body]
    with channel, subprocess.Popen(command, pass_fds=passed, stderr=subprocess.PIPE) as guarding:
        control.close()
        theirs.close()
        child = int(channel.recv(64))
        assert ours.recv(64).startswith(guard.HERE)
        ours.send(guard.ARM + guard.MOMENT.pack(now() + 600))
        ours.send(guard.ASK + guard.NUMBER.pack(1))
        assert ours.recv(64, socket.MSG_PEEK).startswith(guard.ASK)
        ours.close()
        assert guarding.stderr is not None
        assert guarding.stderr.read() == b""
    eventually(lambda: is_dead(child))
