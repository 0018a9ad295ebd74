"""Snapshots of a store in memory."""

import bisect
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

from leasekit._lifecycle.states import WAITING
from leasekit.errors import Refused
from leasekit.named import PREFIXES
from leasekit.server.store import (
    AuditRow,
    Checkpoint,
    Deadline,
    Dedupe,
    DrainRow,
    Ending,
    Entity,
    Filter,
    GateRow,
    Holding,
    KindRow,
    Lane,
    MinuteRow,
    PeriodicRow,
    Run,
    SessionRow,
    Tagged,
    TokenRow,
    Trigger,
    View,
)
from leasekit.server.store.memory.tables import NEVER, Due, Tables, chosen
from leasekit.server.store.routes import is_route, kind_of


class MemoryView(View):
    """A snapshot of a store in memory. `View` describes the methods."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def triggers(self, ids: Collection[str]) -> dict[str, Trigger]:
        seqs, triggers = self._tables.seqs, self._tables.triggers
        return {task_id: triggers[seqs[task_id]] for task_id in ids if task_id in seqs}

    def entities(self, seqs: Collection[int]) -> dict[int, Entity]:
        return chosen(self._tables.entities, seqs)

    def progress(self, seqs: Collection[int]) -> dict[int, Checkpoint]:
        return chosen(self._tables.progress, seqs)

    def last_runs(self, seqs: Collection[int], *, limit: int) -> dict[int, list[Run]]:
        runs = chosen(self._tables.runs, seqs)
        return {seq: [own[fence] for fence in sorted(own)][-limit:] for seq, own in runs.items() if own}

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

    def chained(self, root: str, *, after: int, newest: bool, limit: int) -> list[int]:
        first = [self._tables.seqs[root]] if root in self._tables.seqs else []
        seqs = first + [seq for seq, (_, its_root) in self._tables.chains.items() if its_root == root]
        return sorted((seq for seq in seqs if (seq < after if newest else seq > after)), reverse=newest)[:limit]

    def tagged(self, tags: Sequence[str], *, after: int, newest: bool, limit: int) -> Tagged:
        of_tags = [self._tables.tagged.get(tag, {}) for tag in tags]
        rarest = min(of_tags, key=len)
        seqs = [seq for seq in (reversed(rarest) if newest else rarest) if (seq < after if newest else seq > after)]
        step = seqs[:limit]
        found = [seq for seq in step if all(seq in of_tag for of_tag in of_tags)]
        return Tagged(found, step[-1] if step else None)

    def tags(self, seqs: Collection[int]) -> dict[int, list[str]]:
        return chosen(self._tables.tags, seqs)

    def next_seq(self, *, after: int, newest: bool) -> int | None:
        seqs = reversed(self._tables.triggers) if newest else iter(self._tables.triggers)
        return next((seq for seq in seqs if (seq < after if newest else seq > after)), None)

    def dedupes(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], Dedupe]:
        return chosen(self._tables.dedupes, keys)

    def counts(self) -> dict[str, dict[str, int]]:
        return _counted(self._tables.triggers.values())

    def holders(self) -> dict[str, Holding]:
        return Holding.by_owner(
            (row.owner, row.kind, 1, row.heartbeat_timeout) for row in self._leased() if row.owner is not None
        )

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
        lanes_due = {lane: min(ats, default=NEVER) for lane, ats in firsts.items()}
        keyed = [Lane(*lane, due_at, has_keys=True) for lane, due_at in lanes_due.items() if due_at < NEVER]
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
        return {seq: key for seq, key in chosen(self._tables.keys, seqs).items() if key}

    def routes(self, kinds: Collection[str]) -> list[str]:
        names = {name for _, name in self._tables.queues if is_route(name)} if self._tables.routes else ()
        return sorted(name for name in names if kind_of(name) in kinds)

    def routes_of(self, seqs: Collection[int]) -> dict[int, str]:
        return chosen(self._tables.routes, seqs)

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

    def _ended(self, wanted: Filter, until: float, first: int) -> Iterator[Due]:
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

    def names_due(self, *, now: float, limit: int) -> list[str]:
        rows = self._tables.periodics.values()
        due = [(row.next_at, row.name, row.changed_by) for row in rows if row.next_at is not None]
        before, turns = Counter[str | None](), list[tuple[int, float, str]]()
        for next_at, name, by in sorted((each for each in due if each[0] <= now), key=lambda each: each[:2]):
            before[by] += 1
            turns.append((before[by], next_at, name))
        return [name for _, _, name in sorted(turns)[:limit]]

    def tokens(self) -> list[TokenRow]:
        return sorted(self._tables.tokens.values(), key=lambda row: (row.created_at, row.id))

    def session(self, digest: bytes) -> SessionRow | None:
        return self._tables.sessions.get(digest)

    def sessions(self) -> list[SessionRow]:
        return sorted(self._tables.sessions.values(), key=lambda row: row.until)

    def audit(self, *, before: str, limit: int) -> list[AuditRow]:
        ids = sorted((row for row in self._tables.audit if not before or row < before), reverse=True)
        return [self._tables.audit[entry] for entry in ids[:limit]]

    def gates(self) -> list[GateRow]:
        return sorted(self._tables.gates.values(), key=lambda row: row[:2])

    def held_by(self, worker: str) -> list[int]:
        return sorted(row.seq for row in self._leased() if row.owner == worker)

    def drains(self) -> list[DrainRow]:
        return [row for _, row in sorted(self._tables.drains.items())]

    def parked_tasks(self, seqs: Collection[int]) -> dict[int, float]:
        return {seq: due_at for seq, (due_at, _) in chosen(self._tables.parked, seqs).items()}

    def running(self, kinds: Collection[str]) -> dict[str, int]:
        return Counter(row.kind for row in self._leased() if row.kind in kinds)

    def running_of_keys(self, kind: str, keys: Collection[str]) -> dict[str, int]:
        kept = (row for row in map(self._tables.triggers.__getitem__, self._tables.kept) if row.status in WAITING)
        rows = itertools.chain(self._leased(), kept)
        of_kind = (self._tables.keys.get(row.seq) for row in rows if row.kind == kind)
        return Counter(key for key in of_kind if key is not None and key in keys)

    def waits_of(self, ids: Collection[str], *, limit: int | None = None) -> list[tuple[str, str]]:
        of = self._tables.waits_of
        waits = ((awaited, task_id) for task_id in sorted(ids) for awaited in sorted(of.get(task_id, ())))
        return list(islice(waits, limit))

    def chains_of(self, seqs: Collection[int]) -> dict[int, tuple[str, str]]:
        return chosen(self._tables.chains, seqs)

    def deadlines(self, seqs: Collection[int]) -> dict[int, Deadline]:
        return chosen(self._tables.deadlines, seqs)

    def roots(self, ids: Collection[str]) -> dict[str, str]:
        chains = self._tables.chains
        return {row.id: chains.get(row.seq, ("", row.id))[1] for row in self.triggers(ids).values()}

    def due_times(self, seqs: Collection[int]) -> dict[int, float]:
        return {seq: entity.at for seq, entity in self.entities(seqs).items()}

    def creation_times(self, seqs: Collection[int]) -> dict[int, float]:
        return {seq: entity.created_at for seq, entity in self.entities(seqs).items()}

    def free_names(self, *, until: float, limit: int) -> list[int]:
        lanes = (lane for kind, of in self._tables.lanes.items() if kind.startswith(PREFIXES) for lane in of.values())
        return list(islice((seq for lane in lanes for at, seq in lane if at <= until), limit))

    def free_space(self) -> int:
        raise Refused("the tasks are in the memory of a process: there is no file that could be made smaller")

    def _leased(self) -> list[Trigger]:
        return [self._tables.triggers[seq] for _, seq in self._tables.leases]


def _counted(rows: Iterable[Trigger]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for row in rows:
        of_kind = counts.setdefault(row.kind, {})
        of_kind[row.status.value] = of_kind.get(row.status.value, 0) + 1
    return counts
