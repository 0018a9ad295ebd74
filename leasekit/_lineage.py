"""The task in whose run the current code is: it is the `parent` of the tasks that this code schedules.

An exception out of a signal handler can end a block before it is left, so each look asks whether the run is over.
"""

import weakref
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import NamedTuple, Optional, Protocol

from leasekit.task import Task
from leasekit.task.words import NAME_PREFIXES

__all__ = ["Place", "current", "enter", "leave", "outside"]


class Run(Protocol):
    @property
    def is_over(self) -> bool: ...


class _Entered(NamedTuple):
    """A run that code has entered in a context, within that of `outer`."""

    task_id: str | None
    run: weakref.ref[Run]
    outer: Optional["_Entered"]


Place = Token[_Entered | None]

_running: ContextVar[_Entered | None] = ContextVar("leasekit-task", default=None)


def current() -> str | None:
    """Return the id of the task in whose run the caller is; None: it is in none."""
    return None if (entered := _innermost()) is None else entered.task_id


def _innermost() -> _Entered | None:
    entered = _running.get()
    while entered is not None and ((run := entered.run()) is None or run.is_over):
        entered = entered.outer
    return entered


def enter(task: Task, run: Run) -> Place:
    """Make this task the current one in this context, in which its code starts; the task of a name is not."""
    task_id = None if task.kind.startswith(NAME_PREFIXES) else task.id
    return _running.set(_Entered(task_id, weakref.ref(run), _innermost()))


def leave(place: Place) -> None:
    """Undo `enter`. A block that is left in another context has nothing to undo there."""
    try:
        _running.reset(place)
    except (ValueError, RuntimeError):
        return


@contextmanager
def outside() -> Generator[None]:
    """Let what is scheduled in this block come from no task, in whichever run the caller is."""
    place = _running.set(None)
    try:
        yield
    finally:
        leave(place)
