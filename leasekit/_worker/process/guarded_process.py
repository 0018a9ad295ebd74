"""Guarded process: one guard and its executor, from start to death, as the worker sees them."""

import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from leasekit._core.term import Term
from leasekit._driver.guarding.watchdog import Watchdog
from leasekit._worker import linux
from leasekit._worker.process import guard
from leasekit._worker.process.messages import SHOW_STACKS, Frames, FromExecutor, FromWorker, packed
from leasekit.errors import ConfigError

# `sys.path` first: the executor must import this very leasekit, wherever the worker has it from.
_BOOT = "import sys; sys.path[:] = {path!r}; from leasekit._worker.process.child import main; main({fd})"
_CHUNK = 64 * 1024
_CONTROL = 64 + 1024  # bytes of a datagram from a guard
_PATIENCE = 10.0  # seconds for a guard to start
_LAST_WORD = 2.0  # seconds for a guard to end what its executor left behind, and to report how it ended
_DYING = 0.2  # seconds between the end of an executor's socket and the executor's death
_PRECISION = 0.005  # seconds between two readings of one clock
_PROCESS_GROUP = 1 << 2  # PIDFD_SIGNAL_PROCESS_GROUP, since Linux 6.9
_NO_SIGPIPE = socket.MSG_NOSIGNAL  # user code may have made SIGPIPE deadly: no executor's end may kill the worker


