"""The tables of the store, whose columns are the fields of their records, and the version mark.

`broker_server.store.migrations` upgrades a database of an older version.
"""

from types import NoneType
from typing import Any, get_args, get_type_hints

from sqlalchemy import (
    Boolean,
    Column,
    Float,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Table,
)
from sqlalchemy.schema import SchemaItem
from sqlalchemy.types import TypeEngine

from broker_server.store.records import (
    DeviceRecord,
    EventRecord,
    RefusalRecord,
    RoundRecord,
    RunRecord,
    VersionRecord,
)
from broker_server.store.task_records import TaskRecord

DATABASE = "shoal.db"
"""Name of the database in the folder of a store."""

SCHEMA_VERSION = 5  # of the newest file in migrations/versions

metadata = MetaData()

# The version of a database, in a table that Alembic creates and writes.
mark = Table(
    "alembic_version", MetaData(), Column("version_num", String(32), nullable=False)
).c.version_num

_NUMBERS: dict[object, type[TypeEngine[Any]]] = {
    bool: Boolean,
    int: Integer,
    float: Float,
}


def _table(name: str, record: type, keys: tuple[str, ...], *constraints: SchemaItem) -> Table:
    """Return the table for the records of one kind.

    Values that are not numbers are text, as `broker_server.store.rows` writes them.
    """
    columns: list[Column[Any]] = []
    for field, hint in get_type_hints(record).items():
        types = get_args(hint) or (hint,)
        column_type: type[TypeEngine[Any]] = String
        for python_type in types:
            # The number among the types decides; None is only for missing values.
            column_type = _NUMBERS.get(python_type, column_type)
        column: Column[Any] = Column(
            field,
            column_type,
            primary_key=field in keys,
            nullable=NoneType in types,
        )
        columns.append(column)
    return Table(name, metadata, *columns, *constraints)


_OF_RUN = ["run"], ["runs.id"]

runs = _table("runs", RunRecord, ("id",), Index("runs_by_name", "name", unique=True))
devices = _table("devices", DeviceRecord, ("fleet", "id"))
rounds = _table("rounds", RoundRecord, ("run", "number"), ForeignKeyConstraint(*_OF_RUN))
tasks = _table(
    "tasks",
    TaskRecord,
    ("id",),
    ForeignKeyConstraint(["run", "round"], ["rounds.run", "rounds.number"]),
    Index("tasks_by_round", "run", "round"),
)
versions = _table("versions", VersionRecord, ("run", "number"), ForeignKeyConstraint(*_OF_RUN))
# Lines are read by run, in the order of their ids.
events = _table("events", EventRecord, ("id",), Index("events_by_run", "run", "id"))
refusals = _table("refusals", RefusalRecord, ("run", "device", "reason", "by"))
