"""The kernel kills in time whatever a process does to itself, and never one whose bodies end in time.

Each victim is a process of its own. It writes the time into a file that is mapped into its memory, over and over: the
last entry is the last moment at which its code ran.
"""

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from leasekit._driver.guarding.kill_timer import obstacle
from tests.sampling import slow_after

linux = pytest.mark.skipif(obstacle() is not None, reason=obstacle() or "")

LATE = 1.0  # seconds after the deadline, at which a kill would come too late; measured are 0.03 ms
WITHIN = 60.0

PRELUDE = """
import ctypes, itertools, mmap, os, re, signal, struct, sys, threading, time
from leasekit._core.term import Term
from leasekit._driver.guarding.watchdog import Watchdog
from leasekit.config import Heartbeats

def now():
    return time.clock_gettime(time.CLOCK_BOOTTIME)

memory = mmap.mmap(os.open(os.environ["MEMORY"], os.O_RDWR), 4096)

def stamp(slot=1):
    struct.pack_into("d", memory, 8 * slot, now())

def spin(slot=1):
    while True:
        stamp(slot)

heartbeats = Heartbeats().for_ttl(60)
watchdog = Watchdog("required", now=now)

def due(after=0.3):
    "What the test takes for the deadline, and nobody else."
    at = now() + after
    struct.pack_into("d", memory, 0, at)
    return at

def begin(after=0.3):
    "A body that must have ended so many seconds from now."
    at = due(after)
    stamp()
    term = Term(None, heartbeats, granted_at=at - heartbeats.trust)
    watchdog.begins(term)
    return term
"""


@dataclass(frozen=True, slots=True)
class End:
    """How a victim ended."""

    code: int
    deadline: float  # CLOCK_BOOTTIME, as `last`
    stamps: list[float]  # of each slot, the last
    error: str

    @property
    def last(self) -> float:
        """When its code ran last."""
        return max(self.stamps)

    @property
    def in_time(self) -> bool:
        """Killed, and nothing of it has run too late."""
        assert self.code == -signal.SIGKILL, self.error
        return self.last <= self.deadline + LATE


