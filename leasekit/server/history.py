"""History: what happened to the tasks of each kind in each minute of the last day.

Rule 1: a node counts in memory (`Tally`), and writes what a minute has added once that is over: rows of its own, which
        are never updated. So no transaction of a task knows of it, and nodes do not wait for each other.
Rule 2: what a node has counted since its last row is in its memory alone: after its death, that is lost.
Rule 3: names (`named`, `once`) are of no kind, and not in it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct

from leasekit.named import PREFIXES
from leasekit.server.store import MinuteRow, View
from leasekit.server.tally import SECONDS, KindTally, Tally
from leasekit.server.unit_of_work import UnitOfWork

KEPT = 24 * 60
"""Minutes that are kept."""
_FORGOTTEN = 2000  # rows that one transaction forgets, at most
_WAITING = 20_000  # rows that wait until the store takes them, at most: the oldest are dropped

_encode = msgspec.json.Encoder().encode


class Counts(Struct, frozen=True, array_like=True, gc=False):
    """The events of a kind. Durations are counted by `SECONDS`, each up to a bound, the rest last."""

    scheduled: int = 0
    succeeded: int = 0
    failed: int = 0
    """Runs that have failed, for good or to be retried."""
    lost: int = 0
    """Leases that expired, and runs that crashed."""
    died: int = 0
    starts: list[int] = []
    """From due to the begin of the handler."""
    runs: list[int] = []
    """From the claim to the end of a run."""

    def __add__(self, other: object) -> "Counts":
        if not isinstance(other, Counts):
            return NotImplemented
        return Counts(
            self.scheduled + other.scheduled,
            self.succeeded + other.succeeded,
            self.failed + other.failed,
            self.lost + other.lost,
            self.died + other.died,
            _added(self.starts, other.starts),
            _added(self.runs, other.runs),
        )

    def since(self, before: "Counts") -> "Counts":
        """Return what was added to `before`."""
        return Counts(
            self.scheduled - before.scheduled,
            self.succeeded - before.succeeded,
            self.failed - before.failed,
            self.lost - before.lost,
            self.died - before.died,
            _added(self.starts, [-count for count in before.starts]),
            _added(self.runs, [-count for count in before.runs]),
        )

    @property
    def ended(self) -> int:
        """Runs that have ended with an outcome, or were lost."""
        return self.succeeded + self.failed + self.lost


_Counted = Mapping[str, tuple[KindTally, Counts]]
_decode = msgspec.json.Decoder(Counts).decode


def quantile(counts: Sequence[int], share: float) -> float | None:
    """Return the duration below which this share of the durations is, about; None: there are none."""
    total = sum(counts)
    if not total:
        return None
    left, lower = share * total, 0.0
    for count, upper in zip(counts, (*SECONDS, 2 * SECONDS[-1]), strict=False):
        if left <= count:
            return lower + (upper - lower) * left / count
        left, lower = left - count, upper
    return lower


class Recorder:
    """The minutes of one node, from what its writer has counted."""

    def __init__(self, tally: Tally, node: str) -> None:
        self._tally, self._node = tally, node
        self._minute: int | None = None  # that is under way
        self._before: _Counted | None = None  # what was counted when it began; None: it is the first
        self._waiting: list[MinuteRow] = []

    def due(self, now: float) -> Sequence[MinuteRow]:
        """Return the rows that are to be written; `written` must follow."""
        minute = int(now // 60)
        if self._minute is None:
            self._minute = minute
        if minute > self._minute:
            self._close()
            self._minute = minute
        return self._waiting

    def rest(self) -> Sequence[MinuteRow]:
        """Return all rows, that of the minute under way too: the node stops.

        A node that has seen no minute end has none: a process that uses a store for a moment adds no transaction to it.
        """
        if self._before is not None:
            self._close()
        return self._waiting

    def written(self, rows: Sequence[MinuteRow]) -> None:
        """Forget rows that are in the store by now."""
        self._waiting = self._waiting[len(rows) :]

    def current(self) -> Mapping[str, Counts]:
        """Return what has happened in the minute under way."""
        return dict(self._changes(self._counted()))

    def _close(self) -> None:
        assert self._minute is not None  # noqa: S101 - a minute is under way
        counted = self._counted()
        rows = [MinuteRow(self._minute, kind, self._node, _encode(counts)) for kind, counts in self._changes(counted)]
        self._waiting = [*self._waiting, *rows][-_WAITING:]
        self._before = counted

    def _counted(self) -> _Counted:
        kinds = list(self._tally.kinds.items())
        return {kind: (tally, _counted(tally)) for kind, tally in kinds if not kind.startswith(PREFIXES)}

    def _changes(self, counted: _Counted) -> Iterable[tuple[str, Counts]]:
        """Return what was added since the minute began; a kind that got its label again has begun anew."""
        before = self._before or {}
        for kind, (tally, counts) in counted.items():
            is_known = kind in before and before[kind][0] is tally
            more = counts.since(before[kind][1]) if is_known else counts
            if more.scheduled or more.ended or more.died or any(more.starts):
                yield kind, more


def _counted(tally: KindTally) -> Counts:
    events = Counter[str]()
    for (event, detail), count in list(tally.events.items()):
        events[event if event != "settled" else detail] += count
    return Counts(
        events["scheduled"],
        events["success"],
        events["retry"] + events["fatal"],
        events["expired"] + events["crash"],
        events["dead"],
        tally.starts.counts(),
        tally.runs.counts(),
    )


def _added(one: Sequence[int], other: Sequence[int]) -> list[int]:
    if not one or not other:
        return list(one or other)
    return [a + b for a, b in zip(one, other, strict=True)]


def write(turn: UnitOfWork, batches: Sequence[Sequence[MinuteRow]]) -> Sequence[None]:
    """Write minutes that are over, and forget some of those that are older than a day."""
    for rows in batches:
        turn.tx.add_minutes(rows)
    turn.tx.forget_minutes(before=int(turn.now // 60) - KEPT, limit=_FORGOTTEN)
    return [None] * len(batches)


def read(view: View, *, since: int, kind: str | None) -> dict[str, dict[int, Counts]]:
    """Return what happened in each minute from `since` on, by kind; minutes in which nothing did are left out."""
    found: dict[str, dict[int, Counts]] = {}
    for row in view.minutes(since=since, kind=kind):
        try:
            counts = _decode(row.counts)
        except (msgspec.MsgspecError, TypeError):  # damaged: a plot has a gap
            continue
        of_kind = found.setdefault(row.kind, {})
        of_kind[row.at] = of_kind[row.at] + counts if row.at in of_kind else counts
    return found
