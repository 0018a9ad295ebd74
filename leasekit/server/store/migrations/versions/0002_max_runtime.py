"""Add `max_runtime` and the end of a run to `trigger`."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Run this migration."""
    op.add_column("trigger", sa.Column("max_runtime", sa.Double[float]()))
    op.add_column("trigger", sa.Column("run_until", sa.Double[float]()))
    op.execute("UPDATE trigger SET max_runtime = (SELECT max_runtime FROM task WHERE task.seq = trigger.seq)")
