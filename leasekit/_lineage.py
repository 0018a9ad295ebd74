"""The task in whose run the current code is: it is the `parent` of the tasks that this code schedules."""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar, Token

from leasekit.task import Task
from leasekit.task.words import NAME_PREFIXES

__all__ = ["Place", "current", "enter", "leave", "outside"]

Place = Token[str | None]

_running: ContextVar[str | None] = ContextVar("leasekit-task", default=None)


def current() -> str | None:
    """Return the id of the task in whose run the caller is; None: it is in none."""
    return _running.get()


def enter(task: Task) -> Place:
    """Make this task the current one in this context, in which its code starts; the task of a name is not."""
    return _running.set(None if task.kind.startswith(NAME_PREFIXES) else task.id)


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
