"""The tags of tasks in an SQL database."""

import math
from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam, func, literal, select

from leasekit.server.store import Tagged
from leasekit.server.store.schema import task_tag
from leasekit.server.store.sql.session import Reads, Writes
from leasekit.server.store.sql.statements import MOST, Insert, Statement, is_one_of, listed

_AFTER = bindparam("after", type_=sa.BigInteger)


def _in_order(*, newest: bool) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[Any]]:
    seq = task_tag.c.seq
    return (seq < _AFTER, seq.desc()) if newest else (seq > _AFTER, seq.asc())


def _tagged(*, newest: bool) -> sa.Select[Any, Any]:
    place, order = _in_order(newest=newest)
    other = task_tag.alias()
    others = select(func.count()).where(other.c.seq == task_tag.c.seq, is_one_of(other.c.tag, "others"))
    has_all = others.scalar_subquery() == bindparam("count", type_=sa.Integer)
    tagged = select(task_tag.c.seq, has_all).where(task_tag.c.tag == bindparam("of_tag", type_=sa.Text), place)
    return tagged.order_by(order).limit(MOST)


def _reaches(*, newest: bool) -> sa.Select[Any, Any]:
    place, order = _in_order(newest=newest)
    tags = listed("tags", sa.Text())
    last = select(task_tag.c.seq).where(task_tag.c.tag == tags.c.value, place).order_by(order)
    return select(tags.c.value, last.limit(literal(1)).offset(MOST).scalar_subquery())


TAGGED, TAGGED_NEWEST = (Statement(_tagged(newest=newest)) for newest in (False, True))
"""The next tasks with a tag, and whether they have all others."""
TAG_REACHES, TAG_REACHES_NEWEST = (Statement(_reaches(newest=newest)) for newest in (False, True))
"""How far so many tasks of each of these tags reach; null: fewer are left."""
TAGS = Statement(
    select(task_tag.c.seq, task_tag.c.tag).where(is_one_of(task_tag.c.seq, "seqs")).order_by(task_tag.c.tag)
)
ADD_TAGS = Insert(task_tag)
DROP_TAGS = Statement(sa.delete(task_tag).where(is_one_of(task_tag.c.seq, "seqs")))


class TagView(Reads):
    """Reads of the tags of tasks."""

    def tagged(self, tags: Sequence[str], *, after: int, newest: bool, limit: int) -> Tagged:
        rarest = tags[0] if len(tags) == 1 else self._rarest(tags, after=after, newest=newest, limit=limit)
        others = set(tags) - {rarest}
        of = {"of_tag": rarest, "others": others, "count": len(others), "after": after, "most": limit}
        rows = self._session.rows(TAGGED_NEWEST if newest else TAGGED, **of)
        return Tagged([row[0] for row in rows if row[1]], rows[-1][0] if rows else None)

    def _rarest(self, tags: Sequence[str], *, after: int, newest: bool, limit: int) -> str:
        """Return the tag of which the next `limit` tasks reach the furthest."""
        statement = TAG_REACHES_NEWEST if newest else TAG_REACHES
        reaches: dict[str, int | None] = dict(self._session.rows(statement, tags=tags, after=after, most=limit))
        ends = {tag: math.inf if seq is None else -seq if newest else seq for tag, seq in reaches.items()}
        return max(ends, key=lambda tag: ends[tag])

    def tags(self, seqs: Collection[int]) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for seq, tag in self._session.rows(TAGS, seqs=seqs):
            found.setdefault(seq, []).append(tag)
        return found


class TagTx(Writes, TagView):
    """Reads and writes of the tags of new tasks."""

    def add_tags(self, tags: Sequence[tuple[str, int]]) -> None:
        self._session.insert(ADD_TAGS, tags)
