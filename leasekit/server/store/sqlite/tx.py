"""Transactions and snapshots of an SQLite file: what `SqlTx` and `SqlView` leave to each database."""

from collections import Counter as Counts
from collections.abc import Collection, MutableMapping, Sequence
from typing import Any

import msgspec

from leasekit.errors import Refused
from leasekit.server.store import Anchor, Entity, Trigger
from leasekit.server.store import statements as sql
from leasekit.server.store.sqlite.lease_cache import LeaseCache
from leasekit.server.store.sqlite.session import SqliteSession
from leasekit.server.store.sqlite.task_counts import Key
from leasekit.server.store.tx import SqlTx, SqlView
from leasekit.task import Status

INCREMENTAL = 2
"""The `auto_vacuum` of a file that can be shortened step by step."""

# One key at a time, not a list as JSON: some versions of SQLite cut a key at a null character in JSON.
_encode = msgspec.json.encode
_decode_anchor = msgspec.json.Decoder(Anchor).decode


class Counter:
    """The last `seq` that the writer has reserved; a failed transaction leaves a gap."""

    def __init__(self) -> None:
        self.last: int | None = None


class SqliteView(SqlView):
    """A consistent snapshot of an SQLite file. `View` describes the methods."""

    _session: SqliteSession

    def numbered_counts(self) -> tuple[int, Sequence[tuple[Any, Any, int]]]:
        """Return the number of the last transaction, and the tasks of each kind in each status."""
        return self._session.rows(sql.COMMITS)[0][0], self._session.rows(sql.COUNTS)

    def free_space(self) -> int:
        free, page, mode = (
            self._session.driver.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("freelist_count", "page_size", "auto_vacuum")
        )
        if mode != INCREMENTAL:
            raise Refused(
                "the file was made without room for the notes by which space is given back step by step: stop all "
                "processes that use it, then run sqlite3 FILE 'PRAGMA auto_vacuum = incremental; VACUUM'"
            )
        return int(free * page)


class SqliteTx(SqlTx, SqliteView):
    """A transaction of the only writer of an SQLite file. `Tx` describes the methods."""

    _session: SqliteSession
    _renewal = sql.RENEW_SORTED

    def __init__(
        self, session: SqliteSession, counter: Counter, held: LeaseCache, changes: MutableMapping[Key, int]
    ) -> None:
        super().__init__(session)
        self._counter = counter
        self._held = held
        self._changes = changes  # of the numbers of tasks
        self.new_anchor: str | None = None  # the store writes it if anything else is written

    def allocate_seqs(self, count: int) -> int:
        last: int = self._session.rows(sql.LAST_SEQ)[0][0] if self._counter.last is None else self._counter.last
        self._counter.last = last + count
        return last + 1

    def add(self, entities: Sequence[Entity], triggers: Sequence[Trigger]) -> None:
        super().add(entities, triggers)
        for (kind, status), tasks in Counts((row.kind, row.status) for row in triggers).items():
            key = (kind.encode(), status.encode())
            self._changes[key] = self._changes.get(key, 0) + tasks

    def triggers(self, ids: Collection[str]) -> dict[str, Trigger]:
        known = self._held.find(ids)
        if len(known) < len(ids) and (missing := [task_id for task_id in ids if task_id not in known]):
            stored = super().triggers(missing)
            self._held.keep(stored.values())
            known |= stored
        return known

    def save(self, triggers: Sequence[Trigger]) -> None:
        super().save(triggers)
        self._held.keep(triggers)

    def renew(self, seqs: Collection[int], status: Status, *, now: float, at: float) -> None:
        super().renew(seqs, status, now=now, at=at)
        self._held.renew(seqs, status, now=now, at=at)

    def end(self, seqs: Collection[int], status: Status, *, now: float) -> None:
        super().end(seqs, status, now=now)
        self._held.drop(seqs)

    def remove(self, seqs: Collection[int]) -> None:
        super().remove(seqs)
        self._held.drop(seqs)

    def follow_leases(self, *, now: float, limit: int) -> None:
        """Do nothing: a renewal sorts its lease, which costs SQLite no more than to do it later."""

    def restart_leases(self, *, now: float, shift: float | None) -> None:
        super().restart_leases(now=now, shift=shift)
        self._held.clear()

    def give_back(self, *, most: int) -> None:
        driver = self._session.driver
        (page,) = driver.execute("PRAGMA page_size").fetchone()
        for _ in range(max(1, most // page)):  # one by one, because the driver ends such a statement at its first page
            driver.execute("PRAGMA incremental_vacuum(1)").fetchall()
        self.probe_write()

    def anchor(self) -> Anchor | None:
        rows = self._session.rows(sql.ANCHOR)
        try:
            return _decode_anchor(rows[0][0]) if rows else None
        except (msgspec.MsgspecError, ValueError, TypeError):
            return None

    def set_anchor(self, anchor: Anchor) -> None:
        self.new_anchor = _encode(anchor).decode()
