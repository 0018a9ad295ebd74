"""Interrupts at every place: an exception out of a signal handler, raised where CPython may run one, place by place.

CPython looks for signals when a function begins, after a call into C, and where a loop goes back. `interrupts` makes
these places countable, in the frames of the library and of what it calls in the standard library, in one thread. An
event loop of the user's that is interrupted between two callbacks may never wake a task again: nothing here mends that,
so its own frames are no places.
"""

import asyncio
import concurrent.futures
import dis
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import leasekit

__all__ = ["Interrupt", "Place", "interrupts", "places"]

_UNREACHED = 10  # in a row: how often code comes by where an answer is waited for depends on a race
_LIBRARY = str(Path(leasekit.__file__).parent)
_CALLED = (
    str(Path(asyncio.__file__).parent),
    str(Path(concurrent.futures.__file__).parent),
    threading.__file__,
)


class Interrupt(KeyboardInterrupt):
    """What the signal handler raises."""


class Place:
    """The place with this number, counted from zero in the order in which the code comes by.

    `also`: code whose frames count too: of a test, for the boundary of its own `with` statement, or of a plug-in.
    """

    def __init__(self, number: int, *, also: Collection[CodeType] = (), error: type[BaseException] = Interrupt) -> None:
        self._left = number
        self._also = also
        self._error = error
        self.at: str | None = None
        """Where that is; None as long as the code has not come by."""

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Raise the error there; a trace function."""
        code = frame.f_code
        if code not in self._also and not (code.co_filename.startswith(_LIBRARY) or _is_called_by_us(frame)):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if self.at is None and (event == "call" or (event == "opcode" and frame.f_lasti in _looks_after(code))):
            self._left -= 1
            if self._left < 0:
                self.at = f"{code.co_filename}:{frame.f_lineno} {code.co_qualname} +{frame.f_lasti}"
                raise self._error
        return self.trace


def _is_called_by_us(frame: FrameType) -> bool:
    """Tell whether this is code of the standard library that code which is watched has called."""
    by = frame.f_back
    return by is not None and by.f_trace is not None and frame.f_code.co_filename.startswith(_CALLED)


@cache
def _looks_after(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions before which CPython may run a signal handler.

    "Before a call" stands for a function in C that waits and looks for signals meanwhile. The call that ends a `with`
    statement is no such place, nor is that of `release`: what ends one in C is a lock, whose release does not wait. A
    lock that is left held because of an interrupt that cannot happen would stop every test that follows.
    """
    found: set[int] = set()
    steps = [step for step in dis.get_instructions(code) if step.opname != "PRECALL"]
    for number, step in enumerate(steps):
        before = steps[number - 1].opname if number else ""
        ends_with = number >= 3 and all(one.argrepr == "None" for one in steps[number - 3 : number])
        may_wait = step.opname.startswith("CALL") and not ends_with and steps[number - 1].argval != "release"
        if may_wait or before.startswith(("CALL", "RESUME", "JUMP_BACKWARD", "SEND")):
            found.add(step.offset)
    return frozenset(found)


@contextmanager
def interrupts(place: Place) -> Iterator[None]:
    """Raise `Interrupt` when the code of this block comes by, in this thread."""
    before = sys.gettrace()
    sys.settrace(place.trace)
    try:
        yield
    finally:
        sys.settrace(before)


def places(*, also: Collection[CodeType] = (), step: int = 1, more_than: int = 0) -> Iterator[Place]:
    """Yield a place for each run of some code, until several in a row were not reached: after `more_than` numbers."""
    number = unreached = 0
    while unreached < _UNREACHED:
        yield (place := Place(number, also=also))
        unreached = unreached + 1 if place.at is None else 0
        number += step
    assert number - unreached * step > more_than
