"""When a process is guarded, and to which moment: what the watchdog tells the kernel, and what it says where it cannot.

The kernel does as it is told: `test_watchdog.py`.
"""

# The kernel's timer is replaced by one that kills nobody.
# pyright: reportPrivateUsage=false

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import cast

import pytest

from leasekit._core.term import Term
from leasekit._driver.guarding.kill_timer import KillTimer, obstacle
from leasekit._driver.guarding.watchdog import Watchdog
from leasekit.config import Heartbeats
from tests.sampling import slow_after

linux = pytest.mark.skipif(obstacle() is not None, reason=obstacle() or "")

WITHIN = 60.0

# Where it cannot guard -----------------------------------------------------------------------------------------------

# What makes a process one that cannot be guarded, and a word of the sentence that says so.
OBSTACLES = {
    "another system": ("sys.platform = 'darwin'", "only Linux"),
    "an unknown machine": ("platform.machine = lambda: 'riscv64'", "riscv64"),
    "the first process of a container": ("assert os.getpid() == 1", "process 1"),
    "a kernel that refuses": (
        "resource.setrlimit(resource.RLIMIT_SIGPENDING, (0, 0))",
        "Resource temporarily unavailable",
    ),
    "leases by a clock from zero": ("now = lambda: 0.0", "CLOCK_BOOTTIME"),
    "leases by the time of day": ("now = time.time", "CLOCK_BOOTTIME"),
    "a Python without ctypes": ("sys.modules['ctypes'] = None", "ctypes"),
}

UNGUARDED = """
import logging, os, platform, resource, sys, time
from leasekit._core.term import Term
from leasekit._driver.guarding.watchdog import Watchdog
from leasekit.config import Heartbeats

def boot_time():
    return time.clock_gettime(time.CLOCK_BOOTTIME)

now = boot_time
logging.basicConfig(format="%(levelname)s %(message)s")
"""


def unguarded(obstacle: str, code: str) -> tuple[int, str]:
    """Exit code and stderr of a process that has this obstacle, and then runs this code."""
    command = [sys.executable, "-c", f"{UNGUARDED}\n{OBSTACLES[obstacle][0]}\n{code}"]
    if "process" in obstacle:
        command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", *command]
        if subprocess.run([*command[:5], "true"], check=False, capture_output=True).returncode:
            pytest.skip("there are no pid namespaces here")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WITHIN)
    return done.returncode, done.stderr


@linux
@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_required_refuses_with_one_sentence_that_says_why(obstacle: str) -> None:
    code, said = unguarded(obstacle, "Watchdog('required', now=now)")
    assert code == 1
    last = said.splitlines()[-1]
    assert last.startswith("leasekit.errors.ConfigError: watchdog='required'")
    assert OBSTACLES[obstacle][1] in last


@linux
@pytest.mark.parametrize("obstacle", slow_after(2, OBSTACLES))
def test_auto_says_in_one_line_why_it_does_not_guard_and_kills_nobody(obstacle: str) -> None:
    begin = "watchdog.begins(Term(None, Heartbeats(), granted_at=boot_time() - 1000))"
    code, said = unguarded(obstacle, f"watchdog = Watchdog('auto', now=now); {begin}; sys.exit(watchdog.guards + 7)")
    assert code == 7, said
    (line,) = said.splitlines()
    assert line.startswith("WARNING this process is not guarded")
    assert OBSTACLES[obstacle][1] in line


