"""Recognizes the folder of a store without the packages that read it."""

from pathlib import Path

DATABASE = "shoal.db"
"""Name of the database in a store, as `broker_server.store.schema` has it."""


def is_store(folder: Path) -> bool:
    """Return whether a folder has the database of a store."""
    return (folder / DATABASE).is_file()
