"""What the supervisor asks of Linux, tried on processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from leasekit._worker import linux

FAMILY = """
import os, sys, time
from leasekit._worker import linux

linux.adopt_orphans()
spared = os.spawnvp(os.P_NOWAIT, "sleep", ["sleep", "600"])
before = linux.children(os.getpid())
if os.fork() == 0:
    for _ in range(5):
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)  # leaves an orphan in a session of its own
            while True:
                time.sleep(1)
    os._exit(0)
while len(linux.children(os.getpid()) - before) < 5:
    time.sleep(0.01)
looks = 0
def waiting(seconds):
    global looks
    looks += 1
    time.sleep(seconds)
    return False
print(before == {spared})
print(linux.end_all_but(before, waiting=waiting))
print(linux.children(os.getpid()) == {spared})
os.kill(spared, 9)
print(linux.end_all_but([], waiting=waiting), linux.children(os.getpid()))
"""


def python(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


def test_all_that_descends_from_a_process_is_killed_and_reaped_but_what_it_spares() -> None:
    assert python(FAMILY) == ["True", "True", "True", "True set()"]


def test_who_has_no_patience_is_told_that_not_all_are_gone() -> None:
    code = """
import subprocess
from leasekit._worker import linux
process = subprocess.Popen(["sleep", "600"])
import os; real = os.kill; os.kill = lambda *_: None  # as of a process that hangs in the kernel
print(linux.end_all_but([], waiting=lambda seconds: True))
real(process.pid, 9); process.wait()
"""
    assert python(code) == ["False"]


def test_one_that_hangs_in_the_kernel_holds_nobody_up_for_ever() -> None:
    code = """
import os, subprocess, time
from leasekit._worker import linux
process = subprocess.Popen(["sleep", "600"])
real = os.kill; os.kill = lambda *_: None
def waiting(seconds):
    time.sleep(seconds)
    return False
print(linux.end_all_but([], waiting=waiting, within=0.1))
real(process.pid, 9); process.wait()
"""
    assert python(code) == ["False"]


def test_what_somebody_forks_just_before_he_is_killed_is_killed_too() -> None:
    code = """
import os, time
from leasekit._worker import linux
linux.adopt_orphans()
now, done = os.pipe(), os.pipe()
if not (child := os.fork()):
    os.read(now[0], 1)
    if os.fork():
        os.write(done[1], b"!")
    time.sleep(600)
kill = os.kill
def late(process, number):  # between the look that found it and its end it has its turn once more
    if process == child:
        os.write(now[1], b"!")
        os.read(done[0], 1)
    kill(process, number)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)  # so quickly
os.kill = late
print(linux.end_all_but([], waiting=lambda seconds: False), linux.children(os.getpid()))
"""
    assert python(code) == ["True set()"]


def test_children_that_cannot_be_seen_are_not_taken_for_gone() -> None:
    code = """
import collections, subprocess
from leasekit._worker import linux
process = subprocess.Popen(["sleep", "600"])
linux._families = lambda: collections.defaultdict(set)
print(linux.end_all_but([], waiting=lambda seconds: False, within=0.1))
process.kill(); process.wait()
print(linux.end_all_but([], waiting=lambda seconds: False, within=0.1))
"""
    assert python(code) == ["False", "True"]


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root")
def test_in_a_pid_namespace_with_the_proc_of_another_nobody_is_taken_for_somebody_else() -> None:
    """As with `unshare --pid --fork`, or a container with the /proc of its host: the numbers in there are others."""
    code = """
import os, subprocess
from leasekit._worker import linux
here, ready = os.pipe()
if (child := os.fork()) == 0:  # process 2: in the /proc of the machine, that has all threads of the kernel as children
    os.read(here, 1)
    mine = subprocess.Popen(["sleep", "600"])
    print(linux.end_all_but([], waiting=lambda seconds: False, within=0.1), flush=True)
    mine.kill()
    os._exit(0)
bystanders = [subprocess.Popen(["sleep", "600"]) for _ in range(10)]
os.write(ready, b"!")
os.waitpid(child, 0)
print({bystander.poll() for bystander in bystanders})
"""
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["False", "{None}"]


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    code = """
import os, signal, time
from leasekit._worker import linux
parent = os.getpid()
reads, writes = os.pipe()
if os.fork() == 0:
    os.close(reads)
    linux.end_with(parent)
    os.write(writes, b"x")
    time.sleep(600)
os.close(writes)
os.read(reads, 1)
os.kill(parent, signal.SIGKILL)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        assert process.wait(60) == -signal.SIGKILL
        assert process.stdout.read() == b""  # at its end: nobody has it open any more


def test_a_child_whose_parent_has_ended_already_ends_too() -> None:
    code = "import os\nfrom leasekit._worker import linux\nlinux.end_with(os.getppid() + 1)\nprint('lives')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


def test_it_is_taken_before_others_when_memory_runs_out() -> None:
    code = """
from pathlib import Path
from leasekit._worker import linux
score = Path("/proc/self/oom_score_adj")
before = int(score.read_text())
linux.expendable()
print(int(score.read_text()) > before or before == 1000)
"""
    assert python(code) == ["True"]


@pytest.mark.parametrize(
    ("cgroup", "file", "text"),
    [
        ("0::/app", "app/memory.events", "low 0\noom 2\noom_kill 3\noom_group_kill 0\n"),
        ("9:name=systemd:/\n4:cpu,memory:/app\n0::/", "memory/app/memory.oom_control", "under_oom 0\noom_kill 3\n"),
    ],
)
def test_memory_that_ran_out_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, file: str, text: str
) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    (tmp_path / "cgroup").write_text(cgroup)

    class Somewhere(type(Path())):  # type: ignore[misc]
        def __new__(cls, path: str) -> Path:  # type: ignore[misc]
            return tmp_path / "cgroup" if path == "/proc/self/cgroup" else Path(path)

    monkeypatch.setattr(linux, "Path", Somewhere)
    monkeypatch.setattr(linux, "_CGROUPS", tmp_path)
    assert linux.ended_for_memory() == 3


def test_of_a_machine_without_groups_the_kernels_own_count_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "_CGROUPS", Path("/nowhere"))
    assert linux.ended_for_memory() >= 0


def test_children_are_only_ones_own() -> None:
    process = subprocess.Popen(["sleep", "600"])
    try:
        assert process.pid in linux.children(os.getpid())
        assert os.getpid() not in linux.children(os.getpid())
    finally:
        process.kill()
        process.wait()
