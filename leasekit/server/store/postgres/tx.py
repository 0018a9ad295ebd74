"""Transactions on PostgreSQL: what several writers need beside `SqlTx`, which locks the rows that it reads.

Rule 1: a row is locked before it is judged, and only a locked row is written. No row is kept for a later transaction.
Renewals and results do not wait for a lock: one row that is locked for long must not delay the other leases.
Rule 2: rows that a writer has added meanwhile undo the transaction: it is repeated, and then sees them.
Rule 3: counts of tasks are kept as what each node has added and taken, so that writers never update the same row.
"""

import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec.structs import fields

from leasekit.errors import Refused
from leasekit.server.store import (
    Anchor,
    AuditRow,
    Contended,
    Deadline,
    Entity,
    InboxRow,
    Lane,
    MinuteRow,
    Node,
    PeriodicRow,
    Reading,
    SessionRow,
    Trigger,
)
from leasekit.server.store.postgres.session import PostgresSession, array
from leasekit.server.store.postgres.view import NO_TAGS, PostgresView
from leasekit.server.store.routes import kind_of
from leasekit.server.store.schema import QUEUED_AT, trigger
from leasekit.server.store.sql import leases, tasks
from leasekit.server.store.sql.keyed import KEYED, Charge
from leasekit.server.store.sql.session import Walk
from leasekit.server.store.sql.tx import SqlTx
from leasekit.task import Status

