"""Link a task to the client that keeps its lease, outside the fields of the task."""

from collections.abc import Callable
from typing import TypeAlias

from leasekit._driver.connection import Connection
from leasekit._driver.keeping.held_lease import HeldLease
from leasekit.task import Task

__all__ = ["Reserve", "bind", "reserve_of"]

Reserve: TypeAlias = Callable[[Task, object], tuple[Connection, HeldLease] | None]
"""Reserve the lease of a task while the second argument (a `Lease`) lives; None: this process does not hold it."""


def bind(task: Task, reserve: Reserve) -> Task:
    """Link the task to the client whose `reserve` is given, and return the task."""
    vars(task)["reserve"] = reserve  # the instance's __dict__ is neither compared nor serialised
    return task


def reserve_of(task: Task) -> Reserve | None:
    """Return the `reserve` that `bind` stored; None if no client of this process has claimed or adopted the task."""
    return vars(task).get("reserve")
