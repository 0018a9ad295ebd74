"""Handlers that never end by themselves; each writes the time into a shared file again and again."""

import collections
import itertools
import mmap
import signal
import struct
import time
from pathlib import Path

__all__ = ["BODIES"]

_STAMP = struct.Struct("d")


def _memory(path: str) -> mmap.mmap:
    with Path(path).open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def busy_loop(path: str) -> None:
    """Loop in Python code."""
    memory = _memory(path)
    while True:
        _STAMP.pack_into(memory, 0, time.clock_gettime(time.CLOCK_BOOTTIME))


def c_loop_with_the_gil(path: str) -> None:
    """Loop within one C call, which never releases the GIL."""
    times = map(time.clock_gettime, itertools.repeat(time.CLOCK_BOOTTIME))
    stamps = map(_STAMP.pack_into, itertools.repeat(_memory(path)), itertools.repeat(0), times)
    collections.deque(stamps, maxlen=0)


def signals_masked(path: str) -> None:
    """Loop with all signals masked."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    busy_loop(path)


BODIES = {body.__name__: body for body in (busy_loop, c_loop_with_the_gil, signals_masked)}
