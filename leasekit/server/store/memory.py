"""A store in memory, for `memory://`, tests and simulations; its tasks end with the process."""

import bisect
import math
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice, takewhile
from typing import Any, TypeVar

from msgspec.structs import replace

from leasekit._lifecycle.states import LEASED, WAITING
from leasekit._lifecycle.transitions import renewed
from leasekit.errors import Refused
from leasekit.named import PREFIXES
from leasekit.server.store import (
    NOT_DECLARED,
    Anchor,
    AuditRow,
    Checkpoint,
    ClaimMemory,
    Content,
    Deadline,
    Dedupe,
    Ending,
    Entity,
    Filter,
    GateRow,
    Holding,
    KindDeclaration,
    KindRow,
    Lane,
    Limits,
    MinuteRow,
    PeriodicRow,
    Run,
    Share,
    Store,
    Tagged,
    TokenRow,
    Trigger,
    Tx,
    View,
    shifted,
)
from leasekit.server.store.routes import is_route, kind_of
from leasekit.task import Status

_Due = tuple[float, int]  # a next trigger time, and the `seq` of its task
_K = TypeVar("_K")
_V = TypeVar("_V")
_NO_KEYS: Mapping[int, str] = {}
_NONE_TAKEN = (0.0, False)
_NEVER = math.inf


class MemoryStore(Store):
    """Tasks in the memory of one process; they outlive the engine that opened the store."""

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self._tables = _Tables()
        self._lock = threading.Lock()

    def open(self) -> None:
        """Do nothing: the store is always open."""

    @contextmanager
    def transaction(self) -> Generator[Tx]:
        with self._lock:
            tx = _MemoryTx(self._tables)
            try:
                yield tx
            except BaseException:
                tx.undo()
                raise
            tx.remove_now()

    @contextmanager
    def view(self) -> Generator[View]:
        """Open a snapshot; the writer waits for its end."""
        with self._lock:
            yield _MemoryView(self._tables)

    def close(self) -> None:
        """Keep all tasks, so that the store can be opened again."""


class _Tables:
    """The rows of a store, and indexes of tasks by next trigger time."""

    def __init__(self) -> None:
        self.last_seq = 0
        self.seqs: dict[str, int] = {}
        self.entities: dict[int, Entity] = {}
        self.triggers: dict[int, Trigger] = {}
        # Sorted by next trigger time, so that claims and the reaper find their tasks without a scan of all tasks.
        self.leases: list[_Due] = []
        self.ended: list[_Due] = []  # by the end of the task
        self.lanes: dict[str, dict[int, list[_Due]]] = {}  # kind → priority → waiting tasks without keys
        self.keys: dict[int, str] = {}
        self.routes: dict[int, str] = {}
        self.queues: dict[tuple[int, str], dict[str, list[_Due]]] = {}  # lane → key → waiting tasks
        self.shares: dict[tuple[int, str], dict[str, tuple[float, bool]]] = {}  # taken, and whether it has joined
        self.full: dict[tuple[int, str], dict[str, float]] = {}  # the keys that have left a lane, and until when
        self.progress: dict[int, Checkpoint] = {}
        self.runs: dict[int, dict[int, Run]] = {}
        self.dedupes: dict[tuple[str, str], Dedupe] = {}
        self.claims: dict[tuple[str, str], ClaimMemory] = {}
        self.anchors: dict[None, Anchor] = {}  # at most one
        self.kinds: dict[str, KindRow] = {}
        self.gates: dict[tuple[str, str], GateRow] = {}
        self.parked: dict[int, tuple[float, str]] = {}  # when a task was due, and its collection
        self.buckets: dict[tuple[str, str], float] = {}
        self.periodics: dict[str, PeriodicRow] = {}
        self.minutes: dict[tuple[int, str, str], MinuteRow] = {}
        self.tokens: dict[str, TokenRow] = {}
        self.audit: dict[str, AuditRow] = {}
        self.waits: dict[str, dict[str, None]] = {}  # the tasks that wait for each awaited one
        self.waits_of: dict[str, dict[str, None]] = {}  # the tasks for which each waiting one waits
        self.wakes: dict[str, str] = {}
        self.chains: dict[int, tuple[str, str]] = {}  # the parent and the root of a task
        self.cancelled_chains: dict[str, float] = {}
        self.deadlines: dict[int, Deadline] = {}
        self.tags: dict[int, list[str]] = {}
        self.tagged: dict[str, dict[int, None]] = {}  # the tasks with each tag, the oldest first
        self.changes: dict[None, int] = {None: 0}  # the number of the last change of a kind or gate

    def remove(self, row: Trigger) -> None:
        """Delete a task with all its rows, if `row` is still its state."""
        seq = row.seq
        if self.triggers.get(seq) is not row:
            return
        self._unindex(self.triggers.pop(seq))
        entity = self.entities.pop(seq)
        del self.seqs[row.id]
        self.keys.pop(seq, None)
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

    def _unindex(self, row: Trigger) -> None:
        if (at := _place_of(row)) is not None:
            listed = self._index_of(row)
            del listed[bisect.bisect_left(listed, (at, row.seq))]
            if not listed and row.seq in self.keys and (queues := self.queues.get(self._lane_of(row))):
                if queues.get(self.keys[row.seq]) is listed:
                    del queues[self.keys[row.seq]]
                    self.full.get(self._lane_of(row), {}).pop(self.keys[row.seq], None)  # its next task is looked at
            elif not listed and (lanes := self.lanes.get(row.kind)) and lanes.get(row.priority) is listed:
                del self.lanes[row.kind][row.priority]
                if not lanes:
                    del self.lanes[row.kind]

    def _index_of(self, row: Trigger) -> list[_Due]:
        if row.status.ended:
            return self.ended
        if row.status in LEASED:
            return self.leases
        if row.seq in self.keys:
            return self.queues.setdefault(self._lane_of(row), {}).setdefault(self.keys[row.seq], [])
        return self.lanes.setdefault(row.kind, {}).setdefault(row.priority, [])

    def _lane_of(self, row: Trigger) -> tuple[int, str]:
        return row.priority, self.routes.get(row.seq, row.kind)


