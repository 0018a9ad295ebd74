"""The rows of a store in memory, and indexes of them."""

import bisect
import math
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from leasekit._lifecycle.states import LEASED
from leasekit.server.store import (
    Anchor,
    AuditRow,
    Checkpoint,
    ClaimMemory,
    Deadline,
    Dedupe,
    DrainRow,
    Entity,
    GateRow,
    KindRow,
    MinuteRow,
    PeriodicRow,
    Run,
    SessionRow,
    TokenRow,
    Trigger,
)

Due = tuple[float, int]  # a next trigger time, and the `seq` of its task
_K = TypeVar("_K")
_V = TypeVar("_V")
NEVER = math.inf


class Tables:
    """The rows of a store, and indexes of tasks by next trigger time."""

    def __init__(self) -> None:
        self.last_seq = 0
        self.seqs: dict[str, int] = {}
        self.entities: dict[int, Entity] = {}
        self.triggers: dict[int, Trigger] = {}
        # Sorted by next trigger time, so that claims and the reaper find their tasks without a scan of all tasks.
        self.leases: list[Due] = []
        self.ended: list[Due] = []  # by the end of the task
        self.lanes: dict[str, dict[int, list[Due]]] = {}  # kind → priority → waiting tasks without keys
        self.keys: dict[int, str] = {}
        self.kept: dict[int, None] = {}  # tasks that keep the places of their keys, and wait in the lanes
        self.routes: dict[int, str] = {}
        self.queues: dict[tuple[int, str], dict[str, list[Due]]] = {}  # lane → key → waiting tasks
        self.shares: dict[tuple[int, str], dict[str, tuple[float, bool]]] = {}  # taken, and whether it has joined
        self.full: dict[tuple[int, str], dict[str, float]] = {}  # the keys that have left a lane, and until when
        self.progress: dict[int, Checkpoint] = {}
        self.runs: dict[int, dict[int, Run]] = {}
        self.dedupes: dict[tuple[str, str], Dedupe] = {}
        self.claims: dict[tuple[str, str], ClaimMemory] = {}
        self.anchors: dict[None, Anchor] = {}  # at most one
        self.kinds: dict[str, KindRow] = {}
        self.gates: dict[tuple[str, str], GateRow] = {}
        self.drains: dict[str, DrainRow] = {}
        self.parked: dict[int, tuple[float, str]] = {}  # when a task was due, and its collection
        self.buckets: dict[tuple[str, str], float] = {}
        self.periodics: dict[str, PeriodicRow] = {}
        self.minutes: dict[tuple[int, str, str], MinuteRow] = {}
        self.tokens: dict[str, TokenRow] = {}
        self.sessions: dict[bytes, SessionRow] = {}
        self.audit: dict[str, AuditRow] = {}
        self.waits: dict[str, dict[str, None]] = {}  # the tasks that wait for each awaited one
        self.waits_of: dict[str, dict[str, None]] = {}  # the tasks for which each waiting one waits
        self.wakes: dict[str, str] = {}
        self.chains: dict[int, tuple[str, str]] = {}  # the parent and the root of a task
        self.cancelled_chains: dict[str, float] = {}
        self.deadlines: dict[int, Deadline] = {}
        self.tags: dict[int, list[str]] = {}
        self.tagged: dict[str, dict[int, None]] = {}  # the tasks with each tag, the oldest first
        self.changes: dict[None, int] = {None: 0}  # the number of the last change of a kind, gate or drain

    def remove(self, row: Trigger) -> None:
        """Delete a task with all its rows, if `row` is still its state."""
        seq = row.seq
        if self.triggers.get(seq) is not row:
            return
        self._unindex(self.triggers.pop(seq))
        entity = self.entities.pop(seq)
        del self.seqs[row.id]
        self.keys.pop(seq, None)
        self.kept.pop(seq, None)
        self.routes.pop(seq, None)
        self.progress.pop(seq, None)
        self.runs.pop(seq, None)
        self.chains.pop(seq, None)
        for tag in self.tags.pop(seq, ()):
            del self.tagged[tag][seq]
            if not self.tagged[tag]:
                del self.tagged[tag]
        self.cancelled_chains.pop(row.id, None)
        key = (entity.kind, entity.dedupe_key or "")
        if (first := self.dedupes.get(key)) is not None and first.id == row.id:
            del self.dedupes[key]

    def place(self, row: Trigger) -> Callable[[], object]:
        """Write the state of a task, and return a function that undoes the change."""
        before = self.triggers.get(row.seq)
        if before is not None:
            self._unindex(before)
        self.triggers[row.seq] = row
        if (at := _place_of(row)) is not None:
            bisect.insort(self._index_of(row), (at, row.seq))
        return (lambda: self._unindex(self.triggers.pop(row.seq))) if before is None else (lambda: self.place(before))

    def keep(self, seq: int, *, kept: bool) -> Callable[[], object]:
        """Note whether a task keeps the place of its key, and return a function that undoes the change."""
        row = self.triggers[seq]
        self._unindex(row)
        if kept:
            self.kept[seq] = None
        else:
            self.kept.pop(seq, None)
        if (at := _place_of(row)) is not None:
            bisect.insort(self._index_of(row), (at, seq))
        return lambda: self.keep(seq, kept=not kept)

    def _unindex(self, row: Trigger) -> None:
        if (at := _place_of(row)) is not None:
            listed = self._index_of(row)
            del listed[bisect.bisect_left(listed, (at, row.seq))]
            if not listed and self._has_queue(row.seq) and (queues := self.queues.get(self._lane_of(row))):
                if queues.get(self.keys[row.seq]) is listed:
                    del queues[self.keys[row.seq]]
                    self.full.get(self._lane_of(row), {}).pop(self.keys[row.seq], None)  # its next task is looked at
            elif not listed and (lanes := self.lanes.get(row.kind)) and lanes.get(row.priority) is listed:
                del self.lanes[row.kind][row.priority]
                if not lanes:
                    del self.lanes[row.kind]

    def _index_of(self, row: Trigger) -> list[Due]:
        if row.status.ended:
            return self.ended
        if row.status in LEASED:
            return self.leases
        if self._has_queue(row.seq):
            return self.queues.setdefault(self._lane_of(row), {}).setdefault(self.keys[row.seq], [])
        return self.lanes.setdefault(row.kind, {}).setdefault(row.priority, [])

    def _has_queue(self, seq: int) -> bool:
        return seq in self.keys and seq not in self.kept

    def _lane_of(self, row: Trigger) -> tuple[int, str]:
        return row.priority, self.routes.get(row.seq, row.kind)


def _place_of(row: Trigger) -> float | None:
    return row.ended_at if row.status.ended else row.next_trigger_at


def chosen(table: Mapping[_K, _V], keys: Collection[_K]) -> dict[_K, _V]:
    """Return the rows with these keys; unknown keys are left out."""
    return {key: table[key] for key in keys if key in table}
