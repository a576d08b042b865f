"""Turns records into rows and back: enums by value, messages as JSON, all other values as they are.

Anybody who can write the database, or supplies a backup, can put any value into a column. So each
value is checked against its field when it is read: names and digests become parts of paths, topics
and commands to copy, and times become dates. A value that its column cannot have is a
`DamagedRowError`. `broker_server.store.column_readers` has the checks.
"""

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from types import NoneType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from broker_server.store import schema
from broker_server.store.column_readers import columns_of, read_columns
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
from fleet_protocol.nesting import is_deep

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


_STORED_AS_THEY_ARE = frozenset({str, int, float, bool, NoneType})


class DamagedRowError(StorageError):
    """A row of the database has a value that no server can have written."""


def from_row(kind: type[RecordT], row: Sequence[Any]) -> RecordT:
    """Return the record of a row, whose columns are the record's fields in their order.

    Raises:
        DamagedRowError: a column has a value that its field cannot have.
    """
    columns = columns_of(kind)  # type: ignore[arg-type]  # a type is hashable
    try:
        values = read_columns(columns.values(), row)
    # Pydantic's errors are ValueErrors.
    except ValueError as error:
        raise _damaged(kind, dict(zip(columns, row, strict=True))) from error
    return kind(*values)


def values_of(kind: type, names: Sequence[str], row: Sequence[Any]) -> list[Any]:
    """Return some fields of a kind of record, from a row that has only these columns.

    Raises:
        DamagedRowError: a column has a value that its field cannot have.
    """
    columns = columns_of(kind)
    selected = [columns[name] for name in names]
    try:
        return read_columns(selected, row)
    except ValueError as error:
        raise _damaged(kind, dict(zip(names, row, strict=True))) from error


def to_row(record: object) -> dict[str, Any]:
    """Return the values of a record's row, by column."""
    row = {}
    for name in columns_of(type(record)):  # type: ignore[arg-type]  # a type is hashable
        value = getattr(record, name)
        # The type itself, because a subclass of str would be stored as its own type.
        if type(value) in _STORED_AS_THEY_ARE:
            row[name] = value
        else:
            row[name] = _column_value(value)
    return row


def _column_value(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump_json()
    if isinstance(value, Enum):
        return str(value.value)
    return value


def config_json(record: RunRecord) -> Any:
    """Return the configuration of a run as JSON values.

    Raises:
        DamagedRowError: it is not JSON, or nested too deeply.
    """
    row = f"id {quoted(record.id)}"
    too_deep = damaged_row(schema.runs.name, row, "config", "it is nested too deeply")
    try:
        config = json.loads(record.config)
    except ValueError as error:
        raise damaged_row(schema.runs.name, row, "config", f"it is not JSON: {error}") from error
    # The parser itself follows the nesting, and may give up first.
    except RecursionError as error:
        raise too_deep from error
    if is_deep(config):
        raise too_deep
    return config


def damaged_row(table: str, row: str, column: str, why: str) -> DamagedRowError:
    """Return the error of a column with a value that it cannot have.

    Args:
        table: name of the table.
        row: the row's keys, for people.
        column: name of the column.
        why: the problem with its value.
    """
    return DamagedRowError(
        f"the database was changed, or is damaged: table {table}, row {row}, column "
        f"{column}: {why}; correct it, or make a store from a backup with `shoal restore`"
    )


def _damaged(kind: type, values: Mapping[str, Any]) -> DamagedRowError:
    """Return the error of the first of some columns whose value cannot be read."""
    table = TABLES[kind]
    # A row of some columns may lack the keys; then all of its values name it.
    keys = [column.name for column in table.primary_key if column.name in values]
    row = ", ".join(f"{name} {quoted(str(values[name]))}" for name in keys or values)
    columns = columns_of(kind)
    for name, value in values.items():
        try:
            read_columns([columns[name]], [value])
        except ValidationError as error:
            return damaged_row(table.name, row, name, problems(error, "the value"))
        except ValueError as error:
            return damaged_row(table.name, row, name, str(error))
    raise AssertionError(f"every value of table {table.name}, row {row} can be read")
