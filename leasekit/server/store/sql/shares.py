"""The keys of tasks in an SQL database: their shares, their limits, and the token buckets of kinds and keys."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam, func, literal, select, tuple_

from leasekit.server.store import Lane, Share, Trigger, damage
from leasekit.server.store.routes import kind_of
from leasekit.server.store.schema import (
    QUEUED_AT,
    bucket,
    is_idle,
    is_joining,
    is_leased,
    is_of_key,
    is_queued,
    is_waiting,
    keeps_place,
    keyed,
    share,
    trigger,
)
from leasekit.server.store.sql.keyed import DROP_PLACES, KEPT_PLACES, KEYED, Charge, Place
from leasekit.server.store.sql.lanes import IN_QUEUE, OF_LANE, LaneTx
from leasekit.server.store.sql.session import PRIORITIES, Reads
from leasekit.server.store.sql.statements import MOMENT, MOST, NOW, Insert, Statement, is_one_of, is_one_pair_of, listed
from leasekit.server.store.sql.tasks import DUE, LEASE_END, STATE

_ALL = 2**31 - 1
_SHARE = (share.c.taken, share.c.key)
ACTIVE_SHARES = Statement(
    select(*_SHARE)
    .where(
        *OF_LANE,
        share.c.active,
        tuple_(*_SHARE) > tuple_(bindparam("after_taken", type_=sa.Double), bindparam("after_key", type_=sa.Text)),
    )
    .order_by(*_SHARE)
    .limit(MOST)
)
JOINING_SHARES = Statement(
    select(*_SHARE).where(*OF_LANE, is_joining(), share.c.due_at <= NOW).order_by(share.c.due_at).limit(MOST)
)
SHARES = Statement(select(*_SHARE).where(*OF_LANE, is_one_of(share.c.key, "keys")))
QUEUED = Statement(
    select(*(keyed.c.due_at if column is LEASE_END else column for column in STATE))
    .join_from(keyed, trigger, trigger.c.seq == keyed.c.seq)
    .where(
        *IN_QUEUE,
        keyed.c.key == bindparam("key", type_=sa.Text),
        keyed.c.due_at <= NOW,
        tuple_(keyed.c.due_at, keyed.c.seq)
        > tuple_(bindparam("after_due", type_=sa.Double), bindparam("after_seq", type_=sa.BigInteger)),
        is_waiting(),
        DUE == QUEUED_AT,  # else another version of leasekit has changed the task
    )
    .order_by(keyed.c.due_at, keyed.c.seq)
    .limit(MOST)
    .with_for_update(of=trigger, skip_locked=True, key_share=True)
)
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
    .limit(MOST)
    .with_for_update(skip_locked=True)
)
FORGET_SHARES = Statement(sa.delete(share).where(tuple_(*share.primary_key).in_(_FORGOTTEN)))
"""Delete keys without tasks that owe nothing, or compete with no other key."""
_PAGE = (
    select(keyed)
    .where(keyed.c.seq > bindparam("after", type_=sa.BigInteger))
    .order_by(keyed.c.seq)
    .limit(MOST)
    .subquery()
)
_IN_ORDER = func.coalesce(sa.and_(trigger.c.owner.is_(None), DUE == QUEUED_AT), sa.false())
LOST = Statement(
    select(_PAGE.c.seq, _PAGE.c.kind, _PAGE.c.priority, _PAGE.c.key, _IN_ORDER)
    .join_from(_PAGE, trigger, trigger.c.seq == _PAGE.c.seq, isouter=True)
    .join(share, sa.and_(*(share.c[name] == _PAGE.c[name] for name in ("kind", "priority", "key"))), isouter=True)
    .where(_PAGE.c.due_at.is_not(None), sa.or_(share.c.due_at.is_(None), sa.not_(_IN_ORDER)))
)
"""Of a page of tasks with keys, those that wait and are in no share, or of which only `keyed` says that they wait."""
END_OF_PAGE = Statement(select(func.max(_PAGE.c.seq)))
RUNNING = Statement(
    select(trigger.c.kind, func.count()).where(is_leased(), is_one_of(trigger.c.kind, "kinds")).group_by(trigger.c.kind)
)
_KIND = bindparam("kind", type_=sa.Text)
_OF_KEYS = (
    select(keyed.c.key, func.count())
    .join_from(trigger, keyed, keyed.c.seq == trigger.c.seq)
    .where(is_one_of(keyed.c.key, "keys"))
    .group_by(keyed.c.key)
)
RUNNING_OF_KEYS = Statement(
    sa.union_all(
        _OF_KEYS.where(is_leased(), trigger.c.kind == _KIND),
        _OF_KEYS.where(is_waiting(), keeps_place(), keyed.c.kind == _KIND),
    )
)
_ENDED_TASK = keyed.alias()
_FULL_KEY = (
    share.c.priority,
    share.c.kind,
    select(func.min(keyed.c.due_at))
    .where(*(keyed.c[name] == share.c[name] for name in ("kind", "priority", "key")), is_queued())
    .scalar_subquery(),
    share.c.key,
)
_HAS_LEFT = (is_joining(), share.c.due_at == QUEUED_AT)
_FULL_KEYS = select(*_FULL_KEY).where(is_one_of(share.c.kind, "kinds"), is_one_of(share.c.priority, "priorities"))
FULL_KEYS = Statement(_FULL_KEYS.where(is_joining(), share.c.due_at > NOW, share.c.due_at > _FULL_KEY[2]).limit(MOST))
"""The keys that have left their lanes, and come back later than now."""
FULL_KEYS_TILL_AN_END = Statement(_FULL_KEYS.where(*_HAS_LEFT).limit(MOST))
"""The keys that have left their lanes, and come back only at the end of a run."""


def _full_keys_of_tasks() -> sa.Select[Any, Any, Any, Any]:
    priorities = listed("priorities", sa.Integer())
    of_key = (
        share.c.kind == _ENDED_TASK.c.kind,
        share.c.key == _ENDED_TASK.c.key,
        share.c.priority == priorities.c.value,
    )
    found = select(*_FULL_KEY).select_from(
        _ENDED_TASK.join(priorities, literal(value=True)).join(share, sa.and_(*of_key, *_HAS_LEFT))
    )
    return found.where(is_one_of(_ENDED_TASK.c.seq, "seqs")).distinct()


FULL_KEYS_OF = Statement(_full_keys_of_tasks())
"""Of the keys of these tasks, those that have left their lanes."""
BUCKETS = Statement(select(bucket).where(is_one_pair_of(bucket.c.kind, bucket.c.key, "pairs")))
ADD_BUCKET = Insert(bucket)
_IS_PAIR = is_one_pair_of(bucket.c.kind, bucket.c.key, "pairs")
DROP_BUCKETS = Statement(sa.delete(bucket).where(_IS_PAIR))
FULL_BUCKETS = Statement(
    select(bucket.c.kind, bucket.c.key)
    .where(is_one_of(bucket.c.kind, "kinds"), is_of_key(), bucket.c.full_at <= NOW)
    .limit(MOST)
)
DROP_FULL_BUCKETS = Statement(sa.delete(bucket).where(_IS_PAIR, bucket.c.full_at <= NOW))
FILL_BUCKET, FILL_BUCKETS_OF_KEYS = (
    Statement(
        sa.update(bucket)
        .where(bucket.c.kind == bindparam("of_kind", type_=sa.Text), which, bucket.c.full_at > MOMENT)
        .values(full_at=MOMENT)
    )
    for which in (bucket.c.key == "", is_of_key())
)


class ShareView(Reads):
    """Reads of the running tasks of kinds and keys."""

    def running(self, kinds: Collection[str]) -> dict[str, int]:
        return {row[0]: row[1] for row in self._session.rows(RUNNING, kinds=kinds)}

    def running_of_keys(self, kind: str, keys: Collection[str]) -> dict[str, int]:
        counts = Counter[str]()
        for key, count in self._session.rows(RUNNING_OF_KEYS, kind=kind, keys=keys):
            counts[key] += count
        return counts

    def full_keys(self, kinds: Collection[str], *, now: float, limit: int) -> list[tuple[Lane, str]]:
        of = {"kinds": kinds, "priorities": PRIORITIES, "now": now}
        return _full(self._session.rows(FULL_KEYS, **of, most=limit))


class ShareTx(LaneTx, ShareView):
    """Reads and writes of the shares, the limits and the buckets of keys."""

    def active_shares(self, lane: Lane, *, after: Share, limit: int) -> list[Share]:
        of = {"kind": lane.name, "priority": lane.priority, "after_taken": after.taken, "after_key": after.key}
        return _shares(self._session.rows(ACTIVE_SHARES, **of, most=limit))

    def joining_shares(self, lane: Lane, *, now: float, limit: int) -> list[Share]:
        of = {"kind": lane.name, "priority": lane.priority}
        known = _shares(self._session.rows(JOINING_SHARES, **of, now=now, most=limit))
        new = self._keyed.keys(lane) - {share.key for share in known}
        if new:
            joined = {share.key: share for share in _shares(self._session.rows(SHARES, **of, keys=new))}
            known += [joined.get(key, Share(0.0, key)) for key in sorted(new)]
        return known

    def share(self, lane: Lane, key: str) -> Share:
        rows = self._session.rows(SHARES, kind=lane.name, priority=lane.priority, keys=[key])
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

    def keep_places(self, seqs: Collection[int]) -> None:
        queued = self._keyed.queued(seqs)
        of_keys = {(place.kind, place.key): (seq, place, due_at) for seq, place, due_at in sorted(queued, reverse=True)}
        for kind in {kind for kind, _ in of_keys}:
            for key in self.running_of_keys(kind, [key for of_kind, key in of_keys if of_kind == kind]):
                del of_keys[kind, key]
        self._keyed.keep([*of_keys.values()])

    def drop_places_of(self, kind: str) -> None:
        self._keyed.drop_places_of(kind)

    def drop_places(self, seqs: Collection[int]) -> bool:
        return self._session.count(DROP_PLACES, seqs=seqs) > 0

    def kept_places(self, seqs: Collection[int]) -> set[int]:
        return {row[0] for row in self._session.rows(KEPT_PLACES, seqs=seqs)}

    def free_keys(self, seqs: Collection[int]) -> list[Lane]:
        kinds = {kind_of(row[1]) for row in self._session.rows(KEYED, seqs=seqs)} if self.has_routes() else ()
        if kinds and (routes := self.routes(kinds)):
            # A key has the same places in all routes of its kind: which of them wait for these is not looked up.
            return self.free_keys_of([*kinds, *routes], at_moments=False)
        rows = self._session.rows(FULL_KEYS_OF, seqs=seqs, priorities=PRIORITIES)
        return self._keyed.come_back(_full(rows))

    def free_keys_of(self, kinds: Collection[str], *, at_moments: bool = True) -> list[Lane]:
        if not kinds or not self._has_keys:
            return []
        if at_moments:
            return self._keyed.come_back(self.full_keys(kinds, now=0.0, limit=_ALL))
        rows = self._session.rows(FULL_KEYS_TILL_AN_END, kinds=kinds, priorities=PRIORITIES, most=_ALL)
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
        self._forget_shares(limit)
        page = {"after": self._walk.after, "most": limit}
        lost = self._session.rows(LOST, **page)
        self._keyed.forget({row[0]: Place(*row[1:4]) for row in lost}, {row[0] for row in lost if row[4]})
        self._walk.after = self._session.rows(END_OF_PAGE, **page)[0][0] or 0

    def _forget_shares(self, limit: int) -> None:
        self._session.run(FORGET_SHARES, most=limit)

    def begin_starts(self, kinds: Collection[str]) -> Collection[str]:
        return kinds

    def buckets(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], float]:
        rows = self._session.rows(BUCKETS, pairs=keys)
        self._buckets.update((row[0], row[1]) for row in rows)
        return {(row[0], row[1]): row[2] for row in rows if damage.is_number(row[2])}

    def set_buckets(self, full_at: Mapping[tuple[str, str], float]) -> None:
        if old := full_at.keys() & self._buckets:
            self._session.run(DROP_BUCKETS, pairs=old)
        self._session.insert(ADD_BUCKET, [(*key, at) for key, at in full_at.items()])
        self._buckets.update(full_at)

    def fill_buckets(self, kind: str, *, full_by: float, of_keys: bool = False) -> None:
        self._session.run(FILL_BUCKETS_OF_KEYS if of_keys else FILL_BUCKET, of_kind=kind, at=full_by)

    def forget_buckets(self, kinds: Collection[str], *, now: float, limit: int) -> None:
        full = [(row[0], row[1]) for row in self._session.rows(FULL_BUCKETS, kinds=kinds, now=now, most=limit)]
        ours = set(self.begin_starts({kind for kind, _ in full})) if full else set[str]()
        if pairs := [pair for pair in full if pair[0] in ours]:
            self._session.run(DROP_FULL_BUCKETS, pairs=pairs, now=now)


def _full(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Lane, str]]:
    return [(Lane(row[0], row[1], row[2], has_keys=True), row[3]) for row in rows if damage.is_number(row[2])]


def _shares(rows: Sequence[tuple[Any, ...]]) -> list[Share]:
    return [Share(*row) for row in rows if damage.is_number(row[0]) and isinstance(row[1], str)]
