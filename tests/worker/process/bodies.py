"""What the tests have run in executors. These import this file by its name."""

import asyncio
import ctypes
import itertools
import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import anyio

import leasekit


def note(path: str) -> None:
    """Leave one line about this run: its process, its guard."""
    with Path(path).open("a") as file:
        file.write(f"{os.getpid()} {os.getppid()}\n")


def calls(payload: list[str], held: leasekit.Lease) -> Any:
    """One of these functions, by its name: an executor has one handler alone."""
    name, path = payload
    return heeds(path, held) if name == "heeds" else globals()[name](path)


def add(payload: list[int], held: leasekit.Lease) -> int:
    held.check()
    return sum(payload)


def around(held: leasekit.Lease) -> Iterator[None]:
    _around.append("before")
    yield
    held.complete([*_around, "after"])


_around: list[str] = []
_tenant: ContextVar[str] = ContextVar("tenant", default="nobody")


def around_tenant(held: leasekit.Lease) -> Iterator[None]:
    held.progress(_tenant.get())
    _tenant.set(held.task.payload)
    yield


def tenant(payload: str, held: leasekit.Lease) -> str:
    return _tenant.get()


async def async_tenant(payload: str, held: leasekit.Lease) -> str:
    return await asyncio.to_thread(_tenant.get)


def around_noting(held: leasekit.Lease) -> Iterator[None]:
    """Leave a line about how the run ended, and swallow that."""
    try:
        yield
    except leasekit.LeasekitError as error:
        with Path(held.task.payload).open("a") as file:
            file.write(f"{type(error).__name__}\n")


async def async_around(held: leasekit.Lease) -> AsyncIterator[None]:
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0.001)
            await anyio.Path(held.task.payload).write_text("put away\n")


def checks(payload: str, held: leasekit.Lease) -> str:
    if held.fence == 1:
        held.progress("begun")
        while True:
            held.check()
            time.sleep(0.01)
    return "second"


async def waits(payload: str, held: leasekit.Lease) -> str:
    if held.fence == 1:
        held.progress("begun")
        await anyio.sleep(600)
    return "second"


def lifespan() -> Iterator[None]:
    _around.append("started")
    yield
    with Path(os.environ["LEASEKIT_TEST_ENDS"]).open("a") as file:
        file.write("ended\n")


def broken() -> Iterator[None]:
    if not _around:
        raise ConnectionError("no database")
    yield


def run_once(payload: str) -> str:
    note(payload)
    return "done"


def who(payload: Any) -> dict[str, int]:
    return {"executor": os.getpid(), "guard": os.getppid(), "session": os.getsid(0)}


_pool = ThreadPoolExecutor(1)


async def awaits_a_thread(payload: str) -> None:
    """Its coroutine can be cancelled, the thread cannot."""
    note(payload)
    await asyncio.get_running_loop().run_in_executor(_pool, time.sleep, 600)


def tells(payload: None, held: leasekit.Lease) -> Any:
    """Everything that a lease can be asked."""
    held.progress({"page": 1})
    held.then("next", {"after": held.task.id}, priority=0)
    return {
        "fence": held.fence,
        "attempt": held.attempt,
        "checkpoint": held.checkpoint,
        "trusted": held.remaining() > 0,
        "lost": held.lost,
    }


def outlasts_its_limit(payload: None, held: leasekit.Lease) -> None:
    limit = held.task.max_runtime
    while True:
        left = held.remaining_runtime()
        if left != limit:  # the service has answered the first heartbeat
            held.progress(left)
        held.check()
        time.sleep(0.01)


def fails_first(payload: None, held: leasekit.Lease) -> Any:
    if held.checkpoint is None:
        held.progress([1, 2])
        os._exit(9)
    return held.checkpoint


async def sleeps(payload: float, held: leasekit.Lease) -> str:
    await anyio.sleep(payload)
    held.check()
    return "slept"


def holds_the_gil(payload: dict[str, Any]) -> str:
    note(payload["path"])
    ctypes.PyDLL(None).usleep(int(payload["seconds"] * 1e6))  # a PyDLL does not let go of it
    return "done"


def goes_on(payload: str) -> None:
    """Whatever it is told."""
    note(payload)
    time.sleep(600)


def goes_on_with_progress(payload: str, held: leasekit.Lease) -> None:
    held.progress("far")
    note(payload)
    time.sleep(600)


def heeds(payload: str, held: leasekit.Lease) -> None:
    note(payload)
    while True:
        held.check()
        time.sleep(0.005)


def counts(payload: str, held: leasekit.Lease) -> None:
    note(payload)
    for number in itertools.count():
        Path(f"{payload}-done").write_text(str(number))
        held.progress(number)


def checks_without_rest(payload: str, held: leasekit.Lease) -> str:
    note(payload)
    while not Path(f"{payload}-finish").exists():
        held.check()
    return "done"


def changes_its_user(payload: None) -> int:
    """As far as the kernel is concerned: it forgets then with whom a process has to end."""
    return int(ctypes.CDLL(None).prctl(1, 0, 0, 0, 0))  # PR_SET_PDEATHSIG


def leaves_a_thread(payload: str | None, held: leasekit.Lease) -> None:
    """Its thread reports in the middle of the next body, as one may that looked at its lease just before the end."""
    if payload is None:
        record = held._run.held

        def report() -> None:
            _next_runs.wait()
            record.report(b'"of another"')
            _reported.set()

        threading.Thread(target=report).start()
        return
    _next_runs.set()
    _reported.wait()
    os._exit(1)


