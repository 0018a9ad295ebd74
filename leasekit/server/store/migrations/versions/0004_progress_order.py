"""Add the order of checkpoints (`fence`, `number`) to `progress`."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Run this migration."""
    op.add_column("progress", sa.Column("fence", sa.BigInteger()))
    op.add_column("progress", sa.Column("number", sa.BigInteger()))
