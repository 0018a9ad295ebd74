"""Linux calls of a supervisor: start the worker, adopt orphans, end them, and detect that memory ran out."""

import contextlib
import errno
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_EXPENDABLE = 200  # thousandths of the memory: the kernel rates the process as if it used so much more
_CGROUPS = Path("/sys/fs/cgroup")
_PAUSE = 0.02  # seconds between two checks of processes that are about to end …
_DYING = 10.0  # … and after which a killed process counts as hanging in the kernel


def can_supervise() -> bool:
    """Return whether orphans come to the process that started them: only then is it known that no code still runs."""
    return sys.platform == "linux"


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parents have ended. Raises `OSError`."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, also if the parent has ended a moment ago."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def spawn(command: Sequence[str], environment: Mapping[str, str], *, mask: Iterable[signal.Signals]) -> int:
    """Start a program as a child, and return its pid. The kernel kills the child when this process ends.

    It does so from the start, before any code of the program runs. The program starts with the signals of `mask`
    blocked. Raises `OSError` if it cannot be started.
    """
    parent = os.getpid()
    failure, pipe = os.pipe2(os.O_CLOEXEC)
    try:
        if (child := os.fork()) == 0:
            _become(command, environment, mask, parent=parent, pipe=pipe)
    except OSError:
        os.close(failure)
        raise
    finally:
        os.close(pipe)
    with os.fdopen(failure, "rb") as told:  # the pipe closes when the child has become that program
        error = told.read()
    if error:
        os.waitpid(child, 0)
        raise OSError(int(error), os.strerror(int(error)), command[0])
    return child


def _become(
    command: Sequence[str], environment: Mapping[str, str], mask: Iterable[signal.Signals], *, parent: int, pipe: int
) -> NoReturn:
    """Run a program in this forked child, in place of it; if that fails, write the errno to `pipe`."""
    try:
        end_with(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execve(command[0], list(command), dict(environment))  # noqa: S606 - a program, no shell
    except OSError as error:
        os.write(pipe, b"%d" % (error.errno or errno.EIO))
    finally:  # whatever happened: a second supervisor must not run
        os._exit(127)


def expendable() -> None:
    """Have the kernel end this process and its children before their supervisor when memory runs out."""
    path = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        path.write_text(str(min(1000, int(path.read_text()) + _EXPENDABLE)), encoding="ascii")


def ended_for_memory() -> int:
    """Return how many processes were killed for lack of memory, in this control group, or else on the machine."""
    for path, field in [*_oom_counters(), (Path("/proc/vmstat"), "oom_kill")]:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return int(dict(line.split() for line in path.read_text(encoding="ascii").splitlines())[field])
    return 0


def _oom_counters() -> Iterator[tuple[Path, str]]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield _CGROUPS / path.lstrip("/") / "memory.events", "oom_kill"
            elif "memory" in controllers.split(","):
                yield _CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control", "oom_kill"


def children(parent: int) -> set[int]:
    """Return the children of process `parent`, including ended ones that were not reaped."""
    return set(_families()[parent])


def end_all_but(spared: Iterable[int], *, waiting: Callable[[float], bool], within: float = _DYING) -> bool:
    """Kill all descendants of this process, except the children `spared` and their descendants.

    Returns True when all are gone and reaped: none of their code runs. `waiting` is called between two checks with the
    seconds to wait. Returns False if `waiting` returns True, and after `within` seconds: a process that hangs in the
    kernel dies only when it leaves the kernel, which may be never.
    """
    spared = set(spared)
    until = time.monotonic() + within
    # Until a check finds no process: a killed one may have forked between that check and its end.
    while (ours := _descendants(spared)) or (not spared and _has_children()):
        for process in ours:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        left = set(ours)
        while (reaped := _reap_one()) is not None:
            spared.discard(reaped)  # its pid may be used again
            left.discard(reaped)
        if waiting(_PAUSE if left or not ours else 0.0) or time.monotonic() >= until:
            return False
    return True


def _has_children() -> bool:
    """Return whether there are children, even if /proc does not show them (hidepid)."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _reap_one() -> int | None:
    try:
        process, _ = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return process or None


def _descendants(spared: set[int]) -> set[int]:
    families = _families()
    found: set[int] = set()
    look_at = families[os.getpid()] - spared
    while look_at:
        found |= look_at
        look_at = set[int]().union(*(families[process] for process in look_at)) - found
    return found


def _families() -> defaultdict[int, set[int]]:
    families: defaultdict[int, set[int]] = defaultdict(set)
    try:
        if Path("/proc/self").readlink().name != str(os.getpid()):  # its numbers are of another pid namespace
            return families
    except OSError:  # there is none
        return families
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                # The name, in parentheses, may contain any character.
                stat = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()
                families[int(stat[1])].add(int(entry.name))
    return families


def _prctl(option: int, value: int) -> None:
    import ctypes  # not every Python has it, and not every process needs it

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
