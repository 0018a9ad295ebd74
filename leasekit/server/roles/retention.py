"""Retention: remove tasks that ended long ago, or that an operator purges, in small steps.

Rule 1: only ended tasks are removed, once those that wait for them know of that. A task is chosen in a snapshot and
checked again where it is removed: it may live again meanwhile.
Rule 2: age counts from the end of a task, not from its scheduling.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import UNSET

from leasekit._lifecycle.states import WAITING
from leasekit.errors import Refused
from leasekit.server.access import KindPatterns
from leasekit.server.roles.selection import Found, Named, Search, of_kinds, split
from leasekit.server.store import Ending, Filter, Trigger, View
from leasekit.server.store.kind_defaults import decoded
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import Purged
from leasekit.wire import PurgeRequest, selected

PURGE_BATCH = 200
"""Tasks that are removed in one transaction, at most: about 5 ms."""
FORGET_BATCH = 500
"""Answers of claims that are dropped in one transaction, at most."""

_LOOK = 20_000
"""Ended tasks that are looked at in one step, at most: a few milliseconds of a reader."""
_ANEW = 86_400.0  # seconds after which all ended tasks are looked at again: a clock, or a row, may have been wrong
CLAIM_MEMORY = 1_200.0  # seconds; TCP gives up after a quarter of an hour: a request that is later is no copy
_FIRST = "0/0"
_BEGIN = Ending(0.0, 0)
_LAST_SEQ = 2**62  # greater than each `seq`
_CURSOR = re.compile(r"\d{1,12}(\.\d{1,20})?/\d{1,18}", re.ASCII)


class Removal(NamedTuple):
    """Tasks to remove that ended by `until`."""

    seqs: Sequence[int]
    until: float
    by: str = "purge"  # or *retention*
    change: int | None = None  # of a kind, the last when they were chosen: after another, they may have to stay


class Chosen(NamedTuple):
    """The tasks of one step, and where the next step begins (None: this is the last one)."""

    removal: Removal
    cursor: str | None
    kinds: dict[str, dict[str, int]]  # how many there are of each kind in each status, where they were counted


class _Group(NamedTuple):
    """Kinds whose ended tasks are kept for the same time."""

    keep: float
    kinds: frozenset[str]
    others: bool  # all kinds but these


class _Window(NamedTuple):
    """The tasks of a group that are looked at together: those that ended by `until`, and were not passed yet."""

    until: float
    is_last: bool


class Step(NamedTuple):
    """A part of the search for old tasks: what to remove, and where the search goes on once that is removed."""

    removal: Removal
    passed: Ending
    is_full: bool  # more may be left of the tasks that were looked at


class OldTasks:
    """The search for tasks whose retention is over: the retention of their kind, or the store's if the kind has none.

    Ended tasks are sorted by their end alone: another index, by kind, would cost each task more than the search does.
    So each kind's tasks are searched among all that have ended, together with those of the kinds that keep theirs for
    as long. What a search has passed is not looked at again, except once a day: tasks that are kept for longer than
    others are in its way, and may be many. When the settings of any kind change, the search begins anew.
    """

    def __init__(self, keep: float) -> None:
        self._keep = keep  # seconds, for kinds without a retention of their own
        self._passed: dict[_Group, Ending] = {}
        self._left: list[_Group] = []  # of this search
        self._window: _Window | None = None  # of the first of these
        self._change = 0  # the last change of a kind that this search knows
        self._removed: Step | None = None  # the last step, unless the settings of kinds have changed since it was made
        self._began_at = -_ANEW

    def begin(self, view: View, *, now: float) -> None:
        """Read the retention of kinds, and begin to search all of them."""
        if now - self._began_at >= _ANEW:
            self._passed, self._began_at = {}, now
        kinds: dict[float, set[str]] = {}
        rows = view.kinds()
        self._change, self._removed = max((row.change for row in rows), default=0), None
        for row in rows:
            if (settings := decoded(row)) is not None and settings.retention is not UNSET:
                kinds.setdefault(settings.retention, set()).add(row.name)
        of_own = frozenset(kind for those in kinds.values() for kind in those)
        groups = [_Group(keep, frozenset(those), others=False) for keep, those in kinds.items()]
        self._left = [_Group(self._keep, of_own, others=True), *groups]
        self._passed = {group: self._passed.get(group, _BEGIN) for group in self._left}
        self._window = None

    def step(self, view: View, *, now: float) -> Step | None:
        """Look for the next tasks, among `_LOOK` at most; None: all are looked at. `done` goes on to others."""
        if view.kinds(after=self._change):
            self.begin(view, now=now)  # and pass nothing: the tasks of the last step may not have been removed
        elif self._removed is not None:
            self._pass(self._removed)
        if not self._left:
            return None
        group = self._left[0]
        after, until = self._passed[group], now - group.keep
        if self._window is None:
            further = view.end_further(until=until, after=after, skip=_LOOK)
            self._window = _Window(until, is_last=True) if further is None else _Window(further, is_last=False)
        last = self._window.until
        found = view.ended_of(group.kinds, others=group.others, until=last, after=after, limit=PURGE_BATCH)
        is_full = len(found) == PURGE_BATCH
        passed = found[-1] if is_full else max(after, Ending(last, _LAST_SEQ))
        return Step(Removal([end.seq for end in found], until, "retention", self._change), passed, is_full)

    def done(self, step: Step) -> None:
        """Note that the tasks of this step are removed."""
        self._removed = step

    def _pass(self, step: Step) -> None:
        self._removed = None
        self._passed[self._left[0]] = step.passed
        if not step.is_full:
            if self._window is None or self._window.is_last:
                self._left.pop(0)
            self._window = None


def choose(view: View, wanted: Filter, *, until: float, cursor: str | None) -> Chosen:
    """Choose the next ended tasks of this kind and status; `cursor` is that of the step before."""
    after = _ending(cursor or _FIRST)
    found = view.ended(wanted, until=until, after=after, limit=PURGE_BATCH)
    last = found[-1] if len(found) == PURGE_BATCH else None
    removal = Removal([end.seq for end in found], until)
    return Chosen(removal, None if last is None else f"{last.at!r}/{last.seq}", {})


def wanted(request: PurgeRequest) -> Filter:
    """Return what the table of ended tasks can select by itself."""
    return Filter(request.kind, request.status)


def search(request: PurgeRequest, kinds: KindPatterns | None = None) -> Search | Named | None:
    """Begin to look for the tasks of a purge, where it says more than a kind and a status; None: see `choose`.

    Only tasks of these `kinds` (None: of all) are found.
    """
    after = None if request.cursor is None else _ending(request.cursor)  # refused also where none is used
    if request.ids:
        return Named(request.ids, of_kinds(kinds))
    is_all = kinds is None or kinds.has_all or (request.kind is not None and kinds.match(request.kind))
    if request.collection is None and request.tags is None and not request.needs_a_look and is_all:
        return None
    cursor = None if after is None else str(after.seq)
    return Search(*split(selected(request)), cursor=cursor, limit=PURGE_BATCH, accept=of_kinds(kinds))


def chosen(found: Found, *, until: float) -> Chosen:
    """Choose the tasks in `found` that have ended by `until`, and count them."""
    rows = [row for row in found.rows if _is_old(row, until)]
    cursor = None if found.cursor is None else f"0/{found.cursor}"  # in the form of the cursors of `choose`
    return Chosen(Removal([row.seq for row in rows], until), cursor, _counted(rows))


def _is_old(row: Trigger, until: float) -> bool:
    return row.ended_at is not None and row.status.ended and row.ended_at <= until


def _counted(rows: Sequence[Trigger]) -> dict[str, dict[str, int]]:
    kinds: dict[str, dict[str, int]] = {}
    for row in rows:
        counts = kinds.setdefault(row.kind, {})
        counts[row.status.value] = counts.get(row.status.value, 0) + 1
    return kinds


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
    if removal.change is not None and turn.tx.kinds(after=removal.change):
        return Purged(kinds={})
    rows = turn.tx.triggers_of(removal.seqs).values()
    old = [row for row in rows if _is_old(row, removal.until)]
    if turn.tx.has_waits():
        untold = turn.tx.wakes_for([row.id for row in old])
        old = [row for row in old if row.id not in untold]
        turn.tx.drop_waits_of([row.id for row in old])
    turn.tx.remove([row.seq for row in old])
    turn.counted.update((row.kind, "removed", removal.by) for row in old)
    return Purged(kinds=_counted(old))


def remove_old(turn: UnitOfWork, *, keep: float) -> None:
    """Remove all tasks whose retention is over; `keep` is that of kinds without one of their own."""
    old = OldTasks(keep)
    old.begin(turn.tx, now=turn.now)
    while (step := old.step(turn.tx, now=turn.now)) is not None:
        _removed(turn, step.removal)
        old.done(step)


def remove_names(turn: UnitOfWork, removals: Sequence[Removal]) -> list[None]:
    """Remove the chosen names that are still free. They begin anew when they are asked for, with higher fences."""
    for removal in removals:
        rows = [row for row in turn.tx.triggers_of(removal.seqs).values() if row.status in WAITING]
        unused = [row for row in rows if (row.next_trigger_at or 0) <= removal.until]
        turn.tx.remove([row.seq for row in unused])
        turn.counted.update((row.kind, "removed", removal.by) for row in unused)
    return [None] * len(removals)


def forget_claims(turn: UnitOfWork, *, older_than: float = CLAIM_MEMORY) -> bool:
    """Drop answers of claims noted more than `older_than` seconds ago; return whether more of them may be left."""
    # By the clock without steps: it is never ahead of the clock by which the answers were noted.
    return turn.tx.forget_claims(before=turn.instant - older_than, limit=FORGET_BATCH) == FORGET_BATCH
