"""Supervisor: a small process that has the worker as its child, and hands back its leases when it has died.

    worker dies ─▶ reaped ─▶ all orphans of it killed and reaped ─▶ its leases handed back ─▶ the worker started again

Rule 1: nothing is reported while any code of the worker can run.
Rule 2: the supervisor loads no user code, and never waits for the worker: it only reads what the worker noted. A worker
that was told to stop, and hangs (C code keeps the interpreter's lock, or the process is stopped), is killed.
Rule 3: the end of the supervisor ends the worker: by a signal that is passed on, or, if it is killed, by the kernel.
"""

import logging
import math
import os
import signal
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from leasekit._driver.clock import BOOT_CLOCK
from leasekit._driver.reporting.ledger import Past, SharedMemory
from leasekit._log import LogThread
from leasekit._worker import linux
from leasekit._worker.handback import hand_back
from leasekit._worker.signals import LOST_EXIT_CODE
from leasekit._worker.supervisor_link import VARIABLE

logger = logging.getLogger("leasekit")

_STOPPING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
_COUNTED = frozenset({signal.SIGTERM, signal.SIGINT})  # counted by the worker too, which a second one ends at once
_PASSED_ON = frozenset({signal.SIGUSR1, signal.SIGUSR2})
_HEARD = _STOPPING | _PASSED_ON | {signal.SIGCHLD}
_MAY_BE_IGNORED = (signal.SIGHUP, signal.SIGQUIT)  # as under nohup: then they are ignored here too
_WRONG_USAGE = 2
_NOT_STARTED = 71  # EX_OSERR
_NOTHING = Past(None, [], [], [])
_QUICK = 30.0  # seconds: a worker that ends earlier ends in quick succession
_MOST_QUICK = 20  # tasks that kill each worker that runs them are dead before that (`max_crashes`)
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 5.0
_LATE = 4.0  # seconds in which a worker writes its results and logs before it ends: one that lives on hangs
_HUNG = "was killed by its supervisor, because it was told to stop, and hung"
_LOOK = 1.0  # seconds between checks of the worker; less than is left of any lease that has been renewed
_NAMES: Mapping[int, str] = {number: number.name for number in signal.Signals}  # not all of the real-time ones


class _Life(NamedTuple):
    """The end of one worker, and what it left."""

    code: int  # as a shell reports it: 128 + n for signal n
    why: str
    past: Past
    lasted: float


