"""Create the first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


_SECONDS = sa.Double[float]()


def upgrade() -> None:
    """Run this migration."""
    serial = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "store",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("commits", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_store"),
    )
    _tasks(serial)
    _beside_tasks(serial)
    op.create_table(
        "claim",
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("claim_id", sa.Text(), nullable=False),
        sa.Column("granted_at", _SECONDS, nullable=False),
        sa.Column("waited", _SECONDS, nullable=False),
        sa.Column("grants", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("worker", "claim_id", name="pk_claim"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_claim_granted_at", "claim", ["granted_at"])
    op.create_table(
        "dedupe",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("until", _SECONDS),
        sa.PrimaryKeyConstraint("kind", "key", name="pk_dedupe"),
        sqlite_with_rowid=False,
    )


def _tasks(serial: sa.types.TypeEngine[int]) -> None:
    op.create_table(
        "task",
        sa.Column("seq", serial, autoincrement=False, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("collection", sa.Text()),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("created_at", _SECONDS, nullable=False),
        sa.Column("at", _SECONDS, nullable=False),
        sa.Column("max_attempts", sa.Integer()),
        sa.Column("max_crashes", sa.Integer(), nullable=False),
        sa.Column("max_runtime", _SECONDS),
        sa.Column("enqueue_timeout", _SECONDS, nullable=False),
        sa.Column("retry", sa.LargeBinary()),
        sa.Column("dedupe_key", sa.Text()),
        sa.Column("traceparent", sa.Text()),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_task"),
        sa.UniqueConstraint("id", name="uq_task_id"),
    )
    op.create_table(
        "trigger",
        sa.Column("seq", serial, autoincrement=False, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("claim_timeout", _SECONDS, nullable=False),
        sa.Column("heartbeat_timeout", _SECONDS, nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("crashes", sa.Integer(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False),
        sa.Column("owner", sa.Text()),
        sa.Column("token", sa.Text()),
        sa.Column("next_trigger_at", _SECONDS),
        sa.Column("reason", sa.Text()),
        sa.PrimaryKeyConstraint("seq", name="pk_trigger"),
        sa.ForeignKeyConstraint(["seq"], ["task.seq"], name="fk_trigger_seq"),
    )
    waiting, leased = sa.text("owner IS NULL AND next_trigger_at IS NOT NULL"), sa.text("owner IS NOT NULL")
    op.create_index(
        "ix_trigger_waiting",
        "trigger",
        ["kind", "priority", "next_trigger_at"],
        sqlite_where=waiting,
    )
    op.create_index("ix_trigger_leased", "trigger", ["next_trigger_at"], sqlite_where=leased)


def _beside_tasks(serial: sa.types.TypeEngine[int]) -> None:
    op.create_table(
        "progress",
        sa.Column("seq", serial, autoincrement=False, nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_progress"),
        sa.ForeignKeyConstraint(["seq"], ["task.seq"], name="fk_progress_seq"),
    )
    op.create_table(
        "run",
        sa.Column("seq", serial, nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("at", _SECONDS, nullable=False),
        sa.Column("worker", sa.Text()),
        sa.Column("token", sa.Text(), nullable=False),
        sa.Column("digest", sa.LargeBinary()),
        sa.Column("result", sa.LargeBinary()),
        sa.Column("error", sa.LargeBinary()),
        sa.PrimaryKeyConstraint("seq", "fence", name="pk_run"),
        sa.ForeignKeyConstraint(["seq"], ["task.seq"], name="fk_run_seq"),
        sqlite_with_rowid=False,
    )
