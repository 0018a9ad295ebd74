"""Selection: the tasks that an operator's call is for, found in steps of bounded work.

A store filters by what its tables have as columns (`Filter`); the rest of a `TaskSelection` is judged here, on the rows
that are left.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import fields

from leasekit._lifecycle.states import RESCHEDULED
from leasekit.errors import Refused
from leasekit.server.access import KindPatterns
from leasekit.server.store import Filter, Run, Trigger, View
from leasekit.server.store.damage import is_number
from leasekit.task import TaskInfo, TaskSelection
from leasekit.wire import decode_value

LOOK = 20_000
"""Tasks that are looked at in one step: a few milliseconds."""
AFTER_ALL = 10**18
"""More than any `seq`, as no cursor is."""

_TAGGED = 2_000  # tasks with a tag, of a worker or of a chain, that are looked at in one step
_STEPS = 50  # steps after which a search ends its page, however few tasks it has found
_STEP = 10  # tasks whose errors are loaded at once
_SCAN = 250  # tasks that one step reads at most; so many where some may not match: a small page costs no more steps
_FIELDS = frozenset(field.name for field in fields(TaskSelection))


def split(given: Mapping[str, Any]) -> tuple[Filter, TaskSelection]:
    """Return what a store can filter by, and the whole selection."""
    chosen = {name: value for name, value in given.items() if name in _FIELDS}
    return Filter(**{name: given[name] for name in Filter._fields if name in given}), TaskSelection(**chosen)


def seq_of_cursor(cursor: str | None) -> int:
    """Return the `seq` after which a page begins. Raises `Refused` for a made-up cursor."""
    if cursor is None:
        return 0
    if cursor.isascii() and cursor.isdigit() and len(cursor) <= 18:
        return int(cursor)
    detail = "must be the cursor of an earlier page"
    raise Refused(f"cursor {detail}", errors=[{"field": "cursor", "detail": detail}])


class Stretch(NamedTuple):
    """The tasks that one step looks at."""

    until: int
    """The `seq` of the last of them."""
    among: Sequence[int] | None = None
    """The tasks of the stretch that can match, by `seq`; None: all."""

    @classmethod
    def next(cls, view: View, wanted: Filter, *, after: int, last: int = AFTER_ALL) -> "Stretch | None":
        """Return the stretch behind `after`, up to `last`; None: no task is left. Indexes are used where there are."""
        if wanted.tags:
            tagged = view.tagged(wanted.tags, after=after, newest=wanted.newest, limit=_TAGGED)
            if tagged.last is None or (after >= last and not wanted.newest):
                return None
            return cls(min(tagged.last, last), [seq for seq in tagged.seqs if seq <= last])
        if wanted.worker is not None:
            held = [seq for seq in view.held_by(wanted.worker) if seq <= last]
            left = (
                [seq for seq in reversed(held) if seq < after] if wanted.newest else held[bisect_right(held, after) :]
            )
            return cls(left[-1], left) if (left := left[:_TAGGED]) else None
        if wanted.root is not None:
            chained = view.chained(wanted.root, after=after, newest=wanted.newest, limit=_TAGGED)
            return cls(chained[-1], chained) if (chained := [seq for seq in chained if seq <= last]) else None
        first = view.next_seq(after=after, newest=wanted.newest)
        if first is None or first > last:
            return None
        return cls(max(0, first - LOOK + 1) if wanted.newest else min(first + LOOK - 1, last))


def of_kinds(kinds: KindPatterns | None) -> Callable[[Trigger], bool]:
    """Return whether a task is of one of these kinds (None: of any), as a function."""
    if kinds is None or kinds.has_all:
        return any_kind
    return lambda row: kinds.match(row.kind)


def any_kind(row: Trigger) -> bool:
    """Return True."""
    return True


def number_to_read(room: int, wanted: TaskSelection, accept: Callable[[Trigger], bool]) -> int:
    """Return how many tasks a step reads for a page that has room for so many, and one more to know of the next page.

    A step of thousands holds the interpreter lock for too long: other reads take turns with steps.
    """
    return min(room + 1, _SCAN) if accept is any_kind and not wanted.needs_a_look else _SCAN


def matching(view: View, rows: Sequence[Trigger], wanted: TaskSelection) -> list[Trigger]:
    """Return those of these tasks, which a store has filtered, that match the rest of the selection too."""
    if not wanted.needs_a_look:
        return list(rows)
    keys = view.keys([row.seq for row in rows]) if wanted.key is not None else {}
    has_time = wanted.since is not None or wanted.until is not None
    begun = view.creation_times([row.seq for row in rows if row.ended_at is None]) if has_time else {}
    has_error = wanted.error is not None or wanted.error_type is not None
    found: list[Trigger] = []
    for start in range(0, len(rows), _STEP):
        step = rows[start : start + _STEP]
        # The others have had none.
        runs = view.last_runs([row.seq for row in step if row.fence], limit=2) if has_error else {}
        for row in step:
            at = row.ended_at if row.ended_at is not None else begun.get(row.seq)
            if wanted.matches(_looked_at(row, last_run(runs.get(row.seq, ())), key=keys.get(row.seq), at=at)):
                found.append(row)
    return found


def _looked_at(row: Trigger, run: Run | None, *, key: str | None, at: float | None) -> TaskInfo:
    """Return what a selection looks at in a task."""
    return TaskInfo(
        id=row.id,
        kind=row.kind,
        status=row.status,
        priority=row.priority,
        attempt=row.attempt,
        crashes=row.crashes,
        fence=row.fence,
        at=datetime.fromtimestamp(at if at is not None and is_number(at) else 0.0, UTC),
        key=key,
        reason=row.reason,
        error=None if run is None else _decoded(run.error),
    )


def last_run(runs: Sequence[Run]) -> Run | None:
    """Return the last of these runs, or the last redrive; a reschedule is neither, and does not follow another."""
    return next((run for run in reversed(runs) if run.outcome != RESCHEDULED), None)


def _decoded(error: bytes | None) -> Any:
    """Return a stored error; None if there is none, or it is damaged: that matches nothing."""
    try:
        return None if error is None else decode_value(error)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


class Found(NamedTuple):
    """A page of tasks that match, and its cursor (None: this is the last page)."""

    rows: list[Trigger]
    cursor: str | None


class Named:
    """Tasks that a call names: a page of its own."""

    def __init__(self, ids: Sequence[str], accept: Callable[[Trigger], bool]) -> None:
        self._ids, self._accept = ids, accept

    def look(self, view: View) -> Found:
        """Return those of the tasks that exist and are accepted."""
        return Found([row for row in view.triggers(set(self._ids)).values() if self._accept(row)], None)

    whole = look


class Search:
    """A page of tasks that match, the oldest first, found in steps: other reads go in between.

    A page may have fewer tasks than its limit, or none, and yet a cursor: where very few tasks match.
    """

    def __init__(
        self,
        wanted: Filter,
        selection: TaskSelection,
        *,
        cursor: str | None,
        limit: int,
        last: int = AFTER_ALL,
        accept: Callable[[Trigger], bool] = any_kind,
    ) -> None:
        """Begin a page of up to `limit` tasks that `accept` lets pass. Raises `Refused` for a made-up `cursor`.

        `last` is the last `seq` that is looked at.
        """
        self._wanted, self._selection, self._limit = wanted, selection, limit
        self._last, self._accept = last, accept
        self._after = seq_of_cursor(cursor)
        self._rows: list[Trigger] = []
        self._steps = 0

    def look(self, view: View) -> Found | None:
        """Look at the next `LOOK` tasks; return the page once it is complete, else None."""
        stretch = Stretch.next(view, self._wanted, after=self._after, last=self._last)
        if stretch is None:
            return Found(self._rows, None)
        room = self._limit - len(self._rows)
        most = number_to_read(room, self._selection, self._accept)
        rows = view.page(self._wanted, after=self._after, limit=most, **stretch._asdict())
        found = matching(view, [row for row in rows if self._accept(row)], self._selection)
        self._rows += found[:room]
        if len(found) > room:
            return Found(self._rows, str(found[room - 1].seq if room else self._after))
        self._after = rows[-1].seq if len(rows) == most else stretch.until
        self._steps += 1
        return Found(self._rows, str(self._after)) if self._steps == _STEPS else None

    def whole(self, view: View) -> Found:
        """Return the page at once."""
        while (found := self.look(view)) is None:
            pass
        return found