class Supervisor:
    """Run a command as a child, and again when it has died, until told to stop."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._child: int | None = None
        self._beyond: int | None = None  # the child that refused a signal, once that was logged
        self._memory: SharedMemory | None = None
        self._signals = 0
        self._told_at: list[float] = []  # by the monotonic clock: when a signal that the worker counts was passed on
        self._hangs = False
        self._strangers: set[int] = set()
        self._heard = _HEARD - {number for number in _MAY_BE_IGNORED if signal.getsignal(number) is signal.SIG_IGN}

    def run(self) -> int:
        """Run workers, one after another; return the last exit code. Raises `OSError` if the first cannot start."""
        linux.adopt_orphans()
        self._strangers = linux.children(os.getpid())  # of the program that became this process by exec
        quick, came_to_work = 0, False
        with _hearing(self._heard) as mask:
            while True:
                try:
                    life = self._life(mask)
                except OSError as error:  # the machine will have enough processes, memory and files again
                    if not came_to_work:
                        raise
                    life = _Life(_NOT_STARTED, f"no worker can be started ({error})", _NOTHING, 0.0)
                came_to_work |= life.past.holder is not None
                quick = quick + 1 if life.lasted < _QUICK else 0
                if self._signals or not came_to_work or self._is_final(life):
                    return life.code
                with LogThread():
                    if quick > _MOST_QUICK:
                        what = "%s, and so did %d before it in quick succession: no more is started"
                        logger.error(what, life.why, quick)
                        return life.code
                    wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** (quick - 2)) if quick > 1 else 0.0
                    logger.warning("%s; it is started again%s", life.why, f" in {wait:g} s" if wait else "")
                    if self._rest(wait):
                        return 0

    def _is_final(self, life: _Life) -> bool:
        """Return whether the worker ended on purpose, or would end so again. An end during a run is neither."""
        return life.code == _WRONG_USAGE or (life.code == 0 and not life.past.leases)

    def _life(self, mask: set[signal.Signals]) -> _Life:
        """Run one worker, from its start until none of its code runs and none of its leases is held."""
        memory = self._memory = SharedMemory()
        try:
            killed_for_memory, began_at = linux.ended_for_memory(), time.monotonic()
            process, line = self._start(memory.fd, mask)  # a fork: no log thread runs meanwhile
            with os.fdopen(line), LogThread():
                code = os.waitstatus_to_exitcode(self._wait_for_end(process, line))
            self._child = None
            lasted = time.monotonic() - began_at
            past = memory.read()
            is_late = past.armed_at is not None and past.armed_at <= BOOT_CLOCK.now()
            reason = _reason(code, for_memory=linux.ended_for_memory() > killed_for_memory, is_late=is_late)
            why = f"the worker (process {process}) {_HUNG if self._hangs else reason}"
        finally:
            memory.close()
            self._memory = None
        if code != 0 or not past.is_empty:
            with LogThread():
                self._end_and_hand_back(past, why)
        return _Life(code if code >= 0 else 128 - code, why, past, lasted)

    def _start(self, ledger: int, mask: set[signal.Signals]) -> tuple[int, int]:
        """Start the worker. Return its pid, and a pipe from it that closes when it becomes another program."""
        line, end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            for fd in (ledger, end):
                os.set_inheritable(fd, True)  # noqa: FBT003 - of one argument
            environment: Mapping[str, str] = os.environ | {VARIABLE: f"{ledger}:{end}:{os.getpid()}"}
            self._child = linux.spawn(self._command, environment, mask=mask)
        except OSError:
            os.close(line)
            raise
        finally:
            os.close(end)
        return self._child, line

    def _end_and_hand_back(self, past: Past, why: str) -> None:
        self._listen(0)  # the Ctrl-C that has ended the worker came here too
        heard = self._signals

        def waiting(seconds: float) -> bool:
            """Listen for signals; return True after one more stop signal, which means that the user will not wait."""
            self._listen(seconds)
            return self._signals > max(1, heard)

        if not linux.end_all_but(self._strangers, waiting=waiting):
            logger.warning("processes of the worker go on: its %d leases expire by themselves", len(past.leases))
            return
        hand_back(past, why, waiting=waiting)

    def _wait_for_end(self, child: int, line: int) -> int:
        """Return the worker's wait status as soon as it has ended, and reap orphans meanwhile.

        A child that is no longer the worker, because a handler has exec'ed, is killed: the timer is gone, and its
        leases are not renewed. So is a worker that hangs after a signal.
        """
        while True:
            try:
                while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                    if reaped[0] == child:
                        return reaped[1]
                    self._strangers.discard(reaped[0])
            except ChildProcessError as error:
                raise AssertionError("other code of this process has reaped the worker") from error
            if _is_closed(line):  # or it is about to end: then this changes nothing
                self._send(signal.SIGKILL)
            left = self._ends_by() - time.monotonic()
            if left <= 0:
                if not self._hangs:
                    self._hangs = True
                    logger.warning("the worker (process %d) was told to stop, and hangs: it is killed", child)
                self._send(signal.SIGKILL)
            self._listen(min(_LOOK, left) if left > 0 else _LOOK)

    def _ends_by(self) -> float:
        """Return until when the worker ends by itself: after its drain, or at once after a second signal."""
        if not self._told_at:
            return math.inf
        assert self._memory is not None  # noqa: S101 - only the signals of a worker that lives are noted
        return _LATE + min(self._told_at[0] + self._memory.drain_timeout, *self._told_at[1:2], math.inf)

    def _listen(self, seconds: float) -> None:
        """Wait for a signal for at most `seconds`, and pass it on."""
        # Not every number is a signal: if this process was stopped for longer, Python returns uninitialised memory.
        if (heard := signal.sigtimedwait(self._heard, seconds)) is None or heard.si_signo not in self._heard:
            return
        number = signal.Signals(heard.si_signo)
        if number is signal.SIGCHLD:
            return
        if number in _STOPPING:
            self._signals += 1
        if number in _COUNTED and self._memory is not None:
            self._memory.count_signal()
            self._told_at.append(time.monotonic())
        if self._child is not None:  # it was not reaped, so its pid is still its own
            self._send(number)

    def _send(self, number: signal.Signals) -> None:
        """Send a signal to the worker, which was not reaped yet."""
        assert self._child is not None  # noqa: S101 - there is one
        try:
            os.kill(self._child, number)
        except PermissionError:
            if self._beyond != self._child:
                self._beyond = self._child
                logger.error(
                    "%s may not be sent to the worker (process %d), which has changed its user: end it by hand, and "
                    "let its supervisor signal processes of all users (CAP_KILL)", number.name, self._child,
                )  # fmt: skip

    def _rest(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self._signals and (left := until - time.monotonic()) > 0:
            self._listen(left)
        return bool(self._signals)


def _is_closed(line: int) -> bool:
    try:
        return os.read(line, 1) == b""
    except BlockingIOError:
        return False


@contextmanager
def _hearing(heard: Iterable[signal.Signals]) -> Generator[set[signal.Signals]]:
    """Block signals, so that they wait for `_listen`. Gives the signal mask from before."""
    chld = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, the end of children is not reported
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    try:
        yield {signal.Signals(number) for number in mask}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGCHLD, chld)


def _reason(code: int, *, for_memory: bool, is_late: bool) -> str:
    if code == -signal.SIGKILL:
        because = ": by the kernel's timer, because a handler outlived its lease" if is_late else ""
        return "was killed by SIGKILL" + (", probably because memory ran out" if for_memory else because)
    if code < 0:
        return f"was ended by {_NAMES.get(-code, f'signal {-code}')}"
    if code == LOST_EXIT_CODE:
        return f"ended itself with exit code {code}: a handler outlived its lease"
    return f"ended with exit code {code}"