class Victim:
    """A process, its memory, and what it says."""

    def __init__(self, memory: Path, command: list[str]) -> None:
        self.memory = memory
        memory.write_bytes(bytes(4096))
        self.popen = subprocess.Popen(
            command,
            env=os.environ | {"MEMORY": str(memory)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self) -> End:
        """Wait for it."""
        _, error = self.popen.communicate(timeout=WITHIN)
        deadline, *stamps = struct.unpack("512d", self.memory.read_bytes())
        return End(self.popen.returncode, deadline, stamps, error)


Start = Callable[[str], Victim]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a victim that runs this code after the prelude."""
    victims: list[Victim] = []

    def start(code: str) -> Victim:
        victim = Victim(tmp_path / f"memory{len(victims)}", [sys.executable, "-c", PRELUDE + code])
        victims.append(victim)
        return victim

    yield start
    for victim in victims:
        victim.popen.kill()
        victim.popen.communicate()


BODIES = {
    "a busy loop": "begin(); spin()",
    "C code that holds the GIL": "begin(); stamp(); ctypes.PyDLL(None).usleep(5_000_000); stamp()",
    "a catastrophic regular expression": r"begin(); stamp(); re.match(r'(a+)+$', 'a' * 30 + 'b'); stamp()",
    "all signals masked": "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); begin(); spin()",
    "handlers of SIGALRM, and alarms that are turned off": """
signal.signal(signal.SIGALRM, lambda *_: None)
signal.alarm(60)
signal.setitimer(signal.ITIMER_REAL, 60)
begin()
signal.alarm(0)
signal.setitimer(signal.ITIMER_REAL, 0)
spin()
""",
    "faulthandler's own watchdog, set and cancelled": """
import faulthandler
faulthandler.dump_traceback_later(60)
begin()
faulthandler.cancel_dump_traceback_later()
spin()
""",
    "a main thread that has ended": """
threading.Thread(target=lambda: (begin(), spin())).start()
ctypes.CDLL(None).pthread_exit(None)
""",
    "eight busy threads": """
for slot in range(1, 9):
    threading.Thread(target=spin, args=[slot], daemon=True).start()
begin()
time.sleep(60)
""",
    "a sleep": "begin(); stamp(); time.sleep(60); stamp()",
    "a finally that cleans up for long": "begin()\ntry: sys.exit()\nfinally: spin()",
    "garbage that was the watchdog": "begin(); del watchdog; spin()",
    "a fork that lives on": "begin(); os.fork() or (time.sleep(2), os._exit(0)); spin()",
}


@linux
@pytest.mark.parametrize("body", slow_after(6, BODIES))
def test_no_code_runs_after_the_deadline_whatever_the_body_is(body: str, start: Start) -> None:
    assert start(BODIES[body]).end().in_time


@pytest.mark.slow  # and slows down others
@linux
def test_no_code_runs_after_the_deadline_while_others_take_the_processors(start: Start) -> None:
    hog = "import time\nuntil = time.monotonic() + 10\nwhile time.monotonic() < until: pass"
    hogs = [subprocess.Popen([sys.executable, "-c", hog]) for _ in range(8)]
    try:
        assert start("begin(); spin()").end().in_time
    finally:
        for process in hogs:
            process.kill()
            process.wait()


@linux
def test_a_stopped_process_dies_while_it_is_stopped_and_runs_nothing_when_it_is_continued(start: Start) -> None:
    victim = start("begin(); stamp(); os.kill(os.getpid(), signal.SIGSTOP); spin()")
    pid = victim.popen.pid
    assert os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    while time.clock_gettime(time.CLOCK_BOOTTIME) < struct.unpack("d", victim.memory.read_bytes()[:8])[0]:
        time.sleep(0.01)
    victim.popen.send_signal(signal.SIGCONT)
    end = victim.end()
    assert end.in_time
    assert end.last < end.deadline


@linux
def test_pytests_own_timeouts_do_not_disarm_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # others take most of the time of such a short run
    test = "import pytest\n" + PRELUDE + "\ndef test_it():\n    begin()\n    spin()\n"
    (tmp_path / "test_it.py").write_text(test)
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "pytest_timeout",
        "-o",
        "faulthandler_timeout=60",
        "-o",
        "timeout=60",
    ]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path / "test_it.py")]
    assert Victim(tmp_path / "memory", command).end().in_time


# Each has a deadline, and another that was the one before.
MOVED = {
    "the first to end, begun last": "begin(60); begin()",
    "the first to end, begun first": "term = begin(); begin(60); due(term.trusted_until - now())",
    "a lost one, before its trust ends": "term = begin(60); watchdog.lost(term, due())",
    "a lost one that is renewed later": """
term = begin(60)
watchdog.lost(term, due())
watchdog.renewed([term], now() + 60)
""",
    "one that is renewed for less": "term = begin(60); watchdog.renewed([term], due())",
    "the next, when the first has ended": "first = begin(0.9); begin(1.0); watchdog.ended(first)",
    "one that runs on when its client is closed": "begin(); watchdog.close()",
}


@linux
@pytest.mark.parametrize("case", slow_after(3, MOVED))
def test_the_deadline_is_that_of(case: str, start: Start) -> None:
    assert start(MOVED[case] + "\nspin()").end().in_time


@linux
def test_a_deadline_that_has_passed_kills_before_the_next_line(start: Start) -> None:
    end = start("begin(-1.0); stamp(2)").end()
    assert end.code == -signal.SIGKILL, end.error
    assert not end.stamps[1]


# Each would die in two seconds, and lives on for longer.
SPARED = {
    "a body that was renewed": "watchdog.renewed([term], now() + 60)",
    "one of many that were renewed": """
others = [begin(50) for _ in range(100)]
watchdog.ended(others.pop())
watchdog.renewed([term, *others], now() + 60)
""",
    "a body that has ended": "watchdog.ended(term)",
    "a body that was lost, and has ended": "watchdog.lost(term, now() + 0.9); watchdog.ended(term)",
    "a body that has ended after its client was closed": "watchdog.close(); watchdog.ended(term)",
    "a program that is exec'ed": """
code = f"import os, time\\ntime.sleep(max(0, {first + 0.3} - time.clock_gettime(time.CLOCK_BOOTTIME)))\\nos._exit(7)"
os.execv(sys.executable, [sys.executable, "-c", code])
""",
}


@linux
@pytest.mark.parametrize("case", slow_after(3, SPARED))
def test_it_does_not_kill(case: str, start: Start) -> None:
    code = "term = begin(2.0)\nfirst = term.trusted_until\n" + SPARED[case]
    end = start(code + "\nwhile now() < first + 0.3: time.sleep(0.01)\nos._exit(7)").end()
    assert end.code == 7, end.error


@linux
def test_a_forked_child_outlives_its_parent_and_can_guard_itself(start: Start) -> None:
    victim = start(
        """
term = begin(0.5)
parent = os.getpid()
if os.fork():
    time.sleep(60)
signal.alarm(30)
watchdog._lock.acquire(False)  # as where another thread had it when the process forked
watchdog.renewed([term], now() - 1)
watchdog.ended(term)
watchdog.close()
while os.getppid() == parent: time.sleep(0.01)
print("alive", now() > term.trusted_until, file=sys.stderr, flush=True)
watchdog = Watchdog("required", now=now)
begin(-1.0)
print("undead", file=sys.stderr, flush=True)
"""
    )
    end = victim.end()  # of both: the child has the other end of their stderr
    assert end.code == -signal.SIGKILL
    assert end.error == "alive True\n"


@linux
def test_a_timer_is_made_anew_in_a_forked_child_and_stays_armed_in_its_parent(start: Start) -> None:
    victim = start(
        """
from leasekit._driver.guarding.kill_timer import KillTimer
timer = KillTimer()
timer.arm(now() + 60)
child = os.fork()
if child:
    _, status = os.waitpid(child, 0)
    print(os.WTERMSIG(status), timer.remaining() > 10, file=sys.stderr, flush=True)
    os._exit(7)
signal.alarm(30)
timer.disarm()
timer.close()
print(timer.remaining(), file=sys.stderr, flush=True)
timer.arm(now() - 1)
print("undead", file=sys.stderr, flush=True)
"""
    )
    end = victim.end()
    assert (end.code, end.error) == (7, "None\n9 True\n")
