"""What Alembic runs for each upgrade: the migrations, in the transaction of the caller (a script,
not a module).
"""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
