"""Changes of later events in a store in memory: start deadlines, firings, tasks after others, chains."""

from collections.abc import Collection, Mapping, Sequence

from leasekit._lifecycle.states import LEASED
from leasekit.server.store import Deadline, PeriodicRow
from leasekit.server.store.memory.changes import Changes


class MemoryLater(Changes):
    """Writes of what happens later. `LaterWrites` describes the methods."""

    def next_deadline(self) -> float | None:
        return min((deadline.at for deadline in self._tables.deadlines.values()), default=None)

    def passed_deadlines(self, *, now: float, limit: int) -> list[int]:
        passed = sorted((deadline.at, seq) for seq, deadline in self._tables.deadlines.items() if deadline.at <= now)
        return [seq for _, seq in passed if not self._is_in_a_buffer(seq)][:limit]

    def _is_in_a_buffer(self, seq: int) -> bool:
        row = self._tables.triggers.get(seq)
        return row is not None and row.status in LEASED and row.started_at is None

    def set_deadlines(self, deadlines: Mapping[int, Deadline]) -> None:
        for seq, deadline in deadlines.items():
            self._put(self._tables.deadlines, seq, deadline)

    def drop_deadlines(self, seqs: Collection[int]) -> None:
        for seq in seqs:
            self._drop(self._tables.deadlines, seq)

    def next_firing(self) -> float | None:
        return min((row.next_at for row in self._tables.periodics.values() if row.next_at is not None), default=None)

    def due_periodics(self, names: Collection[str], *, now: float) -> list[PeriodicRow]:
        rows = [self._tables.periodics[name] for name in names if name in self._tables.periodics]
        return [row for row in rows if row.next_at is not None and row.next_at <= now]

    def set_periodic(self, row: PeriodicRow) -> None:
        self._put(self._tables.periodics, row.name, row)

    def remove_periodic(self, name: str) -> None:
        self._drop(self._tables.periodics, name)

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