_next_runs, _reported = threading.Event(), threading.Event()


def leaves_a_child(payload: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(payload).write_text(f"{child.pid}\n")
    os.kill(os.getpid(), signal.SIGKILL)


def forks(payload: None) -> Any:
    """Its child comes back from the handler, as it should not."""
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    return "child"


def ends_a_child(payload: None) -> int:
    is_there, here = os.pipe()
    if not (child := os.fork()):
        os.write(here, b"!")
        while True:
            time.sleep(0.05)  # a signal just before a sleep does not end that sleep
    os.read(is_there, 1)  # a signal that comes in the middle of a fork is dropped by Python
    os.kill(child, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def says(payload: str) -> None:
    print(payload)
    print(payload, file=sys.stderr)


def no_json(payload: None) -> object:
    return object()


def no_number(payload: None) -> float:
    return float("nan")


def too_deep(payload: None) -> list[Any]:
    value: list[Any] = []
    for _ in range(64):
        value = [value]
    return value


def large(payload: str) -> str:
    return payload + payload


def raises_value_error(payload: str) -> None:
    raise ValueError(payload)


def raises_fatal(payload: str) -> None:
    raise leasekit.Fatal(payload)


def exits(payload: Any) -> None:
    sys.exit(payload)


def hard_exit(payload: int) -> None:
    os._exit(payload)


def aborts(payload: None) -> None:
    os.abort()


def reads_nowhere(payload: None) -> None:
    ctypes.string_at(0)


def closes_everything(payload: Any) -> None:
    os.closerange(3, 1000)


def garbles_its_line(payload: None) -> None:
    _write_into_sockets(b"\0\0\0\2{]")


def prints_into_its_line(payload: None) -> None:
    _write_into_sockets(b"\n\t 2026-11-28 what a program prints whose stdout was closed\n")


def _write_into_sockets(data: bytes) -> None:
    for entry in Path("/proc/self/fd").iterdir():
        if entry.is_symlink() and "socket:" in str(entry.readlink()):
            os.write(int(entry.name), data)
    time.sleep(600)


def leaves_a_sleeper(payload: str) -> int:
    """In its process group."""
    return subprocess.Popen(["sleep", "120"]).pid


def leaves_a_daemon(payload: str) -> int:
    """In a session of its own, and an orphan."""
    command = ["setsid", "--fork", "sh", "-c", "echo $$; exec sleep 120 >/dev/null"]
    return int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def spins(payload: str) -> None:
    """Writes the time into this file, over and over."""
    _spin(_memory(payload), 0)


def spins_as_another_user(payload: str) -> None:
    memory = _memory(payload)
    _become_another_user()
    _spin(memory, 0)


def family_spins(payload: str) -> None:
    """As another user, beside a child in the same process group, and a grandchild outside of it."""
    memory = _memory(payload)
    if os.fork() == 0:
        _spin(memory, 1)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            _spin(memory, 2)
        os._exit(0)
    _become_another_user()
    _spin(memory, 0)


def _become_another_user() -> None:
    if os.geteuid() == 0:
        os.setresuid(65534, 65534, 65534)
    else:
        changes_its_user(None)


def _memory(path: str) -> mmap.mmap:
    with Path(path).open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def _spin(memory: mmap.mmap, member: int) -> None:
    """Write the own number once, and the time over and over."""
    signal.alarm(120)  # no process is left behind by a test that fails
    memory[8 * (3 + member) : 8 * (4 + member)] = struct.pack("d", os.getpid())
    while True:  # in one piece, which `pack_into` is not: it writes zeros first
        memory[8 * member : 8 * (member + 1)] = struct.pack("d", time.clock_gettime(time.CLOCK_BOOTTIME))
        time.sleep(0.001)  # other tests run beside it


def returns_much(payload: Any) -> str:
    return "x" * 9_000_000


def returns_its_payload(payload: int, held: leasekit.Lease) -> int:
    held.progress(payload)
    return payload


_met = threading.Barrier(3)


async def meets_others(payload: int) -> int:
    """As soon as three run, in three loops."""
    await asyncio.to_thread(_met.wait)
    return os.getpid()


def sees(payload: None) -> dict[str, Any]:
    """What this process, and a program that it starts, have of those above them."""
    code = "import os, json; print(json.dumps([os.listdir('/proc/self/fd'), dict(os.environ)]))"
    command = [sys.executable, "-c", code]
    inherited, environ = json.loads(subprocess.run(command, close_fds=False, stdout=subprocess.PIPE, check=True).stdout)
    return {
        "files": {entry.name: str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()},
        "guard's": [str(entry.readlink()) for entry in Path(f"/proc/{os.getppid()}/fd").iterdir()],
        "inherited": inherited,
        "environ": environ,
        "command": Path("/proc/self/cmdline").read_text(),
    }


def has_imported_this(payload: str) -> int:
    return int("this" in sys.modules)


def polls(payload: str, held: leasekit.Lease) -> list[Any]:
    """Ask three times, and leave a line at each call."""
    note(payload)
    seen = [held.executions, held.checkpoint, held.fence, held.attempt]
    if held.executions < 3:
        if held.executions == 1:
            held.progress("asked once")
        raise leasekit.NotYet("the VM boots", after=0.05)
    return seen


async def polls_for_long(payload: str, held: leasekit.Lease) -> None:
    note(payload)
    held.progress("asked once")
    raise leasekit.NotYet("the VM boots", after=20)
