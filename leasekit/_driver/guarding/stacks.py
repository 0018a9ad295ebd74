"""Where code is: the stack of the thread or coroutine in which it runs, taken from another thread.

Rule 1: nothing here takes a lock or reads a file: the driver's thread calls it. Lines of source are read when the stack
becomes a string, which the log thread does.
"""

import sys
from collections.abc import Iterator
from traceback import FrameSummary, StackSummary, walk_stack
from types import FrameType
from typing import Any


class Stack:
    """The stack of a thread, or of a coroutine that waits in its event loop; its string is like a traceback's."""

    def __init__(self, thread: int, coroutine: Any = None) -> None:
        if coroutine is not None and not getattr(coroutine, "cr_running", False):
            frames = list(_waiting(coroutine))
        else:
            here = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage] - documented all the same
            frames = [] if here is None else [frame for frame, _ in walk_stack(here)][::-1]
        self._frames = [(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in frames]

    def __str__(self) -> str:
        summary = StackSummary.from_list(
            [FrameSummary(path, line, name, lookup_line=False) for path, line, name in self._frames]
        )
        return "".join(summary.format()).rstrip() or "  (its thread has ended)"


def _waiting(awaited: Any) -> Iterator[FrameType]:
    """Yield the frames of a suspended coroutine, the outermost first."""
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            yield frame
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