def _place_of(row: Trigger) -> float | None:
    return row.ended_at if row.status.ended else row.next_trigger_at


class _MemoryView(View):
    """A snapshot of a store in memory. `View` describes the methods."""

    def __init__(self, tables: _Tables) -> None:
        self._tables = tables

    def triggers(self, ids: Collection[str]) -> dict[str, Trigger]:
        seqs, triggers = self._tables.seqs, self._tables.triggers
        return {task_id: triggers[seqs[task_id]] for task_id in ids if task_id in seqs}

    def entities(self, seqs: Collection[int]) -> dict[int, Entity]:
        return _chosen(self._tables.entities, seqs)

    def progress(self, seqs: Collection[int]) -> dict[int, Checkpoint]:
        return _chosen(self._tables.progress, seqs)

    def last_runs(self, seq: int, *, limit: int) -> list[Run]:
        runs = self._tables.runs.get(seq, {})
        return [runs[fence] for fence in sorted(runs)][-limit:]

    def page(
        self,
        wanted: Filter,
        *,
        after: int,
        limit: int,
        until: int | None = None,
        among: Sequence[int] | None = None,
    ) -> list[Trigger]:
        rows = self._tables.triggers.items()
        if among is not None:
            rows = {seq: self._tables.triggers[seq] for seq in sorted(among)}.items()
        matching = (
            row
            for seq, row in (reversed(rows) if wanted.newest else rows)
            if (seq < after if wanted.newest else seq > after)
            and (until is None or (seq >= until if wanted.newest else seq <= until))
            and wanted.kind in (None, row.kind)
            and wanted.status in (None, row.status)
            and wanted.worker in (None, row.owner)
            and wanted.collection in (None, self._tables.entities[seq].collection)
            and not (wanted.is_live and row.status.ended)
            and (wanted.scheduled_by is None or self._tables.entities[seq].created_at <= wanted.scheduled_by)
            and wanted.root in (None, row.id, self._tables.chains.get(seq, ("", ""))[1])
        )
        return [row for row, _ in zip(matching, range(limit), strict=False)]

    def tagged(self, tags: Sequence[str], *, after: int, newest: bool, limit: int) -> Tagged:
        of_tags = [self._tables.tagged.get(tag, {}) for tag in tags]
        rarest = min(of_tags, key=len)
        seqs = [seq for seq in (reversed(rarest) if newest else rarest) if (seq < after if newest else seq > after)]
        step = seqs[:limit]
        found = [seq for seq in step if all(seq in of_tag for of_tag in of_tags)]
        return Tagged(found, step[-1] if step else None)

    def tags(self, seqs: Collection[int]) -> dict[int, list[str]]:
        return _chosen(self._tables.tags, seqs)

    def next_seq(self, *, after: int, newest: bool) -> int | None:
        seqs = reversed(self._tables.triggers) if newest else iter(self._tables.triggers)
        return next((seq for seq in seqs if (seq < after if newest else seq > after)), None)

    def dedupes(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], Dedupe]:
        return _chosen(self._tables.dedupes, keys)

    def counts(self) -> dict[str, dict[str, int]]:
        return _counted(self._tables.triggers.values())

    def holders(self) -> dict[str, Holding]:
        ttls: dict[str, list[float]] = {}
        for row in self._leased():
            if row.owner is not None:
                ttls.setdefault(row.owner, []).append(row.heartbeat_timeout)
        return {owner: Holding(len(of_owner), min(of_owner)) for owner, of_owner in ttls.items()}

    def lanes(self, kinds: Collection[str]) -> list[Lane]:
        lanes = self._tables.lanes
        unkeyed = [
            Lane(priority, kind, waiting[0][0])
            for kind in kinds
            for priority, waiting in lanes.get(kind, {}).items()
            if waiting
        ]
        firsts = {
            lane: [max(waiting[0][0], self._left_until(lane, key)) for key, waiting in queues.items()]
            for lane, queues in self._tables.queues.items()
            if lane[1] in kinds
        }
        lanes_due = {lane: min(ats, default=_NEVER) for lane, ats in firsts.items()}
        keyed = [Lane(*lane, due_at, has_keys=True) for lane, due_at in lanes_due.items() if due_at < _NEVER]
        return sorted(unkeyed + keyed)

    def full_keys(self, kinds: Collection[str], *, now: float, limit: int) -> list[tuple[Lane, str]]:
        queues, of_lanes = self._tables.queues, self._tables.full.items()
        full = [(lane, key) for lane, of in of_lanes if lane[1] in kinds for key, at in of.items() if at > now]
        waiting = ((lane, key, queues.get(lane, {}).get(key)) for lane, key in full[:limit])
        return [(Lane(*lane, first[0][0], has_keys=True), key) for lane, key, first in waiting if first]

    def _left_until(self, lane: tuple[int, str], key: str) -> float:
        """Return until when a key has left its lane; zero: it has not."""
        return self._tables.full.get(lane, {}).get(key, 0.0)

    def keys(self, seqs: Collection[int]) -> dict[int, str]:
        return {seq: key for seq, key in _chosen(self._tables.keys, seqs).items() if key}

    def routes(self, kinds: Collection[str]) -> list[str]:
        names = {name for _, name in self._tables.queues if is_route(name)} if self._tables.routes else ()
        return sorted(name for name in names if kind_of(name) in kinds)

    def routes_of(self, seqs: Collection[int]) -> dict[int, str]:
        return _chosen(self._tables.routes, seqs)

    def count_waiting(self, lane: Lane, *, now: float, most: int) -> tuple[int, int]:
        if lane.has_keys:
            ats = [at for waiting in self._tables.queues.get(lane[:2], {}).values() for at, _ in waiting][:most]
            due = sum(at <= now for at in ats)
            return due, len(ats) - due
        waiting = self._tables.lanes.get(lane.kind, {}).get(lane.priority, [])
        due = bisect.bisect_right(waiting, now, key=lambda item: item[0])
        return min(due, most), min(len(waiting) - due, most)

    def count_keys(self, lane: Lane, *, now: float, most: int) -> int:
        queues = self._tables.queues.get(lane[:2], {}).items()
        return min(most, sum(max(waiting[0][0], self._left_until(lane[:2], key)) <= now for key, waiting in queues))

    def ended(self, wanted: Filter, *, until: float, after: Ending, limit: int) -> list[Ending]:
        first = bisect.bisect_right(self._tables.ended, tuple(after))
        return [Ending(*end) for end in islice(self._ended(wanted, until, first), limit)]

    def end_further(self, *, until: float, after: Ending, skip: int) -> float | None:
        listed = self._tables.ended
        place = bisect.bisect_right(listed, tuple(after)) + skip
        return listed[place][0] if place < len(listed) and listed[place][0] <= until else None

    def ended_of(
        self, kinds: Collection[str], *, others: bool, until: float, after: Ending, limit: int
    ) -> list[Ending]:
        first = bisect.bisect_right(self._tables.ended, tuple(after))
        ended, rows = self._ended(Filter(), until, first), self._tables.triggers
        return [Ending(*end) for end in islice((it for it in ended if (rows[it[1]].kind in kinds) != others), limit)]

    def count_ended(self, wanted: Filter, *, until: float) -> dict[str, dict[str, int]]:
        return _counted(self._tables.triggers[seq] for _, seq in self._ended(wanted, until, 0))

    def _ended(self, wanted: Filter, until: float, first: int) -> Iterator[_Due]:
        listed = self._tables.ended
        for at, seq in (listed[position] for position in range(first, len(listed))):
            row = self._tables.triggers[seq]
            if at > until:
                return
            if wanted.kind in (None, row.kind) and wanted.status in (None, row.status):
                yield at, seq

    def kinds(self, *, after: int = 0) -> list[KindRow]:
        return sorted(row for row in self._tables.kinds.values() if row.change > after)

    def periodic(self, name: str) -> PeriodicRow | None:
        return self._tables.periodics.get(name)

    def minutes(self, *, since: int, kind: str | None = None) -> list[MinuteRow]:
        rows = list(self._tables.minutes.values())
        return [row for row in rows if row.at >= since and kind in (None, row.kind)]

    def periodics(self, *, after: str, limit: int) -> list[PeriodicRow]:
        names = sorted(name for name in self._tables.periodics if name > after)
        return [self._tables.periodics[name] for name in names[:limit]]

    def tokens(self) -> list[TokenRow]:
        return sorted(self._tables.tokens.values(), key=lambda row: (row.created_at, row.id))

    def audit(self, *, before: str, limit: int) -> list[AuditRow]:
        ids = sorted((row for row in self._tables.audit if not before or row < before), reverse=True)
        return [self._tables.audit[entry] for entry in ids[:limit]]

    def gates(self) -> list[GateRow]:
        return sorted(self._tables.gates.values(), key=lambda row: row[:2])

    def parked_tasks(self, seqs: Collection[int]) -> dict[int, float]:
        return {seq: due_at for seq, (due_at, _) in _chosen(self._tables.parked, seqs).items()}

    def running(self, kinds: Collection[str]) -> dict[str, int]:
        return Counter(row.kind for row in self._leased() if row.kind in kinds)

    def running_of_keys(self, kind: str, keys: Collection[str]) -> dict[str, int]:
        leased = (self._tables.keys.get(row.seq) for row in self._leased() if row.kind == kind)
        return Counter(key for key in leased if key is not None and key in keys)

    def waits_of(self, ids: Collection[str]) -> list[tuple[str, str]]:
        of = self._tables.waits_of
        return [(awaited, task_id) for task_id in sorted(ids) for awaited in sorted(of.get(task_id, ()))]

    def chains_of(self, seqs: Collection[int]) -> dict[int, tuple[str, str]]:
        return _chosen(self._tables.chains, seqs)

    def deadlines(self, seqs: Collection[int]) -> dict[int, Deadline]:
        return _chosen(self._tables.deadlines, seqs)

    def roots(self, ids: Collection[str]) -> dict[str, str]:
        chains = self._tables.chains
        return {row.id: chains.get(row.seq, ("", row.id))[1] for row in self.triggers(ids).values()}

    def due_times(self, seqs: Collection[int]) -> dict[int, float]:
        return {seq: entity.at for seq, entity in self.entities(seqs).items()}

    def free_names(self, *, until: float, limit: int) -> list[int]:
        lanes = (lane for kind, of in self._tables.lanes.items() if kind.startswith(PREFIXES) for lane in of.values())
        return list(islice((seq for lane in lanes for at, seq in lane if at <= until), limit))

    def free_space(self) -> int:
        raise Refused("the tasks are in the memory of a process: there is no file that could be made smaller")

    def _leased(self) -> list[Trigger]:
        return [self._tables.triggers[seq] for _, seq in self._tables.leases]


