"""What a transaction on an SQL database does: batches of rows in, batches of rows out."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, select, tuple_

from leasekit.server.store import (
    Anchor,
    Checkpoint,
    ClaimMemory,
    Content,
    Dedupe,
    Entity,
    Filter,
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
from leasekit.task import Status

__all__ = ["Counter", "SqlTx", "SqlView"]

_PRIORITIES = "[0,1,2,3,4]"
_NAMES = {status: status.value for status in Status}
_PAIRS = 200  # pairs of values in one statement
_encode = msgspec.json.encode
_decode_grants = msgspec.json.Decoder(list[tuple[int, str]]).decode
_decode_anchor = msgspec.json.Decoder(Anchor).decode
_astuple = msgspec.structs.astuple


class Counter:
    """The last `seq` that the only writer gave out; a transaction that fails leaves a gap."""

    def __init__(self) -> None:
        self.last: int | None = None


class SqlView(View):
    """One consistent look at an SQL database."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def triggers(self, ids: Collection[str]) -> dict[str, Trigger]:
        """Where those of these tasks stand that there are."""
        return {one.id: one for one in self._standing(sql.BY_ID.rows(self._connection, ids=_list(ids)))}

    def entities(self, seqs: Collection[int]) -> dict[int, Entity]:
        """What these tasks are."""
        return {row[0]: Entity(*row) for row in sql.ENTITIES.rows(self._connection, seqs=_list(seqs))}

    def progress(self, seqs: Collection[int]) -> dict[int, bytes]:
        """The latest checkpoints of those of these tasks that have one."""
        return {row[0]: row[1] for row in sql.PROGRESS.rows(self._connection, seqs=_list(seqs))}

    def last_runs(self, seq: int, *, limit: int) -> list[Run]:
        """The latest runs of a task with their values, the oldest of them first."""
        return damage.runs(sql.LAST_RUNS.rows(self._connection, seq=seq, most=limit)[::-1])

    def page(self, wanted: Filter, *, after: int, limit: int) -> list[Trigger]:
        """The first tasks that came in after the `seq` given and match, in that order."""
        query = select(trigger).where(trigger.c.seq > after).order_by(trigger.c.seq).limit(limit)
        if wanted.kind is not None:
            query = query.where(trigger.c.kind == wanted.kind)
        if wanted.status is not None:
            query = query.where(trigger.c.status == wanted.status.value)
        if wanted.worker is not None:
            query = query.where(trigger.c.owner == wanted.worker)
        if wanted.collection is not None:
            query = query.join(task, task.c.seq == trigger.c.seq).where(task.c.collection == wanted.collection)
        return self._standing(sql.Statement(query).rows(self._connection))

    def counts(self) -> dict[str, dict[str, int]]:
        """How many tasks of each kind are in which status."""
        return damage.statuses(sql.COUNTS.rows(self._connection))

    def holders(self) -> dict[str, int]:
        """How many leases each worker holds."""
        return {str(row[0]): row[1] for row in sql.HOLDERS.rows(self._connection)}

    def _standing(self, rows: Sequence[tuple[Any, ...]]) -> list[Trigger]:
        """Where tasks stand by their rows; those that are damaged have ended."""
        return damage.triggers(rows)[0]


