"""The tables of an SQL store, for SQLAlchemy. A change needs a migration of older stores, in `sqlite/migrations/`.

`task` is written once; `trigger` is small and changes often. Two partial indexes order `trigger` by next trigger time,
one for waiting tasks and one for leased tasks; a third counts leased tasks by kind; a fourth orders ended tasks by
their end.
"""

import sqlalchemy as sa
from sqlalchemy.sql.elements import ColumnElement

metadata = sa.MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
    }
)

# SQLite uses only an INTEGER as the row's own key; in other databases INTEGER is too small.
_Serial = sa.BigInteger().with_variant(sa.Integer, "sqlite")

store = sa.Table(
    "store",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),  # the identity of the store; the table has one row
    sa.Column("commits", sa.BigInteger, nullable=False),  # transactions that have changed the store
    sa.Column("start", sa.Text),  # the start of the server that has written the last transaction
    sa.Column("anchor", sa.Text),  # an `Anchor` as JSON: the clocks of the last transaction
    sa.Column("kind_change", sa.BigInteger, nullable=False, server_default="0"),  # of the last change: see `RuleWrites`
)

task = sa.Table(
    "task",
    metadata,
    sa.Column("seq", _Serial, primary_key=True, autoincrement=False),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("collection", sa.Text),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("max_attempts", sa.Integer),
    sa.Column("max_crashes", sa.Integer, nullable=False),
    sa.Column("max_runtime", sa.Double),
    sa.Column("enqueue_timeout", sa.Double, nullable=False),
    sa.Column("retry", sa.LargeBinary),
    sa.Column("expiry", sa.Text),
    sa.Column("dedupe_key", sa.Text),
    sa.Column("traceparent", sa.Text),
    sa.Column("digest", sa.LargeBinary, nullable=False),
    # The last column: SQLite reads through a big value to reach the columns behind it.
    sa.Column("payload", sa.LargeBinary, nullable=False),
)