# Each write transaction has the first lock together with others, one that changes kinds or gates has it alone. Two that
# wait for that would wait for each other: so only the one with the second lock waits.
_WRITERS, _CHANGER = 7_205_759_403_792_795, 7_205_759_403_792_796
JOIN_WRITERS = f"SELECT pg_catalog.pg_advisory_xact_lock_shared({_WRITERS})"
_BE_THE_CHANGER = f"SELECT pg_catalog.pg_try_advisory_xact_lock({_CHANGER})"
_BE_ALONE = f"SELECT pg_catalog.pg_advisory_xact_lock({_WRITERS})"
# Of two nodes, one has the lock of a kind whose tasks it starts; `hashtext` is the same for all sessions of a database.
_STARTS = 1_818_583_923
_TRY = f"pg_catalog.pg_try_advisory_xact_lock({_STARTS}, pg_catalog.hashtext(kind))"
_BEGIN_STARTS = f"SELECT kind FROM pg_catalog.unnest(%s::text[]) AS kind WHERE {_TRY}"  # noqa: S608
# Writers that free places of keys have the lock of a kind together; one that lets keys leave their lanes has it alone,
# or leaves these as they are: it never waits. So no place becomes free between its look and its commit.
_PLACES = 1_818_583_924
_LOCK_PLACES = f"SELECT pg_catalog.pg_advisory_xact_lock_shared({_PLACES}, pg_catalog.hashtext(%s::text))"
_TRY_PLACES = f"SELECT pg_catalog.pg_try_advisory_xact_lock({_PLACES}, pg_catalog.hashtext(%s::text))"
_BLOCK = 10_000  # numbers; the increment of the sequence
_BLOCK_FOR = 1.0  # seconds for which a block is used, so that numbers grow with time, in all nodes
_LOCK_WAITS = (0.005, 0.015, 0.03)  # seconds between looks at rows that other nodes may have locked for a moment
_SEQ, _KIND, _STATUS = map([field.name for field in fields(Trigger)].index, ("seq", "kind", "status"))  # in a row
_NO_KEYS: Mapping[int, str] = {}
_COLUMNS = ", ".join(
    "keyed.due_at" if column.name == "next_trigger_at" else f'trigger."{column.name}"'
    for column in trigger.c
    if column is not trigger.c.lease_until
)
# `owner IS NULL` would let PostgreSQL read all that waits, by its index, for each key: while a table is new, it takes
# each index for a short one.
_QUEUES = f"""
SELECT queue.* FROM unnest(%s::text[], %s::float8[], %s::bigint[]) AS after(key, due_at, seq), LATERAL (
    SELECT {_COLUMNS}, keyed.key FROM leasekit.keyed JOIN leasekit.trigger USING (seq)
    WHERE keyed.kind = %s AND keyed.priority = %s AND keyed.key = after.key AND keyed.due_at <= %s
        AND (keyed.due_at, keyed.seq) > (after.due_at, after.seq)
        AND coalesce(trigger.owner, '') = '' AND trigger.next_trigger_at = {QUEUED_AT}
    ORDER BY keyed.due_at, keyed.seq LIMIT %s FOR NO KEY UPDATE OF trigger SKIP LOCKED
) AS queue"""  # noqa: S608
# Adds those that are not there yet, and locks all, in one order: the condition keeps the others as they are.
_LOCK_SHARES = """
INSERT INTO leasekit.share AS old (kind, priority, key, taken, active)
SELECT new.*, 0, false FROM unnest(%s::text[], %s::int[], %s::text[]) AS new(kind, priority, key) ORDER BY 1, 2, 3
ON CONFLICT (kind, priority, key) DO UPDATE SET taken = old.taken WHERE false"""
# The least share of the others is looked up once for each lane, not for each idle key: until the commit, PostgreSQL
# passes all that this transaction has changed. And a lane finds its own keys by an index: there may be many of both.
_FORGET_SHARES = """
WITH lane AS MATERIALIZED (
    SELECT kind, priority, (
        SELECT min(taken) FROM leasekit.share AS one
        WHERE one.kind = idle.kind AND one.priority = idle.priority AND one.active
    ) AS least FROM (SELECT DISTINCT kind, priority FROM leasekit.share WHERE due_at IS NULL) AS idle
)
DELETE FROM leasekit.share WHERE (kind, priority, key) IN (
    SELECT owes_nothing.* FROM lane, LATERAL (
        SELECT kind, priority, key FROM leasekit.share AS one
        WHERE one.kind = lane.kind AND one.priority = lane.priority AND one.due_at IS NULL
            AND one.taken <= coalesce(lane.least, one.taken)
        ORDER BY one.taken LIMIT %s FOR UPDATE SKIP LOCKED
    ) AS owes_nothing LIMIT %s
)"""
# A statement of its own, so that it sees what other writers have queued before they gave up the lock.
_CHANGE_SHARES = """
UPDATE leasekit.share AS old SET due_at = new.due_at,
    active = new.due_at IS NOT NULL AND new.until IS NULL
        AND CASE WHEN new.now IS NULL THEN old.active ELSE new.due_at <= new.now END,
    taken = CASE WHEN new.base IS NULL OR old.active THEN old.taken
        ELSE least(greatest(old.taken, new.base), new.base + 1) END + new.taken
FROM (
    SELECT *, (
        SELECT greatest(one.until, keyed.due_at) FROM leasekit.keyed
        WHERE keyed.kind = one.kind AND keyed.priority = one.priority AND keyed.key = one.key
            AND keyed.due_at IS NOT NULL
        ORDER BY keyed.due_at LIMIT 1
    ) AS due_at
    FROM unnest(%s::text[], %s::int[], %s::text[], %s::int[], %s::float8[], %s::float8[], %s::float8[])
        AS one(kind, priority, key, taken, base, now, until)
) AS new
WHERE old.kind = new.kind AND old.priority = new.priority AND old.key = new.key
    AND NOT (new.base IS NULL AND (
        old.active AND new.due_at IS NOT NULL AND new.until IS NULL OR old.due_at IS NOT DISTINCT FROM new.due_at
    ))
"""
_HAS_INBOX = "SELECT EXISTS (SELECT FROM leasekit.inbox WHERE refused IS NULL)"
_INBOX = """
SELECT number, octet_length(task) FROM leasekit.inbox
WHERE refused IS NULL AND (%s::bigint[] IS NULL OR number = ANY (%s::bigint[]))
ORDER BY number LIMIT %s FOR UPDATE SKIP LOCKED"""
_IN_INBOX = """
SELECT number, CASE WHEN octet_length(task) <= %s THEN task END, extract(epoch FROM at)::float8
FROM leasekit.inbox WHERE number = ANY (%s::bigint[]) ORDER BY number"""
_LEAVE_INBOX = "DELETE FROM leasekit.inbox WHERE number = ANY (%s::bigint[])"
_SET_ASIDE = """
UPDATE leasekit.inbox AS old SET refused = new.refused
FROM unnest(%s::bigint[], %s::text[]) AS new(number, refused) WHERE old.number = new.number"""
_STATUSES = {status.value: status for status in Status}
_RESTART_WAITS = (*_LOCK_WAITS, 0.2, 0.2, 0.5, 1.0)  # the same, for leases that are restarted


