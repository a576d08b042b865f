"""Upgrading a store's database with Alembic, step by step through `broker_server.store.migrations`."""

import threading

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, inspect

from broker_server.store.schema import mark

# Alembic hands its context to a migration through variables of its modules: one upgrade at a time in a process.
_ALEMBIC = threading.Lock()


def upgrade(connection: Connection, found: int, target: str = "head") -> None:
    """Bring a database up to a version, within the transaction that is open.

    Args:
        connection: in a transaction, which the caller commits.
        found: version of the database, 0 if it is empty.
        target: version to end with, ``head`` for the newest.
    """
    config = Config()
    config.set_main_option("script_location", "broker_server.store:migrations")
    config.attributes["connection"] = connection
    with _ALEMBIC:
        if found and not inspect(connection).has_table(mark.table.name):
            command.stamp(config, str(found))  # written before Shoal used Alembic
        command.upgrade(config, target)
