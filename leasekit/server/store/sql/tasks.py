"""The tasks of an SQL database, and their states."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy import bindparam, func, select

from leasekit.server.store import Content, Dedupe, Entity, Limits, Trigger, damage
from leasekit.server.store.schema import dedupe, keyed, progress, task, trigger
from leasekit.server.store.sql.session import Reads, Writes
from leasekit.server.store.sql.statements import NOW, Insert, Statement, Update, is_one_of, is_one_pair_of
from leasekit.task import Status

_NAMES = {status: status.value for status in Status}
_NO_KEYS: Mapping[int, str] = {}
_astuple = msgspec.structs.astuple
DUE = trigger.c.next_trigger_at
LEASE_END = func.coalesce(trigger.c.lease_until, DUE, type_=sa.Double)
STATE = [LEASE_END if column is DUE else column for column in trigger.c if column is not trigger.c.lease_until]
"""The columns of a `Trigger`."""
# The id of `task`, by which rows are selected: the copy in `trigger` may be damaged.
_OF_ID = [task.c.id if column is trigger.c.id else column for column in STATE]
_BY_ID = select(*_OF_ID).join_from(trigger, task, task.c.seq == trigger.c.seq).where(is_one_of(task.c.id, "ids"))
BY_ID = Statement(_BY_ID)
# A dialect of a database with one writer leaves out the locks.
BY_ID_LOCKED = Statement(_BY_ID.order_by(trigger.c.seq).with_for_update(of=trigger, key_share=True))
BY_ID_UNLOCKED = Statement(_BY_ID.with_for_update(of=trigger, key_share=True, skip_locked=True))
KNOWN_IDS = Statement(select(task.c.id).where(is_one_of(task.c.id, "ids")))
BY_SEQ = Statement(
    select(*STATE).where(is_one_of(trigger.c.seq, "seqs")).order_by(trigger.c.seq).with_for_update(key_share=True)
)
ENTITIES = Statement(select(task).where(is_one_of(task.c.seq, "seqs")))
DIGESTS = Statement(select(task.c.seq, task.c.digest).where(is_one_of(task.c.seq, "seqs")))
CONTENTS = Statement(
    select(task.c.seq, task.c.payload, task.c.collection, task.c.traceparent, progress.c.value)
    .outerjoin_from(task, progress, progress.c.seq == task.c.seq)
    .where(is_one_of(task.c.seq, "seqs"))
)
SIZE = Statement(
    select(func.coalesce(func.sum(func.length(task.c.payload) + func.coalesce(func.length(progress.c.value), 0)), 0))
    .outerjoin_from(task, progress, progress.c.seq == task.c.seq)
    .where(is_one_of(task.c.seq, "seqs"))
)
LIMITS = Statement(
    select(
        task.c.seq, task.c.max_attempts, task.c.max_crashes, task.c.retry, task.c.expiry, task.c.enqueue_timeout
    ).where(is_one_of(task.c.seq, "seqs"))
)
LAST_SEQ = Statement(select(func.coalesce(func.max(task.c.seq), 0)))
ADD_TASKS = Insert(task)
ADD_TRIGGERS = Insert(trigger)
SAVE = Update(trigger.c.seq, first=6)
_AT = list(task.c).index(task.c.at)
SET_DUE_TIMES = Update(task.c.seq, first=_AT, last=_AT)
SET_PAYLOADS = Update(task.c.seq, first=list(task.c).index(task.c.digest))
MOVE = tuple(
    Statement(
        sa.update(table)
        .where(is_one_of(table.c.seq, "seqs"))
        .values(priority=bindparam("new_priority", type_=sa.Integer))
    )
    for table in (task, trigger, keyed)
)
END = Statement(
    sa.update(trigger)
    .where(is_one_of(trigger.c.seq, "seqs"))
    .values(
        status=bindparam("to_status"),
        cancel_requested=sa.false(),
        owner=sa.null(),
        token=sa.null(),
        next_trigger_at=sa.null(),
        lease_until=sa.null(),
        reason=sa.null(),
        ended_at=NOW,
    )
)
DEDUPES = Statement(select(dedupe).where(is_one_pair_of(dedupe.c.kind, dedupe.c.key, "pairs")))
DEDUPES_LOCKED = Statement(
    select(dedupe)
    .where(is_one_pair_of(dedupe.c.kind, dedupe.c.key, "pairs"))
    .order_by(dedupe.c.kind, dedupe.c.key)
    .with_for_update()
)
ADD_DEDUPES = Insert(dedupe)
DROP_DEDUPES = Statement(sa.delete(dedupe).where(is_one_pair_of(dedupe.c.kind, dedupe.c.key, "pairs")))
COLLECTIONS = Statement(
    select(task.c.seq, task.c.collection).where(is_one_of(task.c.seq, "seqs"), task.c.collection.is_not(None))
)
DUE_TIMES = Statement(select(task.c.seq, task.c.at).where(is_one_of(task.c.seq, "seqs")))
CREATION_TIMES = Statement(select(task.c.seq, task.c.created_at).where(is_one_of(task.c.seq, "seqs")))


class TaskView(Reads):
    """Reads of tasks and their states."""

    def triggers(self, ids: Collection[str]) -> dict[str, Trigger]:
        return {row.id: row for row in self._decoded(self._session.rows(BY_ID, ids=ids))}

    def entities(self, seqs: Collection[int]) -> dict[int, Entity]:
        return {row[0]: Entity(*row) for row in self._session.rows(ENTITIES, seqs=seqs)}

    def dedupes(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], Dedupe]:
        return _dedupes(self._session.rows(DEDUPES, pairs=keys))

    def due_times(self, seqs: Collection[int]) -> dict[int, float]:
        return self._times(DUE_TIMES, seqs)

    def creation_times(self, seqs: Collection[int]) -> dict[int, float]:
        return self._times(CREATION_TIMES, seqs)

    def _times(self, statement: Statement, seqs: Collection[int]) -> dict[int, float]:
        return {row[0]: row[1] for row in self._session.rows(statement, seqs=seqs) if damage.is_number(row[1])}


class TaskTx(Writes, TaskView):
    """Reads and writes of tasks and their states."""

    def add(
        self,
        entities: Sequence[Entity],
        triggers: Sequence[Trigger],
        keys: Mapping[int, str] = _NO_KEYS,
        routes: Mapping[int, str] = _NO_KEYS,
    ) -> None:
        self._session.insert(ADD_TASKS, [_astuple(entity) for entity in entities])
        rows = [
            (row.seq, row.id, row.kind, row.priority, row.claim_timeout, row.heartbeat_timeout, *_values(row))
            for row in self._keyed.add(triggers, keys, routes)
        ]
        self._session.insert(ADD_TRIGGERS, rows)

    def triggers(self, ids: Collection[str]) -> dict[str, Trigger]:
        return {row.id: row for row in self._decoded(self._session.rows(BY_ID_LOCKED, ids=ids))}

    def triggers_of(self, seqs: Collection[int]) -> dict[int, Trigger]:
        return {row.seq: row for row in self._decoded(self._session.rows(BY_SEQ, seqs=seqs))}

    def digests(self, seqs: Collection[int]) -> dict[int, bytes]:
        return {row[0]: row[1] for row in self._session.rows(DIGESTS, seqs=seqs)}

    def contents(self, seqs: Collection[int]) -> dict[int, Content]:
        return {row[0]: Content(*row[1:]) for row in self._session.rows(CONTENTS, seqs=seqs)}

    def content_size(self, seqs: Collection[int]) -> int:
        return int(self._session.rows(SIZE, seqs=seqs)[0][0])

    def limits(self, seqs: Collection[int]) -> dict[int, Limits]:
        return {row[0]: Limits(*row[1:]) for row in self._session.rows(LIMITS, seqs=seqs)}

    def save(self, triggers: Sequence[Trigger]) -> None:
        self._session.update(SAVE, [(*_values(row), row.seq) for row in self._queued(triggers)])

    def _queued(self, triggers: Sequence[Trigger]) -> Sequence[Trigger]:
        return self._keyed.save(triggers) if self._has_keys else triggers

    def set_due_times(self, due_at: Mapping[int, float]) -> None:
        self._session.update(SET_DUE_TIMES, [(at, seq) for seq, at in due_at.items()])

    def replace_payloads(self, payloads: Mapping[int, tuple[bytes, bytes]]) -> None:
        self._session.update(SET_PAYLOADS, [(*values, seq) for seq, values in payloads.items()])

    def move(self, seqs: Collection[int], *, priority: int) -> None:
        if not seqs:
            return
        if self._has_keys:
            self._keyed.move(seqs, priority)
        for statement in MOVE if self._has_keys else MOVE[:-1]:
            self._session.run(statement, seqs=seqs, new_priority=priority)

    def end(self, seqs: Collection[int], status: Status, *, now: float) -> None:
        if seqs:
            self._session.run(END, seqs=seqs, to_status=status.value, now=now)
            self._keyed.end(seqs)

    def dedupes(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], Dedupe]:
        rows = self._session.rows(DEDUPES_LOCKED, pairs=keys)
        self._firsts.update((row[0], row[1]) for row in rows)
        return _dedupes(rows)

    def set_dedupes(self, dedupes: Sequence[Dedupe]) -> None:
        # Only what was seen is replaced. What another writer has added since then makes the insert fail.
        self._session.run(DROP_DEDUPES, pairs={first[:2] for first in dedupes} & self._firsts)
        self._session.insert(ADD_DEDUPES, [tuple(first) for first in dedupes])
        self._firsts.update(first[:2] for first in dedupes)

    def collections(self, seqs: Collection[int]) -> dict[int, str]:
        return {row[0]: row[1] for row in self._session.rows(COLLECTIONS, seqs=seqs) if isinstance(row[1], str)}


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
        None if row.owner is None else row.next_trigger_at,
    )


def _dedupes(rows: Sequence[tuple[Any, ...]]) -> dict[tuple[str, str], Dedupe]:
    return {(row[0], row[1]): Dedupe(*row) for row in rows if row[3] is None or damage.is_number(row[3])}
