"""Making the tables of a store, and bringing those of an older one up with Alembic, step by step."""

import threading

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

from broker_server.store.schema import metadata

# Alembic hands its context to a migration through variables of its modules: one upgrade at a time in a process.
_ALEMBIC = threading.Lock()


def upgrade(connection: Connection, found: int) -> None:
    """Bring a database from a version, 0 if it is empty, to the newest, within the transaction that is open."""
    config = Config()
    config.set_main_option("script_location", "broker_server.store:migrations")
    config.attributes["connection"] = connection
    with _ALEMBIC:
        if found:
            command.upgrade(config, "head")
        else:
            metadata.create_all(connection)
            command.stamp(config, "head")
