"""A timer of the Linux kernel that kills this process, whatever its interpreter is doing.

Its expiry signal *is* SIGKILL: no handler, mask or thread takes part in it, and a stopped process dies while stopped. A
forked child does not inherit it, a program that is exec'ed loses it, and child processes live on.

By raw system calls, because libfaketime and the like replace those of the C library; and through `PyDLL`, which keeps
the GIL: to let go of it would mean to wait behind whichever thread is busy.
"""

import ctypes
import os
import platform
import signal
import struct
import sys
from typing import NamedTuple

__all__ = ["KillTimer", "obstacle"]


class _Numbers(NamedTuple):
    """The system calls of one machine: `timer_create` and so on."""

    create: int
    settime: int
    gettime: int
    delete: int


_NUMBERS = {"x86_64": _Numbers(222, 223, 224, 226), "aarch64": _Numbers(107, 110, 108, 111)}
_BOOTTIME = 7  # CLOCK_BOOTTIME: it goes on while the machine is suspended
_ABSTIME = 1  # TIMER_ABSTIME
_TO_PROCESS = 0  # SIGEV_SIGNAL: not to a thread, which might end before
_EVENT = struct.Struct("=Qii48x")  # struct sigevent: a value for handlers, the signal, to whom
_SETTING = struct.Struct("=4q")  # struct itimerspec: an interval (none) and the moment, in seconds and nanoseconds
_NANO = 1_000_000_000


def obstacle() -> str | None:
    """Why this process cannot be killed by a timer, in half a sentence; None where nothing speaks against it."""
    if sys.platform != "linux":
        return f"only Linux has a timer that kills, and this is {platform.system()}"
    if platform.machine() not in _NUMBERS or sys.maxsize < 2**32:
        return f"the system calls of this machine ({platform.machine()}) are not known here"
    if os.getpid() == 1:
        # The kernel shields the first process of a pid namespace from every signal from within, be it SIGKILL.
        return "process 1 of a container cannot be killed from within: start it under an init (docker run --init)"
    return None


class KillTimer:
    """The one moment, if any, at which the kernel kills this process. Only where there is no `obstacle`.

    With another `signal_number` the kernel sends that instead of SIGKILL.

    The kernel's part of it is made when it is first armed, in a forked child too, and stays armed when this object is
    garbage: what it was armed for may still run. Not for two threads at once. Raises `OSError` where the kernel
    refuses.
    """

    __slots__ = ("_id", "_numbers", "_owner", "_signal", "_syscall")

    def __init__(self, signal_number: signal.Signals = signal.SIGKILL) -> None:
        self._signal = signal_number
        self._numbers = _NUMBERS[platform.machine()]
        self._syscall = ctypes.PyDLL(None, use_errno=True).syscall
        self._id = ctypes.c_int()
        self._owner = 0  # the process in which it was made

    def arm(self, at: float) -> None:
        """Kill the process at `at`, in seconds of CLOCK_BOOTTIME, and at no other moment that was said before.

        A moment that has passed kills at once. About 2 µs.
        """
        if self._owner != os.getpid():
            self._make()
        self._set(max(1, int(at * _NANO)))  # zero would disarm it

    def disarm(self) -> None:
        """Kill no more."""
        if self._owner == os.getpid():
            self._set(0)

    def remaining(self) -> float | None:
        """Seconds until the process is killed, as the kernel sees it; None where it is not armed."""
        if self._owner != os.getpid():
            return None
        left = ctypes.create_string_buffer(_SETTING.size)
        self._call(self._numbers.gettime, self._id, left)
        _, _, seconds, nanoseconds = _SETTING.unpack(left.raw)
        return seconds + nanoseconds / _NANO or None

    def close(self) -> None:
        """Kill no more, and give back the kernel's part."""
        if self._owner == os.getpid():
            self._owner = 0
            self._call(self._numbers.delete, self._id)

    def _make(self) -> None:
        event = _EVENT.pack(0, self._signal, _TO_PROCESS)
        self._call(self._numbers.create, _BOOTTIME, event, ctypes.byref(self._id))
        self._owner = os.getpid()

    def _set(self, at: int) -> None:
        self._call(self._numbers.settime, self._id, _ABSTIME, _SETTING.pack(0, 0, *divmod(at, _NANO)), None)

    def _call(self, number: int, *arguments: object) -> None:
        if self._syscall(number, *arguments) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
