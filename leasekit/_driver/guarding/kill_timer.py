"""Kill timer: a timer of the Linux kernel that kills this process, whatever its interpreter is doing.

Its expiry signal *is* SIGKILL: no handler, mask or thread takes part in it, and a stopped process dies while stopped. A
forked child does not inherit the timer, a program that is exec'ed loses it, and child processes live on.

It uses raw system calls, because libfaketime and similar tools replace those of the C library; and `PyDLL`, which keeps
the GIL: a call that releases the GIL would wait behind a busy thread to get it back.
"""

import ctypes
import os
import platform
import signal
import struct
import sys
from typing import NamedTuple


class _Numbers(NamedTuple):
    """The numbers of the system calls `timer_create` and so on, on one machine type."""

    create: int
    settime: int
    gettime: int
    delete: int


_NUMBERS = {"x86_64": _Numbers(222, 223, 224, 226), "aarch64": _Numbers(107, 110, 108, 111)}
_BOOTTIME = 7  # CLOCK_BOOTTIME, which goes on while the machine is suspended
_ABSTIME = 1  # TIMER_ABSTIME
_TO_PROCESS = 0  # SIGEV_SIGNAL: to the process, because a thread might end before
_EVENT = struct.Struct("=Qii48x")  # struct sigevent: a value for handlers, the signal, the recipient
_SETTING = struct.Struct("=4q")  # struct itimerspec: an interval (none) and the moment, in seconds and nanoseconds
_NANO = 1_000_000_000


def obstacle() -> str | None:
    """Return why a timer cannot kill this process, as half a sentence; None if it can."""
    if sys.platform != "linux":
        return f"only Linux has a timer that kills, and this is {platform.system()}"
    if platform.machine() not in _NUMBERS or sys.maxsize < 2**32:
        return f"the system calls of this machine ({platform.machine()}) are not known here"
    if os.getpid() == 1:
        # The kernel shields the first process of a pid namespace from all signals from within, even SIGKILL.
        return "process 1 of a container cannot be killed from within: start it under an init (docker run --init)"
    return None


class KillTimer:
    """Kill this process at one moment, by the kernel. Use only where `obstacle` returns None.

    With another `signal_number` the kernel sends that signal instead of SIGKILL.

    The kernel's timer is created when it is first armed, also in a forked child. It stays armed when this object is
    garbage: the code that it guards may still run. Not safe for two threads at once. Raises `OSError` if the kernel
    refuses.
    """

    __slots__ = ("_id", "_numbers", "_owner", "_signal", "_syscall")

    def __init__(self, signal_number: signal.Signals = signal.SIGKILL) -> None:
        self._signal = signal_number
        self._numbers = _NUMBERS[platform.machine()]
        self._syscall = ctypes.PyDLL(None, use_errno=True).syscall
        self._id = ctypes.c_int()
        self._owner = 0  # the process in which the kernel's timer was created

    def arm(self, at: float) -> None:
        """Kill at `at`, by CLOCK_BOOTTIME, instead of the moment that was set before; a past moment kills at once."""
        if self._owner != os.getpid():
            self._create()
        self._set_time(max(1, int(at * _NANO)))  # zero would disarm the timer

    def disarm(self) -> None:
        if self._owner == os.getpid():
            self._set_time(0)

    def remaining(self) -> float | None:
        """Return the seconds until the process is killed, as the kernel counts them; None if the timer is not armed."""
        if self._owner != os.getpid():
            return None
        left = ctypes.create_string_buffer(_SETTING.size)
        self._system_call(self._numbers.gettime, self._id, left)
        _, _, seconds, nanoseconds = _SETTING.unpack(left.raw)
        return seconds + nanoseconds / _NANO or None

    def close(self) -> None:
        if self._owner == os.getpid():
            self._owner = 0
            self._system_call(self._numbers.delete, self._id)

    def _create(self) -> None:
        event = _EVENT.pack(0, self._signal, _TO_PROCESS)
        self._system_call(self._numbers.create, _BOOTTIME, event, ctypes.byref(self._id))
        self._owner = os.getpid()

    def _set_time(self, nanos: int) -> None:
        self._system_call(self._numbers.settime, self._id, _ABSTIME, _SETTING.pack(0, 0, *divmod(nanos, _NANO)), None)

    def _system_call(self, number: int, *arguments: object) -> None:
        if self._syscall(number, *arguments) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
