"""Transactions and snapshots of an SQL database: batches of rows in, batches of rows out."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import sqlalchemy as sa
from sqlalchemy import ColumnElement, Select, func, literal, select, tuple_

from leasekit.server.store import (
    NOT_DECLARED,
    Anchor,
    AuditRow,
    Checkpoint,
    ClaimMemory,
    Contended,
    Content,
    Deadline,
    Dedupe,
    Ending,
    Entity,
    Filter,
    GateRow,
    Holding,
    KindDeclaration,
    KindRow,
    Lane,
    Limits,
    MinuteRow,
    PeriodicRow,
    Run,
    Share,
    Tagged,
    TokenRow,
    Trigger,
    Tx,
    View,
    damage,
)
from leasekit.server.store import statements as sql
from leasekit.server.store.keyed import Charge, KeyedTasks, Place, with_due_times
from leasekit.server.store.routes import is_route, kind_of
from leasekit.server.store.schema import QUEUED_AT, chain, task, trigger
from leasekit.task import Status

_PRIORITIES = range(5)
_ALL = 2**31 - 1
_NAMES = {status: status.value for status in Status}
_encode = msgspec.json.encode
_decode_grants = msgspec.json.Decoder(list[tuple[int, str]]).decode
_decode_anchor = msgspec.json.Decoder(Anchor).decode
_astuple = msgspec.structs.astuple
_NO_KEYS: Mapping[int, str] = {}


class Session(Protocol):
    """A connection with a transaction in progress, and the dialect in which it runs statements."""

    def rows(self, statement: sql.Statement, **values: Any) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows. A parameter that is a list takes any collection."""
        ...

    def run(self, statement: sql.Statement, **values: Any) -> None:
        """Run a statement that only writes."""
        ...

    def count(self, statement: sql.Statement, **values: Any) -> int:
        """Run a statement and return the number of rows that it changed."""
        ...

    def insert(self, into: sql.Insert, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert these rows. Raises an error if one is there already."""
        ...

    def update(self, update: sql.Update, rows: Sequence[tuple[Any, ...]]) -> None:
        """Update the rows with these keys."""
        ...


class SqlView(View):
    """A consistent snapshot of an SQL database. `View` describes the methods."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def triggers(self, ids: Collection[str]) -> dict[str, Trigger]:
        return {row.id: row for row in self._decoded(self._session.rows(sql.BY_ID, ids=ids))}

    def entities(self, seqs: Collection[int]) -> dict[int, Entity]:
        return {row[0]: Entity(*row) for row in self._session.rows(sql.ENTITIES, seqs=seqs)}

    def progress(self, seqs: Collection[int]) -> dict[int, Checkpoint]:
        return {row[0]: Checkpoint(*row[1:]) for row in self._session.rows(sql.PROGRESS, seqs=seqs)}

    def last_runs(self, seq: int, *, limit: int) -> list[Run]:
        return damage.runs(self._session.rows(sql.LAST_RUNS, seq=seq, most=limit)[::-1])

    def page(
        self,
        wanted: Filter,
        *,
        after: int,
        limit: int,
        until: int | None = None,
        among: Sequence[int] | None = None,
    ) -> list[Trigger]:
        seq = trigger.c.seq
        place, order = (seq < after, seq.desc()) if wanted.newest else (seq > after, seq.asc())
        query = select(*sql.STATE).where(place if among is None else sql.is_among(seq)).order_by(order).limit(limit)
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
            first, others = select(task.c.seq).where(task.c.id == wanted.root), select(chain.c.seq)
            query = query.where(seq.in_(sa.union_all(first, others.where(chain.c.root == wanted.root))))
        of = {} if among is None else {"among": among}
        return self._decoded(self._session.rows(sql.Statement(query), **of))

    def tagged(self, tags: Sequence[str], *, after: int, newest: bool, limit: int) -> Tagged:
        rarest = tags[0] if len(tags) == 1 else self._rarest(tags, after=after, newest=newest, limit=limit)
        others = set(tags) - {rarest}
        of = {"of_tag": rarest, "others": others, "count": len(others), "after": after, "most": limit}
        rows = self._session.rows(sql.TAGGED_NEWEST if newest else sql.TAGGED, **of)
        return Tagged([row[0] for row in rows if row[1]], rows[-1][0] if rows else None)

    def _rarest(self, tags: Sequence[str], *, after: int, newest: bool, limit: int) -> str:
        """Return the tag of which the next `limit` tasks reach the furthest."""
        statement = sql.TAG_REACHES_NEWEST if newest else sql.TAG_REACHES
        reaches: dict[str, int | None] = dict(self._session.rows(statement, tags=tags, after=after, most=limit))
        ends = {tag: math.inf if seq is None else -seq if newest else seq for tag, seq in reaches.items()}
        return max(ends, key=lambda tag: ends[tag])

    def tags(self, seqs: Collection[int]) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for seq, tag in self._session.rows(sql.TAGS, seqs=seqs):
            found.setdefault(seq, []).append(tag)
        return found

    def next_seq(self, *, after: int, newest: bool) -> int | None:
        ((found,),) = self._session.rows(sql.PRECEDING if newest else sql.FOLLOWING, after=after)
        return None if found is None else int(found)

    def dedupes(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], Dedupe]:
        return _dedupes(self._session.rows(sql.DEDUPES, pairs=keys))

    def counts(self) -> dict[str, dict[str, int]]:
        return damage.statuses(self._session.rows(sql.COUNTS))

    def holders(self) -> dict[str, Holding]:
        return {
            str(row[0]): Holding(row[1], row[2] if damage.is_number(row[2]) else None)
            for row in self._session.rows(sql.HOLDERS)
        }

    def ended(self, wanted: Filter, *, until: float, after: Ending, limit: int) -> list[Ending]:
        query = _ended(wanted, until, trigger.c.ended_at, trigger.c.seq)
        query = query.where(tuple_(trigger.c.ended_at, trigger.c.seq) > tuple_(literal(after.at), literal(after.seq)))
        query = query.order_by(trigger.c.ended_at, trigger.c.seq).limit(limit)
        return [Ending(*row) for row in self._session.rows(sql.Statement(query))]

    def end_further(self, *, until: float, after: Ending, skip: int) -> float | None:
        of = {"until": until, "after_at": after.at, "after_seq": after.seq}
        rows = self._session.rows(sql.END_FURTHER, **of, most=skip)
        return rows[0][0] if rows else None

    def ended_of(
        self, kinds: Collection[str], *, others: bool, until: float, after: Ending, limit: int
    ) -> list[Ending]:
        statement = sql.ENDED_OF_OTHERS if others else sql.ENDED_OF
        of = {"until": until, "after_at": after.at, "after_seq": after.seq}
        return [Ending(*row) for row in self._session.rows(statement, kinds=kinds, **of, most=limit)]

    def count_ended(self, wanted: Filter, *, until: float) -> dict[str, dict[str, int]]:
        of = (trigger.c.kind, trigger.c.status)
        query = _ended(wanted, until, *of, func.count()).group_by(*of)
        return damage.statuses(self._session.rows(sql.Statement(query)))

    def lanes(self, kinds: Collection[str]) -> list[Lane]:
        return self._lanes(sql.ALL_LANES, kinds)

    def _lanes(self, statement: sql.Statement, kinds: Collection[str]) -> list[Lane]:
        rows = self._session.rows(statement, kinds=kinds, priorities=_PRIORITIES)
        lanes = [Lane(row[0], row[1], row[2], bool(row[3])) for row in rows if damage.is_number(row[2])]
        return sorted(lane for lane in lanes if lane.due_at < QUEUED_AT)

    def count_waiting(self, lane: Lane, *, now: float, most: int) -> tuple[int, int]:
        of = {"kind": lane.name, "priority": lane.priority, "now": now, "most": most}
        if lane.has_keys:
            ((count, of_these_due),) = self._session.rows(sql.COUNT_QUEUED, **of)
            return of_these_due, count - of_these_due
        due, later = (self._session.rows(statement, **of)[0][0] for statement in (sql.COUNT_DUE, sql.COUNT_LATER))
        return due, later

    def count_keys(self, lane: Lane, *, now: float, most: int) -> int:
        of = {"kind": lane.name, "priority": lane.priority, "now": now, "most": most}
        return sum(self._session.rows(statement, **of)[0][0] for statement in (sql.COUNT_ACTIVE, sql.COUNT_JOINING))

    def kinds(self, *, after: int = 0) -> list[KindRow]:
        return [KindRow(*row) for row in self._session.rows(sql.KINDS, after=after)]

    def gates(self) -> list[GateRow]:
        return damage.gates(self._session.rows(sql.GATES))

    def parked_tasks(self, seqs: Collection[int]) -> dict[int, float]:
        return dict(self._session.rows(sql.PARKED_TASKS, seqs=seqs))

    def keys(self, seqs: Collection[int]) -> dict[int, str]:
        rows = self._session.rows(sql.KEYED, seqs=seqs)
        return {row[0]: row[3] for row in rows if isinstance(row[3], str) and row[3]}

    def routes(self, kinds: Collection[str]) -> list[str]:
        return [row[1] for row in self._session.rows(sql.ROUTES, kinds=kinds)]

    def routes_of(self, seqs: Collection[int]) -> dict[int, str]:
        rows = self._session.rows(sql.KEYED, seqs=seqs)
        return {row[0]: row[1] for row in rows if isinstance(row[1], str) and is_route(row[1])}

    def periodic(self, name: str) -> PeriodicRow | None:
        return next(iter(_periodics(self._session.rows(sql.PERIODIC, of_name=name))), None)

    def periodics(self, *, after: str, limit: int) -> list[PeriodicRow]:
        return _periodics(self._session.rows(sql.PERIODICS, after_name=after, most=limit))

    def minutes(self, *, since: int, kind: str | None = None) -> list[MinuteRow]:
        if kind is None:
            return [MinuteRow(*row) for row in self._session.rows(sql.MINUTES, since=since)]
        return [MinuteRow(*row) for row in self._session.rows(sql.MINUTES_OF_KIND, since=since, of_kind=kind)]

    def tokens(self) -> list[TokenRow]:
        return damage.tokens(self._session.rows(sql.TOKENS))

    def audit(self, *, before: str, limit: int) -> list[AuditRow]:
        of = {"before_id": before} if before else {}
        rows = self._session.rows(sql.AUDIT_BEFORE if before else sql.AUDIT, **of, most=limit)
        return [AuditRow(*row) for row in rows]

    def running(self, kinds: Collection[str]) -> dict[str, int]:
        return {row[0]: row[1] for row in self._session.rows(sql.RUNNING, kinds=kinds)}

    def running_of_keys(self, kind: str, keys: Collection[str]) -> dict[str, int]:
        return {row[0]: row[1] for row in self._session.rows(sql.RUNNING_OF_KEYS, kind=kind, keys=keys)}

    def full_keys(self, kinds: Collection[str], *, now: float, limit: int) -> list[tuple[Lane, str]]:
        of = {"kinds": kinds, "priorities": _PRIORITIES, "now": now}
        return _full(self._session.rows(sql.FULL_KEYS, **of, most=limit))

    def waits_of(self, ids: Collection[str]) -> list[tuple[str, str]]:
        return [(row[0], row[1]) for row in self._session.rows(sql.WAITS_OF, ids=ids)]

    def chains_of(self, seqs: Collection[int]) -> dict[int, tuple[str, str]]:
        return {row[0]: (row[1], row[2]) for row in self._session.rows(sql.CHAINS, seqs=seqs)}

    def deadlines(self, seqs: Collection[int]) -> dict[int, Deadline]:
        rows = self._session.rows(sql.DEADLINES, seqs=seqs)
        return {row[0]: Deadline(*row[1:]) for row in rows if damage.is_number(row[1]) and damage.is_number(row[2])}

    def roots(self, ids: Collection[str]) -> dict[str, str]:
        return {row[0]: row[1] for row in self._session.rows(sql.ROOTS, ids=ids)}

    def due_times(self, seqs: Collection[int]) -> dict[int, float]:
        rows = self._session.rows(sql.DUE_TIMES, seqs=seqs)
        return {row[0]: row[1] for row in rows if damage.is_number(row[1])}

    def free_names(self, *, until: float, limit: int) -> list[int]:
        return [row[0] for row in self._session.rows(sql.FREE_NAMES, now=until, most=limit)]

    def _decoded(self, rows: Sequence[tuple[Any, ...]]) -> list[Trigger]:
        return with_due_times(self._session, damage.triggers(rows)[0])[0]


