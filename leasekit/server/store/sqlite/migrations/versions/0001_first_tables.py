"""The first version. A store that has no version yet gets its tables from `schema`, not from here."""

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Do nothing."""
