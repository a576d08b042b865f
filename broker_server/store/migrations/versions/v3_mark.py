"""Version 3: the number of the schema stands in Alembic's table.

The old mark ends at 3, for ever: a Shoal that knows no other mark reads up to 2 and refuses the store, instead of
writing what later versions do not expect.
"""

from alembic import op

revision = "3"
down_revision = "2"


def upgrade() -> None:
    """Raise the old mark for the last time."""
    op.execute("UPDATE shoal_store SET schema_version = 3")
