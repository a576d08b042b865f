"""Version 2: the sub-models that a device may take instead of its task's."""

from alembic import op
from sqlalchemy import Column, Text

revision = "2"
down_revision = "1"


def upgrade() -> None:
    """Add the column; a task that was stored before offers nothing else."""
    op.add_column("tasks", Column("others", Text))
    op.execute("UPDATE shoal_store SET schema_version = 2")