@pytest.mark.parametrize("mode", ["off", "soft"])
def test_off_and_soft_arm_nothing_and_load_nothing(mode: str) -> None:
    code = f"""
watchdog = Watchdog({mode!r}, now=now)
term = Term(None, Heartbeats(), granted_at=boot_time() - 1000)
watchdog.begins(term)
watchdog.renewed([term], 0.0)
watchdog.lost(term, 0.0)
watchdog.ended(term)
watchdog.close()
assert not watchdog.guards
assert not {{"ctypes", "leasekit._driver.guarding.kill_timer"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", UNGUARDED + code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# In step -------------------------------------------------------------------------------------------------------------


class Recorder:
    """A timer that kills nobody."""

    def __init__(self) -> None:
        self.at: float | None = None
        self.calls = 0
        self.closed = False
        self.meanwhile: Callable[[], None] = lambda: None

    def arm(self, at: float) -> None:
        self.meanwhile()
        self.at = at
        self.calls += 1

    def disarm(self) -> None:
        self.meanwhile()
        self.at = None
        self.calls += 1

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def watchdog(recorder: Recorder) -> Watchdog:
    watchdog = Watchdog("soft")
    watchdog._timer = cast("KillTimer", recorder)
    return watchdog


def term(until: float) -> Term:
    heartbeats = Heartbeats()
    return Term(None, heartbeats, granted_at=until - heartbeats.trust)


def test_the_kernel_is_not_called_where_the_earliest_end_stays(watchdog: Watchdog, recorder: Recorder) -> None:
    first = term(300.0)
    others = [term(400.0) for _ in range(10)]
    for one in (first, *others):
        watchdog.begins(one)
    watchdog.renewed(others, 500.0)
    for one in others:
        watchdog.ended(one)
    assert recorder.calls == 1
    assert recorder.at == first.trusted_until


def test_a_body_that_begins_while_it_is_renewed_is_guarded_to_the_new_end(
    watchdog: Watchdog, recorder: Recorder
) -> None:
    """The driver's thread accepts an answer while the body begins in another: whoever of the two comes first."""
    for order in itertools.permutations(("accept", "begin", "tell")):
        if order.index("accept") > order.index("tell"):
            continue
        one = term(300.0)
        for step in order:
            if step == "accept":
                one.renewed(100.0)
            elif step == "begin":
                watchdog.begins(one)
            else:
                watchdog.renewed([one], one.trusted_until)
        assert recorder.at == one.trusted_until == 100.0 + one.heartbeats.trust
        watchdog.ended(one)


CALLS: dict[str, Callable[[Watchdog, Term], None]] = {
    "begins": lambda watchdog, one: watchdog.begins(term(500.0)),
    "is renewed": lambda watchdog, one: watchdog.renewed([one], 700.0),
    "is lost": lambda watchdog, one: watchdog.lost(one, 550.0),
    "ends": lambda watchdog, one: watchdog.ended(one),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_body_that_begins_in_another_thread_is_guarded_whatever_happens_meanwhile_to_one_that(
    call: str, watchdog: Watchdog, recorder: Recorder
) -> None:
    one, first = term(600.0), term(300.0)
    watchdog.begins(one)
    other = threading.Thread(target=watchdog.begins, args=[first])

    def meanwhile() -> None:
        if other.ident is None:
            other.start()
            other.join(0.2)  # it has to wait; where it does not, it is done by then

    recorder.meanwhile = meanwhile
    CALLS[call](watchdog, one)
    other.join()
    assert recorder.at == first.trusted_until


def test_the_timer_is_given_back_when_the_client_is_closed_and_the_last_body_has_ended(
    watchdog: Watchdog, recorder: Recorder
) -> None:
    one = term(300.0)
    watchdog.begins(one)
    watchdog.close()
    assert not recorder.closed
    assert recorder.at == one.trusted_until
    watchdog.ended(one)
    assert recorder.closed


@linux
def test_a_timer_shows_what_is_left_and_nothing_when_it_is_disarmed() -> None:
    timer = KillTimer()
    assert timer.remaining() is None
    timer.arm(time.clock_gettime(time.CLOCK_BOOTTIME) + 1000)
    left = timer.remaining()
    assert left is not None
    assert 900 < left <= 1000
    timer.disarm()
    assert timer.remaining() is None
    timer.close()
    timer.close()
