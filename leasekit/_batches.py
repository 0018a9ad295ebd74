"""Batches of tasks to schedule: their ids, the parts in which they are sent, and positions in what is refused.

Rule 1: each task has its id before the first request leaves, so that every request can be repeated.
"""

import re
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

from msgspec.structs import replace

from leasekit import _lineage
from leasekit._driver.reporting import encoding
from leasekit.errors import Refused
from leasekit.ids import uuid7s
from leasekit.task import NewTask
from leasekit.wire import MAX_BATCH, MAX_WAITS

__all__ = ["alone", "parts", "placed", "with_ids"]


def with_ids(tasks: Sequence[NewTask]) -> list[NewTask]:
    """Return the tasks with an id each, so that a request whose answer was lost can be repeated.

    Raises `Refused` if a payload or an option would arrive as another value.
    """
    for item, task in enumerate(tasks):
        if (fault := encoding.number_fault(task)) is not None:
            field, detail = fault
            error = {"item": item, "field": field, "detail": detail}
            raise Refused(f"item {item}: {field} {detail}", errors=[error])
    ids = iter(uuid7s(len(tasks), time.time()))
    parent = _lineage.current()
    return [
        task
        if task.id is not None and (task.parent is not None or parent is None)
        else replace(task, id=task.id or next(ids), parent=task.parent or parent)
        for task in tasks
    ]


def parts(tasks: Sequence[NewTask]) -> Iterator[tuple[int, Sequence[NewTask]]]:
    """Yield the tasks in parts for one call each, with the position of the first task; no tasks make one empty part."""
    first = waits = 0
    for at, task in enumerate(tasks):
        more = len(task.after or ())  # None, which the service refuses
        if at > first and (at - first == MAX_BATCH or waits + more > MAX_WAITS):
            yield first, tasks[first:at]
            first, waits = at, 0
        waits += more
    yield first, tasks[first:]


@contextmanager
def placed(first: int) -> Generator[None]:
    """Count the positions in a `Refused` from the begin of the whole batch; `first` is the position of the part."""
    try:
        yield
    except Refused as refused:
        if not first:
            raise
        said = re.sub(r"^item (\d+)", lambda at: f"item {int(at[1]) + first}", str(refused))
        errors = [{**error, "item": error["item"] + first} if "item" in error else error for error in refused.errors]
        raise Refused(f"{said} (the {first:,} tasks before this part are scheduled)", errors=errors) from refused


@contextmanager
def alone() -> Generator[None]:
    """Leave the position in the batch out of a `Refused`, for a task that was scheduled alone."""
    try:
        yield
    except Refused as refused:
        said = re.sub(r"^item 0(: )?", lambda at: "" if at[1] else "the task", str(refused))
        raise Refused(said, errors=refused.errors) from refused
