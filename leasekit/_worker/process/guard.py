"""Guard: a small process without user code that ends one executor in time.

    worker ──── arm, disarm ───▶ guard ──── forks, dies with it ───▶ executor ───▶ what handlers start
       └──────────────── tasks, progress, settlements ────────────────┘

Rule 1: shortly before trust ends, a timer wakes the guard, which kills the executor and its process group. A guard that
is stopped, or gets no processor, is killed by the kernel when trust ends, and the executor dies with it:
PR_SET_PDEATHSIG, which survives exec. A handler that changes its user clears that; then `child` sets it again.
Rule 2: when the worker is gone the guard kills the executor at once.
Rule 3: processes that an executor leaves behind end with it: its process group always, and if it died during a run also
processes that have left that group. Orphans come to the guard, so the guard finds all of them.
Rule 4: one guard, one executor. When the executor has died, the guard reports how, and ends.

Run as a file, the guard loads no more of leasekit than the timer: it must start in milliseconds, and be small if it
dies. Messages to the guard and from it are datagrams: a letter, followed by numbers.
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
    for _name, _path in (("leasekit", "../../.."), ("leasekit._worker", "../..")):
        _package = type(sys)(_name)
        _package.__path__ = [os.path.abspath(os.path.join(__file__, _path))]  # noqa: PTH100, PTH118 - pathlib is 5 ms
        sys.modules[_name] = _package

from leasekit._driver.guarding.kill_timer import KillTimer, obstacle

# From the worker.
ARM = b"A"  # and a double: the moment, in seconds of CLOCK_BOOTTIME
DISARM = b"D"
ASK = b"?"  # and a number, which is sent back once all messages before it are done
# To the worker. ASK comes back as it is.
HERE = b"H"  # and HERE_FORMAT; a pidfd of the executor goes with it
REFUSED = b"R"  # and the reason why this process cannot be a guard, as text
EXITED = b"X"  # and a number: the wait status of the executor
NUMBER = struct.Struct("=i")
MOMENT = struct.Struct("=d")
HERE_FORMAT = struct.Struct("=id")  # the executor's pid, and the time as the kernel's timer counts it

AHEAD = 0.02  # seconds before the end of trust at which the guard kills the executor
_LONGEST = 64  # bytes of a datagram to the guard
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_FAR = 100 * 365 * 86400.0  # later than any uptime: for a trial of the timer
_NOT_FOR_US = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # all processes of a stopped service get them
_CANNOT_EXEC = 71  # EX_OSERR
_ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT  # for `waitid`: see a child that has ended, and do not reap it


def main(control: socket.socket, channel: int, worker: int, command: list[str]) -> None:
    """Start the executor and guard it until it has died. `worker` is the pid of the process that started this one."""
    control.set_inheritable(False)  # an executor with this socket would hide the end of its worker
    for number in _NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, ended children are not reported
    try:
        timers, now = _tested_timers()
        parent = os.pidfd_open(worker)
        if _prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
            raise OSError("the kernel refuses orphans (PR_SET_CHILD_SUBREAPER)")
    except OSError as error:
        with contextlib.suppress(OSError):  # the worker is gone
            control.send(REFUSED + str(error).encode())
        return
    guard = os.getpid()  # not read by the child: if the guard is dead by then, `getppid` returns another process
    pid = os.fork()
    if pid == 0:
        _become(command, channel, guard=guard)
    with contextlib.suppress(OSError):  # where permitted: the guard then acts at once, however busy the machine is
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    os.close(channel)
    executor = _Executor(pid, timers)
    here = HERE + HERE_FORMAT.pack(pid, now)
    with contextlib.suppress(ConnectionError):  # the worker has died
        control.sendmsg([here], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, NUMBER.pack(executor.pidfd))])
    if os.getppid() == worker:
        _watch(control, executor, worker=parent)
    status = executor.reap()
    with contextlib.suppress(OSError):
        control.send(EXITED + NUMBER.pack(status))


class _Timers(NamedTuple):
    """The timers against a handler that runs on: `alarm` wakes the guard, and `kill` kills the guard."""

    alarm: KillTimer
    kill: KillTimer


def _tested_timers() -> tuple[_Timers, float]:
    """Return timers that were armed once, and the kernel's time. Raises OSError if they cannot be armed."""
    if (why := obstacle()) is not None:
        raise OSError(why)
    timers, left = _Timers(KillTimer(signal.SIGALRM), KillTimer()), None
    for timer in timers:
        timer.arm(_FAR)
        left = timer.remaining()
        timer.disarm()
        if left is None:
            raise OSError("the kernel accepts the timer, but does not arm it")
    return timers, _FAR - (left or 0.0)


def _become(command: list[str], channel: int, *, guard: int) -> NoReturn:
    """Turn the forked child into the executor: in a session of its own, and killed when its guard dies."""
    try:
        os.setsid()
        if _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0 and os.getppid() == guard:
            for number in _NOT_FOR_US:
                signal.signal(number, signal.SIG_DFL)
            os.set_inheritable(channel, True)  # noqa: FBT003
            os.execv(command[0], command)  # noqa: S606 - the worker's own command
    finally:
        os._exit(_CANNOT_EXEC)


def _prctl(option: int, value: int) -> int:
    return int(ctypes.CDLL(None).prctl(option, value, 0, 0, 0))


def _watch(control: socket.socket, executor: "_Executor", *, worker: int) -> None:
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
    """Follow one datagram. Return False if the worker will send no other."""
    try:
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
    except ConnectionError:  # the worker has died, and had not read an answer
        return False
    return True


class _Executor:
    """The executor as its parent sees it. Killing it by its pid is safe, because only `reap` waits for it."""

    def __init__(self, pid: int, timers: _Timers) -> None:
        self.pidfd = os.pidfd_open(pid)
        self._pid = pid
        self._timers = timers
        self._handler_runs = False
        self.killed = False
        signal.signal(signal.SIGALRM, self._kill)
        signal.signal(signal.SIGCHLD, self._reap_orphans)
        # The thread of the worker that started the guard may have blocked these signals.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM, signal.SIGCHLD})

    def arm(self, at: float) -> None:
        """Set the timers against a handler that must have ended at `at`."""
        self._handler_runs = True
        self._timers.alarm.arm(at - AHEAD)
        if not self.killed:
            self._timers.kill.arm(at)

    def disarm(self) -> None:
        self._handler_runs = False
        for timer in self._timers:
            timer.disarm()

    def _kill(self, *_: object) -> None:
        """Kill the executor and its process group, and stop the timer that would kill the guard."""
        for kill in (partial(signal.pidfd_send_signal, self.pidfd), partial(os.killpg, self._pid)):
            with contextlib.suppress(ProcessLookupError, PermissionError):  # another user's: see docs/promises.md
                kill(signal.SIGKILL)
        self.killed = True
        self._timers.kill.disarm()

    def _reap_orphans(self, *_: object) -> None:
        """Reap children that have ended, but not the executor: its pid must stay its own."""
        while (ended := os.waitid(os.P_ALL, 0, _ENDED)) is not None and ended.si_pid != self._pid:
            os.waitpid(ended.si_pid, 0)

    def reap(self) -> int:
        """Kill what is left of the executor, and return its wait status."""
        self._kill()
        os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _, status = os.waitpid(self._pid, 0)
        if self._handler_runs and _has_children():
            from leasekit._worker.linux import end_all_but  # only when needed: a guard starts in milliseconds

            end_all_but((), waiting=lambda seconds: bool(select.select((), (), (), seconds)[0]))
        return status


def _has_children() -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, _ENDED)
        return True
    return False


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