class _MemoryTx(_MemoryView, Tx):
    """A transaction in memory, which can undo its changes. `Tx` describes the methods."""

    def __init__(self, tables: _Tables) -> None:
        super().__init__(tables)
        self._undo: list[Callable[[], Any]] = []
        self._removed: list[Trigger] = []
        self._queued_routes: dict[str, list[float]] = {}

    def undo(self) -> None:
        for undo in reversed(self._undo):
            undo()

    def allocate_seqs(self, count: int) -> int:
        first = self._tables.last_seq + 1
        self._tables.last_seq += count
        return first

    def add(
        self,
        entities: Sequence[Entity],
        triggers: Sequence[Trigger],
        keys: Mapping[int, str] = _NO_KEYS,
        routes: Mapping[int, str] = _NO_KEYS,
    ) -> None:
        for seq, name in routes.items():
            self._put(self._tables.routes, seq, name)
            self._put(self._tables.keys, seq, "")
        for seq, key in keys.items():
            self._put(self._tables.keys, seq, key)
        for entity in entities:
            if entity.id in self._tables.seqs:
                raise ValueError(f"there is a task {entity.id!r} already")
            self._put(self._tables.seqs, entity.id, entity.seq)
            self._put(self._tables.entities, entity.seq, entity)
        self.save(triggers)

    def add_tags(self, tags: Sequence[tuple[str, int]]) -> None:
        for tag, seq in sorted(tags, key=lambda item: item[1]):
            self._put(self._tables.tags, seq, sorted([*self._tables.tags.get(seq, ()), tag]))
            self._put(self._tables.tagged.setdefault(tag, {}), seq, None)

    def triggers_of(self, seqs: Collection[int]) -> dict[int, Trigger]:
        return _chosen(self._tables.triggers, seqs)

    def digests(self, seqs: Collection[int]) -> dict[int, bytes]:
        return {seq: entity.digest for seq, entity in self.entities(seqs).items()}

    def contents(self, seqs: Collection[int]) -> dict[int, Content]:
        progress = self.progress(seqs)
        return {
            seq: Content(
                entity.payload, entity.collection, entity.traceparent, progress[seq].value if seq in progress else None
            )
            for seq, entity in self.entities(seqs).items()
        }

    def content_size(self, seqs: Collection[int]) -> int:
        return sum(len(c.payload) + len(c.progress or b"") for c in self.contents(seqs).values())

    def limits(self, seqs: Collection[int]) -> dict[int, Limits]:
        entities = self.entities(seqs).items()
        return {seq: Limits(e.max_attempts, e.max_crashes, e.retry, e.expiry, e.enqueue_timeout) for seq, e in entities}

    def save(self, triggers: Sequence[Trigger]) -> None:
        for row in triggers:
            self._undo.append(self._tables.place(row))
            name = self._tables.routes.get(row.seq)
            if name is not None and row.next_trigger_at is not None and row.status in WAITING:
                self._queued_routes.setdefault(name, []).append(row.next_trigger_at)

    def queued_routes(self) -> Mapping[str, Sequence[float]]:
        return self._queued_routes

    def set_due_times(self, due_at: Mapping[int, float]) -> None:
        for seq, entity in self.entities(due_at).items():
            self._put(self._tables.entities, seq, replace(entity, at=due_at[seq]))

    def replace_payloads(self, payloads: Mapping[int, tuple[bytes, bytes]]) -> None:
        for seq, entity in self.entities(payloads).items():
            digest, payload = payloads[seq]
            self._put(self._tables.entities, seq, replace(entity, digest=digest, payload=payload))

    def move(self, seqs: Collection[int], *, priority: int) -> None:
        for seq, entity in self.entities(seqs).items():
            self._put(self._tables.entities, seq, replace(entity, priority=priority))

    def renew(self, seqs: Collection[int], status: Status, *, now: float, at: float) -> None:
        rows = self.triggers_of(seqs).values()
        self.save([renewed(row, status, now=now, at=at) for row in rows])

    def end(self, seqs: Collection[int], status: Status, *, now: float) -> None:
        rows = self.triggers_of(seqs).values()
        ended = {"status": status, "cancel_requested": False, "owner": None, "token": None, "reason": None}
        self.save([replace(row, next_trigger_at=None, ended_at=now, **ended) for row in rows])

    def remove(self, seqs: Collection[int]) -> None:
        self._removed += self.triggers_of(seqs).values()

    def remove_now(self) -> None:
        """Delete what was removed: at the end of the transaction, because the order of the tables cannot be undone."""
        for row in self._removed:
            self._tables.remove(row)

    def give_back(self, *, most: int) -> None:
        """Do nothing: there is no file."""

    def ready(self, lane: Lane, *, now: float, after: tuple[float, int], limit: int) -> list[Trigger]:
        waiting = self._tables.lanes.get(lane.kind, {}).get(lane.priority, [])
        first = bisect.bisect_right(waiting, after)
        return self._due(waiting, first, first + limit, now=now)

    def active_shares(self, lane: Lane, *, after: Share, limit: int) -> list[Share]:
        of_lane = self._tables.shares.get(lane[:2], {})
        return sorted(
            share for key, (taken, active) in of_lane.items() if active and (share := Share(taken, key)) > after
        )[:limit]

    def joining_shares(self, lane: Lane, *, now: float, limit: int) -> list[Share]:
        shares, queues = self._tables.shares.get(lane[:2], {}), self._tables.queues.get(lane[:2], {})
        waiting = ((key, max(waiting[0][0], self._left_until(lane[:2], key))) for key, waiting in queues.items())
        due = (key for key, due_at in waiting if due_at <= now and not shares.get(key, _NONE_TAKEN)[1])
        return [self.share(lane, key) for key in islice(due, limit)]

    def share(self, lane: Lane, key: str) -> Share:
        return Share(self._tables.shares.get(lane[:2], {}).get(key, _NONE_TAKEN)[0], key)

    def queued(
        self, lane: Lane, after: Mapping[str, tuple[float, int]], *, now: float, limit: int
    ) -> dict[str, list[Trigger]]:
        queues = self._tables.queues.get(lane[:2], {})
        firsts = {key: bisect.bisect_right(queues.get(key, []), last) for key, last in after.items()}
        return {key: self._due(queues.get(key, []), at, at + limit, now=now) for key, at in firsts.items()}

    def charge(self, lane: Lane, taken: Mapping[str, int], *, base: float, now: float) -> None:
        shares, queues = self._tables.shares.setdefault(lane[:2], {}), self._tables.queues.get(lane[:2], {})
        for key, count in taken.items():
            was, active = shares.get(key, (base, False))
            start = was if active else min(max(was, base), base + 1)
            waiting = queues.get(key)
            self._put(shares, key, (start + count, waiting is not None and waiting[0][0] <= now))
            self._drop(self._tables.full.get(lane[:2], {}), key)

    def leave(self, lane: Lane, until: Mapping[str, float | None], *, most: int) -> None:
        shares, queues = self._tables.shares.setdefault(lane[:2], {}), self._tables.queues.get(lane[:2], {})
        for key in [key for key in until if key in queues]:
            again_at = until[key]
            self._put(self._tables.full.setdefault(lane[:2], {}), key, _NEVER if again_at is None else again_at)
            self._put(shares, key, (shares.get(key, _NONE_TAKEN)[0], False))

    def free_keys(self, seqs: Collection[int]) -> list[Lane]:
        keys = {(row.kind, self._tables.keys.get(row.seq)) for row in self.triggers_of(seqs).values()}
        kinds = {kind for kind, _ in keys}
        full = self.full_keys([*kinds, *self.routes(kinds)], now=0.0, limit=sys.maxsize)
        return self._freed([(lane, key) for lane, key in full if (lane.kind, key) in keys and self._is_full(lane, key)])

    def free_keys_of(self, kinds: Collection[str], *, at_moments: bool = True) -> list[Lane]:
        full = self.full_keys(kinds, now=0.0, limit=sys.maxsize)
        return self._freed([(lane, key) for lane, key in full if at_moments or self._is_full(lane, key)])

    def _is_full(self, lane: Lane, key: str) -> bool:
        """Return whether a key has left its lane until the end of a run."""
        return self._left_until(lane[:2], key) == _NEVER

    def _freed(self, full: Sequence[tuple[Lane, str]]) -> list[Lane]:
        for lane, key in full:
            self._drop(self._tables.full[lane[:2]], key)
        return [lane for lane, _ in full]

    def tend_shares(self, *, limit: int) -> None:
        for lane, shares in self._tables.shares.items():
            queues = self._tables.queues.get(lane, {})
            base = min((taken for taken, active in shares.values() if active), default=math.inf)
            idle = (key for key, (taken, _) in shares.items() if taken <= base and key not in queues)
            for key in list(islice(idle, limit)):
                self._drop(shares, key)

    def expired(self, *, now: float, limit: int) -> list[Trigger]:
        return self._due(self._tables.leases, 0, limit, now=now)

    def _due(self, listed: Sequence[_Due], first: int, last: int, *, now: float) -> list[Trigger]:
        triggers = self._tables.triggers
        return [triggers[seq] for at, seq in listed[first:last] if at <= now]

    def follow_leases(self, *, now: float, limit: int) -> None:
        """Do nothing: a renewal sorts its lease."""

    def restart_leases(self, *, now: float, shift: float | None) -> None:
        for row in self._leased():
            until = now + max(row.claim_timeout, row.heartbeat_timeout) * (1 + (row.seq % 100) / 1000)
            if row.was_extended and shift is not None:
                until = min(until, (row.next_trigger_at or 0.0) + shift)
            run_until = shifted(row.run_until, shift)
            self.save([replace(row, next_trigger_at=until, run_until=run_until, was_extended=True)])

    def anchor(self) -> Anchor | None:
        return self._tables.anchors.get(None)

    def set_anchor(self, anchor: Anchor) -> None:
        self._put(self._tables.anchors, None, anchor)

    def progress_marks(self, seqs: Collection[int]) -> dict[int, tuple[int, int]]:
        return {seq: checkpoint.mark for seq, checkpoint in self.progress(seqs).items()}

    def set_progress(self, values: Mapping[int, Checkpoint]) -> None:
        for seq, checkpoint in values.items():
            self._put(self._tables.progress, seq, checkpoint)

    def add_runs(self, runs: Sequence[Run]) -> None:
        for run in runs:
            of_task = self._tables.runs.setdefault(run.seq, {})
            if run.fence in of_task:
                raise ValueError(f"there is a run {run.fence} of task {run.seq} already")
            self._put(of_task, run.fence, run)

    def forget_runs(self, keys: Sequence[tuple[int, int]]) -> None:
        for seq, fence in keys:
            self._drop(self._tables.runs.get(seq, {}), fence)

    def runs(self, seqs: Collection[int]) -> list[Run]:
        of_tasks = _chosen(self._tables.runs, seqs).values()
        return [replace(run, result=None, error=None) for of_task in of_tasks for run in of_task.values()]

    def set_dedupes(self, dedupes: Sequence[Dedupe]) -> None:
        for first in dedupes:
            self._put(self._tables.dedupes, first[:2], first)

    def claim_memories(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], ClaimMemory]:
        return _chosen(self._tables.claims, keys)

    def remember_claims(self, claims: Sequence[ClaimMemory]) -> None:
        for memory in claims:
            self._put(self._tables.claims, memory[:2], memory)

    def forget_claims(self, *, before: float, limit: int) -> int:
        # In the order in which they were granted: the first one that is not old ends the search.
        old = list(islice(takewhile(lambda item: item[1].granted_at < before, self._tables.claims.items()), limit))
        for key, _ in old:
            self._drop(self._tables.claims, key)
        return len(old)

    def last_kind_change(self) -> int:
        return self._tables.changes[None]

    def set_kind(
        self,
        name: str,
        settings: bytes | None,
        *,
        at: float,
        by: str | None,
        declaration: KindDeclaration = NOT_DECLARED,
    ) -> None:
        self._put(self._tables.kinds, name, KindRow(name, settings, at, by, self._count_change(), *declaration))

    def note_kind(self, name: str, digests: str, *, at: float) -> None:
        row = self._tables.kinds.get(name)
        if row is not None and row.digests == digests:
            self._put(self._tables.kinds, name, row._replace(declared_at=at))

    def _count_change(self) -> int:
        self._put(self._tables.changes, None, self.last_kind_change() + 1)
        return self.last_kind_change()

    def begin_change(self) -> None:
        """Do nothing: there is one writer."""

    def set_gate(self, row: GateRow) -> None:
        self._count_change()
        self._put(self._tables.gates, row[:2], row)

    def remove_gate(self, scope: str, name: str) -> None:
        self._count_change()
        self._drop(self._tables.gates, (scope, name))

    def next_deadline(self) -> float | None:
        return min((deadline.at for deadline in self._tables.deadlines.values()), default=None)

    def passed_deadlines(self, *, now: float, limit: int) -> list[int]:
        passed = sorted((deadline.at, seq) for seq, deadline in self._tables.deadlines.items() if deadline.at <= now)
        return [seq for _, seq in passed[:limit]]

    def set_deadlines(self, deadlines: Mapping[int, Deadline]) -> None:
        for seq, deadline in deadlines.items():
            self._put(self._tables.deadlines, seq, deadline)

    def drop_deadlines(self, seqs: Collection[int]) -> None:
        for seq in seqs:
            self._drop(self._tables.deadlines, seq)

    def next_firing(self) -> float | None:
        return min((row.next_at for row in self._tables.periodics.values() if row.next_at is not None), default=None)

    def due_periodics(self, *, now: float, limit: int) -> list[PeriodicRow]:
        due = [(row.next_at, row.name) for row in self._tables.periodics.values() if row.next_at is not None]
        return [self._tables.periodics[name] for at, name in sorted(due) if at <= now][:limit]

    def set_periodic(self, row: PeriodicRow) -> None:
        self._put(self._tables.periodics, row.name, row)

    def remove_periodic(self, name: str) -> None:
        self._drop(self._tables.periodics, name)

    def add_minutes(self, rows: Sequence[MinuteRow]) -> None:
        for row in rows:
            self._put(self._tables.minutes, row[:3], row)

    def forget_minutes(self, *, before: int, limit: int) -> None:
        oldest = sorted(key for key in self._tables.minutes if key[0] < before)[:limit]
        for key in [key for key in self._tables.minutes if oldest and key[0] <= oldest[-1][0]]:
            self._drop(self._tables.minutes, key)

    def set_tokens(self, rows: Sequence[TokenRow]) -> None:
        for row in rows:
            self._put(self._tables.tokens, row.id, row)

    def use_tokens(self, used_at: Mapping[str, float]) -> None:
        for token_id, at in used_at.items():
            if token_id in self._tables.tokens:
                self._put(self._tables.tokens, token_id, self._tables.tokens[token_id]._replace(used_at=at))

    def remove_tokens(self, ids: Collection[str]) -> None:
        for token_id in ids:
            self._drop(self._tables.tokens, token_id)

    def add_audit(self, rows: Sequence[AuditRow]) -> None:
        for row in rows:
            self._put(self._tables.audit, row.id, row)

    def forget_audit(self, *, before: float, limit: int) -> int:
        old = [entry for entry, row in self._tables.audit.items() if row.at < before][:limit]
        for entry in old:
            self._drop(self._tables.audit, entry)
        return len(old)

    def collections(self, seqs: Collection[int]) -> dict[int, str]:
        entities = self.entities(seqs).items()
        return {seq: entity.collection for seq, entity in entities if entity.collection is not None}

    def parked(self, collection: str, *, limit: int) -> list[tuple[float, int]]:
        return sorted((due_at, seq) for seq, (due_at, of) in self._tables.parked.items() if of == collection)[:limit]

    def park(self, tasks: Sequence[tuple[str, float, int]]) -> None:
        for collection, due_at, seq in tasks:
            self._put(self._tables.parked, seq, (due_at, collection))

    def unpark(self, seqs: Collection[int]) -> None:
        for seq in seqs:
            self._drop(self._tables.parked, seq)

    def begin_starts(self, kinds: Collection[str]) -> Collection[str]:
        return kinds

    def buckets(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], float]:
        return _chosen(self._tables.buckets, keys)

    def set_buckets(self, full_at: Mapping[tuple[str, str], float]) -> None:
        for key, at in full_at.items():
            self._put(self._tables.buckets, key, at)

    def fill_buckets(self, kind: str, *, full_by: float, of_keys: bool = False) -> None:
        full_at = self._tables.buckets
        self.set_buckets({key: full_by for key in self._buckets_of({kind}, of_keys=of_keys) if full_at[key] > full_by})

    def forget_buckets(self, kinds: Collection[str], *, now: float, limit: int) -> None:
        full = (key for key in self._buckets_of(kinds, of_keys=True) if self._tables.buckets[key] <= now)
        for key in list(islice(full, limit)):
            self._drop(self._tables.buckets, key)

    def _buckets_of(self, kinds: Collection[str], *, of_keys: bool) -> list[tuple[str, str]]:
        """Return the ⟨kind, key⟩ pairs of token buckets: of the keys of these kinds, or of the kinds as a whole."""
        return [key for key in self._tables.buckets if key[0] in kinds and bool(key[1]) == of_keys]

    def has_waits(self) -> bool:
        return bool(self._tables.waits)

    def waits(self, awaited: Collection[str], *, limit: int, after: str = "") -> list[tuple[str, str]]:
        of = self._tables.waits
        waits = [(name, task_id) for name in awaited for task_id in of.get(name, ()) if task_id > after]
        return sorted(waits)[:limit]

    def awaited(self, ids: Collection[str]) -> set[str]:
        return {name for name in ids if self._tables.waits.get(name)}

    def add_waits(self, waits: Collection[tuple[str, str]]) -> None:
        for awaited, task_id in waits:
            self._put(self._tables.waits.setdefault(awaited, {}), task_id, None)
            self._put(self._tables.waits_of.setdefault(task_id, {}), awaited, None)

    def drop_waits(self, waits: Collection[tuple[str, str]]) -> None:
        for awaited, task_id in waits:
            self._drop(self._tables.waits.get(awaited, {}), task_id)
            self._drop(self._tables.waits_of.get(task_id, {}), awaited)

    def drop_waits_of(self, ids: Collection[str]) -> None:
        self.drop_waits(self.waits_of(ids))

    def wakes(self, *, limit: int) -> list[tuple[str, str]]:
        return sorted(self._tables.wakes.items())[:limit]

    def wakes_for(self, awaited: Collection[str]) -> set[str]:
        return self._tables.wakes.keys() & awaited

    def set_wakes(self, wakes: Mapping[str, str | None]) -> None:
        for name, after in wakes.items():
            self._drop(self._tables.wakes, name)
            if after is not None:
                self._put(self._tables.wakes, name, after)

    def add_to_chains(self, tasks: Sequence[tuple[int, str, str]]) -> None:
        for seq, *of_task in tasks:
            self._put(self._tables.chains, seq, (of_task[0], of_task[1]))

    def cancelled_chains(self, roots: Collection[str]) -> set[str]:
        return self._tables.cancelled_chains.keys() & roots

    def cancel_chains(self, roots: Collection[str], *, at: float) -> None:
        for root in roots:
            self._put(self._tables.cancelled_chains, root, at)

    def latest_time(self) -> float:
        last = next(reversed(self._tables.entities.values()), None)
        granted_at = max((memory.granted_at for memory in self._tables.claims.values()), default=0.0)
        waiting = (seq for lanes in self._tables.lanes.values() for lane in lanes.values() for _, seq in lane)
        put_back = (run.at for seq in waiting for run in self._tables.runs.get(seq, {}).values())
        return max(granted_at, 0.0 if last is None else last.created_at, max(put_back, default=0.0))

    def probe_write(self) -> None:
        pass

    def _put(self, table: dict[_K, _V], key: _K, value: _V) -> None:
        if key in table:
            before = table[key]
            self._undo.append(lambda: table.__setitem__(key, before))
        else:
            self._undo.append(lambda: table.pop(key, None))
        table[key] = value

    def _drop(self, table: dict[_K, _V], key: _K) -> None:
        if key in table:
            before = table.pop(key)
            self._undo.append(lambda: table.__setitem__(key, before))


def _counted(rows: Iterable[Trigger]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for row in rows:
        of_kind = counts.setdefault(row.kind, {})
        of_kind[row.status.value] = of_kind.get(row.status.value, 0) + 1
    return counts


def _chosen(table: Mapping[_K, _V], keys: Collection[_K]) -> dict[_K, _V]:
    return {key: table[key] for key in keys if key in table}
