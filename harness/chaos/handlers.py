"""The handlers of the workers, well-behaved and not; each logs what it does.

A payload says for how long a handler runs, and whether it misbehaves in each attempt or only in the first.
"""

import asyncio
import contextlib
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

import leasekit
from harness.chaos import logs
from harness.history import Effect, Fault, Lost, Started, Stopped
from leasekit import hooks

MASKED = "CHAOS_MASKED"
UNGUARDED = "CHAOS_UNGUARDED"

_LIBC = ctypes.PyDLL(None)  # a PyDLL keeps the GIL during its calls
_STEP = 0.01
_MIB = 1024 * 1024


class Work(msgspec.Struct):
    """The payload: for how long a handler runs, and whether it misbehaves in each attempt."""

    seconds: float = 0.0
    always: bool = False
    until: str = ""  # a file in the working directory that ends the handler once it exists


def hear(event: hooks.Event) -> None:
    if isinstance(event, hooks.Lost) and event.task_id in fences:
        logs.current().add(Lost, task=event.task_id, fence=fences[event.task_id], reason=event.reason)


fences: dict[str, int] = {}  # of the newest run of each task
worker = leasekit.Worker(hooks=[hear], watchdog="soft" if os.environ.get(UNGUARDED) else "auto")

if os.environ.get(MASKED):  # before there are other threads, which inherit the mask
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGTERM, signal.SIGINT})
    signal.signal(signal.SIGALRM, signal.SIG_IGN)


@contextlib.contextmanager
def logged(held: leasekit.Lease) -> Iterator[None]:
    lease = {"task": held.task.id, "fence": held.fence}
    fences[held.task.id] = held.fence
    logs.current().add(Started, **lease)
    how = "finished"
    try:
        yield
    except BaseException as error:
        how = type(error).__name__
        raise
    finally:
        logs.current().add(Stopped, **lease, how=how)


def act(held: leasekit.Lease) -> None:
    logs.current().add(Effect, task=held.task.id, fence=held.fence)


def misbehaves(work: Work, held: leasekit.Lease) -> bool:
    return work.always or held.task.fence == 1


def moments(work: Work) -> Iterator[None]:
    """Yield for as long as the handler runs; the caller waits between the steps."""
    until = time.monotonic() + work.seconds
    while time.monotonic() < until and not (work.until and Path(work.until).exists()):
        yield


def steps(work: Work) -> Iterator[None]:
    for moment in moments(work):
        yield moment
        time.sleep(_STEP)


@worker.handler("steady")
def steady(work: Work, held: leasekit.Lease) -> dict[str, float]:
    with logged(held):
        for _ in steps(work):
            held.check()
            act(held)
    return {"time": time.time()}


@worker.handler("waits")
def waits(work: Work, held: leasekit.Lease) -> None:
    """Act, and ask to be called again until the file is there: no thread is held between two calls."""
    with logged(held):
        held.check()
        act(held)
        if not Path(work.until).exists():
            raise leasekit.NotYet(after=0.1)


@worker.handler("patient")
async def patient(work: Work, held: leasekit.Lease) -> None:
    with logged(held):
        for _ in moments(work):
            act(held)
            await asyncio.sleep(_STEP)


@worker.handler("deaf")
def deaf(work: Work, held: leasekit.Lease) -> None:
    """Act without a look at the clock or the lease."""
    with logged(held):
        for _ in steps(work) if misbehaves(work, held) else ():
            act(held)


@worker.handler("threads")
async def threads(work: Work, held: leasekit.Lease) -> None:
    """Await a thread that does not end with the coroutine."""
    await asyncio.to_thread(deaf.function, work, held)


@worker.handler("idles", idle_timeout=1)
async def idles(work: Work, held: leasekit.Lease) -> None:
    await asyncio.to_thread(deaf.function, work, held)


@worker.handler("gil")
def gil(work: Work, held: leasekit.Lease) -> None:
    with logged(held):
        act(held)
        if misbehaves(work, held):
            _LIBC.usleep(int(work.seconds * 1e6))
            act(held)


@worker.handler("regex")
def regex(work: Work, held: leasekit.Lease) -> None:
    """Backtrack in a regular expression for minutes, with the GIL held."""
    with logged(held):
        act(held)
        if misbehaves(work, held):
            re.match("(a+)+$", "a" * 34 + "b")
            act(held)


@worker.handler("blocks")
async def blocks(work: Work, held: leasekit.Lease) -> None:
    with logged(held):
        act(held)
        time.sleep(work.seconds)  # noqa: ASYNC251 - that is the fault
        act(held)


@worker.handler("poison")
def poison(work: Work, held: leasekit.Lease) -> None:
    with logged(held):
        act(held)
        if misbehaves(work, held):
            os.kill(os.getpid(), signal.SIGKILL)


@worker.handler("hungry")
def hungry(work: Work, held: leasekit.Lease) -> None:
    """Take all memory that the process may have, and keep it."""
    with logged(held):
        act(held)
        if not misbehaves(work, held):
            return
        used = int(re.findall(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + 64 * _MIB, hard))
        eaten: list[bytearray] = []
        with contextlib.suppress(MemoryError):
            while True:
                eaten.append(bytearray(_MIB // 4))
        eaten.pop()  # frees enough to log the fault
        logs.current().add(Fault, name="memory")
        for _ in steps(work):
            act(held)
        raise MemoryError


@worker.handler("forks")
def forks(work: Work, held: leasekit.Lease) -> int:
    """Fork a child that returns from the handler as if it were the worker."""
    with logged(held):
        act(held)
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            return os.waitstatus_to_exitcode(status)
    return -1


@worker.handler("spawns")
def spawns(work: Work, held: leasekit.Lease) -> int:
    """Start another program in a session of its own, which outlives the handler."""
    with logged(held):
        act(held)
        code = f"import time; time.sleep({work.seconds})"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        Path(f"child-of-{held.fence}").write_text(str(child.pid))
        if misbehaves(work, held):
            for _ in steps(work):
                act(held)
        return child.pid


@worker.handler("family")
def family(work: Work, held: leasekit.Lease) -> None:
    """Act in three processes, one of them outside the process group, and change the user."""
    with logged(held):
        act(held)
        if not misbehaves(work, held):
            return
        for leaves in (False, True):
            if os.fork() == 0:
                if leaves:
                    os.setsid()
                    if os.fork():
                        os._exit(0)
                break
        else:
            if os.geteuid() == 0:
                os.setresuid(65534, 65534, 65534)
            else:
                _LIBC.prctl(1, 0, 0, 0, 0)  # clears PR_SET_PDEATHSIG, as a change of user does
        for _ in steps(work):
            act(held)
        os._exit(0)


@worker.handler("execs")
def execs(work: Work, held: leasekit.Lease) -> None:
    """Replace the process by another program, which knows no lease."""
    with logged(held):
        act(held)
        if misbehaves(work, held):
            os.execv(sys.executable, [sys.executable, "-c", f"import time; time.sleep({work.seconds})"])
