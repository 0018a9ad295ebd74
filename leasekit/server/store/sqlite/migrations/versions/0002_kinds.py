"""Kinds, limits, gates, keys, tags, deadlines, what tasks wait for, periodic tasks, access tokens, the audit log."""

import sqlalchemy as sa
from alembic import op

revision = "0002_leasekit_0.2.0"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the tables of kinds, gates, drains, keys, buckets, waits, chains, tags, periodic tasks, tokens, the audit."""
    op.add_column("store", sa.Column("kind_change", sa.BigInteger, nullable=False, server_default="0"))
    op.create_table(
        "kind",
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
        "drain",
        sa.Column("worker", sa.Text, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("by", sa.Text),
        sa.PrimaryKeyConstraint("worker"),
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
        sa.Column("keeps_place", sa.Boolean, nullable=False),
    )
    op.create_index("ix_keyed_places", "keyed", ["kind", "key"], sqlite_where=sa.text("keeps_place = 1"))
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
    op.create_index("ix_bucket_of_keys", "bucket", ["kind", "full_at"], sqlite_where=sa.text("\"key\" != ''"))
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
        "task_tag",
        sa.Column("tag", sa.Text, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("tag", "seq"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_task_tag_seq", "task_tag", ["seq"])
    op.create_table(
        "cancelled_chain",
        sa.Column("root", sa.Text, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("root"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "deadline",
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("allowed", sa.Double, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
    )
    op.create_index("ix_deadline_at", "deadline", ["at"])
    op.create_table(
        "periodic",
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
    op.create_table(
        "minute",
        sa.Column("at", sa.Integer, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("node", sa.Text, nullable=False),
        sa.Column("counts", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("kind", "at", "node"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_minute_at", "minute", ["at"])
    op.create_index("ix_periodic_next_at", "periodic", ["next_at"], sqlite_where=sa.text("next_at IS NOT NULL"))
    op.create_table(
        "access_token",
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
    op.create_table(
        "console_session",
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("secret", sa.LargeBinary, nullable=False),
        sa.Column("until", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("digest"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "audit",
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
    op.create_index("ix_audit_at", "audit", ["at"])
