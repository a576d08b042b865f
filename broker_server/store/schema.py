"""The tables of the store, each with the fields of its record as columns, and the mark that tells a
database's version.

How a database of an older version becomes this one: `broker_server.store.migrations`.
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

SCHEMA_VERSION = 4  # of the newest file in migrations/versions

metadata = MetaData()

# What Alembic wrote last; the table is its own.
mark = Table(
    "alembic_version", MetaData(), Column("version_num", String(32), nullable=False)
).c.version_num

_NUMBERS: dict[object, type[TypeEngine[Any]]] = {
    bool: Boolean,
    int: Integer,
    float: Float,
}


def _table(name: str, record: type, keys: tuple[str, ...], *others: SchemaItem) -> Table:
    """A table for the records of one kind.

    What is no number is text, as `broker_server.store.rows` writes it.
    """
    columns: list[Column[Any]] = []
    for field, hint in get_type_hints(record).items():
        kinds = get_args(hint) or (hint,)
        kind = next((_NUMBERS[item] for item in kinds if item in _NUMBERS), String)
        columns.append(Column(field, kind, primary_key=field in keys, nullable=NoneType in kinds))
    return Table(name, metadata, *columns, *others)


_OF_RUN = ["run"], ["runs.id"]

runs = _table("runs", RunRecord, ("id",))
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
events = _table("events", EventRecord, ("id",), Index("events_by_run", "run", "id"))
refusals = _table("refusals", RefusalRecord, ("run", "device", "reason", "by"))
