"""In which start, and by which clocks, a store was last written to.

Without an anchor, runs that are bounded count anew.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Take this step."""
    op.add_column("store", sa.Column("start", sa.Text()))
    op.add_column("store", sa.Column("anchor", sa.Text()))
