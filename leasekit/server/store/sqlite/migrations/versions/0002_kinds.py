"""The settings of kinds."""

import sqlalchemy as sa
from alembic import op

revision = "0002_leasekit_0.2.0"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table of kinds, and the number of its last change."""
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
