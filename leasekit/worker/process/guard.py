"""The guard of one executor: a small process without user code that ends the executor in time.

    worker ──── arm, disarm ───▶ guard ──── forks, dies with it ───▶ executor ───▶ what handlers start
       └──────────────── tasks, progress, settlements ────────────────┘

Rule 1: shortly before trust ends, a timer wakes the guard, which kills the executor and its process group. A guard that
is stopped, or gets no processor, is killed by the kernel when trust ends, and the executor dies with it:
PR_SET_PDEATHSIG, which survives exec. A handler that changes its user clears that; then `child` sets it again.
Rule 2: when the worker is gone the guard kills the executor at once.
Rule 3: what an executor leaves behind ends with it: its process group always, and where it died in the middle of a
handler also what has left that group. Orphans come to the guard, so the guard finds all of them.
Rule 4: one guard, one executor. When that has died, the guard says how, and ends.

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
from functools import partial
from typing import NamedTuple, NoReturn

if __name__ == "__main__":  # in place of the packages, whose own __init__ import all of them
    for _name, _path in (("leasekit", "../../.."), ("leasekit.worker", "../..")):
        _package = type(sys)(_name)
        _package.__path__ = [os.path.abspath(os.path.join(__file__, _path))]  # noqa: PTH100, PTH118 - pathlib is 5 ms
        sys.modules[_name] = _package

from leasekit._driver.kill_timer import KillTimer, obstacle

__all__ = [
    "AHEAD", "ARM", "ASK", "DISARM", "EXITED", "HERE", "HERE_FORMAT", "MOMENT", "NUMBER", "REFUSED", "main",
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

AHEAD = 0.02  # seconds before the end of trust: then the guard kills the executor
_LONGEST = 64  # bytes of a datagram that is sent here
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_FAR = 100 * 365 * 86400.0  # later than any uptime: to try the timer with
_NOT_FOR_US = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # who stops a service tells all of its processes
_CANNOT_EXEC = 71  # EX_OSERR
_ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT  # for `waitid`: look at a child that has ended, and leave it there


def main(control: socket.socket, channel: int, worker: int, command: list[str]) -> None:
    """Start the executor and guard it until it has died. `worker` is the pid of who started this process."""
    control.set_inheritable(False)  # an executor that had it would hide the end of its worker
    for number in _NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who ignores it, as the worker may, is not told how a child ended
    try:
        timers, now = _tried()
        parent = os.pidfd_open(worker)
        if _prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
            raise OSError("the kernel refuses orphans (PR_SET_CHILD_SUBREAPER)")
    except OSError as error:
        with contextlib.suppress(OSError):  # the worker is gone
            control.send(REFUSED + str(error).encode())
        return
    guard = os.getpid()  # not asked for by the child: who asks when its parent is dead is told of another
    pid = os.fork()
    if pid == 0:
        _become(command, channel, guard=guard)
    with contextlib.suppress(OSError):  # where that is allowed: it acts at once then, however busy the machine is
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    os.close(channel)
    executor = _Executor(pid, timers)
    here = HERE + HERE_FORMAT.pack(pid, now)
    control.sendmsg([here], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, NUMBER.pack(executor.pidfd))])
    if os.getppid() == worker:
        _watch(control, executor, worker=parent)
    status = executor.reap()
    with contextlib.suppress(OSError):
        control.send(EXITED + NUMBER.pack(status))


class _Timers(NamedTuple):
    """What ends a handler that runs on: the alarm wakes the guard, and `kill` kills it."""

    alarm: KillTimer
    kill: KillTimer


def _tried() -> tuple[_Timers, float]:
    """Timers that have been armed, and the time as the kernel counts it. Raises OSError where they cannot be."""
    if (why := obstacle()) is not None:
        raise OSError(why)
    timers, left = _Timers(KillTimer(signal.SIGALRM), KillTimer()), None
    for timer in timers:
        timer.arm(_FAR)
        left = timer.remaining()
        timer.disarm()
        if left is None:
            raise OSError("the kernel takes the timer, and does not arm it")
    return timers, _FAR - (left or 0.0)


def _become(command: list[str], channel: int, *, guard: int) -> NoReturn:
    """The forked child turns into the executor: in a session of its own, and dead as soon as its guard is."""
    try:
        os.setsid()
        if _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0 and os.getppid() == guard:
            for number in _NOT_FOR_US:
                signal.signal(number, signal.SIG_DFL)
            os.set_inheritable(channel, True)  # noqa: FBT003
            os.execv(command[0], command)  # noqa: S606 - our own command
    finally:
        os._exit(_CANNOT_EXEC)


def _prctl(option: int, value: int) -> int:
    return int(ctypes.CDLL(None).prctl(option, value, 0, 0, 0))


def _watch(control: socket.socket, executor: "_Executor", *, worker: int) -> None:
    """Do what the worker says, until it or the executor is gone."""
    poll = select.poll()
    for fd in (control.fileno(), worker, executor.pidfd):
        poll.register(fd, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if executor.pidfd in ready or worker in ready:
            return
        if not _obey(control, executor):
            return


def _obey(control: socket.socket, executor: "_Executor") -> bool:
    """One datagram. False where nobody will send any more."""
    said = control.recv(_LONGEST)
    match said[:1]:
        case b"A":
            executor.arm(*MOMENT.unpack(said[1:]))
        case b"D":
            executor.disarm()
        case b"?" if not executor.killed:
            control.send(said)
        case _:
            return False
    return True


class _Executor:
    """The executor as its parent sees it: it may be killed by its number, for only `bury` waits for it."""

    def __init__(self, pid: int, timers: _Timers) -> None:
        self.pidfd = os.pidfd_open(pid)
        self._pid = pid
        self._timers = timers
        self._body_runs = False
        self.killed = False
        signal.signal(signal.SIGALRM, self._kill)
        signal.signal(signal.SIGCHLD, self._reap_orphans)
        # The thread of the worker that started the guard may have held them back.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM, signal.SIGCHLD})

    def arm(self, at: float) -> None:
        """A handler runs, and has to have ended by then."""
        self._body_runs = True
        self._timers.alarm.arm(at - AHEAD)
        if not self.killed:
            self._timers.kill.arm(at)

    def disarm(self) -> None:
        """No handler runs."""
        self._body_runs = False
        for timer in self._timers:
            timer.disarm()

    def _kill(self, *_: object) -> None:
        """Kill the executor and its process group; after that the guard need not die."""
        for kill in (partial(signal.pidfd_send_signal, self.pidfd), partial(os.killpg, self._pid)):
            with contextlib.suppress(ProcessLookupError, PermissionError):  # another user's, see docs/promises.md
                kill(signal.SIGKILL)
        self.killed = True
        self._timers.kill.disarm()

    def _reap_orphans(self, *_: object) -> None:
        """Wait for children that have ended, but not for the executor: its number must stay its own."""
        while (ended := os.waitid(os.P_ALL, 0, _ENDED)) is not None and ended.si_pid != self._pid:
            os.waitpid(ended.si_pid, 0)

    def reap(self) -> int:
        """Kill what is left of the executor. Its wait status."""
        self._kill()
        os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _, status = os.waitpid(self._pid, 0)
        if self._body_runs and _has_children():
            from leasekit.worker.linux import end_all_but  # not before it is needed: a guard starts in milliseconds

            end_all_but((), waiting=lambda seconds: bool(select.select((), (), (), seconds)[0]))
        return status


def _has_children() -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, _ENDED)
        return True
    return False


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
