"""The script that Alembic runs for each upgrade: migrations in the transaction of the caller."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
