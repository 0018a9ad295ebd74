"""The unit of work: the transaction, the time and the random generator that roles work with.

Roles (`frontend`, `claims`, `hsc`, `consumer`) are functions of a unit of work (`turn`) and a batch. They run in the
writer's thread, and note in the unit of work which tasks have become ready and what has happened.
"""

import random as _random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from leasekit.periodic import Firing
from leasekit.server.store import DrainRow, GateRow, Lane, Trigger, Tx
from leasekit.server.store.gates import KIND, Gates
from leasekit.server.store.kind_defaults import KindDefaults
from leasekit.server.store.kind_rules import KindRules
from leasekit.server.store.routes import fitting, kind_of, ready_after
from leasekit.task import Status

_ENDS = frozenset({"settled", "expired"})  # events that end a run
_COUNTED = _ENDS | {"scheduled", "enqueued", "redriven", "rescheduled", "replaced"}
_encode = msgspec.json.encode


class NewlyDue(NamedTuple):
    """The number of tasks of a kind that have become due, and when the next one becomes due (`next_at`).

    A kind that `is_full` is at a limit: its due tasks can start from `next_at` on, or once places are `freed`.
    """

    number: int
    next_at: float | None
    freed: int = 0
    is_full: bool = False

    def __add__(self, other: object) -> "NewlyDue":
        if not isinstance(other, NewlyDue):
            return NotImplemented
        times = [at for at in (self.next_at, other.next_at) if at is not None]
        freed, is_full = self.freed + other.freed, self.is_full or other.is_full
        return NewlyDue(self.number + other.number, min(times, default=None), freed, is_full)


