"""Transactions and snapshots of an SQLite file: what `SqlTx` and `SqlView` leave to each database."""

from collections import Counter as Counts
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy import bindparam, func, select

from leasekit.errors import Refused
from leasekit.server.store import Anchor, Entity, Lane, Trigger
from leasekit.server.store.schema import store
from leasekit.server.store.sql import lanes, later, leases, listing, shares, tasks
from leasekit.server.store.sql.keyed import Charge
from leasekit.server.store.sql.session import Walk
from leasekit.server.store.sql.statements import Statement
from leasekit.server.store.sql.tx import SqlTx, SqlView
from leasekit.server.store.sqlite.lease_cache import LeaseCache
from leasekit.server.store.sqlite.session import SqliteSession
from leasekit.server.store.sqlite.task_counts import Key
from leasekit.task import Status

INCREMENTAL = 2
"""The `auto_vacuum` of a file that can be shortened step by step."""

# One key at a time, not a list as JSON: some versions of SQLite cut a key at a null character in JSON.
_encode = msgspec.json.encode
_NO_KEYS: Mapping[int, str] = {}
# A share stays active as long as it has due tasks, and its key does not leave.
_CHANGE_SHARE = (
    "INSERT INTO share (kind, priority, key, taken, active, due_at)"
    " SELECT kind, priority, key, coalesce(base, 0) + taken, coalesce(due_at <= now, 0), due_at"
    " FROM (SELECT *, (SELECT max(coalesce(until, due_at), due_at) FROM keyed"
    " WHERE kind = new.kind AND priority = new.priority AND key = new.key AND due_at IS NOT NULL"
    " ORDER BY due_at LIMIT 1) AS due_at FROM (SELECT"
    " ?1 AS kind, ?2 AS priority, ?3 AS key, ?4 AS taken, ?5 AS base, ?6 AS now, ?7 AS until) AS new) AS new"
    " WHERE true ON CONFLICT DO UPDATE SET due_at = excluded.due_at,"
    " active = excluded.due_at IS NOT NULL AND ?7 IS NULL AND iif(?6 IS NULL, active, excluded.due_at <= ?6),"
    " taken = iif(?5 IS NULL OR active, taken, min(max(taken, ?5), ?5 + 1)) + ?4"
)
_COMMITS = Statement(select(store.c.commits))
_ANCHOR = Statement(select(store.c.anchor))
COUNT_COMMIT = Statement(
    sa.update(store).values(
        commits=bindparam("commits"),
        start=bindparam("start"),
        anchor=func.coalesce(bindparam("new_anchor", type_=sa.Text), store.c.anchor),
    )
)
_decode_anchor = msgspec.json.Decoder(Anchor).decode


class Counter:
    """The last `seq` that the only writer has reserved (a failed transaction leaves a gap), how far it has looked, and
    whether tasks wait for others or require labels, or have since the store was opened.
    """

    def __init__(self) -> None:
        self.last: int | None = None
        self.walk = Walk()
        self.has_waits: bool | None = None  # None: not looked up yet
        self.has_routes: bool | None = None


class SqliteView(SqlView):
    """A consistent snapshot of an SQLite file. `View` describes the methods."""

    _session: SqliteSession

    def numbered_counts(self) -> tuple[int, Sequence[tuple[Any, Any, int]]]:
        """Return the number of the last transaction, and the tasks of each kind in each status."""
        return self._session.rows(_COMMITS)[0][0], self._session.rows(listing.COUNTS)

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
    _renewal = leases.RENEW_SORTED

    def __init__(
        self, session: SqliteSession, counter: Counter, held: LeaseCache, changes: MutableMapping[Key, int]
    ) -> None:
        super().__init__(session, counter.walk)
        self._counter = counter
        self._held = held
        self._changes = changes  # of the numbers of tasks
        self.new_anchor: str | None = None  # the store writes it if anything else is written

    def allocate_seqs(self, count: int) -> int:
        last: int = self._session.rows(tasks.LAST_SEQ)[0][0] if self._counter.last is None else self._counter.last
        self._counter.last = last + count
        return last + 1

    def add(
        self,
        entities: Sequence[Entity],
        triggers: Sequence[Trigger],
        keys: Mapping[int, str] = _NO_KEYS,
        routes: Mapping[int, str] = _NO_KEYS,
    ) -> None:
        super().add(entities, triggers, keys, routes)
        for (kind, status), count in Counts((row.kind, row.status) for row in triggers).items():
            key = (kind.encode(), status.encode())
            self._changes[key] = self._changes.get(key, 0) + count

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

    def has_routes(self) -> bool:
        if self._counter.has_routes is None:
            self._counter.has_routes = bool(self._session.rows(lanes.HAS_ROUTES)[0][0])
        return self._counter.has_routes

    def finish(self) -> None:
        super().finish()
        if self._keyed.queued_routes:
            self._counter.has_routes = True

    def has_waits(self) -> bool:
        if self._counter.has_waits is None:
            self._counter.has_waits = any(self._session.rows(later.HAS_WAITS)[0])
        return self._counter.has_waits

    def add_waits(self, waits: Collection[tuple[str, str]]) -> None:
        super().add_waits(waits)
        self._counter.has_waits = True

    def follow_leases(self, *, now: float, limit: int) -> None:
        """Do nothing: each renewal puts its lease in order at once, which costs SQLite no more than to do so later."""

    def restart_leases(self, *, now: float, shift: float | None) -> None:
        super().restart_leases(now=now, shift=shift)
        self._held.clear()

    def give_back(self, *, most: int) -> None:
        driver = self._session.driver
        (page,) = driver.execute("PRAGMA page_size").fetchone()
        for _ in range(max(1, most // page)):  # one by one, because the driver ends such a statement at its first page
            driver.execute("PRAGMA incremental_vacuum(1)").fetchall()
        self.probe_write()

    def _queues(
        self, lane: Lane, after: Mapping[str, tuple[float, int]], *, now: float, limit: int
    ) -> dict[str, list[tuple[Any, ...]]]:
        of = {"kind": lane.name, "priority": lane.priority, "now": now, "most": limit}
        return {
            key: self._session.rows(shares.QUEUED, **of, key=key, after_due=due_at, after_seq=seq)
            for key, (due_at, seq) in after.items()
        }

    def _write_shares(self, changes: Sequence[Charge]) -> None:
        self._session.driver.executemany(_CHANGE_SHARE, [(*change[0], *change[1:]) for change in changes])

    def anchor(self) -> Anchor | None:
        rows = self._session.rows(_ANCHOR)
        try:
            return _decode_anchor(rows[0][0]) if rows else None
        except (msgspec.MsgspecError, ValueError, TypeError):
            return None

    def set_anchor(self, anchor: Anchor) -> None:
        self.new_anchor = _encode(anchor).decode()
