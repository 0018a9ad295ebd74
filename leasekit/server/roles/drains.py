"""Drains: mark workers that take no new tasks, so that they finish what they hold, and stop.

Rule 1: a claim of a marked worker is granted nothing, at any node, from the commit of the mark on. It is answered at
once, also one that waits, and says `draining`. Claims of names are granted as ever: a task that runs may need a lock.
Rule 2: a mark is for the process that an operator has seen. A worker that started after it, under the same name, is
granted tasks, and the mark is removed.
Rule 3: the mark of a worker that no node has heard of for a while, and that holds nothing, is removed.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from leasekit.errors import Refused
from leasekit.server.roles.audit import Counted
from leasekit.server.store import DrainRow
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task.words import NAME_PREFIXES

_MOST = 10_000  # marks, which are all in the memory of each node


class DrainChange(NamedTuple):
    """A worker that is to drain, or no longer."""

    worker: str
    by: str | None  # who asked; None: it is over by itself
    is_draining: bool = True
    marked_at: float | None = None  # remove only the mark that was set then


class Claimant(Protocol):
    """A claim, as far as a drain is concerned with it."""

    worker: str
    kinds: Sequence[str]
    since: float | None
    """When the process started, by the store's time; None: it has not said."""


def holds(drains: Mapping[str, DrainRow], claim: Claimant) -> bool:
    """Return whether the worker of a claim is draining, and the claim is granted nothing."""
    mark = drains.get(claim.worker)
    if mark is None or (claim.since is not None and claim.since > mark.at):
        return False
    return not all(kind.startswith(NAME_PREFIXES) for kind in claim.kinds)


def change(turn: UnitOfWork, changes: Sequence[DrainChange]) -> list[Counted[bool]]:
    """Mark workers, or remove their marks; return for each whether that has changed anything."""
    marks = {row.worker: row for row in turn.tx.drains()}
    done = [_changed(turn, wanted, marks) for wanted in changes]
    return [Counted(is_changed, int(is_changed)) for is_changed in done]


def _changed(turn: UnitOfWork, wanted: DrainChange, marks: dict[str, DrainRow]) -> bool:
    old = marks.get(wanted.worker)
    if wanted.is_draining:
        if old is None and len(marks) >= _MOST:
            raise Refused(f"{_MOST} workers drain already: take some of these back first")
        # A new mark in place of an old one, which may be that of a process that has ended.
        marks[wanted.worker] = row = DrainRow(wanted.worker, turn.now, wanted.by)
        turn.tx.set_drain(row)
    elif old is None or wanted.marked_at not in (None, old.at):
        return False
    else:
        del marks[wanted.worker]
        turn.tx.remove_drain(wanted.worker)
    turn.tell_of_drain(wanted.worker, is_draining=wanted.is_draining)
    return True