trigger = sa.Table(
    "trigger",
    metadata,
    sa.Column("seq", _Serial, sa.ForeignKey(task.c.seq), primary_key=True, autoincrement=False),
    sa.Column("id", sa.Text, nullable=False),  # a copy of the column in `task`, so that the hot path needs no join
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("claim_timeout", sa.Double, nullable=False),
    sa.Column("heartbeat_timeout", sa.Double, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("fence", sa.BigInteger, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("crashes", sa.Integer, nullable=False),
    sa.Column("failures", sa.Integer, nullable=False),
    sa.Column("cancel_requested", sa.Boolean, nullable=False),
    sa.Column("owner", sa.Text),
    sa.Column("token", sa.Text),
    sa.Column("next_trigger_at", sa.Double),
    sa.Column("reason", sa.Text),
    sa.Column("max_runtime", sa.Double),
    sa.Column("run_until", sa.Double),
    sa.Column("was_extended", sa.Boolean, nullable=False),
    sa.Column("ended_at", sa.Double),
    sa.Column("claimed_at", sa.Double),
    sa.Column("started_at", sa.Double),
    sa.Column("heartbeat_at", sa.Double),
    # The end of a lease. `next_trigger_at` of a leased task, which is indexed, is at most that: a renewal that changes
    # no indexed column costs much less, and the index follows when the time in it has come.
    sa.Column("lease_until", sa.Double),
)


def is_waiting() -> ColumnElement[bool]:
    return sa.and_(trigger.c.owner.is_(None), trigger.c.next_trigger_at.is_not(None))


def is_leased() -> ColumnElement[bool]:
    return trigger.c.owner.is_not(None)


sa.Index("ix_trigger_waiting", trigger.c.kind, trigger.c.priority, trigger.c.next_trigger_at, sqlite_where=is_waiting())
sa.Index("ix_trigger_leased", trigger.c.next_trigger_at, sqlite_where=is_leased())
sa.Index("ix_trigger_running", trigger.c.kind, sqlite_where=is_leased())
sa.Index("ix_trigger_ended", trigger.c.ended_at, sqlite_where=trigger.c.ended_at.is_not(None))

progress = sa.Table(
    "progress",
    metadata,
    sa.Column("seq", _Serial, sa.ForeignKey(task.c.seq), primary_key=True, autoincrement=False),
    sa.Column("value", sa.LargeBinary, nullable=False),
    sa.Column("fence", sa.BigInteger),
    sa.Column("number", sa.BigInteger),
    sa.Column("at", sa.Double),
)

run = sa.Table(
    "run",
    metadata,
    sa.Column("seq", _Serial, sa.ForeignKey(task.c.seq), nullable=False),
    sa.Column("fence", sa.BigInteger, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("worker", sa.Text),
    sa.Column("claimed_at", sa.Double),
    sa.Column("started_at", sa.Double),
    sa.Column("heartbeat_at", sa.Double),
    sa.Column("token", sa.Text, nullable=False),
    sa.Column("digest", sa.LargeBinary),
    sa.Column("result", sa.LargeBinary),
    sa.Column("error", sa.LargeBinary),
    sa.PrimaryKeyConstraint("seq", "fence"),
    sqlite_with_rowid=False,
)

claim = sa.Table(
    "claim",
    metadata,
    sa.Column("worker", sa.Text, nullable=False),
    sa.Column("claim_id", sa.Text, nullable=False),
    sa.Column("granted_at", sa.Double, nullable=False),
    sa.Column("waited", sa.Double, nullable=False),
    sa.Column("grants", sa.LargeBinary, nullable=False),
    sa.PrimaryKeyConstraint("worker", "claim_id"),
    sqlite_with_rowid=False,
)
sa.Index("ix_claim_granted_at", claim.c.granted_at)

dedupe = sa.Table(
    "dedupe",
    metadata,
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("key", sa.Text, nullable=False),
    sa.Column("id", sa.Text, nullable=False),
    sa.Column("until", sa.Double),
    sa.PrimaryKeyConstraint("kind", "key"),
    sqlite_with_rowid=False,
)

# A kind that no longer has settings keeps its row, so that nodes that remember them hear of it.
kind = sa.Table(
    "kind",
    metadata,
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("settings", sa.LargeBinary),
    sa.Column("changed_at", sa.Double, nullable=False),
    sa.Column("changed_by", sa.Text),
    sa.Column("change", sa.BigInteger, nullable=False),
    sa.Column("declared", sa.LargeBinary),
    sa.Column("digests", sa.Text),
    sa.Column("declared_at", sa.Double),
    sa.PrimaryKeyConstraint("name"),
    sqlite_with_rowid=False,
)

# A gate of a collection keeps its row until its parked tasks have been put back.
gate = sa.Table(
    "gate",
    metadata,
    sa.Column("scope", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("mode", sa.Text, nullable=False),
    sa.Column("until", sa.Double),
    sa.Column("reason", sa.Text),
    sa.Column("changed_at", sa.Double, nullable=False),
    sa.Column("changed_by", sa.Text),
    sa.PrimaryKeyConstraint("scope", "name"),
    sqlite_with_rowid=False,
)

# The workers that take no new tasks.
drain = sa.Table(
    "drain",
    metadata,
    sa.Column("worker", sa.Text, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("by", sa.Text),
    sa.PrimaryKeyConstraint("worker"),
    sqlite_with_rowid=False,
)

# No foreign key: what has become of a parked task is looked up when it is put back.
parked = sa.Table(
    "parked",
    metadata,
    sa.Column("collection", sa.Text, nullable=False),
    sa.Column("due_at", sa.Double, nullable=False),
    sa.Column("seq", sa.BigInteger, nullable=False),
    sa.PrimaryKeyConstraint("collection", "due_at", "seq"),
    sqlite_with_rowid=False,
)
sa.Index("ix_parked_seq", parked.c.seq)

QUEUED_AT = 253_402_260_000.0
"""The `next_trigger_at` of a task with a key that waits: later than any task can be scheduled, or is parked."""

# A task with a key. While it waits, `next_trigger_at` of its `trigger` is `QUEUED_AT`, and this table says when it is
# due: so it is in none of the queues of tasks without keys, which cost what they did before there were keys.
keyed = sa.Table(
    "keyed",
    metadata,
    sa.Column("seq", _Serial, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("key", sa.Text, nullable=False),
    sa.Column("due_at", sa.Double),  # null: the task does not wait in the queue of its key
    # Until the task ends, no other one of its key starts: it waits beside the queue, like a task without a key.
    sa.Column("keeps_place", sa.Boolean, nullable=False),
)


def keeps_place() -> ColumnElement[bool]:
    return keyed.c.keeps_place


def is_queued() -> ColumnElement[bool]:
    return keyed.c.due_at.is_not(None)


_LANE_OF_KEYED = (keyed.c.kind, keyed.c.priority)
sa.Index("ix_keyed_queued", *_LANE_OF_KEYED, keyed.c.key, keyed.c.due_at, keyed.c.seq, sqlite_where=is_queued())
sa.Index("ix_keyed_places", keyed.c.kind, keyed.c.key, sqlite_where=sa.text("keeps_place = 1"))

# A key of a lane that has waiting tasks, or has taken more tasks than others. The key of tasks without one is ''.
share = sa.Table(
    "share",
    metadata,
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("key", sa.Text, nullable=False),
    sa.Column("taken", sa.Double, nullable=False),
    sa.Column("active", sa.Boolean, nullable=False),  # it has joined for its due tasks
    sa.Column("due_at", sa.Double),  # when its first task is due; null: it has none
    sa.PrimaryKeyConstraint("kind", "priority", "key"),
    sqlite_with_rowid=False,
)


def is_joining() -> ColumnElement[bool]:
    return sa.and_(sa.not_(share.c.active), share.c.due_at.is_not(None))


def is_idle() -> ColumnElement[bool]:
    return share.c.due_at.is_(None)


_LANE_OF_SHARE = (share.c.kind, share.c.priority)
sa.Index("ix_share_active", *_LANE_OF_SHARE, share.c.taken, share.c.key, sqlite_where=sa.text("active = 1"))
sa.Index("ix_share_joining", *_LANE_OF_SHARE, share.c.due_at, sqlite_where=is_joining())
sa.Index("ix_share_idle", *_LANE_OF_SHARE, share.c.taken, sqlite_where=is_idle())

# The token buckets of kinds with a rate, and of their keys. No bucket: it is full. The key is empty if the bucket is
# that of a whole kind.
bucket = sa.Table(
    "bucket",
    metadata,
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("key", sa.Text, nullable=False),
    sa.Column("full_at", sa.Double, nullable=False),
    sa.PrimaryKeyConstraint("kind", "key"),
    sqlite_with_rowid=False,
)


def is_of_key() -> ColumnElement[bool]:
    return bucket.c.key != sa.literal_column("''")


sa.Index("ix_bucket_of_keys", bucket.c.kind, bucket.c.full_at, sqlite_where=is_of_key())

# A task waits for each `awaited` until that has succeeded; then the row goes. The awaited task may be unknown.
wait = sa.Table(
    "wait",
    metadata,
    sa.Column("awaited", sa.Text, nullable=False),
    sa.Column("id", sa.Text, nullable=False),
    sa.PrimaryKeyConstraint("awaited", "id"),
    sqlite_with_rowid=False,
)
sa.Index("ix_wait_id", wait.c.id)

# Awaited tasks to be looked at: what waits for them may not know of their end, but for the first ones, up to `told`.
wake = sa.Table(
    "wake",
    metadata,
    sa.Column("awaited", sa.Text, nullable=False),
    sa.Column("told", sa.Text, nullable=False),
    sa.PrimaryKeyConstraint("awaited"),
    sqlite_with_rowid=False,
)

# The tasks that came from others. No foreign key: rows are read and deleted with those of their tasks.
chain = sa.Table(
    "chain",
    metadata,
    sa.Column("seq", _Serial, primary_key=True, autoincrement=False),
    sa.Column("parent", sa.Text, nullable=False),
    sa.Column("root", sa.Text, nullable=False),
)
sa.Index("ix_chain_root", chain.c.root, chain.c.seq)

# The tags of tasks. Rows are read and deleted with those of their tasks.
task_tag = sa.Table(
    "task_tag",
    metadata,
    sa.Column("tag", sa.Text, nullable=False),
    sa.Column("seq", sa.BigInteger, nullable=False),
    sa.PrimaryKeyConstraint("tag", "seq"),
    sqlite_with_rowid=False,
)
sa.Index("ix_task_tag_seq", task_tag.c.seq)

# The roots of the chains to which no task is added any longer.
cancelled_chain = sa.Table(
    "cancelled_chain",
    metadata,
    sa.Column("root", sa.Text, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
    sa.PrimaryKeyConstraint("root"),
    sqlite_with_rowid=False,
)

# The tasks that are dropped unless they have begun by `at`, which is `allowed` seconds after their due time.
deadline = sa.Table(
    "deadline",
    metadata,
    sa.Column("seq", _Serial, primary_key=True, autoincrement=False),
    sa.Column("allowed", sa.Double, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
)
sa.Index("ix_deadline_at", deadline.c.at)

# The periodic tasks. Each write counts up `version`, and replaces the version that its writer has read.
periodic = sa.Table(
    "periodic",
    metadata,
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("task", sa.LargeBinary, nullable=False),
    sa.Column("since", sa.Double, nullable=False),
    sa.Column("next_at", sa.Double),
    sa.Column("is_paused", sa.Boolean, nullable=False),
    sa.Column("last_id", sa.Text),
    sa.Column("firings", sa.LargeBinary, nullable=False),
    sa.Column("digests", sa.Text),
    sa.Column("declared_at", sa.Double),
    sa.Column("changed_at", sa.Double, nullable=False),
    sa.Column("changed_by", sa.Text),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.PrimaryKeyConstraint("name"),
    sqlite_with_rowid=False,
)
sa.Index("ix_periodic_next_at", periodic.c.next_at, sqlite_where=periodic.c.next_at.is_not(None))

# What happened in each minute: each node has rows of its own, which it writes once.
minute = sa.Table(
    "minute",
    metadata,
    sa.Column("at", sa.Integer, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("node", sa.Text, nullable=False),
    sa.Column("counts", sa.LargeBinary, nullable=False),
    sa.PrimaryKeyConstraint("kind", "at", "node"),
    sqlite_with_rowid=False,
)
sa.Index("ix_minute_at", minute.c.at)

access_token = sa.Table(
    "access_token",
    metadata,
    sa.Column("id", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("digest", sa.LargeBinary, nullable=False),
    sa.Column("former_digest", sa.LargeBinary),
    sa.Column("former_until", sa.Double),
    sa.Column("scopes", sa.Text, nullable=False),
    sa.Column("kinds", sa.Text, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("created_by", sa.Text, nullable=False),
    sa.Column("expires_at", sa.Double),
    sa.Column("used_at", sa.Double),
    sa.Column("rotated_at", sa.Double),
    sa.Column("revoked_at", sa.Double),
    sa.PrimaryKeyConstraint("id"),
    sqlite_with_rowid=False,
)

console_session = sa.Table(
    "console_session",
    metadata,
    sa.Column("digest", sa.LargeBinary, nullable=False),
    sa.Column("secret", sa.LargeBinary, nullable=False),
    sa.Column("until", sa.Double, nullable=False),
    sa.PrimaryKeyConstraint("digest"),
    sqlite_with_rowid=False,
)

# Rows are added, and deleted after a long time; none is ever updated.
audit = sa.Table(
    "audit",
    metadata,
    sa.Column("id", sa.Text, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("by", sa.Text, nullable=False),
    sa.Column("token_id", sa.Text),
    sa.Column("worker", sa.Text),
    sa.Column("act", sa.Text, nullable=False),
    sa.Column("target", sa.Text),
    sa.Column("fields", sa.Text, nullable=False),
    sa.Column("changed", sa.BigInteger, nullable=False),
    sa.PrimaryKeyConstraint("id"),
    sqlite_with_rowid=False,
)
sa.Index("ix_audit_at", audit.c.at)

# As Alembic itself would create it, with one row.
version = sa.Table(
    "alembic_version",
    metadata,
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
HEAD = "0002_leasekit_0.2.0"
"""The last migration: the version of these tables."""
