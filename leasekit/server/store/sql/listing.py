"""Lists and counts of the tasks of an SQL database: by filter, status and end."""

from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import ColumnElement, Select, bindparam, func, literal, select, tuple_

from leasekit.server.store import Ending, Filter, Holding, Trigger, damage
from leasekit.server.store.schema import chain, is_leased, task, trigger
from leasekit.server.store.sql.session import Reads
from leasekit.server.store.sql.statements import MOST, Statement, is_among, is_one_of
from leasekit.server.store.sql.tasks import STATE

FOLLOWING = Statement(select(func.min(trigger.c.seq)).where(trigger.c.seq > bindparam("after")))
PRECEDING = Statement(select(func.max(trigger.c.seq)).where(trigger.c.seq < bindparam("after")))
_ENDED_AT = trigger.c.ended_at
_ENDED_THEN = (
    bindparam("until", type_=sa.Double) >= _ENDED_AT,
    tuple_(_ENDED_AT, trigger.c.seq) > tuple_(bindparam("after_at", type_=sa.Double), bindparam("after_seq")),
)
_BY_END = (_ENDED_AT, trigger.c.seq)
END_FURTHER = Statement(select(_ENDED_AT).where(*_ENDED_THEN).order_by(*_BY_END).limit(literal(1)).offset(MOST))
ENDED_OF, ENDED_OF_OTHERS = (
    Statement(select(*_BY_END).where(*_ENDED_THEN, is_of).order_by(*_BY_END).limit(MOST))
    for is_of in (is_one_of(trigger.c.kind, "kinds"), sa.not_(is_one_of(trigger.c.kind, "kinds")))
)
COUNTS = Statement(select(trigger.c.kind, trigger.c.status, func.count()).group_by(trigger.c.kind, trigger.c.status))
HOLDERS = Statement(
    select(trigger.c.owner, trigger.c.kind, func.count(), func.min(trigger.c.heartbeat_timeout))
    .where(is_leased())
    .group_by(trigger.c.owner, trigger.c.kind)
)
# Without a bound of `seq`, nor an order: a database would read all tasks in that order, and not the index of leases.
HELD_BY = Statement(select(trigger.c.seq).where(is_leased(), trigger.c.owner == bindparam("of_worker", type_=sa.Text)))


class ListingView(Reads):
    """Reads of lists and counts."""

    def page(
        self, wanted: Filter, *, after: int, limit: int, until: int | None = None, among: Sequence[int] | None = None
    ) -> list[Trigger]:
        seq = trigger.c.seq
        place, order = (seq < after, seq.desc()) if wanted.newest else (seq > after, seq.asc())
        query = select(*STATE).where(place if among is None else is_among(seq)).order_by(order).limit(limit)
        if until is not None and among is None:
            query = query.where(seq >= until if wanted.newest else seq <= until)
        if wanted.kind is not None:
            query = query.where(trigger.c.kind == wanted.kind)
        if wanted.status is not None:
            query = query.where(trigger.c.status == wanted.status.value)
        if wanted.worker is not None:
            query = query.where(trigger.c.owner == wanted.worker)
        if wanted.is_live:
            query = query.where(trigger.c.ended_at.is_(None))
        if wanted.collection is not None or wanted.scheduled_by is not None:
            query = query.join(task, task.c.seq == trigger.c.seq)
        if wanted.collection is not None:
            query = query.where(task.c.collection == wanted.collection)
        if wanted.scheduled_by is not None:
            query = query.where(task.c.created_at <= wanted.scheduled_by)
        if wanted.root is not None:
            is_other = select(chain.c.seq).where(chain.c.seq == seq, chain.c.root == wanted.root).exists()
            query = query.where(sa.or_(trigger.c.id == wanted.root, is_other))
        of = {} if among is None else {"among": among}
        return self._decoded(self._session.rows(Statement(query), **of))

    def next_seq(self, *, after: int, newest: bool) -> int | None:
        ((found,),) = self._session.rows(PRECEDING if newest else FOLLOWING, after=after)
        return None if found is None else int(found)

    def counts(self) -> dict[str, dict[str, int]]:
        return damage.statuses(self._session.rows(COUNTS))

    def holders(self) -> dict[str, Holding]:
        return Holding.by_owner(
            (str(owner), str(kind), number, ttl if damage.is_number(ttl) else None)
            for owner, kind, number, ttl in self._session.rows(HOLDERS)
        )

    def held_by(self, worker: str) -> list[int]:
        return sorted(row[0] for row in self._session.rows(HELD_BY, of_worker=worker))

    def ended(self, wanted: Filter, *, until: float, after: Ending, limit: int) -> list[Ending]:
        query = _ended(wanted, until, trigger.c.ended_at, trigger.c.seq)
        query = query.where(tuple_(trigger.c.ended_at, trigger.c.seq) > tuple_(literal(after.at), literal(after.seq)))
        query = query.order_by(trigger.c.ended_at, trigger.c.seq).limit(limit)
        return [Ending(*row) for row in self._session.rows(Statement(query))]

    def end_further(self, *, until: float, after: Ending, skip: int) -> float | None:
        of = {"until": until, "after_at": after.at, "after_seq": after.seq}
        rows = self._session.rows(END_FURTHER, **of, most=skip)
        return rows[0][0] if rows else None

    def ended_of(
        self, kinds: Collection[str], *, others: bool, until: float, after: Ending, limit: int
    ) -> list[Ending]:
        statement = ENDED_OF_OTHERS if others else ENDED_OF
        of = {"until": until, "after_at": after.at, "after_seq": after.seq}
        return [Ending(*row) for row in self._session.rows(statement, kinds=kinds, **of, most=limit)]

    def count_ended(self, wanted: Filter, *, until: float) -> dict[str, dict[str, int]]:
        of = (trigger.c.kind, trigger.c.status)
        query = _ended(wanted, until, *of, func.count()).group_by(*of)
        return damage.statuses(self._session.rows(Statement(query)))


def _ended(wanted: Filter, until: float, *columns: ColumnElement[Any]) -> Select[Any]:
    """Select from the tasks of this kind and status that ended by `until`."""
    query = select(*columns).where(trigger.c.ended_at <= until)
    if wanted.kind is not None:
        query = query.where(trigger.c.kind == wanted.kind)
    return query if wanted.status is None else query.where(trigger.c.status == wanted.status.value)
