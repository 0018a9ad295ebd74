"""Kinds, gates, drains, access tokens, the audit log and the minutes of the history, in an SQL database."""

from collections.abc import Collection, Mapping, Sequence

import sqlalchemy as sa
from sqlalchemy import bindparam, select

from leasekit.server.store import (
    NOT_DECLARED,
    AuditRow,
    DrainRow,
    GateRow,
    KindDeclaration,
    KindRow,
    MinuteRow,
    SessionRow,
    TokenRow,
    damage,
)
from leasekit.server.store.schema import access_token, audit, console_session, drain, gate, kind, minute, parked, store
from leasekit.server.store.sql.session import Reads, Writes
from leasekit.server.store.sql.statements import MOST, Insert, Statement, Update, is_one_of

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
DRAINS = Statement(select(drain).order_by(drain.c.worker))
ADD_DRAIN = Insert(drain)
DROP_DRAIN = Statement(sa.delete(drain).where(drain.c.worker == bindparam("of_worker", type_=sa.Text)))
PARKED = Statement(
    select(parked.c.due_at, parked.c.seq)
    .where(parked.c.collection == bindparam("of_collection", type_=sa.Text))
    .order_by(parked.c.due_at, parked.c.seq)
    .limit(MOST)
)
PARKED_TASKS = Statement(select(parked.c.seq, parked.c.due_at).where(is_one_of(parked.c.seq, "seqs")))
ADD_PARKED = Insert(parked)
DROP_PARKED = Statement(sa.delete(parked).where(is_one_of(parked.c.seq, "seqs")))
_SINCE = minute.c.at >= bindparam("since", type_=sa.Integer)
MINUTES = Statement(select(minute).where(_SINCE))
MINUTES_OF_KIND = Statement(select(minute).where(_SINCE, minute.c.kind == bindparam("of_kind", type_=sa.Text)))
ADD_MINUTES = Insert(minute)
_IS_OLD = minute.c.at < bindparam("before", type_=sa.Integer)
OLDEST_MINUTES = Statement(select(minute.c.at).where(_IS_OLD).order_by(minute.c.at).limit(MOST))
DROP_MINUTES = Statement(sa.delete(minute).where(_IS_OLD))
DROP_MINUTES_OF_NODE = Statement(
    sa.delete(minute).where(
        minute.c.at == bindparam("of_minute", type_=sa.Integer), minute.c.node == bindparam("of_node", type_=sa.Text)
    )
)
TOKENS = Statement(select(access_token).order_by(access_token.c.created_at, access_token.c.id))
ADD_TOKENS = Insert(access_token)
DROP_TOKENS = Statement(sa.delete(access_token).where(is_one_of(access_token.c.id, "ids")))
USE_TOKENS = Update(access_token.c.id, first=10, last=10)
SESSION = Statement(
    select(console_session).where(console_session.c.digest == bindparam("of_digest", type_=sa.LargeBinary))
)
SESSIONS = Statement(select(console_session).order_by(console_session.c.until))
ADD_SESSIONS = Insert(console_session)
DROP_SESSIONS = Statement(
    sa.delete(console_session).where(console_session.c.digest == bindparam("of_digest", type_=sa.LargeBinary))
)
AUDIT, AUDIT_BEFORE = (
    Statement(select(audit).where(which).order_by(audit.c.id.desc()).limit(MOST))
    for which in (sa.true(), audit.c.id < bindparam("before_id", type_=sa.Text))
)
ADD_AUDIT = Insert(audit)
FORGET_AUDIT = Statement(
    sa.delete(audit).where(
        audit.c.id.in_(
            select(audit.c.id).where(audit.c.at < bindparam("before", type_=sa.Double)).order_by(audit.c.at).limit(MOST)
        )
    )
)


class RuleView(Reads):
    """Reads of what operators have set, and minutes."""

    def kinds(self, *, after: int = 0) -> list[KindRow]:
        return [KindRow(*row) for row in self._session.rows(KINDS, after=after)]

    def gates(self) -> list[GateRow]:
        return damage.gates(self._session.rows(GATES))

    def drains(self) -> list[DrainRow]:
        return damage.drains(self._session.rows(DRAINS))

    def parked_tasks(self, seqs: Collection[int]) -> dict[int, float]:
        return dict(self._session.rows(PARKED_TASKS, seqs=seqs))

    def minutes(self, *, since: int, kind: str | None = None) -> list[MinuteRow]:
        if kind is None:
            return [MinuteRow(*row) for row in self._session.rows(MINUTES, since=since)]
        return [MinuteRow(*row) for row in self._session.rows(MINUTES_OF_KIND, since=since, of_kind=kind)]

    def tokens(self) -> list[TokenRow]:
        return damage.tokens(self._session.rows(TOKENS))

    def session(self, digest: bytes) -> SessionRow | None:
        rows = self._session.rows(SESSION, of_digest=digest)
        return SessionRow(*rows[0]) if rows else None

    def sessions(self) -> list[SessionRow]:
        return [SessionRow(*row) for row in self._session.rows(SESSIONS)]

    def audit(self, *, before: str, limit: int) -> list[AuditRow]:
        of = {"before_id": before} if before else {}
        rows = self._session.rows(AUDIT_BEFORE if before else AUDIT, **of, most=limit)
        return [AuditRow(*row) for row in rows]


