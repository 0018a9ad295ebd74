"""Every statement that a transaction runs, in SQLAlchemy Core, compiled once for the dialect that runs it.

Statements run on the driver's own cursor, and rows are plain tuples, so that both cost no more than the driver does.
Only `_Listed`, `_OneOf` and `_PairOf`, which pass a list of values as one parameter, are written anew for each dialect.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import sqlalchemy as sa
from sqlalchemy import bindparam, func, literal, select, tuple_
from sqlalchemy.engine.interfaces import Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.selectable import TableValuedAlias

from leasekit.named import PREFIXES
from leasekit.server.store.routes import AFTER_BREAK
from leasekit.server.store.schema import (
    QUEUED_AT,
    access_token,
    audit,
    bucket,
    cancelled_chain,
    chain,
    claim,
    deadline,
    dedupe,
    gate,
    is_idle,
    is_joining,
    is_leased,
    is_of_key,
    is_queued,
    is_waiting,
    keyed,
    kind,
    minute,
    parked,
    periodic,
    progress,
    run,
    share,
    store,
    task,
    task_tag,
    trigger,
    version,
    wait,
    wake,
)

_SPREAD = 100  # steps over which the new ends of leases are spread


class Compiled(NamedTuple):
    """A statement as text in one dialect."""

    sql: str
    names: tuple[str, ...]  # the parameters in their order, for a dialect that numbers them
    values: Mapping[str, Any]  # those written in the statement itself; None for the others
    lists: frozenset[str]  # the parameters that are lists

    def bound(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.values, **values}


class Statement:
    """A statement, which each dialect compiles once."""

    def __init__(self, expression: sa.ClauseElement) -> None:
        self.expression = expression
        self._compiled: dict[tuple[str, str | None], Compiled] = {}

    def compiled(self, dialect: Dialect, *, schema: str | None = None) -> Compiled:
        known = self._compiled.get((dialect.name, schema))
        if known is None:
            self._compiled[dialect.name, schema] = known = _compiled(self.expression, dialect, schema)
        return known


class Insert:
    """An insert of many rows into a table; the values are in the order of its columns."""

    def __init__(self, table: sa.Table) -> None:
        self.table = table


class Update:
    """An update of many rows of a table. The values are those of its columns from `first` to `last`, then the key."""

    def __init__(self, key: sa.Column[Any], *, first: int, last: int | None = None) -> None:
        self.table = key.table
        self.key = key
        self.columns = list(key.table.c)[first : None if last is None else last + 1]


def _compiled(expression: sa.ClauseElement, dialect: Dialect, schema: str | None) -> Compiled:
    places: dict[str, Any] = {"schema_translate_map": {None: schema}, "render_schema_translate": True} if schema else {}
    compiled = cast("SQLCompiler", expression.compile(dialect=dialect, **places))
    lists = frozenset(name for name, bind in compiled.binds.items() if isinstance(bind.type, sa.ARRAY))
    return Compiled(str(compiled), tuple(compiled.positiontup or ()), compiled.params, lists)


class _Listed(FunctionElement[Any]):
    """The values of a list as rows of one column, `value`."""

    inherit_cache = True


class _Condition(FunctionElement[bool]):
    type = sa.Boolean()
    inherit_cache = True

    def self_group(self, against: object = None) -> "_Condition":
        return self  # in a WHERE for SQLite, SQLAlchemy would compare it with 1: no index is used for that


class _OneOf(_Condition):
    """Whether a value is in a list."""


class _PairOf(_Condition):
    """Whether two values are a pair in a list of pairs."""


@compiles(_Listed, "sqlite")
def _(element: _Listed, compiler: SQLCompiler, **options: Any) -> str:
    return f"(SELECT value FROM json_each({compiler.process(element.clauses, **options)}))"


@compiles(_Listed, "postgresql")
def _(element: _Listed, compiler: SQLCompiler, **options: Any) -> str:
    return f"(SELECT unnest({compiler.process(element.clauses, **options)}) AS value)"


@compiles(_OneOf, "sqlite")
def _(element: _OneOf, compiler: SQLCompiler, **options: Any) -> str:
    value, listed = (compiler.process(part, **options) for part in element.clauses)
    return f"{value} IN (SELECT value FROM json_each({listed}))"


@compiles(_OneOf, "postgresql")
def _(element: _OneOf, compiler: SQLCompiler, **options: Any) -> str:
    value, listed = (compiler.process(part, **options) for part in element.clauses)
    return f"{value} = ANY ({listed})"


@compiles(_PairOf, "sqlite")
def _(element: _PairOf, compiler: SQLCompiler, **options: Any) -> str:
    first, second, pairs = (compiler.process(part, **options) for part in element.clauses)
    values = "json_extract(value, '$[0]'), json_extract(value, '$[1]')"
    return f"({first}, {second}) IN (SELECT {values} FROM json_each({pairs}))"


@compiles(_PairOf, "postgresql")
def _(element: _PairOf, compiler: SQLCompiler, **options: Any) -> str:
    first, second, pairs = element.clauses
    types = [part.type.compile(dialect=compiler.dialect) for part in (first, second)]
    values = ", ".join(f"CAST(pair ->> {at} AS {of})" for at, of in enumerate(types))
    names = ", ".join(compiler.process(part, **options) for part in (first, second))
    listed = compiler.process(pairs, **options)
    return f"({names}) IN (SELECT {values} FROM jsonb_array_elements(to_jsonb({listed})) AS pair)"


def _listed(parameter: str, of: Any) -> TableValuedAlias:
    return _Listed(bindparam(parameter, type_=sa.ARRAY(of))).table_valued(sa.column("value"), name=parameter)


def _is_one_of(value: sa.ColumnElement[Any], parameter: str) -> sa.ColumnElement[bool]:
    return _OneOf(value, bindparam(parameter, type_=sa.ARRAY(_type(value))))


def is_among(value: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """Return whether a value is in the parameter `among`, a list."""
    return _is_one_of(value, "among")


def _is_one_pair_of(
    first: sa.ColumnElement[Any], second: sa.ColumnElement[Any], parameter: str
) -> sa.ColumnElement[bool]:
    return _PairOf(first, second, bindparam(parameter, type_=sa.ARRAY(_type(first), dimensions=2)))


def _type(value: sa.ColumnElement[Any]) -> Any:
    return sa.BigInteger() if isinstance(value.type, sa.Integer) else sa.Text()


_DUE = trigger.c.next_trigger_at
_END = func.coalesce(trigger.c.lease_until, _DUE, type_=sa.Double)
_NOW = bindparam("now", type_=sa.Double)
_MOMENT = bindparam("at", type_=sa.Double)
_MOST = bindparam("most", type_=sa.Integer)

STATE = [_END if column is _DUE else column for column in trigger.c if column is not trigger.c.lease_until]
"""The columns of a `Trigger`."""
# The id of `task`, by which rows are selected: the copy in `trigger` may be damaged.
_OF_ID = [task.c.id if column is trigger.c.id else column for column in STATE]
_BY_ID = select(*_OF_ID).join_from(trigger, task, task.c.seq == trigger.c.seq).where(_is_one_of(task.c.id, "ids"))
BY_ID = Statement(_BY_ID)
# A dialect of a database with one writer leaves out the locks.
BY_ID_LOCKED = Statement(_BY_ID.order_by(trigger.c.seq).with_for_update(of=trigger, key_share=True))
BY_ID_UNLOCKED = Statement(_BY_ID.with_for_update(of=trigger, key_share=True, skip_locked=True))
KNOWN_IDS = Statement(select(task.c.id).where(_is_one_of(task.c.id, "ids")))
BY_SEQ = Statement(
    select(*STATE).where(_is_one_of(trigger.c.seq, "seqs")).order_by(trigger.c.seq).with_for_update(key_share=True)
)
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
    select(
        task.c.seq, task.c.max_attempts, task.c.max_crashes, task.c.retry, task.c.expiry, task.c.enqueue_timeout
    ).where(_is_one_of(task.c.seq, "seqs"))
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
    select(*STATE)
    .where(
        is_waiting(),
        trigger.c.kind == bindparam("kind"),
        trigger.c.priority == bindparam("priority"),
        _NOW >= _DUE,
        tuple_(_DUE, trigger.c.seq) > tuple_(bindparam("after_due", type_=sa.Double), bindparam("after_seq")),
    )
    .order_by(_DUE, trigger.c.seq)
    .limit(_MOST)
    .with_for_update(skip_locked=True, key_share=True)
)
_IN_LANE = (is_waiting(), trigger.c.kind == bindparam("kind"), trigger.c.priority == bindparam("priority"))
FOLLOWING = Statement(select(func.min(trigger.c.seq)).where(trigger.c.seq > bindparam("after")))
PRECEDING = Statement(select(func.max(trigger.c.seq)).where(trigger.c.seq < bindparam("after")))
COUNT_DUE, COUNT_LATER = (
    Statement(select(func.count()).select_from(select(sa.literal(1)).where(*_IN_LANE, *when).limit(_MOST).subquery()))
    for when in ((_NOW >= _DUE,), (_NOW < _DUE, _DUE < QUEUED_AT))
)
EXPIRED = Statement(
    select(*STATE)
    .where(is_leased(), _NOW >= _DUE, _NOW >= _END)
    .order_by(_DUE, trigger.c.seq)
    .limit(_MOST)
    .with_for_update(skip_locked=True, key_share=True)
)
_RENEWED = (
    select(trigger.c.seq)
    .where(is_leased(), _NOW >= _DUE, trigger.c.lease_until > _DUE)
    .limit(_MOST)
    .with_for_update(skip_locked=True, key_share=True)
)
FOLLOW = Statement(
    sa.update(trigger)
    .where(trigger.c.seq.in_(_RENEWED.scalar_subquery()))
    .values(next_trigger_at=trigger.c.lease_until)
)
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
_ENDED_AT = trigger.c.ended_at
_ENDED_THEN = (
    bindparam("until", type_=sa.Double) >= _ENDED_AT,
    tuple_(_ENDED_AT, trigger.c.seq) > tuple_(bindparam("after_at", type_=sa.Double), bindparam("after_seq")),
)
_BY_END = (_ENDED_AT, trigger.c.seq)
END_FURTHER = Statement(select(_ENDED_AT).where(*_ENDED_THEN).order_by(*_BY_END).limit(literal(1)).offset(_MOST))
ENDED_OF, ENDED_OF_OTHERS = (
    Statement(select(*_BY_END).where(*_ENDED_THEN, is_of).order_by(*_BY_END).limit(_MOST))
    for is_of in (_is_one_of(trigger.c.kind, "kinds"), sa.not_(_is_one_of(trigger.c.kind, "kinds")))
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
    kinds, priorities = _listed("kinds", sa.Text()), _listed("priorities", sa.Integer())
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


def _keyed_lanes() -> sa.Select[Any, Any, Any]:
    kinds, priorities = _listed("kinds", sa.Text()), _listed("priorities", sa.Integer())
    of_lane = (share.c.kind == kinds.c.value, share.c.priority == priorities.c.value)
    firsts = (
        select(share.c.due_at).where(*of_lane, state).order_by(order).limit(literal(1)).scalar_subquery()
        for state, order in ((share.c.active, share.c.taken), (is_joining(), share.c.due_at))
    )
    first = func.coalesce(*firsts, type_=sa.Double)
    of_lanes = select(priorities.c.value, kinds.c.value, first)
    of_lanes = of_lanes.select_from(priorities.join(kinds, literal(value=True)))
    return of_lanes.where(sa.exists(select(literal(1)).select_from(share)))  # no lane is looked at if there is none


_UNKEYED_LANES = _lanes().add_columns(sa.literal_column("0"))
LANES = Statement(_UNKEYED_LANES)
ALL_LANES = Statement(sa.union_all(_UNKEYED_LANES, _keyed_lanes().add_columns(sa.literal_column("1"))))
"""The lanes of tasks without keys, of which `LANES` are all, and those of tasks with keys."""
_OF_LANE = (share.c.kind == bindparam("kind"), share.c.priority == bindparam("priority"))
_SHARE = (share.c.taken, share.c.key)
ACTIVE_SHARES = Statement(
    select(*_SHARE)
    .where(
        *_OF_LANE,
        share.c.active,
        tuple_(*_SHARE) > tuple_(bindparam("after_taken", type_=sa.Double), bindparam("after_key", type_=sa.Text)),
    )
    .order_by(*_SHARE)
    .limit(_MOST)
)
JOINING_SHARES = Statement(
    select(*_SHARE).where(*_OF_LANE, is_joining(), share.c.due_at <= _NOW).order_by(share.c.due_at).limit(_MOST)
)
COUNT_ACTIVE, COUNT_JOINING = (
    Statement(select(func.count()).select_from(select(sa.literal(1)).where(*_OF_LANE, *which).limit(_MOST).subquery()))
    for which in ((share.c.active,), (is_joining(), share.c.due_at <= _NOW))
)
SHARES = Statement(select(*_SHARE).where(*_OF_LANE, _is_one_of(share.c.key, "keys")))
KEYED = Statement(select(keyed).where(_is_one_of(keyed.c.seq, "seqs")))
_IN_QUEUE = (keyed.c.kind == bindparam("kind"), keyed.c.priority == bindparam("priority"), is_queued())
QUEUED = Statement(
    select(*(keyed.c.due_at if column is _END else column for column in STATE))
    .join_from(keyed, trigger, trigger.c.seq == keyed.c.seq)
    .where(
        *_IN_QUEUE,
        keyed.c.key == bindparam("key", type_=sa.Text),
        keyed.c.due_at <= _NOW,
        tuple_(keyed.c.due_at, keyed.c.seq)
        > tuple_(bindparam("after_due", type_=sa.Double), bindparam("after_seq", type_=sa.BigInteger)),
        is_waiting(),
        _DUE == QUEUED_AT,  # else another version of leasekit has changed the task
    )
    .order_by(keyed.c.due_at, keyed.c.seq)
    .limit(_MOST)
    .with_for_update(of=trigger, skip_locked=True, key_share=True)
)
_SOME_QUEUED = select(keyed.c.due_at).where(*_IN_QUEUE).limit(_MOST).subquery()
COUNT_QUEUED = Statement(
    select(func.count(), func.coalesce(func.sum(sa.case((_SOME_QUEUED.c.due_at <= _NOW, 1), else_=0)), 0))
)
ADD_KEYED = Insert(keyed)
SAVE_KEYED = Update(keyed.c.seq, first=4)
DROP_KEYED = Statement(sa.delete(keyed).where(_is_one_of(keyed.c.seq, "seqs")))
_RIVAL = share.alias()
_FORGOTTEN = (
    select(*share.primary_key)
    .where(
        is_idle(),
        share.c.taken
        <= func.coalesce(
            select(func.min(_RIVAL.c.taken))
            .where(_RIVAL.c.kind == share.c.kind, _RIVAL.c.priority == share.c.priority, _RIVAL.c.active)
            .scalar_subquery(),
            share.c.taken,
        ),
    )
    .order_by(share.c.kind, share.c.priority, share.c.taken)  # so that the index of idle keys is read
    .limit(_MOST)
    .with_for_update(skip_locked=True)
)
FORGET_SHARES = Statement(sa.delete(share).where(tuple_(*share.primary_key).in_(_FORGOTTEN)))
"""Delete keys without tasks that owe nothing, or compete with no other key."""
_PAGE = (
    select(keyed)
    .where(keyed.c.seq > bindparam("after", type_=sa.BigInteger))
    .order_by(keyed.c.seq)
    .limit(_MOST)
    .subquery()
)
_IN_ORDER = func.coalesce(sa.and_(trigger.c.owner.is_(None), _DUE == QUEUED_AT), sa.false())
LOST = Statement(
    select(_PAGE.c.seq, _PAGE.c.kind, _PAGE.c.priority, _PAGE.c.key, _IN_ORDER)
    .join_from(_PAGE, trigger, trigger.c.seq == _PAGE.c.seq, isouter=True)
    .join(
        share,
        sa.and_(*(share.c[name] == _PAGE.c[name] for name in ("kind", "priority", "key"))),
        isouter=True,
    )
    .where(_PAGE.c.due_at.is_not(None), sa.or_(share.c.due_at.is_(None), sa.not_(_IN_ORDER)))
)
"""Of a page of tasks with keys, those that wait and are in no share, or of which only `keyed` says that they wait."""
END_OF_PAGE = Statement(select(func.max(_PAGE.c.seq)))


def _greater(first: sa.ColumnElement[float], second: sa.ColumnElement[float]) -> sa.ColumnElement[float]:
    return sa.case((first > second, first), else_=second)


_SHIFT = bindparam("shift", type_=sa.Double)

ADD_TASKS = Insert(task)
ADD_TRIGGERS = Insert(trigger)
SAVE = Update(trigger.c.seq, first=6)
_AT = list(task.c).index(task.c.at)
SET_DUE_TIMES = Update(task.c.seq, first=_AT, last=_AT)
SET_PAYLOADS = Update(task.c.seq, first=list(task.c).index(task.c.digest))
MOVE = tuple(
    Statement(
        sa.update(table)
        .where(_is_one_of(table.c.seq, "seqs"))
        .values(priority=bindparam("new_priority", type_=sa.Integer))
    )
    for table in (task, trigger, keyed)
)
_UNTIL = _greater(_END, _NOW + trigger.c.heartbeat_timeout)
_RENEWAL = (
    sa.update(trigger)
    .where(_is_one_of(trigger.c.seq, "seqs"))
    .values(
        status=bindparam("to_status"),
        lease_until=_UNTIL,
        was_extended=sa.false(),
        started_at=func.coalesce(trigger.c.started_at, bindparam("begun_at", type_=sa.Double)),
        heartbeat_at=_MOMENT,
    )
)
RENEW = Statement(_RENEWAL)
RENEW_SORTED = Statement(_RENEWAL.values(next_trigger_at=_UNTIL))
END = Statement(
    sa.update(trigger)
    .where(_is_one_of(trigger.c.seq, "seqs"))
    .values(
        status=bindparam("to_status"),
        cancel_requested=sa.false(),
        owner=sa.null(),
        token=sa.null(),
        next_trigger_at=sa.null(),
        lease_until=sa.null(),
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
DROP_PROGRESS = Statement(sa.delete(progress).where(_is_one_of(progress.c.seq, "seqs")))
ADD_RUNS = Insert(run)
DROP_RUNS = Statement(sa.delete(run).where(_is_one_pair_of(run.c.seq, run.c.fence, "pairs")))
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
DEDUPES = Statement(select(dedupe).where(_is_one_pair_of(dedupe.c.kind, dedupe.c.key, "pairs")))
DEDUPES_LOCKED = Statement(
    select(dedupe)
    .where(_is_one_pair_of(dedupe.c.kind, dedupe.c.key, "pairs"))
    .order_by(dedupe.c.kind, dedupe.c.key)
    .with_for_update()
)
ADD_DEDUPES = Insert(dedupe)
DROP_DEDUPES = Statement(sa.delete(dedupe).where(_is_one_pair_of(dedupe.c.kind, dedupe.c.key, "pairs")))
KINDS = Statement(select(kind).where(kind.c.change > bindparam("after", type_=sa.BigInteger)).order_by(kind.c.name))
KIND_CHANGE = Statement(select(store.c.kind_change))
COUNT_KIND_CHANGE = Statement(sa.update(store).values(kind_change=store.c.kind_change + 1))
DROP_KIND = Statement(sa.delete(kind).where(kind.c.name == bindparam("kind_name", type_=sa.Text)))
ADD_KIND = Insert(kind)
NOTE_KIND = Statement(
    sa.update(kind)
    .where(kind.c.name == bindparam("of_name", type_=sa.Text), kind.c.digests == bindparam("of_digests", type_=sa.Text))
    .values(declared_at=bindparam("at", type_=sa.Double))
)
GATES = Statement(select(gate).order_by(gate.c.scope, gate.c.name))
ADD_GATE = Insert(gate)
DROP_GATE = Statement(
    sa.delete(gate).where(
        gate.c.scope == bindparam("of_scope", type_=sa.Text), gate.c.name == bindparam("of_name", type_=sa.Text)
    )
)
COLLECTIONS = Statement(
    select(task.c.seq, task.c.collection).where(_is_one_of(task.c.seq, "seqs"), task.c.collection.is_not(None))
)
PARKED = Statement(
    select(parked.c.due_at, parked.c.seq)
    .where(parked.c.collection == bindparam("of_collection", type_=sa.Text))
    .order_by(parked.c.due_at, parked.c.seq)
    .limit(_MOST)
)
PARKED_TASKS = Statement(select(parked.c.seq, parked.c.due_at).where(_is_one_of(parked.c.seq, "seqs")))
ADD_PARKED = Insert(parked)
DROP_PARKED = Statement(sa.delete(parked).where(_is_one_of(parked.c.seq, "seqs")))
RUNNING = Statement(
    select(trigger.c.kind, func.count())
    .where(is_leased(), _is_one_of(trigger.c.kind, "kinds"))
    .group_by(trigger.c.kind)
)
RUNNING_OF_KEYS = Statement(
    select(keyed.c.key, func.count())
    .join_from(trigger, keyed, keyed.c.seq == trigger.c.seq)
    .where(is_leased(), trigger.c.kind == bindparam("kind", type_=sa.Text), _is_one_of(keyed.c.key, "keys"))
    .group_by(keyed.c.key)
)
_ENDED = keyed.alias()
_FULL_KEY = (
    share.c.priority,
    share.c.kind,
    select(func.min(keyed.c.due_at))
    .where(*(keyed.c[name] == share.c[name] for name in ("kind", "priority", "key")), is_queued())
    .scalar_subquery(),
    share.c.key,
)
_HAS_LEFT = (is_joining(), share.c.due_at == QUEUED_AT)
_FULL_KEYS = select(*_FULL_KEY).where(_is_one_of(share.c.kind, "kinds"), _is_one_of(share.c.priority, "priorities"))
FULL_KEYS = Statement(_FULL_KEYS.where(is_joining(), share.c.due_at > _NOW, share.c.due_at > _FULL_KEY[2]).limit(_MOST))
"""The keys that have left their lanes, and come back later than now."""
FULL_KEYS_TILL_AN_END = Statement(_FULL_KEYS.where(*_HAS_LEFT).limit(_MOST))
"""The keys that have left their lanes, and come back only at the end of a run."""


def _full_keys_of_tasks() -> sa.Select[Any, Any, Any, Any]:
    priorities = _listed("priorities", sa.Integer())
    of_key = (share.c.kind == _ENDED.c.kind, share.c.key == _ENDED.c.key, share.c.priority == priorities.c.value)
    found = select(*_FULL_KEY).select_from(
        _ENDED.join(priorities, literal(value=True)).join(share, sa.and_(*of_key, *_HAS_LEFT))
    )
    return found.where(_is_one_of(_ENDED.c.seq, "seqs")).distinct()


FULL_KEYS_OF = Statement(_full_keys_of_tasks())
"""Of the keys of these tasks, those that have left their lanes."""
BUCKETS = Statement(select(bucket).where(_is_one_pair_of(bucket.c.kind, bucket.c.key, "pairs")))
ADD_BUCKET = Insert(bucket)
_IS_PAIR = _is_one_pair_of(bucket.c.kind, bucket.c.key, "pairs")
DROP_BUCKETS = Statement(sa.delete(bucket).where(_IS_PAIR))
FULL_BUCKETS = Statement(
    select(bucket.c.kind, bucket.c.key)
    .where(_is_one_of(bucket.c.kind, "kinds"), is_of_key(), bucket.c.full_at <= _NOW)
    .limit(_MOST)
)
DROP_FULL_BUCKETS = Statement(sa.delete(bucket).where(_IS_PAIR, bucket.c.full_at <= _NOW))
FILL_BUCKET, FILL_BUCKETS_OF_KEYS = (
    Statement(
        sa.update(bucket)
        .where(bucket.c.kind == bindparam("of_kind", type_=sa.Text), which, bucket.c.full_at > _MOMENT)
        .values(full_at=_MOMENT)
    )
    for which in (bucket.c.key == "", is_of_key())
)
HAS_WAITS = Statement(select(sa.exists(select(wait.c.id)), sa.exists(select(wake.c.awaited))))
WAITS = Statement(
    select(wait.c.awaited, wait.c.id)
    .where(_is_one_of(wait.c.awaited, "awaited"), wait.c.id > bindparam("after_id", type_=sa.Text))
    .order_by(wait.c.awaited, wait.c.id)
    .limit(_MOST)
)
AWAITED = Statement(select(wait.c.awaited).where(_is_one_of(wait.c.awaited, "awaited")).distinct())
WAITS_OF = Statement(
    select(wait.c.awaited, wait.c.id).where(_is_one_of(wait.c.id, "ids")).order_by(wait.c.id, wait.c.awaited)
)
ADD_WAITS = Insert(wait)
DROP_WAITS = Statement(sa.delete(wait).where(_is_one_pair_of(wait.c.awaited, wait.c.id, "pairs")))
DROP_WAITS_OF = Statement(sa.delete(wait).where(_is_one_of(wait.c.id, "ids")))
WAKES = Statement(
    select(wake.c.awaited, wake.c.told).order_by(wake.c.awaited).limit(_MOST).with_for_update(skip_locked=True)
)
WAKES_FOR = Statement(select(wake.c.awaited).where(_is_one_of(wake.c.awaited, "awaited")))
ADD_WAKES = Insert(wake)
DROP_WAKES = Statement(sa.delete(wake).where(_is_one_of(wake.c.awaited, "awaited")))
DEADLINES = Statement(select(deadline).where(_is_one_of(deadline.c.seq, "seqs")))
NEXT_DEADLINE = Statement(select(func.min(deadline.c.at)))
PASSED_DEADLINES = Statement(select(deadline.c.seq).where(deadline.c.at <= _NOW).order_by(deadline.c.at).limit(_MOST))
ADD_DEADLINES = Insert(deadline)
DROP_DEADLINES = Statement(sa.delete(deadline).where(_is_one_of(deadline.c.seq, "seqs")))
CHAINS = Statement(select(chain.c.seq, chain.c.parent, chain.c.root).where(_is_one_of(chain.c.seq, "seqs")))
ROOTS = Statement(
    select(task.c.id, func.coalesce(chain.c.root, task.c.id))
    .outerjoin_from(task, chain, chain.c.seq == task.c.seq)
    .where(_is_one_of(task.c.id, "ids"))
)
ADD_CHAINS = Insert(chain)
DROP_CHAINS = Statement(sa.delete(chain).where(_is_one_of(chain.c.seq, "seqs")))
CANCELLED_CHAINS = Statement(select(cancelled_chain.c.root).where(_is_one_of(cancelled_chain.c.root, "roots")))
ADD_CANCELLED_CHAINS = Insert(cancelled_chain)
DROP_CANCELLED_CHAINS = Statement(
    sa.delete(cancelled_chain).where(
        cancelled_chain.c.root.in_(select(task.c.id).where(_is_one_of(task.c.seq, "seqs")))
    )
)


def _routes() -> sa.Select[Any, Any]:
    """Select the names of routes one by one: an index finds the next one, however many keys each has."""
    kinds = _listed("kinds", sa.Text())

    def following(kind: sa.ColumnElement[str], after: sa.ColumnElement[str]) -> sa.ColumnElement[Any]:
        of_kind = (share.c.kind > after, share.c.kind < kind + literal(AFTER_BREAK))
        return select(func.min(share.c.kind)).where(*of_kind).scalar_subquery()

    kind = kinds.c.value
    first = select(kind.label("kind"), following(kind, kind + literal("\n")).label("name"))
    found = first.cte("found", recursive=True)
    found = found.union_all(
        select(found.c.kind, following(found.c.kind, found.c.name)).where(found.c.name.is_not(None))
    )
    return select(found.c.kind, found.c.name).where(found.c.name.is_not(None))


ROUTES = Statement(_routes())
HAS_ROUTES = Statement(
    select(sa.exists(select(share.c.kind).where(func.replace(share.c.kind, "\n", "") != share.c.kind)))
)
_AFTER = bindparam("after", type_=sa.BigInteger)


def _in_order(*, newest: bool) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[Any]]:
    seq = task_tag.c.seq
    return (seq < _AFTER, seq.desc()) if newest else (seq > _AFTER, seq.asc())


def _tagged(*, newest: bool) -> sa.Select[Any, Any]:
    place, order = _in_order(newest=newest)
    other = task_tag.alias()
    others = select(func.count()).where(other.c.seq == task_tag.c.seq, _is_one_of(other.c.tag, "others"))
    has_all = others.scalar_subquery() == bindparam("count", type_=sa.Integer)
    tagged = select(task_tag.c.seq, has_all).where(task_tag.c.tag == bindparam("of_tag", type_=sa.Text), place)
    return tagged.order_by(order).limit(_MOST)


def _reaches(*, newest: bool) -> sa.Select[Any, Any]:
    place, order = _in_order(newest=newest)
    tags = _listed("tags", sa.Text())
    last = select(task_tag.c.seq).where(task_tag.c.tag == tags.c.value, place).order_by(order)
    return select(tags.c.value, last.limit(literal(1)).offset(_MOST).scalar_subquery())


TAGGED, TAGGED_NEWEST = (Statement(_tagged(newest=newest)) for newest in (False, True))
"""The next tasks with a tag, and whether they have all others."""
TAG_REACHES, TAG_REACHES_NEWEST = (Statement(_reaches(newest=newest)) for newest in (False, True))
"""How far so many tasks of each of these tags reach; null: fewer are left."""
TAGS = Statement(
    select(task_tag.c.seq, task_tag.c.tag).where(_is_one_of(task_tag.c.seq, "seqs")).order_by(task_tag.c.tag)
)
ADD_TAGS = Insert(task_tag)
DROP_TAGS = Statement(sa.delete(task_tag).where(_is_one_of(task_tag.c.seq, "seqs")))
_NAME = bindparam("of_name", type_=sa.Text)
PERIODIC = Statement(select(periodic).where(periodic.c.name == _NAME))
PERIODIC_LOCKED = Statement(select(periodic).where(periodic.c.name == _NAME).with_for_update())
PERIODICS = Statement(
    select(periodic)
    .where(periodic.c.name > bindparam("after_name", type_=sa.Text))
    .order_by(periodic.c.name)
    .limit(_MOST)
)
NEXT_FIRING = Statement(select(func.min(periodic.c.next_at)))
DUE_PERIODICS = Statement(
    select(periodic)
    .where(periodic.c.next_at <= _NOW)
    .order_by(periodic.c.next_at, periodic.c.name)
    .limit(_MOST)
    .with_for_update(skip_locked=True)
)
ADD_PERIODIC = Insert(periodic)
_NEW = {column.name: bindparam(f"new_{column.name}", type_=column.type) for column in periodic.c}
SET_PERIODIC = Statement(
    sa.update(periodic)
    .where(periodic.c.name == _NEW["name"], periodic.c.version == _NEW["version"] - 1)
    .values({name: value for name, value in _NEW.items() if name != "name"})
)
DROP_PERIODIC = Statement(sa.delete(periodic).where(periodic.c.name == _NAME))
_SINCE = minute.c.at >= bindparam("since", type_=sa.Integer)
MINUTES = Statement(select(minute).where(_SINCE))
MINUTES_OF_KIND = Statement(select(minute).where(_SINCE, minute.c.kind == bindparam("of_kind", type_=sa.Text)))
ADD_MINUTES = Insert(minute)
_IS_OLD = minute.c.at < bindparam("before", type_=sa.Integer)
OLDEST_MINUTES = Statement(select(minute.c.at).where(_IS_OLD).order_by(minute.c.at).limit(_MOST))
DROP_MINUTES = Statement(sa.delete(minute).where(_IS_OLD))
DROP_MINUTES_OF_NODE = Statement(
    sa.delete(minute).where(
        minute.c.at == bindparam("of_minute", type_=sa.Integer), minute.c.node == bindparam("of_node", type_=sa.Text)
    )
)
TOKENS = Statement(select(access_token).order_by(access_token.c.created_at, access_token.c.id))
ADD_TOKENS = Insert(access_token)
DROP_TOKENS = Statement(sa.delete(access_token).where(_is_one_of(access_token.c.id, "ids")))
USE_TOKENS = Update(access_token.c.id, first=10, last=10)
AUDIT, AUDIT_BEFORE = (
    Statement(select(audit).where(which).order_by(audit.c.id.desc()).limit(_MOST))
    for which in (sa.true(), audit.c.id < bindparam("before_id", type_=sa.Text))
)
ADD_AUDIT = Insert(audit)
FORGET_AUDIT = Statement(
    sa.delete(audit).where(
        audit.c.id.in_(
            select(audit.c.id)
            .where(audit.c.at < bindparam("before", type_=sa.Double))
            .order_by(audit.c.at)
            .limit(_MOST)
        )
    )
)
DUE_TIMES = Statement(select(task.c.seq, task.c.at).where(_is_one_of(task.c.seq, "seqs")))
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
    kept = _END + _SHIFT
    # Without a shift (NULL), every lease begins anew. No end is later than `anew`, unless its row is damaged.
    until = sa.case((sa.and_(trigger.c.was_extended, kept < anew), kept), else_=anew)
    # An end that is over stays; without a shift the other ends become NULL.
    run_until = sa.case((trigger.c.run_until <= 0, trigger.c.run_until), else_=trigger.c.run_until + _SHIFT)
    values = {"next_trigger_at": until, "lease_until": until, "run_until": run_until, "was_extended": sa.true()}
    return sa.update(trigger).where(is_leased(), trigger.c.seq.in_(_UNLOCKED.scalar_subquery())).values(values)


_UNLOCKED = select(trigger.c.seq).where(is_leased()).with_for_update(skip_locked=True, key_share=True)
RESTART_LEASES = Statement(_restart_leases())
COUNT_LOCKED = Statement(
    select(
        select(func.count()).select_from(trigger).where(is_leased()).scalar_subquery()
        - select(func.count()).select_from(_UNLOCKED.subquery()).scalar_subquery()
    )
)
"""The leases that another writer has locked; the others are locked by this statement."""
