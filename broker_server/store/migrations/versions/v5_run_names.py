"""Version 5: names of runs."""

from alembic import op
from sqlalchemy import Column, String

revision = "5"
down_revision = "4"


def upgrade() -> None:
    """Add the column; runs of earlier versions have no names."""
    op.add_column("runs", Column("name", String(64)))
    op.create_index("runs_by_name", "runs", ["name"], unique=True)
