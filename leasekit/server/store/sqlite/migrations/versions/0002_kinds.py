"""The settings of kinds with their limits, gates, the keys of tasks, what they wait for, and what they came from."""

import sqlalchemy as sa
from alembic import op

revision = "0002_leasekit_0.2.0"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the tables of kinds, gates, keys, token buckets, waits and chains, and what else they need."""
    op.add_column("store", sa.Column("kind_change", sa.BigInteger, nullable=False, server_default="0"))
    op.create_table(
        "kind",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("settings", sa.LargeBinary),
        sa.Column("changed_at", sa.Double, nullable=False),
        sa.Column("changed_by", sa.Text),
        sa.Column("change", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "gate",
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
    op.create_table(
        "parked",
        sa.Column("collection", sa.Text, nullable=False),
        sa.Column("due_at", sa.Double, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("collection", "due_at", "seq"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_parked_seq", "parked", ["seq"])
    op.create_table(
        "keyed",
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("due_at", sa.Double),
    )
    of_queue = ["kind", "priority", "key", "due_at", "seq"]
    op.create_index("ix_keyed_queued", "keyed", of_queue, sqlite_where=sa.text("due_at IS NOT NULL"))
    op.create_table(
        "share",
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("taken", sa.Double, nullable=False),
        sa.Column("active", sa.Boolean, nullable=False),
        sa.Column("due_at", sa.Double),
        sa.PrimaryKeyConstraint("kind", "priority", "key"),
        sqlite_with_rowid=False,
    )
    for name, columns, where in (
        ("active", ["taken", "key"], "active = 1"),
        ("joining", ["due_at"], "active = 0 AND due_at IS NOT NULL"),
        ("idle", ["taken"], "due_at IS NULL"),
    ):
        op.create_index(f"ix_share_{name}", "share", ["kind", "priority", *columns], sqlite_where=sa.text(where))
    op.create_table(
        "bucket",
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("full_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("kind", "key"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_trigger_running", "trigger", ["kind"], sqlite_where=sa.text("owner IS NOT NULL"))
    op.create_table(
        "wait",
        sa.Column("awaited", sa.Text, nullable=False),
        sa.Column("id", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("awaited", "id"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_wait_id", "wait", ["id"])
    op.create_table(
        "wake",
        sa.Column("awaited", sa.Text, nullable=False),
        sa.Column("told", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("awaited"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "chain",
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("parent", sa.Text, nullable=False),
        sa.Column("root", sa.Text, nullable=False),
    )
    op.create_index("ix_chain_root", "chain", ["root", "seq"])
    op.create_table(
        "cancelled_chain",
        sa.Column("root", sa.Text, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("root"),
        sqlite_with_rowid=False,
    )