class SqlTx(SqlView, Tx):
    """One transaction of the writer on an SQL database."""

    def __init__(self, connection: Connection, counter: Counter, held: LeaseCache) -> None:
        super().__init__(connection)
        self._counter = counter
        self._held = held
        self.new_anchor: str | None = None  # written by the store, where anything else is

    def allocate(self, count: int) -> int:
        """The first of `count` new, consecutive `seq`s, larger than all before."""
        last: int = sql.LAST_SEQ.rows(self._connection)[0][0] if self._counter.last is None else self._counter.last
        self._counter.last = last + count
        return last + 1

    def add(self, entities: Sequence[Entity], triggers: Sequence[Trigger]) -> None:
        """Keep new tasks."""
        sql.ADD_TASKS.each(self._connection, [_astuple(one) for one in entities])
        identity = [
            (one.seq, one.id, one.kind, one.priority, one.claim_timeout, one.heartbeat_timeout) for one in triggers
        ]
        rows = [(*what, *_values(one)) for what, one in zip(identity, triggers, strict=True)]
        sql.ADD_TRIGGERS.each(self._connection, rows)

    def triggers(self, ids: Collection[str]) -> dict[str, Trigger]:
        """Where those of these tasks stand that there are."""
        known = self._held.find(ids)
        if len(known) < len(ids) and (missing := [task_id for task_id in ids if task_id not in known]):
            found = super().triggers(missing)
            self._held.keep(found.values())
            known |= found
        return known

    def triggers_of(self, seqs: Collection[int]) -> dict[int, Trigger]:
        """Where these tasks stand."""
        return {one.seq: one for one in self._standing(sql.BY_SEQ.rows(self._connection, seqs=_list(seqs)))}

    def digests(self, seqs: Collection[int]) -> dict[int, bytes]:
        """The digests of these tasks' payloads."""
        return {row[0]: row[1] for row in sql.DIGESTS.rows(self._connection, seqs=_list(seqs))}

    def contents(self, seqs: Collection[int]) -> dict[int, Content]:
        """What holders get with these tasks."""
        return {row[0]: Content(*row[1:]) for row in sql.CONTENTS.rows(self._connection, seqs=_list(seqs))}

    def size(self, seqs: Collection[int]) -> int:
        """The bytes of users' values that holders get with these tasks."""
        return int(sql.SIZE.rows(self._connection, seqs=_list(seqs))[0][0])

    def limits(self, seqs: Collection[int]) -> dict[int, Limits]:
        """How often these tasks may fail."""
        return {row[0]: Limits(*row[1:]) for row in sql.LIMITS.rows(self._connection, seqs=_list(seqs))}

    def save(self, triggers: Sequence[Trigger]) -> None:
        """Keep where these tasks stand now."""
        sql.SAVE.each(self._connection, [(*_values(one), one.seq) for one in triggers])
        self._held.keep(triggers)

    def renew(self, seqs: Collection[int], status: Status, *, now: float) -> None:
        """Put these to `status`, and their ends to `now` plus their own `heartbeat_timeout`, unless they are later."""
        if seqs:
            sql.RENEW(self._connection, seqs=_list(seqs), to_status=status.value, now=now)
            self._held.renew(seqs, status, now=now)

    def end(self, seqs: Collection[int], status: Status) -> None:
        """Put these to `status`, which is an end."""
        if seqs:
            sql.END(self._connection, seqs=_list(seqs), to_status=status.value)
            self._held.drop(seqs)

    def lanes(self, kinds: Collection[str]) -> list[Lane]:
        """The lanes of these kinds in which something waits, the most urgent first."""
        rows = sql.LANES.rows(self._connection, kinds=_list(kinds), priorities=_PRIORITIES)
        return sorted(Lane(*row) for row in rows if damage.is_number(row[2]))

    def ready(self, lane: Lane, *, now: float, after: tuple[float, int], limit: int) -> list[Trigger]:
        """The first tasks of a lane that are due, by (next_trigger_at, seq), behind the one given."""
        rows = sql.READY.rows(
            self._connection,
            kind=lane.kind,
            priority=lane.priority,
            now=now,
            after_due=after[0],
            after_seq=after[1],
            most=limit,
        )
        return [row for row in self._standing(rows) if row.next_trigger_at is not None]

    def expired(self, *, now: float, limit: int) -> list[Trigger]:
        """Leases that have ended, the oldest first."""
        rows = self._standing(sql.EXPIRED.rows(self._connection, now=now, most=limit))
        return [row for row in rows if row.next_trigger_at is not None]

    def rebase(self, *, now: float, shift: float | None) -> None:
        """Have every lease end the longer of its two ttls after `now`, spread over a tenth more; move ends of runs."""
        sql.REBASE(self._connection, now=now, shift=shift)
        self._held.clear()

    def anchor(self) -> Anchor | None:
        """The last anchor; None: there is none, or it cannot be read."""
        rows = sql.ANCHOR.rows(self._connection)
        try:
            return _decode_anchor(rows[0][0]) if rows else None
        except (ValueError, TypeError):
            return None

    def set_anchor(self, anchor: Anchor) -> None:
        """Keep this anchor, if the transaction changes anything else."""
        self.new_anchor = _encode(anchor).decode()

    def progress_marks(self, seqs: Collection[int]) -> dict[int, tuple[int, int]]:
        """The fence and the number of the checkpoints of those of these tasks that have one."""
        rows = sql.PROGRESS_MARKS.rows(self._connection, seqs=_list(seqs))
        return {row[0]: row[1:] for row in rows if isinstance(row[1], int) and isinstance(row[2], int)}

    def set_progress(self, values: Mapping[int, Checkpoint]) -> None:
        """Keep the latest checkpoints."""
        sql.DROP_PROGRESS.each(self._connection, [(seq,) for seq in values])
        sql.ADD_PROGRESS.each(self._connection, [(seq, *checkpoint) for seq, checkpoint in values.items()])

    def add_runs(self, runs: Sequence[Run]) -> None:
        """Keep how runs ended."""
        sql.ADD_RUNS.each(self._connection, [_astuple(one) for one in runs])

    def forget_runs(self, keys: Sequence[tuple[int, int]]) -> None:
        """Drop the runs of these (seq, fence)."""
        sql.DROP_RUNS.each(self._connection, keys)

    def runs(self, seqs: Collection[int]) -> list[Run]:
        """The runs of these tasks, without their values."""
        return [Run(*row) for row in sql.RUNS.rows(self._connection, seqs=_list(seqs))]

    def dedupes(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], Dedupe]:
        """The first tasks of those of these (kind, key) that there are."""
        # Keys are anything: with a null character in it, a string out of a JSON list would end there.
        pair = tuple_(dedupe.c.kind, dedupe.c.key)
        rows = (row for some in _split(keys) for row in self._connection.execute(select(dedupe).where(pair.in_(some))))
        return {(row[0], row[1]): Dedupe(*row) for row in rows if row[3] is None or damage.is_number(row[3])}

    def set_dedupes(self, dedupes: Sequence[Dedupe]) -> None:
        """Keep who is the first now."""
        sql.DROP_DEDUPES.each(self._connection, [one[:2] for one in dedupes])
        sql.ADD_DEDUPES.each(self._connection, [tuple(one) for one in dedupes])

    def remembered(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], ClaimMemory]:
        """What those of these claims (worker, claim_id) were answered that were."""
        rows = sql.REMEMBERED.rows(self._connection, pairs=_list(keys))
        return {(row[0], row[1]): _memory(*row) for row in rows}

    def remember(self, claims: Sequence[ClaimMemory]) -> None:
        """Keep what claims were answered."""
        sql.ADD_CLAIMS.each(self._connection, [(*one[:4], _encode(one.grants)) for one in claims])

    def forget_claims(self, *, before: float) -> None:
        """Drop what was answered before then."""
        sql.FORGET_CLAIMS(self._connection, before=before)

    def latest(self) -> float:
        """When a task last came in, or was claimed or put back, as far as that is remembered; or zero."""
        return max([row[0] for row in sql.LATEST.rows(self._connection) if damage.is_number(row[0])], default=0.0)

    def touch(self) -> None:
        """Write something that changes nothing."""
        sql.TOUCH(self._connection)

    def _standing(self, rows: Sequence[tuple[Any, ...]]) -> list[Trigger]:
        """Where tasks stand by their rows; those that are damaged end here and now."""
        found, damaged = damage.triggers(rows)
        if damaged:
            self.save(damaged)
            damage.log(damaged)
        return found


def _memory(worker: str, claim_id: str, granted_at: float, waited: float, grants: bytes) -> ClaimMemory:
    try:
        return ClaimMemory(worker, claim_id, granted_at, max(0.0, waited), _decode_grants(grants))
    except (ValueError, TypeError):  # damaged: nobody hears of these leases any more, and they run out
        return ClaimMemory(worker, claim_id, granted_at, 0.0, ())


def _values(one: Trigger) -> tuple[Any, ...]:
    """The columns of a trigger that change, in their order."""
    return (
        _NAMES[one.status],
        one.fence,
        one.attempt,
        one.crashes,
        one.failures,
        int(one.ordered),  # what is no exact int costs the driver more
        one.owner,
        one.token,
        one.next_trigger_at,
        one.reason,
        one.max_runtime,
        one.run_until,
    )


def _list(values: Iterable[Any]) -> str:
    return _encode(list(values)).decode()


def _split(keys: Collection[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    pairs = list(keys)
    return [pairs[at : at + _PAIRS] for at in range(0, len(pairs), _PAIRS)]
