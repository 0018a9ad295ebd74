"""Add the start and the clocks (`anchor`) of the last transaction to `store`.

Without an anchor, the `max_runtime` of a run counts anew.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Run this migration."""
    op.add_column("store", sa.Column("start", sa.Text()))
    op.add_column("store", sa.Column("anchor", sa.Text()))
