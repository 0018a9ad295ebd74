"""Link a task to the client that keeps its lease, outside the fields of the task."""

from collections.abc import Callable
from typing import TypeAlias

from leasekit._driver.connection import Connection
from leasekit._driver.keeping.held_lease import HeldLease, Owner
from leasekit.task import Task

Reserve: TypeAlias = Callable[[Task, Owner | None], tuple[Connection, HeldLease] | None]
"""Reserve the lease of a task for an owner; for None, give the task back. None: this process does not hold it."""


def bind(task: Task, reserve: Reserve, *, held: HeldLease | None = None) -> Task:
    """Link the task to the client whose `reserve` is given, and to its lease, if that is held; return the task."""
    vars(task).update(reserve=reserve, held=held)  # the instance's __dict__ is neither compared nor serialised
    return task


def reserve_of(task: Task) -> Reserve | None:
    """Return the `reserve` that `bind` stored; None if no client of this process has claimed or adopted the task."""
    return vars(task).get("reserve")


def refuse_lost(task: Task) -> None:
    """Raise `LeaseLost` if the lease that `bind` stored was lost: its keeper has dropped it. `NotHeld` in a fork."""
    held: HeldLease | None = vars(task).get("held")
    if held is not None and held.reason is not None:
        held.check()


def give_back(task: Task) -> None:
    """Release the task, if this process holds it and no block of it has begun."""
    if (reserve := reserve_of(task)) is not None:
        reserve(task, None)