class Walk:
    """How far the upkeep has looked through the tasks with keys."""

    def __init__(self) -> None:
        self.after = 0


class SqlTx(SqlView, Tx):
    """A transaction of the writer on an SQL database. `Tx` describes the methods."""

    _renewal = sql.RENEW

    def __init__(self, session: Session, walk: Walk, *, has_keys: bool = True) -> None:
        super().__init__(session)
        self._has_keys = has_keys  # whether there are the tables of keys
        self._keyed = KeyedTasks(session)
        self._walk = walk
        self._firsts: set[tuple[str, str]] = set()  # the keys of which this transaction has seen the first tasks
        self._buckets: set[tuple[str, str]] = set()  # those that this transaction has seen

    def add(
        self,
        entities: Sequence[Entity],
        triggers: Sequence[Trigger],
        keys: Mapping[int, str] = _NO_KEYS,
        routes: Mapping[int, str] = _NO_KEYS,
    ) -> None:
        self._session.insert(sql.ADD_TASKS, [_astuple(entity) for entity in entities])
        rows = [
            (row.seq, row.id, row.kind, row.priority, row.claim_timeout, row.heartbeat_timeout, *_values(row))
            for row in self._keyed.add(triggers, keys, routes)
        ]
        self._session.insert(sql.ADD_TRIGGERS, rows)

    def add_tags(self, tags: Sequence[tuple[str, int]]) -> None:
        self._session.insert(sql.ADD_TAGS, tags)

    def triggers(self, ids: Collection[str]) -> dict[str, Trigger]:
        return {row.id: row for row in self._decoded(self._session.rows(sql.BY_ID_LOCKED, ids=ids))}

    def triggers_of(self, seqs: Collection[int]) -> dict[int, Trigger]:
        return {row.seq: row for row in self._decoded(self._session.rows(sql.BY_SEQ, seqs=seqs))}

    def digests(self, seqs: Collection[int]) -> dict[int, bytes]:
        return {row[0]: row[1] for row in self._session.rows(sql.DIGESTS, seqs=seqs)}

    def contents(self, seqs: Collection[int]) -> dict[int, Content]:
        return {row[0]: Content(*row[1:]) for row in self._session.rows(sql.CONTENTS, seqs=seqs)}

    def content_size(self, seqs: Collection[int]) -> int:
        return int(self._session.rows(sql.SIZE, seqs=seqs)[0][0])

    def limits(self, seqs: Collection[int]) -> dict[int, Limits]:
        return {row[0]: Limits(*row[1:]) for row in self._session.rows(sql.LIMITS, seqs=seqs)}

    def save(self, triggers: Sequence[Trigger]) -> None:
        self._session.update(sql.SAVE, [(*_values(row), row.seq) for row in self._queued(triggers)])

    def _queued(self, triggers: Sequence[Trigger]) -> Sequence[Trigger]:
        return self._keyed.save(triggers) if self._has_keys else triggers

    def set_due_times(self, due_at: Mapping[int, float]) -> None:
        self._session.update(sql.SET_DUE_TIMES, [(at, seq) for seq, at in due_at.items()])

    def replace_payloads(self, payloads: Mapping[int, tuple[bytes, bytes]]) -> None:
        self._session.update(sql.SET_PAYLOADS, [(*values, seq) for seq, values in payloads.items()])

    def move(self, seqs: Collection[int], *, priority: int) -> None:
        if not seqs:
            return
        if self._has_keys:
            self._keyed.move(seqs, priority)
        for statement in sql.MOVE if self._has_keys else sql.MOVE[:-1]:
            self._session.run(statement, seqs=seqs, new_priority=priority)

    def renew(self, seqs: Collection[int], status: Status, *, now: float, at: float) -> None:
        if seqs:
            begun_at = at if status is Status.PROCESSING else None
            of = {"to_status": status.value, "now": now, "at": at, "begun_at": begun_at}
            self._session.run(self._renewal, seqs=seqs, **of)

    def end(self, seqs: Collection[int], status: Status, *, now: float) -> None:
        if seqs:
            self._session.run(sql.END, seqs=seqs, to_status=status.value, now=now)
            self._keyed.end(seqs)

    def remove(self, seqs: Collection[int]) -> None:
        if self.has_chains():
            self._session.run(sql.DROP_CHAINS, seqs=seqs)
            self._session.run(sql.DROP_CANCELLED_CHAINS, seqs=seqs)
        for statement in (*sql.REMOVE, sql.DROP_KEYED, sql.DROP_TAGS) if self._has_keys else sql.REMOVE:
            self._session.run(statement, seqs=seqs)

    def ready(self, lane: Lane, *, now: float, after: tuple[float, int], limit: int) -> list[Trigger]:
        rows = self._session.rows(
            sql.READY,
            kind=lane.kind,
            priority=lane.priority,
            now=now,
            after_due=after[0],
            after_seq=after[1],
            most=limit,
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

    def active_shares(self, lane: Lane, *, after: Share, limit: int) -> list[Share]:
        of = {"kind": lane.name, "priority": lane.priority, "after_taken": after.taken, "after_key": after.key}
        return _shares(self._session.rows(sql.ACTIVE_SHARES, **of, most=limit))

    def joining_shares(self, lane: Lane, *, now: float, limit: int) -> list[Share]:
        of = {"kind": lane.name, "priority": lane.priority}
        known = _shares(self._session.rows(sql.JOINING_SHARES, **of, now=now, most=limit))
        new = self._keyed.keys(lane) - {share.key for share in known}
        if new:
            joined = {share.key: share for share in _shares(self._session.rows(sql.SHARES, **of, keys=new))}
            known += [joined.get(key, Share(0.0, key)) for key in sorted(new)]
        return known

    def share(self, lane: Lane, key: str) -> Share:
        rows = self._session.rows(sql.SHARES, kind=lane.name, priority=lane.priority, keys=[key])
        return next(iter(_shares(rows)), Share(0.0, key))

    def queued(
        self, lane: Lane, after: Mapping[str, tuple[float, int]], *, now: float, limit: int
    ) -> dict[str, list[Trigger]]:
        found: dict[str, list[Trigger]] = {}
        for key, rows in self._queues(lane, after, now=now, limit=limit).items():
            found[key] = [row for row in self._decoded(rows) if row.next_trigger_at is not None]
            self._keyed.note(lane, key, found[key])
        return found

    def _queues(
        self, lane: Lane, after: Mapping[str, tuple[float, int]], *, now: float, limit: int
    ) -> dict[str, list[tuple[Any, ...]]]:
        """Return the rows of `queued`."""
        raise NotImplementedError

    def charge(self, lane: Lane, taken: Mapping[str, int], *, base: float, now: float) -> None:
        self._keyed.charge(lane, taken, base=base, now=now)

    def leave(self, lane: Lane, until: Mapping[str, float | None], *, most: int) -> None:
        self._keyed.leave(lane, until)

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

    def free_keys(self, seqs: Collection[int]) -> list[Lane]:
        kinds = {kind_of(row[1]) for row in self._session.rows(sql.KEYED, seqs=seqs)} if self.has_routes() else ()
        if kinds and (routes := self.routes(kinds)):
            # A key has the same places in all routes of its kind: which of them wait for these is not looked up.
            return self.free_keys_of([*kinds, *routes], at_moments=False)
        rows = self._session.rows(sql.FULL_KEYS_OF, seqs=seqs, priorities=_PRIORITIES)
        return self._keyed.come_back(_full(rows))

    def free_keys_of(self, kinds: Collection[str], *, at_moments: bool = True) -> list[Lane]:
        if not kinds or not self._has_keys:
            return []
        if at_moments:
            return self._keyed.come_back(self.full_keys(kinds, now=0.0, limit=_ALL))
        rows = self._session.rows(sql.FULL_KEYS_TILL_AN_END, kinds=kinds, priorities=_PRIORITIES, most=_ALL)
        return self._keyed.come_back(_full(rows))

    def finish(self) -> None:
        """Write what the transaction has changed of shares; the last step before the commit."""
        if changes := self._keyed.changes():
            self._write_shares(changes)

    def _write_shares(self, changes: Sequence[Charge]) -> None:
        """Write these changes into the shares, and add the shares that do not exist."""
        raise NotImplementedError

    def tend_shares(self, *, limit: int) -> None:
        if not self._has_keys:
            return
        self._session.run(sql.FORGET_SHARES, most=limit)
        page = {"after": self._walk.after, "most": limit}
        lost = self._session.rows(sql.LOST, **page)
        self._keyed.forget({row[0]: Place(*row[1:4]) for row in lost}, {row[0] for row in lost if row[4]})
        self._walk.after = self._session.rows(sql.END_OF_PAGE, **page)[0][0] or 0

    def expired(self, *, now: float, limit: int) -> list[Trigger]:
        rows = self._decoded(self._session.rows(sql.EXPIRED, now=now, most=limit))
        return [row for row in rows if row.next_trigger_at is not None]

    def follow_leases(self, *, now: float, limit: int) -> None:
        self._session.run(sql.FOLLOW, now=now, most=limit)

    def restart_leases(self, *, now: float, shift: float | None) -> None:
        self._session.run(sql.RESTART_LEASES, now=now, shift=shift)

    def progress_marks(self, seqs: Collection[int]) -> dict[int, tuple[int, int]]:
        rows = self._session.rows(sql.PROGRESS_MARKS, seqs=seqs)
        return {row[0]: row[1:] for row in rows if isinstance(row[1], int) and isinstance(row[2], int)}

    def set_progress(self, values: Mapping[int, Checkpoint]) -> None:
        self._session.run(sql.DROP_PROGRESS, seqs=values)
        self._session.insert(sql.ADD_PROGRESS, [(seq, *checkpoint) for seq, checkpoint in values.items()])

    def add_runs(self, runs: Sequence[Run]) -> None:
        self._session.insert(sql.ADD_RUNS, [_astuple(run) for run in runs])

    def forget_runs(self, keys: Sequence[tuple[int, int]]) -> None:
        self._session.run(sql.DROP_RUNS, pairs=keys)

    def runs(self, seqs: Collection[int]) -> list[Run]:
        return [Run(*row) for row in self._session.rows(sql.RUNS, seqs=seqs)]

    def dedupes(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], Dedupe]:
        rows = self._session.rows(sql.DEDUPES_LOCKED, pairs=keys)
        self._firsts.update((row[0], row[1]) for row in rows)
        return _dedupes(rows)

    def set_dedupes(self, dedupes: Sequence[Dedupe]) -> None:
        # Only what was seen is replaced. What another writer has added since then makes the insert fail.
        self._session.run(sql.DROP_DEDUPES, pairs={first[:2] for first in dedupes} & self._firsts)
        self._session.insert(sql.ADD_DEDUPES, [tuple(first) for first in dedupes])
        self._firsts.update(first[:2] for first in dedupes)

    def claim_memories(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], ClaimMemory]:
        rows = self._session.rows(sql.REMEMBERED, pairs=keys)
        return {(row[0], row[1]): _claim_memory(*row) for row in rows}

    def remember_claims(self, claims: Sequence[ClaimMemory]) -> None:
        self._session.insert(sql.ADD_CLAIMS, [(*memory[:4], _encode(memory.grants)) for memory in claims])

    def forget_claims(self, *, before: float, limit: int) -> int:
        return self._session.count(sql.FORGET_CLAIMS, before=before, most=limit)

    def last_kind_change(self) -> int:
        return int(self._session.rows(sql.KIND_CHANGE)[0][0])

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
        self._session.run(sql.COUNT_KIND_CHANGE)  # from here on, other writers of kinds wait
        ((change,),) = self._session.rows(sql.KIND_CHANGE)
        self._session.run(sql.DROP_KIND, kind_name=name)
        self._session.insert(sql.ADD_KIND, [(name, settings, at, by, change, *declaration)])

    def note_kind(self, name: str, digests: str, *, at: float) -> None:
        self._session.run(sql.NOTE_KIND, of_name=name, of_digests=digests, at=at)

    def begin_change(self) -> None:
        """Do nothing: no other writer can be in the middle of a transaction."""

    def set_gate(self, row: GateRow) -> None:
        self.remove_gate(row.scope, row.name)
        self._session.insert(sql.ADD_GATE, [tuple(row)])

    def remove_gate(self, scope: str, name: str) -> None:
        self.begin_change()
        self._session.run(sql.COUNT_KIND_CHANGE)
        self._session.run(sql.DROP_GATE, of_scope=scope, of_name=name)

    def periodic(self, name: str) -> PeriodicRow | None:
        rows = self._session.rows(sql.PERIODIC_LOCKED, of_name=name) if self._has_keys else []
        return next(iter(_periodics(rows)), None)

    def next_deadline(self) -> float | None:
        ((at,),) = self._session.rows(sql.NEXT_DEADLINE)
        return float(at) if damage.is_number(at) else None

    def passed_deadlines(self, *, now: float, limit: int) -> list[int]:
        return [row[0] for row in self._session.rows(sql.PASSED_DEADLINES, now=now, most=limit)]

    def set_deadlines(self, deadlines: Mapping[int, Deadline]) -> None:
        self.drop_deadlines(deadlines)
        self._session.insert(sql.ADD_DEADLINES, [(seq, *deadline) for seq, deadline in deadlines.items()])

    def drop_deadlines(self, seqs: Collection[int]) -> None:
        if seqs:
            self._session.run(sql.DROP_DEADLINES, seqs=seqs)

    def next_firing(self) -> float | None:
        ((at,),) = self._session.rows(sql.NEXT_FIRING)
        return float(at) if damage.is_number(at) else None

    def due_periodics(self, *, now: float, limit: int) -> list[PeriodicRow]:
        return _periodics(self._session.rows(sql.DUE_PERIODICS, now=now, most=limit))

    def set_periodic(self, row: PeriodicRow) -> None:
        if row.version == 1:
            self._session.insert(sql.ADD_PERIODIC, [tuple(row)])
            return
        values = {f"new_{name}": value for name, value in row._asdict().items()}
        if self._session.count(sql.SET_PERIODIC, **values) != 1:
            raise Contended(f"another writer has changed the periodic task {row.name!r} meanwhile")

    def remove_periodic(self, name: str) -> None:
        self._session.run(sql.DROP_PERIODIC, of_name=name)

    def add_minutes(self, rows: Sequence[MinuteRow]) -> None:
        for at, node in {(row.at, row.node) for row in rows}:
            self._session.run(sql.DROP_MINUTES_OF_NODE, of_minute=at, of_node=node)
        self._session.insert(sql.ADD_MINUTES, list(map(tuple, rows)))

    def forget_minutes(self, *, before: int, limit: int) -> None:
        oldest = self._session.rows(sql.OLDEST_MINUTES, before=before, most=limit)
        if oldest:
            self._session.run(sql.DROP_MINUTES, before=oldest[-1][0] + 1)

    def set_tokens(self, rows: Sequence[TokenRow]) -> None:
        self.remove_tokens([row.id for row in rows])
        self._session.insert(sql.ADD_TOKENS, [tuple(row) for row in rows])

    def use_tokens(self, used_at: Mapping[str, float]) -> None:
        self._session.update(sql.USE_TOKENS, [(at, token_id) for token_id, at in sorted(used_at.items())])

    def remove_tokens(self, ids: Collection[str]) -> None:
        self._session.run(sql.DROP_TOKENS, ids=ids)

    def add_audit(self, rows: Sequence[AuditRow]) -> None:
        self._session.insert(sql.ADD_AUDIT, [tuple(row) for row in rows])

    def forget_audit(self, *, before: float, limit: int) -> int:
        return self._session.count(sql.FORGET_AUDIT, before=before, most=limit)

    def collections(self, seqs: Collection[int]) -> dict[int, str]:
        return {row[0]: row[1] for row in self._session.rows(sql.COLLECTIONS, seqs=seqs) if isinstance(row[1], str)}

    def parked(self, collection: str, *, limit: int) -> list[tuple[float, int]]:
        return [(row[0], row[1]) for row in self._session.rows(sql.PARKED, of_collection=collection, most=limit)]

    def park(self, tasks: Sequence[tuple[str, float, int]]) -> None:
        self.unpark([seq for _, _, seq in tasks])
        self._session.insert(sql.ADD_PARKED, list(tasks))

    def unpark(self, seqs: Collection[int]) -> None:
        self._session.run(sql.DROP_PARKED, seqs=seqs)

    def begin_starts(self, kinds: Collection[str]) -> Collection[str]:
        return kinds

    def buckets(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], float]:
        rows = self._session.rows(sql.BUCKETS, pairs=keys)
        self._buckets.update((row[0], row[1]) for row in rows)
        return {(row[0], row[1]): row[2] for row in rows if damage.is_number(row[2])}

    def set_buckets(self, full_at: Mapping[tuple[str, str], float]) -> None:
        if old := full_at.keys() & self._buckets:
            self._session.run(sql.DROP_BUCKETS, pairs=old)
        self._session.insert(sql.ADD_BUCKET, [(*key, at) for key, at in full_at.items()])
        self._buckets.update(full_at)

    def fill_buckets(self, kind: str, *, full_by: float, of_keys: bool = False) -> None:
        self._session.run(sql.FILL_BUCKETS_OF_KEYS if of_keys else sql.FILL_BUCKET, of_kind=kind, at=full_by)

    def forget_buckets(self, kinds: Collection[str], *, now: float, limit: int) -> None:
        full = [(row[0], row[1]) for row in self._session.rows(sql.FULL_BUCKETS, kinds=kinds, now=now, most=limit)]
        ours = set(self.begin_starts({kind for kind, _ in full})) if full else set[str]()
        if pairs := [pair for pair in full if pair[0] in ours]:
            self._session.run(sql.DROP_FULL_BUCKETS, pairs=pairs, now=now)

    def waits(self, awaited: Collection[str], *, limit: int, after: str = "") -> list[tuple[str, str]]:
        rows = self._session.rows(sql.WAITS, awaited=awaited, after_id=after, most=limit)
        return [(row[0], row[1]) for row in rows]

    def awaited(self, ids: Collection[str]) -> set[str]:
        return {row[0] for row in self._session.rows(sql.AWAITED, awaited=ids)}

    def add_waits(self, waits: Collection[tuple[str, str]]) -> None:
        self._session.insert(sql.ADD_WAITS, list(waits))

    def drop_waits(self, waits: Collection[tuple[str, str]]) -> None:
        if waits:
            self._session.run(sql.DROP_WAITS, pairs=waits)

    def drop_waits_of(self, ids: Collection[str]) -> None:
        if ids:
            self._session.run(sql.DROP_WAITS_OF, ids=ids)

    def wakes(self, *, limit: int) -> list[tuple[str, str]]:
        return [(row[0], row[1]) for row in self._session.rows(sql.WAKES, most=limit)]

    def wakes_for(self, awaited: Collection[str]) -> set[str]:
        return {row[0] for row in self._session.rows(sql.WAKES_FOR, awaited=awaited)}

    def set_wakes(self, wakes: Mapping[str, str | None]) -> None:
        if wakes:  # removed first: that waits for another writer that looks at one of them
            self._session.run(sql.DROP_WAKES, awaited=sorted(wakes))
            self._session.insert(sql.ADD_WAKES, [(name, after) for name, after in wakes.items() if after is not None])

    def add_to_chains(self, tasks: Sequence[tuple[int, str, str]]) -> None:
        self._session.insert(sql.ADD_CHAINS, tasks)

    def cancelled_chains(self, roots: Collection[str]) -> set[str]:
        return {row[0] for row in self._session.rows(sql.CANCELLED_CHAINS, roots=roots)}

    def cancel_chains(self, roots: Collection[str], *, at: float) -> None:
        new = set(roots) - self.cancelled_chains(roots)
        self._session.insert(sql.ADD_CANCELLED_CHAINS, [(root, at) for root in sorted(new)])

    def latest_time(self) -> float:
        return max([row[0] for row in self._session.rows(sql.LATEST) if damage.is_number(row[0])], default=0.0)

    def probe_write(self) -> None:
        self._session.run(sql.TOUCH)

    def _decoded(self, rows: Sequence[tuple[Any, ...]]) -> list[Trigger]:
        tasks, damaged = damage.triggers(rows)
        if damaged:
            self.save(damaged)
            if self.has_waits():
                self.set_wakes({row.id: "" for row in damaged})
            damage.log(damaged)
        return self._keyed.read(tasks)


def _full(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Lane, str]]:
    return [(Lane(row[0], row[1], row[2], has_keys=True), row[3]) for row in rows if damage.is_number(row[2])]


def _shares(rows: Sequence[tuple[Any, ...]]) -> list[Share]:
    return [Share(*row) for row in rows if damage.is_number(row[0]) and isinstance(row[1], str)]


def _periodics(rows: Sequence[tuple[Any, ...]]) -> list[PeriodicRow]:
    return [PeriodicRow(*row)._replace(is_paused=bool(row[4])) for row in rows]


def _ended(wanted: Filter, until: float, *columns: ColumnElement[Any]) -> Select[Any]:
    """Select from the tasks of this kind and status that ended by `until`."""
    query = select(*columns).where(trigger.c.ended_at <= until)
    if wanted.kind is not None:
        query = query.where(trigger.c.kind == wanted.kind)
    return query if wanted.status is None else query.where(trigger.c.status == wanted.status.value)


def _dedupes(rows: Sequence[tuple[Any, ...]]) -> dict[tuple[str, str], Dedupe]:
    return {(row[0], row[1]): Dedupe(*row) for row in rows if row[3] is None or damage.is_number(row[3])}


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
        None if row.owner is None else row.next_trigger_at,
    )
