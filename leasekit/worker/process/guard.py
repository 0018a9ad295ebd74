"""The guard of one executor: a small process without user code, which the kernel kills in time (DESIGN §9).

    worker ──── arm, disarm ───▶ guard ──── forks, dies with it ───▶ executor
       └──────────────── tasks, progress, settlements ────────────────┘

Rule 1: the kernel's timer is in here, and nothing else that could fail or wait. Its expiry kills the guard, stopped or
not, and the executor dies with the guard: PR_SET_PDEATHSIG, which survives its exec.
Rule 2: when the worker is gone the executor is killed at once, and so is what it has left in its process group.
Rule 3: one guard, one executor. When that has died, the guard says how, and ends.

Run as a file, it loads no more of leasekit than the timer: it has to start in milliseconds, and to be small when it
dies. What is sent to it and by it are datagrams, each a letter and its numbers.
"""

import contextlib
import ctypes
import os
import os.path
import select
import signal
import socket
import struct
import sys
from typing import NoReturn

if __name__ == "__main__":  # in place of the package, whose own __init__ imports all of it
    _package = type(sys)("leasekit")
    _package.__path__ = [os.path.abspath(os.path.join(__file__, "../../.."))]  # noqa: PTH100, PTH118 - pathlib is 5 ms
    sys.modules["leasekit"] = _package

from leasekit._driver.timer import Timer, obstacle

__all__ = [
    "ARM", "ASK", "DISARM", "EXITED", "HERE", "HERE_FORMAT", "MOMENT", "NUMBER", "REFUSED", "main",
]  # fmt: skip

# From the worker.
ARM = b"A"  # and a double: the moment, in seconds of CLOCK_BOOTTIME
DISARM = b"D"
ASK = b"?"  # and a number, which comes back once all that was said before is done
# To the worker. ASK comes back as it is.
HERE = b"H"  # and HERE_FORMAT; with it goes a pidfd of the executor
REFUSED = b"R"  # and why this process cannot be a guard, as text
EXITED = b"X"  # and a number: the wait status of the executor
NUMBER = struct.Struct("=i")
MOMENT = struct.Struct("=d")
HERE_FORMAT = struct.Struct("=id")  # the executor's pid, and the time as the kernel's timer counts it

_LONGEST = 64  # bytes of a datagram that is sent here
_PR_SET_PDEATHSIG = 1
_FAR = 100 * 365 * 86400.0  # later than any uptime: to try the timer with
_NOT_FOR_US = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # who stops a service tells all of its processes
_CANNOT_EXEC = 71  # EX_OSERR


def main(control: socket.socket, channel: int, worker: int, command: list[str]) -> None:
    """Start the executor and guard it until it has died. `worker` is the pid of who started this process."""
    control.set_inheritable(False)  # an executor that had it would hide the end of its worker
    for number in _NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who ignores it, as the worker may, is not told how a child ended
    try:
        timer, now = _tried()
        parent = os.pidfd_open(worker)
    except OSError as error:
        with contextlib.suppress(OSError):  # the worker is gone
            control.send(REFUSED + str(error).encode())
        return
    guard = os.getpid()  # not asked for by the child: who asks when its parent is dead is told of another
    executor = os.fork()
    if executor == 0:
        _become(command, channel, guard=guard)
    with contextlib.suppress(OSError):  # where that is allowed: it dies at once then, however busy the machine is
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    os.close(channel)
    watched = os.pidfd_open(executor)
    here = HERE + HERE_FORMAT.pack(executor, now)
    control.sendmsg([here], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, NUMBER.pack(watched))])
    if os.getppid() == worker:
        _watch(control, timer, worker=parent, executor=watched)
    _bury(control, timer, executor, watched)


def _tried() -> tuple[Timer, float]:
    """A timer that has been armed, and the time as the kernel counts it. Raises OSError where it cannot kill."""
    if (why := obstacle()) is not None:
        raise OSError(why)
    timer = Timer()
    timer.arm(_FAR)
    left = timer.remaining()
    timer.disarm()
    if left is None:
        raise OSError("the kernel takes the timer, and does not arm it")
    return timer, _FAR - left


def _become(command: list[str], channel: int, *, guard: int) -> NoReturn:
    """The forked child turns into the executor: in a session of its own, and dead as soon as its guard is."""
    try:
        os.setsid()
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        if prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0 and os.getppid() == guard:
            for number in _NOT_FOR_US:
                signal.signal(number, signal.SIG_DFL)
            os.set_inheritable(channel, True)  # noqa: FBT003
            os.execv(command[0], command)  # noqa: S606 - our own command
    finally:
        os._exit(_CANNOT_EXEC)


def _watch(control: socket.socket, timer: Timer, *, worker: int, executor: int) -> None:
    """Do what the worker says, until it or the executor is gone."""
    poll = select.poll()
    for fd in (control.fileno(), worker, executor):
        poll.register(fd, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if executor in ready or worker in ready:
            return
        if not _obey(control, timer):
            return


def _obey(control: socket.socket, timer: Timer) -> bool:
    """One datagram. False where nobody will send any more."""
    said = control.recv(_LONGEST)
    match said[:1]:
        case b"A":
            timer.arm(*MOMENT.unpack(said[1:]))
        case b"D":
            timer.disarm()
        case b"?":
            control.send(said)
        case _:
            return False
    return True


def _bury(control: socket.socket, timer: Timer, executor: int, watched: int) -> None:
    """Kill what is left of the executor, and say how it ended."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(watched, signal.SIGKILL)
    # Not reaped before its group is killed: as long as it is here, its number is nobody else's.
    os.waitid(os.P_PIDFD, watched, os.WEXITED | os.WNOWAIT)
    timer.disarm()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(executor, signal.SIGKILL)
    _, status = os.waitpid(executor, 0)
    with contextlib.suppress(OSError):
        control.send(EXITED + NUMBER.pack(status))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