class RuleTx(Writes, RuleView):
    """Reads and writes of what operators set, and minutes."""

    def last_kind_change(self) -> int:
        return int(self._session.rows(KIND_CHANGE)[0][0])

    def set_kind(
        self,
        name: str,
        settings: bytes | None,
        *,
        at: float,
        by: str | None,
        declaration: KindDeclaration = NOT_DECLARED,
    ) -> None:
        self.begin_change()
        self._session.run(COUNT_KIND_CHANGE)  # from here on, other writers of kinds wait
        ((change,),) = self._session.rows(KIND_CHANGE)
        self._session.run(DROP_KIND, kind_name=name)
        self._session.insert(ADD_KIND, [(name, settings, at, by, change, *declaration)])

    def note_kind(self, name: str, digests: str, *, at: float) -> None:
        self._session.run(NOTE_KIND, of_name=name, of_digests=digests, at=at)

    def begin_change(self) -> None:
        """Do nothing: no other writer can be in the middle of a transaction."""

    def set_gate(self, row: GateRow) -> None:
        self.remove_gate(row.scope, row.name)
        self._session.insert(ADD_GATE, [tuple(row)])

    def remove_gate(self, scope: str, name: str) -> None:
        self.begin_change()
        self._session.run(COUNT_KIND_CHANGE)
        self._session.run(DROP_GATE, of_scope=scope, of_name=name)

    def set_drain(self, row: DrainRow) -> None:
        self.remove_drain(row.worker)
        self._session.insert(ADD_DRAIN, [tuple(row)])

    def remove_drain(self, worker: str) -> None:
        self.begin_change()
        self._session.run(COUNT_KIND_CHANGE)
        self._session.run(DROP_DRAIN, of_worker=worker)

    def add_minutes(self, rows: Sequence[MinuteRow]) -> None:
        for at, node in {(row.at, row.node) for row in rows}:
            self._session.run(DROP_MINUTES_OF_NODE, of_minute=at, of_node=node)
        self._session.insert(ADD_MINUTES, list(map(tuple, rows)))

    def forget_minutes(self, *, before: int, limit: int) -> None:
        oldest = self._session.rows(OLDEST_MINUTES, before=before, most=limit)
        if oldest:
            self._session.run(DROP_MINUTES, before=oldest[-1][0] + 1)

    def set_tokens(self, rows: Sequence[TokenRow]) -> None:
        self.remove_tokens([row.id for row in rows])
        self._session.insert(ADD_TOKENS, [tuple(row) for row in rows])

    def use_tokens(self, used_at: Mapping[str, float]) -> None:
        self._session.update(USE_TOKENS, [(at, token_id) for token_id, at in sorted(used_at.items())])

    def remove_tokens(self, ids: Collection[str]) -> None:
        self._session.run(DROP_TOKENS, ids=ids)

    def add_sessions(self, rows: Sequence[SessionRow]) -> None:
        self._session.insert(ADD_SESSIONS, [tuple(row) for row in rows])

    def remove_sessions(self, digests: Collection[bytes]) -> None:
        for digest in digests:
            self._session.run(DROP_SESSIONS, of_digest=digest)

    def add_audit(self, rows: Sequence[AuditRow]) -> None:
        self._session.insert(ADD_AUDIT, [tuple(row) for row in rows])

    def forget_audit(self, *, before: float, limit: int) -> int:
        return self._session.count(FORGET_AUDIT, before=before, most=limit)

    def parked(self, collection: str, *, limit: int) -> list[tuple[float, int]]:
        return [(row[0], row[1]) for row in self._session.rows(PARKED, of_collection=collection, most=limit)]

    def park(self, tasks: Sequence[tuple[str, float, int]]) -> None:
        self.unpark([seq for _, _, seq in tasks])
        self._session.insert(ADD_PARKED, list(tasks))

    def unpark(self, seqs: Collection[int]) -> None:
        self._session.run(DROP_PARKED, seqs=seqs)
