"""Version 4: how a round ended, its devices left out, times of the others' answers, and counts."""

from alembic import op
from sqlalchemy import Column, Float, Integer, String, Text

revision = "4"
down_revision = "3"


def upgrade() -> None:
    """Add the columns; for existing rows their values are unknown."""
    for column in (
        Column("wanted", Integer),
        Column("ending", String(16)),
        Column("collect_seconds", Float),
        Column("left_out", Text),
    ):
        op.add_column("rounds", column)
    for name in ("timing", "screening"):
        op.add_column("tasks", Column(name, Text))
    op.drop_table("shoal_store")  # the mark of versions 1 and 2
