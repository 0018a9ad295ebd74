"""Retention: remove tasks that ended long ago, or that an operator purges, in small steps.

Rule 1: only ended tasks are removed. A task is chosen in a snapshot and checked again where it is removed: it may live
again meanwhile.
Rule 2: age counts from the end of a task, not from its scheduling.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from leasekit._lifecycle.states import WAITING
from leasekit.errors import Refused
from leasekit.server.store import Ending, Filter, View
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import Purged

PURGE_BATCH = 200
"""Tasks that are removed in one transaction, at most: about 5 ms."""
FORGET_BATCH = 500
"""Answers of claims that are dropped in one transaction, at most."""

_CLAIM_MEMORY = 1_200.0  # seconds; TCP gives up after a quarter of an hour: a request that is later is no copy
_FIRST = "0/0"
_CURSOR = re.compile(r"\d{1,12}(\.\d{1,20})?/\d{1,18}", re.ASCII)


class Removal(NamedTuple):
    """Tasks to remove that ended by `until`."""

    seqs: Sequence[int]
    until: float
    by: str = "purge"  # or *retention*


class Chosen(NamedTuple):
    """The tasks of one step, and where the next step begins (None: this is the last one)."""

    removal: Removal
    cursor: str | None


def choose(view: View, wanted: Filter, *, until: float, cursor: str | None) -> Chosen:
    """Choose the next ended tasks of this kind and status; `cursor` is that of the step before."""
    after = _ending(cursor or _FIRST)
    found = view.ended(wanted, until=until, after=after, limit=PURGE_BATCH)
    last = found[-1] if len(found) == PURGE_BATCH else None
    removal = Removal([end.seq for end in found], until)
    return Chosen(removal, None if last is None else f"{last.at!r}/{last.seq}")


def _ending(cursor: str) -> Ending:
    if _CURSOR.fullmatch(cursor) is None:
        detail = "must be the cursor of an earlier step"
        raise Refused(f"cursor {detail}", errors=[{"field": "cursor", "detail": detail}])
    at, _, seq = cursor.partition("/")
    return Ending(float(at), int(seq))


def remove(turn: UnitOfWork, removals: Sequence[Removal]) -> list[Purged]:
    """Remove the chosen tasks that have still ended; count them by kind and status."""
    return [_removed(turn, removal) for removal in removals]


def _removed(turn: UnitOfWork, removal: Removal) -> Purged:
    rows = turn.tx.triggers_of(removal.seqs).values()
    old = [row for row in rows if row.ended_at is not None and row.status.ended and row.ended_at <= removal.until]
    turn.tx.remove([row.seq for row in old])
    kinds: dict[str, dict[str, int]] = {}
    for row in old:
        counts = kinds.setdefault(row.kind, {})
        counts[row.status.value] = counts.get(row.status.value, 0) + 1
        turn.counted[row.kind, "removed", removal.by] += 1
    return Purged(kinds=kinds)


def remove_names(turn: UnitOfWork, removals: Sequence[Removal]) -> list[None]:
    """Remove the chosen names that are still free. They begin anew when they are asked for, with higher fences."""
    for removal in removals:
        rows = [row for row in turn.tx.triggers_of(removal.seqs).values() if row.status in WAITING]
        unused = [row for row in rows if (row.next_trigger_at or 0) <= removal.until]
        turn.tx.remove([row.seq for row in unused])
        turn.counted.update((row.kind, "removed", removal.by) for row in unused)
    return [None] * len(removals)


def forget_claims(turn: UnitOfWork) -> bool:
    """Drop answers of claims that are too old to be repeated usefully; return whether more of them may be left."""
    # By the clock without steps: it is never ahead of the clock by which the answers were noted.
    return turn.tx.forget_claims(before=turn.instant - _CLAIM_MEMORY, limit=FORGET_BATCH) == FORGET_BATCH
