"""Transactions and snapshots of an SQL database: batches of rows in, batches of rows out."""

from collections import Counter as Counts
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Select, func, literal, select, tuple_

from leasekit.errors import Refused
from leasekit.server.store import (
    Anchor,
    Checkpoint,
    ClaimMemory,
    Content,
    Dedupe,
    Ending,
    Entity,
    Filter,
    Holding,
    Lane,
    Limits,
    Run,
    Trigger,
    Tx,
    View,
    damage,
)
from leasekit.server.store import statements as sql
from leasekit.server.store.lease_cache import LeaseCache
from leasekit.server.store.schema import dedupe, task, trigger
from leasekit.server.store.task_counts import Key
from leasekit.task import Status

_PRIORITIES = "[0,1,2,3,4]"
_NAMES = {status: status.value for status in Status}
_PAIRS = 200  # pairs of values in one statement, at most
_encode = msgspec.json.encode
_decode_grants = msgspec.json.Decoder(list[tuple[int, str]]).decode
_decode_anchor = msgspec.json.Decoder(Anchor).decode
_astuple = msgspec.structs.astuple


class Counter:
    """The last `seq` that the writer has reserved; a failed transaction leaves a gap."""

    def __init__(self) -> None:
        self.last: int | None = None


class SqlView(View):
    """A consistent snapshot of an SQL database. `View` describes the methods."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def triggers(self, ids: Collection[str]) -> dict[str, Trigger]:
        return {row.id: row for row in self._decoded(sql.BY_ID.rows(self._connection, ids=_json_list(ids)))}

    def entities(self, seqs: Collection[int]) -> dict[int, Entity]:
        return {row[0]: Entity(*row) for row in sql.ENTITIES.rows(self._connection, seqs=_json_list(seqs))}

    def progress(self, seqs: Collection[int]) -> dict[int, Checkpoint]:
        return {row[0]: Checkpoint(*row[1:]) for row in sql.PROGRESS.rows(self._connection, seqs=_json_list(seqs))}

    def last_runs(self, seq: int, *, limit: int) -> list[Run]:
        return damage.runs(sql.LAST_RUNS.rows(self._connection, seq=seq, most=limit)[::-1])

    def page(self, wanted: Filter, *, after: int, limit: int) -> list[Trigger]:
        query = select(trigger).where(trigger.c.seq > after).order_by(trigger.c.seq).limit(limit)
        if wanted.kind is not None:
            query = query.where(trigger.c.kind == wanted.kind)
        if wanted.status is not None:
            query = query.where(trigger.c.status == wanted.status.value)
        if wanted.worker is not None:
            query = query.where(trigger.c.owner == wanted.worker)
        if wanted.collection is not None:
            query = query.join(task, task.c.seq == trigger.c.seq).where(task.c.collection == wanted.collection)
        return self._decoded(sql.Statement(query).rows(self._connection))

    def dedupes(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], Dedupe]:
        # Not a JSON list as elsewhere: SQLite would cut a key at a null character in it.
        pair = tuple_(dedupe.c.kind, dedupe.c.key)
        pairs = list(keys)
        rows = (
            row
            for at in range(0, len(pairs), _PAIRS)
            for row in self._connection.execute(select(dedupe).where(pair.in_(pairs[at : at + _PAIRS])))
        )
        return {(row[0], row[1]): Dedupe(*row) for row in rows if row[3] is None or damage.is_number(row[3])}

    def counts(self) -> dict[str, dict[str, int]]:
        return damage.statuses(sql.COUNTS.rows(self._connection))

    def numbered_counts(self) -> tuple[int, Sequence[tuple[Any, Any, int]]]:
        """Return the number of the last transaction, and the tasks of each kind in each status."""
        return sql.COMMITS.rows(self._connection)[0][0], sql.COUNTS.rows(self._connection)

    def holders(self) -> dict[str, Holding]:
        return {
            str(row[0]): Holding(row[1], row[2] if damage.is_number(row[2]) else None)
            for row in sql.HOLDERS.rows(self._connection)
        }

    def ended(self, wanted: Filter, *, until: float, after: Ending, limit: int) -> list[Ending]:
        query = _ended(wanted, until, trigger.c.ended_at, trigger.c.seq)
        query = query.where(tuple_(trigger.c.ended_at, trigger.c.seq) > tuple_(literal(after.at), literal(after.seq)))
        query = query.order_by(trigger.c.ended_at, trigger.c.seq).limit(limit)
        return [Ending(*row) for row in sql.Statement(query).rows(self._connection)]

    def count_ended(self, wanted: Filter, *, until: float) -> dict[str, dict[str, int]]:
        of = (trigger.c.kind, trigger.c.status)
        query = _ended(wanted, until, *of, func.count()).group_by(*of)
        return damage.statuses(sql.Statement(query).rows(self._connection))

    def lanes(self, kinds: Collection[str]) -> list[Lane]:
        rows = sql.LANES.rows(self._connection, kinds=_json_list(kinds), priorities=_PRIORITIES)
        return sorted(Lane(*row) for row in rows if damage.is_number(row[2]))

    def count_waiting(self, lane: Lane, *, now: float, most: int) -> tuple[int, int]:
        of = {"kind": lane.kind, "priority": lane.priority, "now": now, "most": most}
        due, later = (statement.rows(self._connection, **of)[0][0] for statement in (sql.COUNT_DUE, sql.COUNT_LATER))
        return due, later

    def free_names(self, *, until: float, limit: int) -> list[int]:
        return [row[0] for row in sql.FREE_NAMES.rows(self._connection, now=until, most=limit)]

    def free_space(self) -> int:
        driver = sql.driver(self._connection)
        free, page, mode = (
            driver.execute(f"PRAGMA {name}").fetchone()[0] for name in ("freelist_count", "page_size", "auto_vacuum")
        )
        if mode != sql.INCREMENTAL:
            raise Refused(
                "the file was made without room for the notes by which space is given back step by step: stop all "
                "processes that use it, then run sqlite3 FILE 'PRAGMA auto_vacuum = incremental; VACUUM'"
            )
        return int(free * page)

    def _decoded(self, rows: Sequence[tuple[Any, ...]]) -> list[Trigger]:
        return damage.triggers(rows)[0]


class SqlTx(SqlView, Tx):
    """A transaction of the writer on an SQL database. `Tx` describes the methods."""

    def __init__(
        self, connection: Connection, counter: Counter, held: LeaseCache, changes: MutableMapping[Key, int]
    ) -> None:
        super().__init__(connection)
        self._counter = counter
        self._held = held
        self._changes = changes  # of the numbers of tasks
        self.new_anchor: str | None = None  # the store writes it if anything else is written

    def allocate_seqs(self, count: int) -> int:
        last: int = sql.LAST_SEQ.rows(self._connection)[0][0] if self._counter.last is None else self._counter.last
        self._counter.last = last + count
        return last + 1

    def add(self, entities: Sequence[Entity], triggers: Sequence[Trigger]) -> None:
        sql.ADD_TASKS.each(self._connection, [_astuple(entity) for entity in entities])
        rows = [
            (row.seq, row.id, row.kind, row.priority, row.claim_timeout, row.heartbeat_timeout, *_values(row))
            for row in triggers
        ]
        sql.ADD_TRIGGERS.each(self._connection, rows)
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

    def triggers_of(self, seqs: Collection[int]) -> dict[int, Trigger]:
        return {row.seq: row for row in self._decoded(sql.BY_SEQ.rows(self._connection, seqs=_json_list(seqs)))}

    def digests(self, seqs: Collection[int]) -> dict[int, bytes]:
        return {row[0]: row[1] for row in sql.DIGESTS.rows(self._connection, seqs=_json_list(seqs))}

    def contents(self, seqs: Collection[int]) -> dict[int, Content]:
        return {row[0]: Content(*row[1:]) for row in sql.CONTENTS.rows(self._connection, seqs=_json_list(seqs))}

    def content_size(self, seqs: Collection[int]) -> int:
        return int(sql.SIZE.rows(self._connection, seqs=_json_list(seqs))[0][0])

    def limits(self, seqs: Collection[int]) -> dict[int, Limits]:
        return {row[0]: Limits(*row[1:]) for row in sql.LIMITS.rows(self._connection, seqs=_json_list(seqs))}

    def save(self, triggers: Sequence[Trigger]) -> None:
        sql.SAVE.each(self._connection, [(*_values(row), row.seq) for row in triggers])
        self._held.keep(triggers)

    def renew(self, seqs: Collection[int], status: Status, *, now: float, at: float) -> None:
        if seqs:
            begun_at = at if status is Status.PROCESSING else None
            of = {"to_status": status.value, "now": now, "at": at, "begun_at": begun_at}
            sql.RENEW(self._connection, seqs=_json_list(seqs), **of)
            self._held.renew(seqs, status, now=now, at=at)

    def end(self, seqs: Collection[int], status: Status, *, now: float) -> None:
        if seqs:
            sql.END(self._connection, seqs=_json_list(seqs), to_status=status.value, now=now)
            self._held.drop(seqs)

    def remove(self, seqs: Collection[int]) -> None:
        listed = _json_list(seqs)
        for statement in sql.REMOVE:
            statement(self._connection, seqs=listed)
        self._held.drop(seqs)

    def give_back(self, *, most: int) -> None:
        (page,) = sql.driver(self._connection).execute("PRAGMA page_size").fetchone()
        for _ in range(max(1, most // page)):  # one by one, because the driver ends such a statement at its first page
            sql.driver(self._connection).execute("PRAGMA incremental_vacuum(1)").fetchall()
        self.probe_write()

    def ready(self, lane: Lane, *, now: float, after: tuple[float, int], limit: int) -> list[Trigger]:
        rows = sql.READY.rows(
            self._connection,
            kind=lane.kind,
            priority=lane.priority,
            now=now,
            after_due=after[0],
            after_seq=after[1],
            most=limit,
        )
        return [row for row in self._decoded(rows) if row.next_trigger_at is not None]

    def expired(self, *, now: float, limit: int) -> list[Trigger]:
        rows = self._decoded(sql.EXPIRED.rows(self._connection, now=now, most=limit))
        return [row for row in rows if row.next_trigger_at is not None]

    def restart_leases(self, *, now: float, shift: float | None) -> None:
        sql.RESTART_LEASES(self._connection, now=now, shift=shift)
        self._held.clear()

    def anchor(self) -> Anchor | None:
        rows = sql.ANCHOR.rows(self._connection)
        try:
            return _decode_anchor(rows[0][0]) if rows else None
        except (msgspec.MsgspecError, ValueError, TypeError):
            return None

    def set_anchor(self, anchor: Anchor) -> None:
        self.new_anchor = _encode(anchor).decode()

    def progress_marks(self, seqs: Collection[int]) -> dict[int, tuple[int, int]]:
        rows = sql.PROGRESS_MARKS.rows(self._connection, seqs=_json_list(seqs))
        return {row[0]: row[1:] for row in rows if isinstance(row[1], int) and isinstance(row[2], int)}

    def set_progress(self, values: Mapping[int, Checkpoint]) -> None:
        sql.DROP_PROGRESS.each(self._connection, [(seq,) for seq in values])
        sql.ADD_PROGRESS.each(self._connection, [(seq, *checkpoint) for seq, checkpoint in values.items()])

    def add_runs(self, runs: Sequence[Run]) -> None:
        sql.ADD_RUNS.each(self._connection, [_astuple(run) for run in runs])

    def forget_runs(self, keys: Sequence[tuple[int, int]]) -> None:
        sql.DROP_RUNS.each(self._connection, keys)

    def runs(self, seqs: Collection[int]) -> list[Run]:
        return [Run(*row) for row in sql.RUNS.rows(self._connection, seqs=_json_list(seqs))]

    def set_dedupes(self, dedupes: Sequence[Dedupe]) -> None:
        sql.DROP_DEDUPES.each(self._connection, [first[:2] for first in dedupes])
        sql.ADD_DEDUPES.each(self._connection, [tuple(first) for first in dedupes])

    def claim_memories(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], ClaimMemory]:
        rows = sql.REMEMBERED.rows(self._connection, pairs=_json_list(keys))
        return {(row[0], row[1]): _claim_memory(*row) for row in rows}

    def remember_claims(self, claims: Sequence[ClaimMemory]) -> None:
        sql.ADD_CLAIMS.each(self._connection, [(*memory[:4], _encode(memory.grants)) for memory in claims])

    def forget_claims(self, *, before: float, limit: int) -> int:
        return sql.FORGET_CLAIMS(self._connection, before=before, most=limit).rowcount

    def latest_time(self) -> float:
        return max([row[0] for row in sql.LATEST.rows(self._connection) if damage.is_number(row[0])], default=0.0)

    def probe_write(self) -> None:
        sql.TOUCH(self._connection)

    def _decoded(self, rows: Sequence[tuple[Any, ...]]) -> list[Trigger]:
        tasks, damaged = damage.triggers(rows)
        if damaged:
            self.save(damaged)
            damage.log(damaged)
        return tasks


def _ended(wanted: Filter, until: float, *columns: ColumnElement[Any]) -> Select[Any]:
    """Select from the tasks of this kind and status that ended by `until`."""
    query = select(*columns).where(trigger.c.ended_at <= until)
    if wanted.kind is not None:
        query = query.where(trigger.c.kind == wanted.kind)
    return query if wanted.status is None else query.where(trigger.c.status == wanted.status.value)


def _claim_memory(worker: str, claim_id: str, granted_at: float, waited: float, grants: bytes) -> ClaimMemory:
    try:
        return ClaimMemory(worker, claim_id, granted_at, max(0.0, waited), _decode_grants(grants))
    except (msgspec.MsgspecError, ValueError, TypeError):  # damaged: no answer has these leases, and they expire
        return ClaimMemory(worker, claim_id, granted_at, 0.0, ())


def _values(row: Trigger) -> tuple[Any, ...]:
    """Return the columns of a state that change, in the order of the table."""
    return (
        _NAMES[row.status],
        row.fence,
        row.attempt,
        row.crashes,
        row.failures,
        int(row.cancel_requested),  # a bool costs the driver more than an int
        row.owner,
        row.token,
        row.next_trigger_at,
        row.reason,
        row.max_runtime,
        row.run_until,
        int(row.was_extended),
        row.ended_at,
        row.claimed_at,
        row.started_at,
        row.heartbeat_at,
    )


def _json_list(values: Iterable[Any]) -> str:
    return _encode(list(values)).decode()
