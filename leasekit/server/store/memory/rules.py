"""Changes of the rules that operators set in a store in memory, and of the minutes of its history."""

from collections.abc import Collection, Mapping, Sequence

from leasekit.server.store import (
    NOT_DECLARED,
    AuditRow,
    DrainRow,
    GateRow,
    KindDeclaration,
    KindRow,
    MinuteRow,
    SessionRow,
    TokenRow,
)
from leasekit.server.store.memory.changes import Changes


class MemoryRules(Changes):
    """Writes of rules. `RuleWrites` describes the methods."""

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

    def set_drain(self, row: DrainRow) -> None:
        self._count_change()
        self._put(self._tables.drains, row.worker, row)

    def remove_drain(self, worker: str) -> None:
        self._count_change()
        self._drop(self._tables.drains, worker)

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

    def add_sessions(self, rows: Sequence[SessionRow]) -> None:
        for row in rows:
            self._put(self._tables.sessions, row.digest, row)

    def remove_sessions(self, digests: Collection[bytes]) -> None:
        for digest in digests:
            self._drop(self._tables.sessions, digest)

    def add_audit(self, rows: Sequence[AuditRow]) -> None:
        for row in rows:
            self._put(self._tables.audit, row.id, row)

    def forget_audit(self, *, before: float, limit: int) -> int:
        old = [entry for entry, row in self._tables.audit.items() if row.at < before][:limit]
        for entry in old:
            self._drop(self._tables.audit, entry)
        return len(old)

    def parked(self, collection: str, *, limit: int) -> list[tuple[float, int]]:
        return sorted((due_at, seq) for seq, (due_at, of) in self._tables.parked.items() if of == collection)[:limit]

    def park(self, tasks: Sequence[tuple[str, float, int]]) -> None:
        for collection, due_at, seq in tasks:
            self._put(self._tables.parked, seq, (due_at, collection))

    def unpark(self, seqs: Collection[int]) -> None:
        for seq in seqs:
            self._drop(self._tables.parked, seq)
