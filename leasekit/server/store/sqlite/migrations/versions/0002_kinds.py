"""The settings of kinds, and the gates of kinds and collections."""

import sqlalchemy as sa
from alembic import op

revision = "0002_leasekit_0.2.0"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the tables of kinds and gates, the number of their last change, and the table of parked tasks."""
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
