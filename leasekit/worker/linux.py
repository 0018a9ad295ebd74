"""What a supervisor needs of Linux: to be given orphans, to end them, and to hear of memory that ran out."""

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

__all__ = [
    "adopt_orphans",
    "can_supervise",
    "children",
    "end_all_but",
    "end_with",
    "ended_for_memory",
    "expendable",
    "spawn",
]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_EXPENDABLE = 200  # thousandths of the memory: as if the process used so much more
_CGROUPS = Path("/sys/fs/cgroup")
_PAUSE = 0.02  # seconds between two looks at processes that are about to end …
_DYING = 10.0  # … and after which one that was killed is taken for hanging in the kernel


def can_supervise() -> bool:
    """Only where orphans come to who started them can anybody say that nothing of a worker runs any more."""
    return sys.platform == "linux"


def adopt_orphans() -> None:
    """Have every process whose parents have ended come to this one, if they descend from it. Raises `OSError`."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent has ended, also where that was a moment ago."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def spawn(command: Sequence[str], environment: Mapping[str, str], *, mask: Iterable[signal.Signals]) -> int:
    """Start a program as a child that ends with this process, from before its first line: it may be stopped there.

    Returns its number. Raises `OSError` where it cannot be started.
    """
    parent = os.getpid()
    failure, fail = os.pipe2(os.O_CLOEXEC)
    try:
        if (child := os.fork()) == 0:
            _become(command, environment, mask, parent=parent, fail=fail)
    except OSError:
        os.close(failure)
        raise
    finally:
        os.close(fail)
    with os.fdopen(failure, "rb") as told:  # until the child is that program
        error = told.read()
    if error:
        os.waitpid(child, 0)
        raise OSError(int(error), os.strerror(int(error)), command[0])
    return child


def _become(
    command: Sequence[str], environment: Mapping[str, str], mask: Iterable[signal.Signals], *, parent: int, fail: int
) -> NoReturn:
    try:
        end_with(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execve(command[0], list(command), dict(environment))  # noqa: S606 - a program, no shell
    except OSError as error:
        os.write(fail, b"%d" % (error.errno or errno.EIO))
    finally:  # whatever it was: a second supervisor must not run
        os._exit(127)


def expendable() -> None:
    """When memory runs out, take this process and its children before the supervisor that reports their end."""
    path = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        path.write_text(str(min(1000, int(path.read_text()) + _EXPENDABLE)), encoding="ascii")


def ended_for_memory() -> int:
    """How many processes of this one's control group, or else of the machine, were killed because memory ran out."""
    for path, field in [*_memory_files(), (Path("/proc/vmstat"), "oom_kill")]:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return int(dict(line.split() for line in path.read_text(encoding="ascii").splitlines())[field])
    return 0


def _memory_files() -> Iterator[tuple[Path, str]]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield _CGROUPS / path.lstrip("/") / "memory.events", "oom_kill"
            elif "memory" in controllers.split(","):
                yield _CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control", "oom_kill"


# Processes ----------------------------------------------------------------------------------------------------


def children(parent: int) -> set[int]:
    """The processes whose parent it is, ended ones that nobody has waited for among them."""
    return set(_families()[parent])


def end_all_but(spared: Iterable[int], *, waiting: Callable[[float], bool], within: float = _DYING) -> bool:
    """Kill all that descends from this process, but those children and what descends from them. True when all are gone.

    Whoever is gone has been waited for: nothing of it runs. `waiting` is called between two looks with the seconds to
    wait; where it returns true this gives up, and so it does after so many seconds: what hangs in the kernel dies when
    it comes out of there, which may be never.
    """
    spared = set(spared)
    until = time.monotonic() + within
    # Until a look finds nobody: who was killed may have forked between that look and its end.
    while (ours := _descendants(spared)) or (not spared and _has_children()):
        for process in ours:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        left = set(ours)
        while (reaped := _reaped()) is not None:
            spared.discard(reaped)  # its number may come again
            left.discard(reaped)
        if waiting(_PAUSE if left or not ours else 0.0) or time.monotonic() >= until:
            return False
    return True


def _has_children() -> bool:
    """Be it that they cannot be seen, as where /proc shows everybody only what is his own (hidepid)."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _reaped() -> int | None:
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
    """Parent → children, of all processes that can be seen."""
    families: defaultdict[int, set[int]] = defaultdict(set)
    try:
        if str(Path("/proc/self").readlink()) != str(
            os.getpid()
        ):  # of another pid namespace: its numbers are of others
            return families
    except OSError:  # there is none
        return families
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                # The name, in parentheses, may have any character in it.
                stat = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()
                families[int(stat[1])].add(int(entry.name))
    return families


def _prctl(option: int, value: int) -> None:
    import ctypes  # not every Python has it, and not every process needs it

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
