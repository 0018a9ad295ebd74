"""Which client keeps the lease of a task: noted beside the task, which knows no client."""

from collections.abc import Callable
from typing import TypeAlias

from leasekit._driver.connection import Connection
from leasekit._driver.keeping.held_lease import HeldLease
from leasekit.task import Task

__all__ = ["Reserve", "bind", "reserve_of"]

Reserve: TypeAlias = Callable[[Task, object], tuple[Connection, HeldLease] | None]
"""Reserve what this process holds of a task, for as long as the second argument (a `Lease`) lives."""


def bind(task: Task, reserve: Reserve) -> Task:
    """Note the client that keeps the lease of this task, by its `reserve`, and return the task."""
    vars(task)["reserve"] = reserve  # the instance's __dict__ is neither compared nor serialised
    return task


def reserve_of(task: Task) -> Reserve | None:
    """Return what `bind` noted; None for a task that no client of this process has claimed or adopted."""
    return vars(task).get("reserve")