class Block:
    """The numbers that a node has reserved and not used yet, and how far it has looked through the tasks with keys."""

    def __init__(self) -> None:
        self.walk = Walk()
        self.next = self.end = 0
        self.since = 0.0

    def take(self, count: int) -> int | None:
        """Return the first of `count` numbers; None if a new block is needed."""
        if self.end - self.next < count or time.monotonic() - self.since > _BLOCK_FOR:
            return None
        self.next += count
        return self.next - count


class PostgresTx(SqlTx, PostgresView):
    """A transaction of one of several writers. `SharedTx` describes the methods."""

    def __init__(self, session: PostgresSession, node: Node, block: Block, reading: Reading) -> None:
        super().__init__(session, block.walk, has_keys=reading.kind_change is not None)
        self._connection = session.connection
        self._node = node
        self._block = block
        self._reading = reading
        self._states: dict[int, tuple[str, Status]] = {}  # the kinds and statuses of the rows that are locked
        self._changes: Counter[tuple[str, Status]] = Counter()
        self._freed: set[int] = set()  # tasks of which this transaction has ended a run, and that have keys with limits
        self._key_limits: dict[str, int] = {}
        self._tended = 0

    @property
    def reading(self) -> Reading:
        return self._reading

    def correct_clock(self, correction: float, gained: float) -> None:
        query = "UPDATE leasekit.store SET correction = %s, gained = %s WHERE correction = %s RETURNING id"
        if not self.execute(query, correction, gained, self._reading.correction):
            raise Contended("another node has corrected the clock meanwhile")

    def sign_in(self, sign: Anchor) -> None:
        self._connection.execute(
            "INSERT INTO leasekit.node AS old (id, name, version, address, wants_events, workers, started_at, has_left,"
            " seen, boot_id, boot) VALUES (%s, %s, %s, %s, %s, %s, %s, false, %s, %s, %s) ON CONFLICT (id) DO UPDATE"
            " SET (has_left, seen, boot_id, boot, address, wants_events, workers) = (false, excluded.seen,"
            " excluded.boot_id, excluded.boot, excluded.address, excluded.wants_events,"
            # The old value, if it is the same: a long one is then not written again.
            " CASE WHEN old.workers = excluded.workers THEN old.workers ELSE excluded.workers END)",
            (*self._node, sign.instant, sign.instant, sign.boot_id, sign.boot),
        )

    def forget_nodes(self, before: float) -> None:
        """Remove nodes that were seen last before this moment; keep what they have counted."""
        self._connection.execute("DELETE FROM leasekit.node WHERE seen < %s", (before,))
        self._connection.execute(
            "WITH gone AS (DELETE FROM leasekit.task_count WHERE node <> '' AND node NOT IN"
            " (SELECT id FROM leasekit.node) RETURNING kind, status, tasks)"
            " INSERT INTO leasekit.task_count AS old SELECT '', kind, status, sum(tasks) FROM gone GROUP BY 2, 3"
            " ON CONFLICT (node, kind, status) DO UPDATE SET tasks = old.tasks + excluded.tasks"
        )

    def tend_shares(self, *, limit: int) -> None:
        self._tended = limit  # at the end: a writer that holds shares must not wait for places

    def leave(self, lane: Lane, until: Mapping[str, float | None], *, most: int) -> None:
        super().leave(lane, until, most=most)
        self._key_limits[lane.kind] = most

    def free_keys(self, seqs: Collection[int]) -> list[Lane]:
        self._freed.update(seqs)
        return super().free_keys(seqs)

    def _agree_on_places(self) -> None:
        """Look again which keys have left their lanes, of those freed here, and which may leave now."""
        if self._freed:
            for kind in sorted({kind_of(row[1]) for row in self._session.rows(KEYED, seqs=self._freed)}):
                self.execute(_LOCK_PLACES, kind)
            super().free_keys(self._freed)
        for name, keys in self._keyed.leaving().items():
            kind = kind_of(name)
            ((is_alone,),) = self.execute(_TRY_PLACES, kind)
            running = self.running_of_keys(kind, keys) if is_alone else {}
            self._keyed.stay(name, {key for key in keys if running.get(key, 0) < self._key_limits[kind]})

    def finish(self) -> None:
        """Write what the transaction has changed of the shares, then of the counts."""
        self._agree_on_places()
        if self._tended:
            super().tend_shares(limit=self._tended)
        super().finish()
        changed = [(kind, status.value, tasks) for (kind, status), tasks in self._changes.items() if tasks]
        if changed:
            kinds, statuses, tasks = map(array, zip(*sorted(changed), strict=True))
            self._connection.execute(
                "INSERT INTO leasekit.task_count AS old"
                " SELECT %s, * FROM unnest(%s::text[], %s::text[], %s::bigint[])"
                " ON CONFLICT (node, kind, status) DO UPDATE SET tasks = old.tasks + excluded.tasks",
                (self._node.id, kinds, statuses, tasks),
            )

    def allocate_seqs(self, count: int) -> int:
        while (first := self._block.take(count)) is None:
            # One after another, until there are enough: other nodes take blocks too.
            blocks = -(-count // _BLOCK)
            rows = self.execute("SELECT nextval('leasekit.task_seq') FROM generate_series(1, %s)", blocks)
            if rows[-1][0] - rows[0][0] == _BLOCK * (blocks - 1):
                self._block.next, self._block.end = rows[0][0], rows[-1][0] + _BLOCK
                self._block.since = time.monotonic()
        return first

    def unlocked_triggers(self, ids: Collection[str]) -> tuple[dict[str, Trigger], Collection[str]]:
        found: dict[str, Trigger] = {}
        left = set(ids)
        for wait in (*_LOCK_WAITS, None):
            found |= {row.id: row for row in self._decoded(self._session.rows(tasks.BY_ID_UNLOCKED, ids=left))}
            # A later look than the one at the locks: an id that it finds is one of a locked row, or a new one.
            left = {row[0] for row in self._session.rows(tasks.KNOWN_IDS, ids=left - found.keys())} if left else left
            if not left or wait is None:
                break
            time.sleep(wait)
        return found, left

    def add(
        self,
        entities: Sequence[Entity],
        triggers: Sequence[Trigger],
        keys: Mapping[int, str] = _NO_KEYS,
        routes: Mapping[int, str] = _NO_KEYS,
    ) -> None:
        if (keys or routes) and not self._has_keys:
            what = "keys of tasks" if keys else "tasks that require labels"
            raise Refused(f"the tables of the database have no room for {what}: run `leasekit migrate`")
        if routes and not self._reading.has_routes:
            self.begin_change()  # as in `add_waits`
            self._connection.execute("UPDATE leasekit.store SET has_routes = true")
            self._reading = self._reading._replace(has_routes=True)
        super().add(entities, triggers, keys, routes)
        for row in triggers:
            self._move(row.seq, row.kind, row.status)

    def add_tags(self, tags: Sequence[tuple[str, int]]) -> None:
        if not self._has_keys:
            raise Refused(NO_TAGS)
        super().add_tags(tags)

    def save(self, triggers: Sequence[Trigger]) -> None:
        self._look_up([row.seq for row in triggers])
        super().save(triggers)
        for row in triggers:
            self._move(row.seq, row.kind, row.status)

    def renew(self, seqs: Collection[int], status: Status, *, now: float, at: float) -> None:
        known = self._look_up(seqs)
        super().renew(seqs, status, now=now, at=at)
        for seq in known:
            self._move(seq, self._states[seq][0], status)

    def end(self, seqs: Collection[int], status: Status, *, now: float) -> None:
        known = self._look_up(seqs)
        super().end(seqs, status, now=now)
        for seq in known:
            self._move(seq, self._states[seq][0], status)

    def restart_leases(self, *, now: float, shift: float | None) -> None:
        """Restart all leases but those whose rows stay locked: one of them must not keep the nodes from serving."""
        for wait in _RESTART_WAITS:
            if not self._session.rows(leases.COUNT_LOCKED)[0][0]:
                break
            time.sleep(wait)
        super().restart_leases(now=now, shift=shift)

    def remove(self, seqs: Collection[int]) -> None:
        known = self._look_up(seqs)
        super().remove(seqs)
        for seq in known:
            self._changes[self._states.pop(seq)] -= 1

    def _look_up(self, seqs: Collection[int]) -> list[int]:
        """Lock the rows that this transaction has not read yet, and return the `seqs` that exist."""
        unread = [seq for seq in seqs if seq not in self._states]
        if unread:
            self.triggers_of(unread)
        return [seq for seq in seqs if seq in self._states]

    def _move(self, seq: int, kind: str, status: Status) -> None:
        was = self._states.get(seq)
        if was is not None:
            self._changes[was] -= 1
        self._states[seq] = kind, status
        self._changes[kind, status] += 1

    def _decoded(self, rows: Sequence[tuple[Any, ...]]) -> list[Trigger]:
        # Statuses are noted before `super` writes damaged rows, which would look them up again. The old status of a
        # damaged row may be unknown: *dead*, its new status, then leaves the counts as they are.
        for row in rows:
            self._states.setdefault(row[_SEQ], (row[_KIND], _STATUSES.get(row[_STATUS], Status.DEAD)))
        return super()._decoded(rows)

    def _has_kinds(self) -> bool:
        return self._has_keys

    def _queues(
        self, lane: Lane, after: Mapping[str, tuple[float, int]], *, now: float, limit: int
    ) -> dict[str, list[tuple[Any, ...]]]:
        keys, due, seqs = array(after), *map(array, zip(*after.values(), strict=True))
        found: dict[str, list[tuple[Any, ...]]] = {}
        for *row, key in self.execute(_QUEUES, keys, due, seqs, lane.name, lane.priority, now, limit):
            found.setdefault(key, []).append(tuple(row))
        return found

    def _write_shares(self, changes: Sequence[Charge]) -> None:
        places = list(map(array, zip(*(change.place for change in changes), strict=True)))
        values = list(map(array, zip(*(change[1:] for change in changes), strict=True)))
        self._connection.execute(_LOCK_SHARES, places)
        self._connection.execute(_CHANGE_SHARES, (*places, *values))

    def _forget_shares(self, limit: int) -> None:
        self._connection.execute(_FORGET_SHARES, (limit, limit), prepare=True)

    def has_chains(self) -> bool:
        return self._reading.kind_change is not None

    def has_routes(self) -> bool:
        return self._reading.has_routes

    def has_waits(self) -> bool:
        return self._reading.has_waits

    def add_waits(self, waits: Collection[tuple[str, str]]) -> None:
        if not self._reading.has_waits:
            # Once in the life of a database, and while no other writer is in a transaction: none of them ends a task
            # without a look at what waits for it.
            self.begin_change()
            self._connection.execute("UPDATE leasekit.store SET has_waits = true")
            self._reading = self._reading._replace(has_waits=True)
        super().add_waits(waits)

    def next_deadline(self) -> float | None:
        if not self._has_keys:
            return None
        first = super().next_deadline()
        return math.inf if first is None else first  # another node may add one at any time

    def deadlines(self, seqs: Collection[int]) -> dict[int, Deadline]:
        return super().deadlines(seqs) if self._has_keys else {}

    def drop_deadlines(self, seqs: Collection[int]) -> None:
        if self._has_keys:
            super().drop_deadlines(seqs)

    def set_deadlines(self, deadlines: Mapping[int, Deadline]) -> None:
        if not self._has_keys:
            raise Refused("the tables of the database have no room for start deadlines: run `leasekit migrate`")
        super().set_deadlines(deadlines)

    def add_sessions(self, rows: Sequence[SessionRow]) -> None:
        if not self._has_keys:
            raise Refused("the tables of the database have no room for sessions: run `leasekit migrate`")
        super().add_sessions(rows)

    def add_audit(self, rows: Sequence[AuditRow]) -> None:
        if self._has_keys:
            super().add_audit(rows)

    def forget_audit(self, *, before: float, limit: int) -> int:
        return super().forget_audit(before=before, limit=limit) if self._has_keys else 0

    def next_firing(self) -> float | None:
        return super().next_firing() if self._has_keys else None

    def add_minutes(self, rows: Sequence[MinuteRow]) -> None:
        if self._has_kinds():
            super().add_minutes(rows)

    def forget_minutes(self, *, before: int, limit: int) -> None:
        if self._has_kinds():
            super().forget_minutes(before=before, limit=limit)

    def set_periodic(self, row: PeriodicRow) -> None:
        if not self._has_keys:
            raise Refused("the tables of the database have no room for periodic tasks: run `leasekit migrate`")
        super().set_periodic(row)

    def has_inbox(self) -> bool:
        return self._has_kinds() and self.execute(_HAS_INBOX) == [(True,)]

    def inbox(self, *, limit: int, most_bytes: int, largest: int, numbers: Sequence[int] | None) -> list[InboxRow]:
        if not self._has_kinds():
            return []
        wanted = None if numbers is None else array(numbers)
        room, fitting = most_bytes, list[int]()
        for number, size in self.execute(_INBOX, wanted, wanted, limit):
            room -= min(size, largest)
            if room < 0 and fitting:
                break
            fitting.append(number)
        return [InboxRow(*row) for row in self.execute(_IN_INBOX, largest, array(fitting))] if fitting else []

    def leave_inbox(self, numbers: Collection[int]) -> None:
        if numbers:
            self._connection.execute(_LEAVE_INBOX, (array(numbers),))

    def set_aside(self, refused: Mapping[int, str]) -> None:
        self._connection.execute(_SET_ASIDE, (array(refused), array(refused.values())))

    def last_kind_change(self) -> int:
        return self._reading.kind_change or 0

    def begin_change(self) -> None:
        if self._reading.kind_change is None:
            what = "kinds, gates, drains, chains, access tokens and tasks after others"
            raise Refused(f"the tables of the database have no room for {what}: run `leasekit migrate`")
        if self.execute(_BE_THE_CHANGER) != [(True,)]:
            # The repeat waits until the other node's change has ended.
            raise Contended("another node changes kinds, gates, drains or access tokens")
        self.execute(_BE_ALONE)

    def begin_starts(self, kinds: Collection[str]) -> Collection[str]:
        return [kind for (kind,) in self.execute(_BEGIN_STARTS, array(kinds))]

    def give_back(self, *, most: int) -> None:
        raise Refused("PostgreSQL gives space back itself (autovacuum): there is nothing to do")

    def anchor(self) -> Anchor | None:
        return None  # all nodes use the clock of the database

    def set_anchor(self, anchor: Anchor) -> None:
        """Do nothing: see `anchor`."""

    def probe_write(self) -> None:
        self._connection.execute("UPDATE leasekit.node SET seen = seen WHERE id = %s", (self._node.id,))