class GuardedProcess:
    """A guard and its executor. The `watchdog` guards the executor's handlers: any thread may call it.

    All else is for the thread of the place. That thread waits until `wake_fd` is readable, and `ring` makes it so.
    `now` is the clock by which leases are counted. Raises OSError if no process can be started.
    """

    def __init__(self, ring: Callable[[], None], wake_fd: int, now: Callable[[], float]) -> None:
        self.ring = ring
        self._now = now
        self._wake_fd = wake_fd
        self._started_at = now()
        self._armed_at: float | None = None
        self._asked = 0
        self._sent = 0  # the latest question that was sent …
        self.confirmed = 0  # … and that the guard has answered
        self._status: int | None = None  # of the executor, once the guard has reported it
        self._pidfd: int | None = None
        self._executor = 0
        self._frames = Frames()
        self._decoder = msgspec.json.Decoder[FromExecutor](FromExecutor)
        self._out = bytearray()
        self._hung_up = False
        self._dismissed = False
        self._killed = False
        self._fault = ""  # why this class has killed it
        self._killed_for_memory = linux.ended_for_memory()
        self.over = False  # the executor is dead: none of its code runs
        self._telling = threading.Lock()
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel, channel = socket.socketpair()
        with control, channel:
            try:
                self._guard = _start_guard(control.fileno(), channel.fileno())
            except BaseException:
                self._control.close()
                self._channel.close()
                raise
        self._channel.setblocking(False)  # noqa: FBT003
        self.watchdog: Watchdog = _Watchdog(self)
        self._poll = select.poll()
        self._poll.register(wake_fd, select.POLLIN)
        self._poll.register(self._control, select.POLLIN)

    def arm(self, at: float) -> None:
        """Have the executor killed at `at`, and at no moment that was set before."""
        self._armed_at = at
        self._tell(guard.ARM + guard.MOMENT.pack(at))

    def disarm(self) -> None:
        self._armed_at = None
        self._tell(guard.DISARM)

    def close(self) -> None:
        """Close the socket to the guard: there is nothing left to arm."""
        with self._telling:
            self._control.close()

    def _tell(self, message: bytes) -> None:
        """Send a message to the guard, and kill the executor if the guard cannot receive it."""
        try:
            with self._telling:  # a descriptor that is closed meanwhile may be another file
                self._control.send(message, socket.MSG_DONTWAIT | _NO_SIGPIPE)
        except OSError:
            # The guard is dead, or was stopped until its socket was full: its executor must not outlive the deadline.
            self.kill()
            self._kill_guard()

    def wait_started(self) -> None:
        """Wait until the guard has started its executor. Raises `ConfigError` if it cannot guard, and OSError."""
        if not _readable(self._control, _PATIENCE):
            raise OSError("the guard of an executor does not answer")
        message, fds, _, _ = socket.recv_fds(self._control, _CONTROL, 1, socket.MSG_CMSG_CLOEXEC)
        if message.startswith(guard.REFUSED):
            why = message.removeprefix(guard.REFUSED).decode()
            raise ConfigError(f"run='process', but no guard can be started here: {why}")
        if not message.startswith(guard.HERE):
            raise OSError("the guard of an executor did not start")
        if not fds:  # the kernel leaves the descriptor out if there is no room for it
            raise OSError("this process has too many open files for one more executor")
        (self._pidfd,) = fds
        self._poll.register(self._pidfd, select.POLLIN)
        self._poll.register(self._channel, select.POLLIN)
        self._executor, at = guard.HERE_FORMAT.unpack(message.removeprefix(guard.HERE))
        if not self._started_at - _PRECISION <= at <= self._now() + _PRECISION:
            raise ConfigError("run='process', but leases are not counted by the clock of the kernel (CLOCK_BOOTTIME)")

    def ask(self) -> int:
        """Have the guard confirm that it has followed all messages. No handler may begin before `confirmed` says so."""
        self._asked += 1
        if self._sent == self.confirmed:
            self._send_question()
        return self._asked

    def _send_question(self) -> None:
        # One at a time, the latest: hundreds would fill the socket, as if the guard received no longer.
        self._sent = self._asked
        self._tell(guard.ASK + guard.NUMBER.pack(self._asked))

    def _hear(self) -> bool:
        """Read the guard's next message. Return False if there will be no other."""
        try:
            message = self._control.recv(_CONTROL, socket.MSG_DONTWAIT)
        except OSError:
            return False
        if message.startswith(guard.ASK):
            (self.confirmed,) = guard.NUMBER.unpack(message.removeprefix(guard.ASK))
            if self.confirmed < self._asked:
                self._send_question()
            return True
        if message.startswith(guard.EXITED):
            (self._status,) = guard.NUMBER.unpack(message.removeprefix(guard.EXITED))
        return False

    @property
    def usable(self) -> bool:
        return not self.over and not self._hung_up and not self._killed

    def send(self, message: FromWorker) -> None:
        """Send a message as soon as the executor receives; `step` sends the part that does not fit now."""
        self._out += packed(message)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._out:
                del self._out[: self._channel.send(self._out, _NO_SIGPIPE)]
        except BlockingIOError:
            pass
        except OSError:  # the executor is dead, which `step` will see
            self._out.clear()
        if not self._hung_up:
            self._poll.modify(self._channel, select.POLLIN | (select.POLLOUT if self._out else 0))

    def step(self, seconds: float) -> list[FromExecutor]:
        """Return the executor's messages; wait up to `seconds` for one, for the executor's death (`over`) or a ring."""
        ready = {fd for fd, _ in self._poll.poll(max(0.0, seconds) * 1000)}
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        died = self._pidfd in ready
        if self._control.fileno() in ready and not self._hear():
            self._poll.unregister(self._control)
            self.kill()  # nothing guards the executor any longer
        said = self._read() if died or self._channel.fileno() in ready else []
        if self._out:
            self._flush()
        self.over = died  # only now, when all that it sent before has been read
        return said

    def _read(self) -> list[FromExecutor]:
        """Return the messages that have arrived whole, without waiting; hang up if the socket is closed or garbled."""
        said: list[FromExecutor] = []
        try:
            while not self._hung_up:
                if not (data := self._channel.recv(_CHUNK)):
                    self._hang_up()
                said += map(self._decoder.decode, self._frames.feed(data))
        except BlockingIOError:
            pass
        except (OSError, msgspec.DecodeError):  # a handler has written into the socket
            self._hang_up()
        return said

    def _hang_up(self) -> None:
        """Stop reading: the executor is dying, or its messages cannot be read."""
        self._hung_up = True
        self._poll.unregister(self._channel)
        if not self._dismissed and not _readable(self._pidfd, _DYING):
            self._fault = ", because it had closed or garbled its socket to the worker"
            self.kill()

    def show_stacks(self) -> None:
        """Have the executor write all its stacks to stderr, if it can."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has died, or has changed its user
                signal.pidfd_send_signal(self._pidfd, SHOW_STACKS)

    def kill(self) -> None:
        """Kill the executor and its process group; `over` says when the executor is dead. From any thread."""
        self._killed = True
        with self._telling:  # a descriptor that is closed meanwhile may be another process
            if self._pidfd is None:
                self._kill_guard()
                return
            try:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            except ProcessLookupError:  # it was reaped: its group may live on
                pass
            except PermissionError:  # a handler has changed the user of this process, but not of the guard
                with contextlib.suppress(OSError):
                    self._control.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                _kill_group(self._pidfd, self._executor)

    def _kill_guard(self) -> None:
        with contextlib.suppress(PermissionError):
            self._guard.kill()

    def shutdown(self, within: float) -> None:
        """Let an executor without a run end by itself, and kill it if it takes longer than `within` seconds."""
        self._dismissed = True
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
        until = time.monotonic() + within
        while not self.over and (left := until - time.monotonic()) > 0 and self._pidfd is not None:
            self.step(left)
        self.kill()
        while not self.over and self._pidfd is not None:
            self.step(1.0)

    def reap(self) -> str:
        """Kill what is left, once the executor is `over` or has never started. Return how it ended."""
        past_end = self._armed_at is not None and self._now() >= self._armed_at - guard.AHEAD
        self.kill()  # its group too, even if its guard is stopped
        until = time.monotonic() + _LAST_WORD
        while self._status is None and _readable(self._control, until - time.monotonic()) and self._hear():
            pass
        self._kill_guard()
        self.close()  # a guard that may not be killed ends by this
        code = self._guard.wait()
        self._channel.close()
        with self._telling:
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None
        memory_ran_out = linux.ended_for_memory() > self._killed_for_memory
        if past_end and self._status in (None, signal.SIGKILL):
            return "was killed because a lease in it ended (watchdog)"
        if self._status is not None:
            how = _described(os.waitstatus_to_exitcode(self._status), memory_ran_out=memory_ran_out)
            return how + self._fault
        return f"was killed with its guard, which {_described(code, memory_ran_out=memory_ran_out)}"


class _Watchdog(Watchdog):
    """A watchdog over another process, which must learn the new ends too: also those that do not move the timer."""

    def __init__(self, process: GuardedProcess) -> None:
        super().__init__("required", timer=process)
        self._ring = process.ring

    def renewed(self, terms: Iterable[Term], until: float) -> None:
        super().renewed(terms, until)
        self._ring()


def _start_guard(control: int, channel: int) -> "subprocess.Popen[bytes]":
    path = [entry or os.getcwd() for entry in sys.path]  # noqa: PTH109 - sys.path wants strings
    options = [f"-W{option}" for option in sys.warnoptions] + ["-O"] * sys.flags.optimize
    executor = [sys.executable, *options, "-c", _BOOT.format(path=path, fd=channel)]
    lean = [sys.executable, "-I", "-S", guard.__file__]
    return subprocess.Popen(  # noqa: S603 - the worker's own command
        [*lean, str(control), str(channel), str(os.getpid()), *executor],
        stdin=subprocess.DEVNULL,
        pass_fds=(control, channel),
        start_new_session=True,  # it gets neither Ctrl-C nor the end of a terminal
    )


def _kill_group(pidfd: int, pid: int) -> None:
    """Kill the process group of an executor, but no group of another process that has its number now."""
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL, None, _PROCESS_GROUP)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # An older kernel. While a group has members, no other process can get its number.
        if _exists(partial(signal.pidfd_send_signal, pidfd)) or not _exists(partial(os.kill, pid)):
            os.killpg(pid, signal.SIGKILL)


def _exists(send: Callable[[int], None]) -> bool:
    try:
        send(0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _readable(fd: socket.socket | int | None, seconds: float) -> bool:
    poll = select.poll()
    if fd is not None:
        poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def _described(code: int, *, memory_ran_out: bool) -> str:
    """Describe how a process ended, by its exit code (negative: a signal): "exited with code 3", "was killed by …"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        number = signal.Signals(-code)
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"
    if number is signal.SIGKILL:
        whom = "probably because memory ran out" if memory_ran_out else "from outside, or possibly for want of memory"
        return f"was killed by SIGKILL ({whom})"
    meaning = signal.strsignal(number) or "unknown"
    return f"was killed by {number.name} ({meaning.lower()})"
