"""Start deadlines, firings, tasks after others, and chains in an SQL database: what happens later by itself."""

from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam, func, select

from leasekit.server.store import Contended, Deadline, PeriodicRow, damage
from leasekit.server.store.schema import (
    cancelled_chain,
    chain,
    deadline,
    periodic,
    task,
    trigger,
    wait,
    wake,
)
from leasekit.server.store.sql.session import Reads, Writes
from leasekit.server.store.sql.statements import MOST, NOW, Insert, Statement, is_one_of, is_one_pair_of

HAS_WAITS = Statement(select(sa.exists(select(wait.c.id)), sa.exists(select(wake.c.awaited))))
WAITS = Statement(
    select(wait.c.awaited, wait.c.id)
    .where(is_one_of(wait.c.awaited, "awaited"), wait.c.id > bindparam("after_id", type_=sa.Text))
    .order_by(wait.c.awaited, wait.c.id)
    .limit(MOST)
)
AWAITED = Statement(select(wait.c.awaited).where(is_one_of(wait.c.awaited, "awaited")).distinct())
# Not sorted by the database: it would read all of them before it gives the first.
WAITS_OF = Statement(select(wait.c.awaited, wait.c.id).where(is_one_of(wait.c.id, "ids")).limit(MOST))
_ALL = 2**31 - 1
ADD_WAITS = Insert(wait)
DROP_WAITS = Statement(sa.delete(wait).where(is_one_pair_of(wait.c.awaited, wait.c.id, "pairs")))
DROP_WAITS_OF = Statement(sa.delete(wait).where(is_one_of(wait.c.id, "ids")))
WAKES = Statement(
    select(wake.c.awaited, wake.c.told).order_by(wake.c.awaited).limit(MOST).with_for_update(skip_locked=True)
)
WAKES_FOR = Statement(select(wake.c.awaited).where(is_one_of(wake.c.awaited, "awaited")))
ADD_WAKES = Insert(wake)
DROP_WAKES = Statement(sa.delete(wake).where(is_one_of(wake.c.awaited, "awaited")))
DEADLINES = Statement(select(deadline).where(is_one_of(deadline.c.seq, "seqs")))
NEXT_DEADLINE = Statement(select(func.min(deadline.c.at)))
# `is_leased` would let PostgreSQL read all leases, by their index, for each deadline, while its tables are new.
_IS_HELD = func.coalesce(trigger.c.owner, "") != ""
_IS_IN_A_BUFFER = (
    select(trigger.c.seq).where(trigger.c.seq == deadline.c.seq, _IS_HELD, trigger.c.started_at.is_(None)).exists()
)
PASSED_DEADLINES = Statement(
    select(deadline.c.seq).where(deadline.c.at <= NOW, ~_IS_IN_A_BUFFER).order_by(deadline.c.at).limit(MOST)
)
ADD_DEADLINES = Insert(deadline)
DROP_DEADLINES = Statement(sa.delete(deadline).where(is_one_of(deadline.c.seq, "seqs")))
CHAINS = Statement(select(chain.c.seq, chain.c.parent, chain.c.root).where(is_one_of(chain.c.seq, "seqs")))
ROOTS = Statement(
    select(task.c.id, func.coalesce(chain.c.root, task.c.id))
    .outerjoin_from(task, chain, chain.c.seq == task.c.seq)
    .where(is_one_of(task.c.id, "ids"))
)
_ROOT, _AFTER = bindparam("of_root", type_=sa.Text), bindparam("after", type_=sa.BigInteger)
SEQ_OF_ROOT = Statement(select(task.c.seq).where(task.c.id == _ROOT))
CHAINED, CHAINED_NEWEST = (
    Statement(select(chain.c.seq).where(chain.c.root == _ROOT, place).order_by(order).limit(MOST))
    for place, order in ((chain.c.seq > _AFTER, chain.c.seq), (chain.c.seq < _AFTER, chain.c.seq.desc()))
)
ADD_CHAINS = Insert(chain)
DROP_CHAINS = Statement(sa.delete(chain).where(is_one_of(chain.c.seq, "seqs")))
CANCELLED_CHAINS = Statement(select(cancelled_chain.c.root).where(is_one_of(cancelled_chain.c.root, "roots")))
ADD_CANCELLED_CHAINS = Insert(cancelled_chain)
DROP_CANCELLED_CHAINS = Statement(
    sa.delete(cancelled_chain).where(cancelled_chain.c.root.in_(select(task.c.id).where(is_one_of(task.c.seq, "seqs"))))
)
_NAME = bindparam("of_name", type_=sa.Text)
PERIODIC = Statement(select(periodic).where(periodic.c.name == _NAME))
PERIODIC_LOCKED = Statement(select(periodic).where(periodic.c.name == _NAME).with_for_update())
PERIODICS = Statement(
    select(periodic)
    .where(periodic.c.name > bindparam("after_name", type_=sa.Text))
    .order_by(periodic.c.name)
    .limit(MOST)
)
NEXT_FIRING = Statement(select(func.min(periodic.c.next_at)))
_TURN = func.row_number().over(partition_by=periodic.c.changed_by, order_by=(periodic.c.next_at, periodic.c.name))
_DUE = select(periodic.c.name, periodic.c.next_at, _TURN.label("turn")).where(periodic.c.next_at <= NOW).subquery()
NAMES_DUE = Statement(select(_DUE.c.name).order_by(_DUE.c.turn, _DUE.c.next_at, _DUE.c.name).limit(MOST))
DUE_PERIODICS = Statement(
    select(periodic)
    .where(is_one_of(periodic.c.name, "names"), periodic.c.next_at <= NOW)
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


class LaterView(Reads):
    """Reads of deadlines, periodic tasks and chains."""

    def periodic(self, name: str) -> PeriodicRow | None:
        return next(iter(_periodics(self._session.rows(PERIODIC, of_name=name))), None)

    def periodics(self, *, after: str, limit: int) -> list[PeriodicRow]:
        return _periodics(self._session.rows(PERIODICS, after_name=after, most=limit))

    def names_due(self, *, now: float, limit: int) -> list[str]:
        return [row[0] for row in self._session.rows(NAMES_DUE, now=now, most=limit)]

    def waits_of(self, ids: Collection[str], *, limit: int | None = None) -> list[tuple[str, str]]:
        rows = self._session.rows(WAITS_OF, ids=ids, most=_ALL if limit is None else limit)
        return sorted(((row[0], row[1]) for row in rows), key=itemgetter(1, 0))

    def chained(self, root: str, *, after: int, newest: bool, limit: int) -> list[int]:
        statement = CHAINED_NEWEST if newest else CHAINED
        others = [row[0] for row in self._session.rows(statement, of_root=root, after=after, most=limit)]
        first = [row[0] for row in self._session.rows(SEQ_OF_ROOT, of_root=root)]
        first = [seq for seq in first if (seq < after if newest else seq > after)]
        return sorted(first + others, reverse=newest)[:limit]

    def chains_of(self, seqs: Collection[int]) -> dict[int, tuple[str, str]]:
        return {row[0]: (row[1], row[2]) for row in self._session.rows(CHAINS, seqs=seqs)}

    def deadlines(self, seqs: Collection[int]) -> dict[int, Deadline]:
        rows = self._session.rows(DEADLINES, seqs=seqs)
        return {row[0]: Deadline(*row[1:]) for row in rows if damage.is_number(row[1]) and damage.is_number(row[2])}

    def roots(self, ids: Collection[str]) -> dict[str, str]:
        return {row[0]: row[1] for row in self._session.rows(ROOTS, ids=ids)}


class LaterTx(Writes, LaterView):
    """Reads and writes of deadlines, periodic tasks, waits and chains."""

    def periodic(self, name: str) -> PeriodicRow | None:
        rows = self._session.rows(PERIODIC_LOCKED, of_name=name) if self._has_keys else []
        return next(iter(_periodics(rows)), None)

    def next_deadline(self) -> float | None:
        ((at,),) = self._session.rows(NEXT_DEADLINE)
        return float(at) if damage.is_number(at) else None

    def passed_deadlines(self, *, now: float, limit: int) -> list[int]:
        return [row[0] for row in self._session.rows(PASSED_DEADLINES, now=now, most=limit)]

    def set_deadlines(self, deadlines: Mapping[int, Deadline]) -> None:
        self.drop_deadlines(deadlines)
        self._session.insert(ADD_DEADLINES, [(seq, *deadline) for seq, deadline in deadlines.items()])

    def drop_deadlines(self, seqs: Collection[int]) -> None:
        if seqs:
            self._session.run(DROP_DEADLINES, seqs=seqs)

    def next_firing(self) -> float | None:
        ((at,),) = self._session.rows(NEXT_FIRING)
        return float(at) if damage.is_number(at) else None

    def due_periodics(self, names: Collection[str], *, now: float) -> list[PeriodicRow]:
        return _periodics(self._session.rows(DUE_PERIODICS, names=names, now=now))

    def set_periodic(self, row: PeriodicRow) -> None:
        if row.version == 1:
            self._session.insert(ADD_PERIODIC, [tuple(row)])
            return
        values = {f"new_{name}": value for name, value in row._asdict().items()}
        if self._session.count(SET_PERIODIC, **values) != 1:
            raise Contended(f"another writer has changed the periodic task {row.name!r} meanwhile")

    def remove_periodic(self, name: str) -> None:
        self._session.run(DROP_PERIODIC, of_name=name)

    def waits(self, awaited: Collection[str], *, limit: int, after: str = "") -> list[tuple[str, str]]:
        rows = self._session.rows(WAITS, awaited=awaited, after_id=after, most=limit)
        return [(row[0], row[1]) for row in rows]

    def awaited(self, ids: Collection[str]) -> set[str]:
        return {row[0] for row in self._session.rows(AWAITED, awaited=ids)}

    def add_waits(self, waits: Collection[tuple[str, str]]) -> None:
        self._session.insert(ADD_WAITS, list(waits))

    def drop_waits(self, waits: Collection[tuple[str, str]]) -> None:
        if waits:
            self._session.run(DROP_WAITS, pairs=waits)

    def drop_waits_of(self, ids: Collection[str]) -> None:
        if ids:
            self._session.run(DROP_WAITS_OF, ids=ids)

    def wakes(self, *, limit: int) -> list[tuple[str, str]]:
        return [(row[0], row[1]) for row in self._session.rows(WAKES, most=limit)]

    def wakes_for(self, awaited: Collection[str]) -> set[str]:
        return {row[0] for row in self._session.rows(WAKES_FOR, awaited=awaited)}

    def set_wakes(self, wakes: Mapping[str, str | None]) -> None:
        if wakes:  # removed first: that waits for another writer that looks at one of them
            self._session.run(DROP_WAKES, awaited=sorted(wakes))
            self._session.insert(ADD_WAKES, [(name, after) for name, after in wakes.items() if after is not None])

    def add_to_chains(self, tasks: Sequence[tuple[int, str, str]]) -> None:
        self._session.insert(ADD_CHAINS, tasks)

    def cancelled_chains(self, roots: Collection[str]) -> set[str]:
        return {row[0] for row in self._session.rows(CANCELLED_CHAINS, roots=roots)}

    def cancel_chains(self, roots: Collection[str], *, at: float) -> None:
        new = set(roots) - self.cancelled_chains(roots)
        self._session.insert(ADD_CANCELLED_CHAINS, [(root, at) for root in sorted(new)])


def _periodics(rows: Sequence[tuple[Any, ...]]) -> list[PeriodicRow]:
    return [PeriodicRow(*row)._replace(is_paused=bool(row[4])) for row in rows]
