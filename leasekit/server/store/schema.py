"""The tables of an SQL store, for SQLAlchemy. `migrations/` makes the same of older stores; a test compares the two.

`task` is written once; `trigger` is small and changes often. Two partial indexes order `trigger` by next trigger time,
one for waiting tasks and one for leased tasks; ended tasks are in neither.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    and_,
)
from sqlalchemy.sql.elements import ColumnElement

__all__ = [
    "HEAD", "claim", "dedupe", "is_leased", "is_waiting", "metadata", "progress", "run", "store", "task", "trigger",
    "version",
]  # fmt: skip

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
    }
)

# SQLite uses only an INTEGER as the row's own key; in other databases INTEGER is too small.
_Serial = BigInteger().with_variant(Integer, "sqlite")

store = Table(
    "store",
    metadata,
    Column("id", Text, primary_key=True),  # the identity of the store; the table has one row
    Column("commits", BigInteger, nullable=False),  # transactions that have changed the store
    Column("start", Text),  # the start of the server that has written the last transaction
    Column("anchor", Text),  # an `Anchor` as JSON: the clocks of the last transaction
)

task = Table(
    "task",
    metadata,
    Column("seq", _Serial, primary_key=True, autoincrement=False),
    Column("id", Text, nullable=False, unique=True),
    Column("kind", Text, nullable=False),
    Column("collection", Text),
    Column("priority", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("at", Double, nullable=False),
    Column("max_attempts", Integer),
    Column("max_crashes", Integer, nullable=False),
    Column("max_runtime", Double),
    Column("enqueue_timeout", Double, nullable=False),
    Column("retry", LargeBinary),
    Column("dedupe_key", Text),
    Column("traceparent", Text),
    Column("digest", LargeBinary, nullable=False),
    # The last column: SQLite reads through a big value to reach the columns behind it.
    Column("payload", LargeBinary, nullable=False),
)

trigger = Table(
    "trigger",
    metadata,
    Column("seq", _Serial, ForeignKey(task.c.seq), primary_key=True, autoincrement=False),
    Column("id", Text, nullable=False),  # a copy of the column in `task`, so that the hot path needs no join
    Column("kind", Text, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("claim_timeout", Double, nullable=False),
    Column("heartbeat_timeout", Double, nullable=False),
    Column("status", Text, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("crashes", Integer, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("cancel_requested", Boolean, nullable=False),
    Column("owner", Text),
    Column("token", Text),
    Column("next_trigger_at", Double),
    Column("reason", Text),
    Column("max_runtime", Double),
    Column("run_until", Double),
)


def is_waiting() -> ColumnElement[bool]:
    """Return the condition of the index of waiting tasks."""
    return and_(trigger.c.owner.is_(None), trigger.c.next_trigger_at.is_not(None))


def is_leased() -> ColumnElement[bool]:
    """Return the condition of the index of leased tasks."""
    return trigger.c.owner.is_not(None)


Index(
    "ix_trigger_waiting",
    trigger.c.kind,
    trigger.c.priority,
    trigger.c.next_trigger_at,
    sqlite_where=is_waiting(),
)
Index("ix_trigger_leased", trigger.c.next_trigger_at, sqlite_where=is_leased())

progress = Table(
    "progress",
    metadata,
    Column("seq", _Serial, ForeignKey(task.c.seq), primary_key=True, autoincrement=False),
    Column("value", LargeBinary, nullable=False),
    Column("fence", BigInteger),
    Column("number", BigInteger),
)

run = Table(
    "run",
    metadata,
    Column("seq", _Serial, ForeignKey(task.c.seq), nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("at", Double, nullable=False),
    Column("worker", Text),
    Column("token", Text, nullable=False),
    Column("digest", LargeBinary),
    Column("result", LargeBinary),
    Column("error", LargeBinary),
    PrimaryKeyConstraint("seq", "fence"),
    sqlite_with_rowid=False,
)

claim = Table(
    "claim",
    metadata,
    Column("worker", Text, nullable=False),
    Column("claim_id", Text, nullable=False),
    Column("granted_at", Double, nullable=False),
    Column("waited", Double, nullable=False),
    Column("grants", LargeBinary, nullable=False),
    PrimaryKeyConstraint("worker", "claim_id"),
    sqlite_with_rowid=False,
)
Index("ix_claim_granted_at", claim.c.granted_at)

dedupe = Table(
    "dedupe",
    metadata,
    Column("kind", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("until", Double),
    PrimaryKeyConstraint("kind", "key"),
    sqlite_with_rowid=False,
)

# As Alembic itself would create it, with one row.
version = Table(
    "alembic_version",
    metadata,
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
HEAD = "0004"
"""The last migration: the version of these tables."""