class TaskEvent(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Something that happened to a task, a worker, the settings of a kind, a gate, or a periodic task."""

    event: str
    at: datetime
    id: str | None = None
    kind: str | None = None
    status: Status | None = None  # the status after the event
    worker: str | None = None  # of `kind_changed`, `gate_changed`, `periodic_changed`: the client that changed it
    outcome: str | None = None  # the outcome of a run that was settled; of `firing`: what became of it
    collection: str | None = None  # of `gate_changed`, unless the gate is that of a kind
    mode: str | None = None  # of `gate_changed`: pause, drop or open
    root: str | None = None  # of `scheduled`: the first task of the chain, if the task came from another
    periodic: str | None = None  # of `periodic_changed` and `firing`: the name of the periodic task


class UnitOfWork:
    """A transaction, the moment at which all of it happens, and the tasks that it makes ready."""

    __slots__ = (
        "_at", "_due", "_freed", "_full", "_gates", "_later", "_opened", "_taken", "counted", "ended", "ends",
        "granted", "happened", "instant", "is_repeated", "kinds", "now", "over", "random", "started", "tx",
    )  # fmt: skip

    def __init__(
        self,
        tx: Tx,
        *,
        now: float,
        instant: float,
        random: _random.Random,
        is_repeated: bool = False,
        kinds: KindDefaults | None = None,
    ) -> None:
        self.tx = tx
        self.kinds = kinds or KindDefaults()  # what kinds set for their tasks
        self.is_repeated = is_repeated  # the requests may have been applied already: the result of a commit is unknown
        self.now = now  # the store's time, by which tasks are due
        self.instant = instant  # the same moment by the clock without steps, for ends of leases and waits
        self.random = random
        self.counted = Counter[tuple[str, str, str]]()  # what `Tally` counts: kind, event and a detail of it
        self.granted: list[Trigger] = []  # the states of tasks before they were granted
        self.started: list[Trigger] = []  # the states of tasks before their handlers had begun
        self.ended: list[Trigger] = []  # the states of tasks after their runs have ended
        self.over: list[Trigger] = []  # the states of tasks that have ended for good, and that others may wait for
        self.ends: list[str] = []  # the ids of tasks that have ended for good, also after `over` was worked off
        self.happened: list[TaskEvent] | None = None  # None: events are not recorded
        self._at: datetime | None = None
        self._due: dict[str, int] = {}
        self._later: dict[str, float] = {}
        self._opened: set[str] = set()
        self._taken: set[str] = set()
        self._full: set[str] = set()
        self._freed: dict[str, int] = {}
        self._gates: Gates | None = None  # None: not read yet

    @property
    def gates(self) -> Gates:
        """The gates before this transaction."""
        return self._read() if self._gates is None else self._gates

    @property
    def drains(self) -> Mapping[str, DrainRow]:
        """The workers that take no new tasks, before this transaction."""
        if self._gates is None:
            self._read()
        return self.kinds.drains

    @property
    def rules(self) -> Mapping[str, KindRules]:
        """The rules of the kinds that have any, before this transaction."""
        if self._gates is None:
            self._read()
        return self.kinds.rules

    def _read(self) -> Gates:
        self.kinds.read(self.tx)
        self._gates = self.kinds.gates
        return self._gates

    def lanes(self, kinds: Collection[str], workers: Collection[frozenset[str]] = ()) -> list[Lane]:
        """Return the lanes of those of these kinds that are not closed, the most urgent first.

        `workers`: the labels of workers, for the lanes of tasks that require some: those that any of these may have.
        """
        open_kinds = set(kinds) - self.gates.holding(KIND, self.now).keys()
        routes = fitting(self.tx.routes(open_kinds), workers) if workers else ()
        return self.tx.lanes(open_kinds.union(routes) if routes else open_kinds)

    def opened(self, kind: str) -> None:
        """Note that this transaction has opened the gate of a kind."""
        self._opened.add(kind)
        self._freed[kind] = 1
        self.ready(kind, self.now)

    def ready(self, kind: str, due_at: float, *, count: int = 1) -> None:
        """Note that up to `count` tasks of this kind, or route, can be claimed from `due_at` on."""
        if due_at <= self.now:
            self._due[kind] = self._due.get(kind, 0) + count
        else:
            self._later[kind] = min(self._later.get(kind, due_at), due_at)

    def taken(self, kind: str) -> None:
        """Note that all tasks of this kind, or route, that had become ready were granted in this same transaction."""
        self._due.pop(kind, None)
        self._taken.add(kind)

    def full(self, kind: str, again_at: float) -> None:
        """Note that a kind is at a limit, until `again_at` at the latest: none of its due tasks can be claimed."""
        self._due.pop(kind, None)
        self._full.add(kind_of(kind))
        self._later[kind] = min(self._later.get(kind, again_at), again_at)

    def freed(self, kind: str) -> None:
        """Note that this transaction has changed the limits of a kind."""
        self._full.discard(kind)
        self._freed[kind] = 1
        self.ready(kind, self.now)

    def tell(self, event: str, row: Trigger, *, worker: str | None = None, outcome: str | None = None) -> None:
        """Record an event of a task whose state is now `row`. Give `worker` where it no longer owns the task."""
        if row.ended_at is not None:
            self.over.append(row)
            self.ends.append(row.id)
        if event in _COUNTED:
            self.counted[row.kind, event, outcome or ""] += 1
            if event in _ENDS:
                self.ended.append(row)
                if row.status is Status.DEAD:
                    self.counted[row.kind, "dead", ""] += 1
        if self.happened is None:
            return
        if self._at is None:
            self._at = datetime.fromtimestamp(self.now, UTC)
        self.happened.append(
            TaskEvent(
                event=event,
                at=self._at,
                id=row.id,
                kind=row.kind,
                status=row.status,
                worker=worker or row.owner,
                outcome=outcome,
            )
        )

    def tell_of_chains(self, roots: Mapping[str, str]) -> None:
        """Add the roots to the events of tasks that this transaction has scheduled."""
        for at, event in enumerate(self.happened or ()):
            root = roots.get(event.id or "") if event.event == "scheduled" else None
            if root is not None and self.happened is not None:
                self.happened[at] = replace(event, root=root)

    def tell_of_kind(self, kind: str, by: str | None) -> None:
        """Record that the settings of a kind have changed."""
        if self.happened is not None:
            at = datetime.fromtimestamp(self.now, UTC)
            self.happened.append(TaskEvent(event="kind_changed", at=at, kind=kind, worker=by))

    def tell_of_gate(self, row: GateRow) -> None:
        """Record that a gate was closed, opened, or changed."""
        if self.happened is not None:
            at, of_kind = datetime.fromtimestamp(self.now, UTC), row.scope == KIND
            kind, collection = (row.name, None) if of_kind else (None, row.name)
            event = TaskEvent(event="gate_changed", at=at, kind=kind, collection=collection, mode=row.mode)
            self.happened.append(replace(event, worker=row.changed_by))

    def tell_of_drain(self, worker: str, *, is_draining: bool) -> None:
        """Record that a worker was asked to drain, or no longer is."""
        if self.happened is not None:
            at, event = datetime.fromtimestamp(self.now, UTC), "draining" if is_draining else "undrained"
            self.happened.append(TaskEvent(event=event, at=at, worker=worker))

    def tell_of_periodic(self, name: str, by: str | None) -> None:
        """Record that a periodic task was added, changed or removed."""
        if self.happened is not None:
            at = datetime.fromtimestamp(self.now, UTC)
            self.happened.append(TaskEvent(event="periodic_changed", at=at, periodic=name, worker=by))

    def tell_of_firing(self, name: str, kind: str | None, firing: Firing) -> None:
        """Record what became of a firing of a periodic task. `kind` is None if the periodic task cannot be read."""
        self.counted[kind or "other", "firing", firing.outcome] += firing.count
        if self.happened is not None:
            at = datetime.fromtimestamp(self.now, UTC)
            event = TaskEvent(event="firing", at=at, id=firing.id, kind=kind, outcome=firing.outcome, periodic=name)
            self.happened.append(event)

    def readied(self) -> dict[str, NewlyDue]:
        """Return what has become ready, by kind and route; of a closed kind only when its gate opens by itself."""
        if routes := self.tx.queued_routes():
            self._move_to_routes(routes)
        closed: Mapping[str, GateRow] = {} if not self.kinds.gates.rows else self.kinds.gates.holding(KIND, self.now)
        freed = self._places_freed()
        return {
            name: NewlyDue(0, closed[kind].until)
            if (kind := kind_of(name)) in closed and kind not in self._opened
            else NewlyDue(self._due.get(name, 0), self._later.get(name), freed.get(name, 0), kind in self._full)
            for name in self._due.keys() | self._later.keys() | freed.keys()
        }

    def _move_to_routes(self, routes: Mapping[str, Sequence[float]]) -> None:
        """Count the tasks that were noted as ready by their kinds, and require labels, under their routes."""
        for name, times in routes.items():
            kind, due = kind_of(name), sum(at <= self.now for at in times)
            if kind in self._due:
                self._due[kind] -= min(due, self._due[kind])
            if name in self._taken:
                continue
            for ready_name, kept_for in ready_after(name):
                if ready := sum(at + kept_for <= self.now for at in times):
                    self.ready(ready_name, self.now, count=ready)
                if (
                    later := min((at + kept_for for at in times if at + kept_for > self.now), default=None)
                ) is not None:
                    self.ready(ready_name, later)
        self._due = {name: count for name, count in self._due.items() if count}

    def _places_freed(self) -> Mapping[str, int]:
        """Return how many places have become free, of kinds with a `concurrency` that are not full again."""
        rules = self.kinds.rules
        if not rules:  # most stores: each transaction comes here
            return self._freed
        limited = {kind for kind, of_kind in rules.items() if of_kind.concurrency is not None} - self._full
        return Counter(row.kind for row in self.ended if row.kind in limited) + Counter(self._freed)


def to_bytes(value: Any) -> bytes:
    """Return a user's JSON value as the store keeps it: the bytes that came, or the encoded value."""
    return bytes(value) if type(value) is Raw else _encode(value)
