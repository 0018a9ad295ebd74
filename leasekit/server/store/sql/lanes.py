"""The lanes of an SQL database: which kinds and routes have due tasks, and how many."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam, func, literal, select, tuple_

from leasekit.server.store import Lane, Trigger, damage
from leasekit.server.store.routes import AFTER_BREAK, is_route, kind_of
from leasekit.server.store.schema import QUEUED_AT, is_joining, is_queued, is_waiting, keyed, share, trigger
from leasekit.server.store.sql.keyed import KEYED
from leasekit.server.store.sql.session import PRIORITIES, Reads, Writes
from leasekit.server.store.sql.statements import MOST, NOW, Statement, listed
from leasekit.server.store.sql.tasks import DUE, STATE

READY = Statement(
    select(*STATE)
    .where(
        is_waiting(),
        trigger.c.kind == bindparam("kind"),
        trigger.c.priority == bindparam("priority"),
        NOW >= DUE,
        tuple_(DUE, trigger.c.seq) > tuple_(bindparam("after_due", type_=sa.Double), bindparam("after_seq")),
    )
    .order_by(DUE, trigger.c.seq)
    .limit(MOST)
    .with_for_update(skip_locked=True, key_share=True)
)
_IN_LANE = (is_waiting(), trigger.c.kind == bindparam("kind"), trigger.c.priority == bindparam("priority"))
COUNT_DUE, COUNT_LATER = (
    Statement(select(func.count()).select_from(select(sa.literal(1)).where(*_IN_LANE, *when).limit(MOST).subquery()))
    for when in ((NOW >= DUE,), (NOW < DUE, DUE < QUEUED_AT))
)


def _lanes() -> sa.Select[Any, Any, Any]:
    kinds, priorities = listed("kinds", sa.Text()), listed("priorities", sa.Integer())
    first = (
        select(DUE)
        .where(is_waiting(), trigger.c.kind == kinds.c.value, trigger.c.priority == priorities.c.value)
        .order_by(DUE)
        .limit(literal(1))
        .scalar_subquery()
    )
    of_lanes = select(priorities.c.value, kinds.c.value, sa.type_coerce(first, sa.Double))
    of_lanes = of_lanes.select_from(priorities.join(kinds, literal(value=True)))
    return of_lanes.where(first.is_not(None))


def _keyed_lanes() -> sa.Select[Any, Any, Any]:
    kinds, priorities = listed("kinds", sa.Text()), listed("priorities", sa.Integer())
    of_lane = (share.c.kind == kinds.c.value, share.c.priority == priorities.c.value)
    firsts = (
        select(share.c.due_at).where(*of_lane, state).order_by(order).limit(literal(1)).scalar_subquery()
        for state, order in ((share.c.active, share.c.taken), (is_joining(), share.c.due_at))
    )
    first = func.coalesce(*firsts, type_=sa.Double)
    of_lanes = select(priorities.c.value, kinds.c.value, first)
    of_lanes = of_lanes.select_from(priorities.join(kinds, literal(value=True)))
    has_some = sa.exists(select(literal(1)).select_from(share))  # no lane is looked at if there is none
    return of_lanes.where(has_some, first.is_not(None))


_UNKEYED_LANES = _lanes().add_columns(sa.literal_column("0"))
LANES = Statement(_UNKEYED_LANES)
ALL_LANES = Statement(sa.union_all(_UNKEYED_LANES, _keyed_lanes().add_columns(sa.literal_column("1"))))
"""The lanes of tasks without keys, of which `LANES` are all, and those of tasks with keys."""
OF_LANE = (share.c.kind == bindparam("kind"), share.c.priority == bindparam("priority"))
COUNT_ACTIVE, COUNT_JOINING = (
    Statement(select(func.count()).select_from(select(sa.literal(1)).where(*OF_LANE, *which).limit(MOST).subquery()))
    for which in ((share.c.active,), (is_joining(), share.c.due_at <= NOW))
)
IN_QUEUE = (keyed.c.kind == bindparam("kind"), keyed.c.priority == bindparam("priority"), is_queued())
_SOME_QUEUED = select(keyed.c.due_at).where(*IN_QUEUE).limit(MOST).subquery()
COUNT_QUEUED = Statement(
    select(func.count(), func.coalesce(func.sum(sa.case((_SOME_QUEUED.c.due_at <= NOW, 1), else_=0)), 0))
)


def _routes() -> sa.Select[Any, Any]:
    """Select the names of routes one by one: an index finds the next one, however many keys each has."""
    kinds = listed("kinds", sa.Text())

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


class LaneView(Reads):
    """Reads of lanes and routes."""

    def lanes(self, kinds: Collection[str]) -> list[Lane]:
        return self._lanes(ALL_LANES, kinds)

    def _lanes(self, statement: Statement, kinds: Collection[str]) -> list[Lane]:
        rows = self._session.rows(statement, kinds=kinds, priorities=PRIORITIES)
        lanes = [Lane(row[0], row[1], row[2], bool(row[3])) for row in rows if damage.is_number(row[2])]
        return sorted(lane for lane in lanes if lane.due_at < QUEUED_AT)

    def count_waiting(self, lane: Lane, *, now: float, most: int) -> tuple[int, int]:
        of = {"kind": lane.name, "priority": lane.priority, "now": now, "most": most}
        if lane.has_keys:
            ((count, of_these_due),) = self._session.rows(COUNT_QUEUED, **of)
            return of_these_due, count - of_these_due
        due, later = (self._session.rows(statement, **of)[0][0] for statement in (COUNT_DUE, COUNT_LATER))
        return due, later

    def count_keys(self, lane: Lane, *, now: float, most: int) -> int:
        of = {"kind": lane.name, "priority": lane.priority, "now": now, "most": most}
        return sum(self._session.rows(statement, **of)[0][0] for statement in (COUNT_ACTIVE, COUNT_JOINING))

    def keys(self, seqs: Collection[int]) -> dict[int, str]:
        rows = self._session.rows(KEYED, seqs=seqs)
        return {row[0]: row[3] for row in rows if isinstance(row[3], str) and row[3]}

    def routes(self, kinds: Collection[str]) -> list[str]:
        return [row[1] for row in self._session.rows(ROUTES, kinds=kinds)]

    def routes_of(self, seqs: Collection[int]) -> dict[int, str]:
        rows = self._session.rows(KEYED, seqs=seqs)
        return {row[0]: row[1] for row in rows if isinstance(row[1], str) and is_route(row[1])}


class LaneTx(Writes, LaneView):
    """Reads and writes of lanes, with what this transaction has queued."""

    def ready(self, lane: Lane, *, now: float, after: tuple[float, int], limit: int) -> list[Trigger]:
        rows = self._session.rows(
            READY, kind=lane.kind, priority=lane.priority, now=now, after_due=after[0], after_seq=after[1], most=limit
        )
        return [row for row in self._decoded(rows) if row.next_trigger_at is not None]

    def lanes(self, kinds: Collection[str]) -> list[Lane]:
        stored, new = super().lanes(kinds), self._keyed.lanes(kinds)
        if not new:
            return stored
        lanes: dict[tuple[int, str, bool], Lane] = {}
        for lane in [*stored, *new]:
            of = (lane.priority, lane.name, lane.has_keys)
            lanes[of] = min(lane, lanes.get(of, lane))
        return sorted(lanes.values())

    def has_routes(self) -> bool:
        """Return whether tasks require labels; also True if some once did."""
        raise NotImplementedError

    def routes(self, kinds: Collection[str]) -> list[str]:
        queued = [name for name in self._keyed.queued_routes if kind_of(name) in kinds]
        if not self.has_routes():
            return queued
        return list(dict.fromkeys([*super().routes(kinds), *queued]))

    def routes_of(self, seqs: Collection[int]) -> dict[int, str]:
        return super().routes_of(seqs) if self.has_routes() else {}

    def queued_routes(self) -> Mapping[str, Sequence[float]]:
        return self._keyed.queued_routes
