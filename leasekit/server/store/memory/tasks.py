"""The tasks of a store in memory, and their states."""

from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from leasekit._lifecycle.states import WAITING
from leasekit._lifecycle.transitions import renewed
from leasekit.server.store import Content, Entity, Limits, Trigger
from leasekit.server.store.memory.changes import Changes
from leasekit.server.store.memory.tables import Due, Tables, chosen
from leasekit.task import Status

_NO_KEYS: Mapping[int, str] = {}


class MemoryTasks(Changes):
    """Writes of tasks. `TaskWrites` describes the methods."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        self._removed: list[Trigger] = []
        self._queued_routes: dict[str, list[float]] = {}

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
        return chosen(self._tables.triggers, seqs)

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

    def _due(self, listed: Sequence[Due], first: int, last: int, *, now: float) -> list[Trigger]:
        triggers = self._tables.triggers
        return [triggers[seq] for at, seq in listed[first:last] if at <= now]

    def collections(self, seqs: Collection[int]) -> dict[int, str]:
        entities = self.entities(seqs).items()
        return {seq: entity.collection for seq, entity in entities if entity.collection is not None}
