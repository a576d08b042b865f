"""Turn records into rows and back: enums by value, messages as JSON, all other values as they are.

Anybody who can write the database, or supplies a backup, can put any value into a column. So each
value is checked as it is read, by what its field may be: names and digests become parts of paths,
topics and commands to copy, times become dates. A value that its column cannot have is a
`DamagedRowError`. `broker_server.store.column_readers` has the checks.
"""

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from broker_server.store import schema
from broker_server.store.column_readers import readers_of
from broker_server.store.records import (
    DeviceRecord,
    EventRecord,
    RefusalRecord,
    RoundRecord,
    RunRecord,
    VersionRecord,
)
from broker_server.store.task_records import TaskRecord
from fleet_protocol.errors import StorageError
from fleet_protocol.foreign_files import quoted
from fleet_protocol.frozen import problems

RecordT = TypeVar("RecordT")

TABLES: Mapping[type, Any] = {
    RunRecord: schema.runs,
    DeviceRecord: schema.devices,
    RoundRecord: schema.rounds,
    TaskRecord: schema.tasks,
    VersionRecord: schema.versions,
    EventRecord: schema.events,
    RefusalRecord: schema.refusals,
}
_DEEPEST = 64  # levels of values within each other in a configuration


class DamagedRowError(StorageError):
    """A row of the database has a value that no server can have written."""


def from_row(kind: type[RecordT], row: Sequence[Any]) -> RecordT:
    """Return the record of a row, whose columns are the record's fields in their order.

    Raises:
        DamagedRowError: a column has a value that its field cannot have.
    """
    readers = readers_of(kind)  # type: ignore[arg-type]  # a type is hashable
    try:
        values = [read(value) for value, read in zip(row, readers.values(), strict=True)]
        return kind(*values)
    except ValueError as error:
        raise _damaged(kind, dict(zip(readers, row, strict=True))) from error


def values_of(kind: type, names: Sequence[str], row: Sequence[Any]) -> list[Any]:
    """Return some fields of a kind of record, from a row that has these columns alone.

    Raises:
        DamagedRowError: a column has a value that its field cannot have.
    """
    readers = readers_of(kind)
    try:
        return [readers[name](value) for name, value in zip(names, row, strict=True)]
    except ValueError as error:
        raise _damaged(kind, dict(zip(names, row, strict=True))) from error


def to_row(record: object) -> dict[str, Any]:
    """Return the values of a record's row, by column."""
    row = {}
    for name in readers_of(type(record)):  # type: ignore[arg-type]  # a type is hashable
        row[name] = _column_value(getattr(record, name))
    return row


def _column_value(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump_json()
    return str(value.value) if isinstance(value, Enum) else value


def config_json(record: RunRecord) -> Any:
    """Return the configuration of a run as JSON values.

    Raises:
        DamagedRowError: it is no JSON, or nested too deeply.
    """
    row = f"id {quoted(record.id)}"
    too_deep = damaged_row(schema.runs.name, row, "config", "it is nested too deeply")
    try:
        config = json.loads(record.config)
    except ValueError as error:
        raise damaged_row(schema.runs.name, row, "config", f"it is no JSON: {error}") from error
    except RecursionError as error:
        raise too_deep from error
    if _is_deep(config):
        raise too_deep
    return config


def _is_deep(value: Any) -> bool:
    """Return whether values lie in each other deeper than recursive functions can follow."""
    level = [value]
    for _ in range(_DEEPEST):
        next_level: list[Any] = []
        for container in level:
            if isinstance(container, dict):
                next_level.extend(container.values())
            elif isinstance(container, list):
                next_level.extend(container)
        if not next_level:
            return False
        level = next_level
    return True


def damaged_row(table: str, row: str, column: str, why: str) -> DamagedRowError:
    """Return the error of a column with a value that it cannot have.

    Args:
        table: name of the table.
        row: the row's keys, for people.
        column: name of the column.
        why: the problem with its value.
    """
    return DamagedRowError(
        f"the database was changed, or is damaged: table {table}, row {row}, column {column}:"
        f" {why}; put it right, or make a store from a backup with `shoal restore`"
    )


def _damaged(kind: type, values: Mapping[str, Any]) -> DamagedRowError:
    """Return the error of the first of some columns whose value cannot be read."""
    table = TABLES[kind]
    keys = [column.name for column in table.primary_key if column.name in values]
    row = ", ".join(f"{name} {quoted(str(values[name]))}" for name in keys or values)
    readers = readers_of(kind)
    for name, value in values.items():
        try:
            readers[name](value)
        except ValidationError as error:
            return damaged_row(table.name, row, name, problems(error, "the value"))
        except ValueError as error:
            return damaged_row(table.name, row, name, str(error))
    raise AssertionError(f"table {table.name}, row {row} can be read")
