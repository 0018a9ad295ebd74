"""Every statement that a transaction runs, in SQLAlchemy Core, compiled once.

Statements run on the driver's own cursor, and rows are plain tuples, so that both cost no more than the driver does;
errors are the driver's too. Only `_listed` and `_is_one_pair_of`, which pass a list of values as one parameter, depend
on the SQL dialect.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy import bindparam, func, literal, select, tuple_
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine.interfaces import DBAPICursor
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.selectable import TableValuedAlias

from leasekit.named import PREFIXES
from leasekit.server.store.schema import (
    claim,
    dedupe,
    is_leased,
    is_waiting,
    progress,
    run,
    store,
    task,
    trigger,
    version,
)

DIALECT = sqlite.dialect()

INCREMENTAL = 2
"""The `auto_vacuum` of a file that can be shortened step by step."""
_SPREAD = 100  # steps over which the new ends of leases are spread
_TOGETHER = 43  # rows: every SQLite takes 999 values in one statement, and the widest table has 23 columns


class Statement:
    """A statement that is compiled once."""

    def __init__(self, statement: sa.ClauseElement) -> None:
        compiled = cast("SQLCompiler", statement.compile(dialect=DIALECT))
        self.sql = str(compiled)
        self.names = tuple(compiled.positiontup or ())
        self._values = compiled.params  # values written in the statement itself; None for the others

    def __call__(self, connection: sa.Connection, **values: Any) -> DBAPICursor:
        cursor = _cursor(connection)
        cursor.execute(self.sql, self.bound(values))
        return cursor

    def bound(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        values = {**self._values, **values}
        return tuple([values[name] for name in self.names])

    def rows(self, connection: sa.Connection, **values: Any) -> list[tuple[Any, ...]]:
        try:
            return cast("list[tuple[Any, ...]]", self(connection, **values).fetchall())
        except sqlite3.OperationalError as error:
            driver = connection.connection.driver_connection
            if "UTF-8" not in str(error) or driver is None or driver.text_factory is text_or_bytes:
                raise
            # A damaged text must not fail the other rows. This factory costs more: it is used once there is damage.
            driver.text_factory = text_or_bytes
            return self.rows(connection, **values)

    def each(self, connection: sa.Connection, rows: Sequence[tuple[Any, ...]]) -> None:
        """Run the statement for each tuple of values, which are in the order of its parameters."""
        if rows:
            _cursor(connection).executemany(self.sql, rows)


class Insert(Statement):
    """An insert that writes `_TOGETHER` rows by one statement, which costs less."""

    def __init__(self, table: sa.Table) -> None:
        super().__init__(sa.insert(table))
        row = self.sql.partition(" VALUES ")[2]
        self._together = ", ".join([self.sql] + [row] * (_TOGETHER - 1))

    def each(self, connection: sa.Connection, rows: Sequence[tuple[Any, ...]]) -> None:
        rest = len(rows) - len(rows) % _TOGETHER
        for at in range(0, rest, _TOGETHER):
            _cursor(connection).execute(self._together, list(chain.from_iterable(rows[at : at + _TOGETHER])))
        super().each(connection, rows[rest:])


def text_or_bytes(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _cursor(connection: sa.Connection) -> DBAPICursor:
    # The driver's own cursor: SQLAlchemy's result would cost more than most of these statements.
    return connection.connection.cursor()


def driver(connection: sa.Connection) -> sqlite3.Connection:
    connected = connection.connection.driver_connection
    assert isinstance(connected, sqlite3.Connection)  # noqa: S101 - there is no other
    return connected


def _listed(parameter: str) -> TableValuedAlias:
    """Return the values of the JSON list in this bound parameter as rows, by a function of SQLite."""
    return func.json_each(bindparam(parameter, type_=sa.Text)).table_valued(sa.column("value"), name=parameter)


def _is_one_of(value: sa.ColumnElement[Any], parameter: str) -> sa.ColumnElement[bool]:
    return value.in_(select(_listed(parameter).c.value))


def _is_one_pair_of(
    first: sa.ColumnElement[Any], second: sa.ColumnElement[Any], parameter: str
) -> sa.ColumnElement[bool]:
    pairs = _listed(parameter)
    return tuple_(first, second).in_(
        select(func.json_extract(pairs.c.value, literal("$[0]")), func.json_extract(pairs.c.value, literal("$[1]")))
    )


_DUE = trigger.c.next_trigger_at
_NOW = bindparam("now", type_=sa.Double)
_MOST = bindparam("most", type_=sa.Integer)

# The id of `task`, by which rows are selected: the copy in `trigger` may be damaged.
_TRIGGER = [task.c.id if field.name == "id" else field for field in trigger.c]
BY_ID = Statement(
    select(*_TRIGGER).select_from(trigger).join(task, task.c.seq == trigger.c.seq).where(_is_one_of(task.c.id, "ids"))
)
BY_SEQ = Statement(select(trigger).where(_is_one_of(trigger.c.seq, "seqs")))
ENTITIES = Statement(select(task).where(_is_one_of(task.c.seq, "seqs")))
DIGESTS = Statement(select(task.c.seq, task.c.digest).where(_is_one_of(task.c.seq, "seqs")))
CONTENTS = Statement(
    select(task.c.seq, task.c.payload, task.c.collection, task.c.traceparent, progress.c.value)
    .outerjoin_from(task, progress, progress.c.seq == task.c.seq)
    .where(_is_one_of(task.c.seq, "seqs"))
)
SIZE = Statement(
    select(func.coalesce(func.sum(func.length(task.c.payload) + func.coalesce(func.length(progress.c.value), 0)), 0))
    .outerjoin_from(task, progress, progress.c.seq == task.c.seq)
    .where(_is_one_of(task.c.seq, "seqs"))
)
LIMITS = Statement(
    select(task.c.seq, task.c.max_attempts, task.c.max_crashes, task.c.retry, task.c.expiry).where(
        _is_one_of(task.c.seq, "seqs")
    )
)
PROGRESS = Statement(select(progress).where(_is_one_of(progress.c.seq, "seqs")))
RUNS = Statement(
    select(*(sa.null() if c.name in ("result", "error") else c for c in run.c)).where(_is_one_of(run.c.seq, "seqs"))
)
LAST_RUNS = Statement(select(run).where(run.c.seq == bindparam("seq")).order_by(run.c.fence.desc()).limit(_MOST))
REMEMBERED = Statement(select(claim).where(_is_one_pair_of(claim.c.worker, claim.c.claim_id, "pairs")))
LAST_SEQ = Statement(select(func.coalesce(func.max(task.c.seq), 0)))
LATEST = Statement(
    sa.union_all(
        select(func.coalesce(func.max(claim.c.granted_at), 0.0)),
        select(task.c.created_at).where(task.c.seq == select(func.max(task.c.seq)).scalar_subquery()),
        select(func.coalesce(func.max(run.c.at), 0.0))
        .join_from(trigger, run, run.c.seq == trigger.c.seq)
        .where(is_waiting()),
    )
)
READY = Statement(
    select(trigger)
    .where(
        is_waiting(),
        trigger.c.kind == bindparam("kind"),
        trigger.c.priority == bindparam("priority"),
        _NOW >= _DUE,
        tuple_(_DUE, trigger.c.seq) > tuple_(bindparam("after_due", type_=sa.Double), bindparam("after_seq")),
    )
    .order_by(_DUE, trigger.c.seq)
    .limit(_MOST)
)
_IN_LANE = (is_waiting(), trigger.c.kind == bindparam("kind"), trigger.c.priority == bindparam("priority"))
COUNT_DUE, COUNT_LATER = (
    Statement(select(func.count()).select_from(select(sa.literal(1)).where(*_IN_LANE, when).limit(_MOST).subquery()))
    for when in (_NOW >= _DUE, _NOW < _DUE)
)
EXPIRED = Statement(select(trigger).where(is_leased(), _NOW >= _DUE).order_by(_DUE, trigger.c.seq).limit(_MOST))
FREE_NAMES = Statement(
    select(trigger.c.seq)
    .where(
        is_waiting(),
        # `;` is the character after the `:` with which a prefix ends.
        sa.or_(*(sa.and_(trigger.c.kind >= prefix, trigger.c.kind < f"{prefix[:-1]};") for prefix in PREFIXES)),
        _NOW >= _DUE,
    )
    .limit(_MOST)
)
COMMITS = Statement(select(store.c.commits))
ANCHOR = Statement(select(store.c.anchor))
COUNTS = Statement(select(trigger.c.kind, trigger.c.status, func.count()).group_by(trigger.c.kind, trigger.c.status))
HOLDERS = Statement(
    select(trigger.c.owner, func.count(), func.min(trigger.c.heartbeat_timeout))
    .where(is_leased())
    .group_by(trigger.c.owner)
)


def _lanes() -> sa.Select[Any, Any, Any]:
    kinds, priorities = _listed("kinds"), _listed("priorities")
    first = (
        select(_DUE)
        .where(is_waiting(), trigger.c.kind == kinds.c.value, trigger.c.priority == priorities.c.value)
        .order_by(_DUE)
        .limit(literal(1))
        .scalar_subquery()
    )
    return select(priorities.c.value, kinds.c.value, sa.type_coerce(first, sa.Double)).select_from(
        priorities.join(kinds, literal(value=True))
    )


LANES = Statement(_lanes())


def _greater(first: sa.ColumnElement[float], second: sa.ColumnElement[float]) -> sa.ColumnElement[float]:
    return sa.case((first > second, first), else_=second)


_OF_SEQ = bindparam("of_seq", type_=sa.Integer)
_SHIFT = bindparam("shift", type_=sa.Double)

ADD_TASKS = Insert(task)
ADD_TRIGGERS = Insert(trigger)
SAVE = Statement(
    sa.update(trigger)
    .where(trigger.c.seq == _OF_SEQ)
    .values({name: bindparam(f"to_{name}") for name in trigger.c.keys()[6:]})
)
RENEW = Statement(
    sa.update(trigger)
    .where(_is_one_of(trigger.c.seq, "seqs"))
    .values(
        status=bindparam("to_status"),
        next_trigger_at=_greater(_DUE, _NOW + trigger.c.heartbeat_timeout),
        was_extended=sa.false(),
        started_at=func.coalesce(trigger.c.started_at, bindparam("begun_at", type_=sa.Double)),
        heartbeat_at=bindparam("at", type_=sa.Double),
    )
)
END = Statement(
    sa.update(trigger)
    .where(_is_one_of(trigger.c.seq, "seqs"))
    .values(
        status=bindparam("to_status"),
        cancel_requested=sa.false(),
        owner=sa.null(),
        token=sa.null(),
        next_trigger_at=sa.null(),
        reason=sa.null(),
        ended_at=_NOW,
    )
)
_OF_TASKS = select(task.c.kind, task.c.dedupe_key, task.c.id).where(_is_one_of(task.c.seq, "seqs"))
REMOVE = tuple(  # in this order: the other rows of a task refer to that of `task`
    Statement(statement)
    for statement in (
        sa.delete(dedupe).where(tuple_(dedupe.c.kind, dedupe.c.key, dedupe.c.id).in_(_OF_TASKS)),
        *(sa.delete(table).where(_is_one_of(table.c.seq, "seqs")) for table in (run, progress, trigger, task)),
    )
)
PROGRESS_MARKS = Statement(
    select(progress.c.seq, progress.c.fence, progress.c.number).where(_is_one_of(progress.c.seq, "seqs"))
)
ADD_PROGRESS = Insert(progress)
DROP_PROGRESS = Statement(sa.delete(progress).where(progress.c.seq == _OF_SEQ))
ADD_RUNS = Insert(run)
DROP_RUNS = Statement(sa.delete(run).where(run.c.seq == _OF_SEQ, run.c.fence == bindparam("of_fence")))
ADD_CLAIMS = Insert(claim)
FORGET_CLAIMS = Statement(
    sa.delete(claim).where(
        tuple_(claim.c.worker, claim.c.claim_id).in_(
            select(claim.c.worker, claim.c.claim_id)
            .where(claim.c.granted_at < bindparam("before", type_=sa.Double))
            .order_by(claim.c.granted_at)
            .limit(_MOST)
        )
    )
)
ADD_DEDUPES = Insert(dedupe)
DROP_DEDUPES = Statement(
    sa.delete(dedupe).where(dedupe.c.kind == bindparam("of_kind"), dedupe.c.key == bindparam("of_key"))
)
ADD_STORE = Insert(store)
COUNT_COMMIT = Statement(
    sa.update(store).values(
        commits=bindparam("commits"),
        start=bindparam("start"),
        anchor=func.coalesce(bindparam("new_anchor", type_=sa.Text), store.c.anchor),
    )
)
ADD_VERSION = Insert(version)
TOUCH = Statement(sa.update(version).values(version_num=version.c.version_num))


def _restart_leases() -> sa.Update:
    ttl = _greater(trigger.c.claim_timeout, trigger.c.heartbeat_timeout)
    anew = _NOW + ttl * (1 + (trigger.c.seq % _SPREAD) / (10.0 * _SPREAD))
    kept = _DUE + _SHIFT
    # Without a shift (NULL), every lease begins anew. No end is later than `anew`, unless its row is damaged.
    until = sa.case((sa.and_(trigger.c.was_extended, kept < anew), kept), else_=anew)
    # An end that is over stays; without a shift the other ends become NULL.
    run_until = sa.case((trigger.c.run_until <= 0, trigger.c.run_until), else_=trigger.c.run_until + _SHIFT)
    values = {"next_trigger_at": until, "run_until": run_until, "was_extended": sa.true()}
    return sa.update(trigger).where(is_leased()).values(values)


RESTART_LEASES = Statement(_restart_leases())
