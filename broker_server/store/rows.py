"""Records to rows and back: enums by their value, messages as JSON, everything else as it is.

Whoever can write the database, or hands on a backup, can put anything into a column. So each value
is checked as it is read, by what its field may be: names and digests become parts of paths, topics
and commands to copy, times become dates. What a column cannot have is a `DamagedRowError`.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from functools import cache, lru_cache
from itertools import chain
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError

from broker_server.store import schema
from broker_server.store.configurations import is_name
from broker_server.store.records import (
    DeviceRecord,
    EventRecord,
    RefusalRecord,
    RoundRecord,
    RunRecord,
    VersionRecord,
)
from broker_server.store.task_records import TaskRecord
from fleet_protocol.digests import DIGEST_PATTERN
from fleet_protocol.errors import StorageError
from fleet_protocol.foreign_files import quoted
from fleet_protocol.frozen import problems
from fleet_protocol.messages import BlobRef

RecordT = TypeVar("RecordT")
Reader = Callable[[Any], Any]

TABLES: Mapping[type, Any] = {
    RunRecord: schema.runs,
    DeviceRecord: schema.devices,
    RoundRecord: schema.rounds,
    TaskRecord: schema.tasks,
    VersionRecord: schema.versions,
    EventRecord: schema.events,
    RefusalRecord: schema.refusals,
}
_MOST = 2**53  # a count that every reader of JSON has, too
_DEEPEST = 64  # values within each other in a configuration
_LATEST = 250_000_000_000.0  # a time that a calendar has, in seconds since the epoch
_NAMES = {
    RunRecord: ("id", "fleet", "arch"),
    DeviceRecord: ("id", "fleet"),
    RoundRecord: ("run",),
    TaskRecord: ("id", "run", "device", "tier"),
    VersionRecord: ("run",),
}
_DIGESTS = ("digest", "state_digest", "statistics_digest", "update_digest")
_TIMES = (
    "at",
    "created_at",
    "ended_at",
    "first_seen_at",
    "last_seen_at",
    "planned_at",
    "opened_at",
    "received_at",
)


class DamagedRowError(StorageError):
    """A row of the database in which no server can have written what stands there."""


def from_row(kind: type[RecordT], row: Sequence[Any]) -> RecordT:
    """A row of the table of a kind of record, whose columns are its fields in their order.

    Raises:
        DamagedRowError: a column has what its field cannot be.
    """
    columns = _columns(kind)  # type: ignore[arg-type]  # a type is hashable
    try:
        return kind(*[read(value) for value, (_, read) in zip(row, columns, strict=True)])
    except ValueError as error:
        keys = dict(zip((name for name, _ in columns), row, strict=True))
        raise _damaged(kind, keys, keys) from error


def values_of(kind: type, names: Sequence[str], row: Sequence[Any]) -> list[Any]:
    """Some fields of a kind of record, from a row that has these columns alone.

    Raises:
        DamagedRowError: likewise.
    """
    readers = dict(_columns(kind))
    try:
        return [readers[name](value) for name, value in zip(names, row, strict=True)]
    except ValueError as error:
        values = dict(zip(names, row, strict=True))
        raise _damaged(kind, values, values) from error


def config_json(record: RunRecord) -> Any:
    """The configuration of a run as JSON values.

    Raises:
        DamagedRowError: it is no JSON, or nested too deeply.
    """
    row = f"id {quoted(record.id)}"
    try:
        config = json.loads(record.config)
    except ValueError as error:
        raise damaged_row(schema.runs.name, row, "config", f"it is no JSON: {error}") from error
    except RecursionError as error:
        raise damaged_row(schema.runs.name, row, "config", "it is nested too deeply") from error
    if _is_deep(config):
        raise damaged_row(schema.runs.name, row, "config", "it is nested too deeply")
    return config


def _is_deep(value: Any) -> bool:
    """Whether values lie in each other deeper than whoever walks them can follow."""
    level = [value]
    for _ in range(_DEEPEST):
        holders = [
            each.values() if isinstance(each, dict) else each
            for each in level
            if isinstance(each, dict | list)
        ]
        level = list(chain.from_iterable(holders))
        if not level:
            return False
    return True


def damaged_row(table: str, row: str, column: str, why: str) -> DamagedRowError:
    """The error of a column that has what it cannot have; `row` is its keys for people."""
    return DamagedRowError(
        f"the database was changed, or is damaged: table {table}, row {row}, column {column}: {why}; put it right, or "
        "make a store from a backup with `shoal restore`"
    )


def _damaged(kind: type, values: Mapping[str, Any], keys: Mapping[str, Any]) -> DamagedRowError:
    """The error of the first of some columns that has what it cannot have."""
    table = TABLES[kind]
    primary = [column.name for column in table.primary_key if column.name in keys]
    row = ", ".join(f"{name} {quoted(str(keys[name]))}" for name in primary or keys)
    readers = dict(_columns(kind))
    for name, value in values.items():
        try:
            readers[name](value)
        except ValidationError as error:
            return damaged_row(table.name, row, name, problems(error, "the value"))
        except ValueError as error:
            return damaged_row(table.name, row, name, str(error))
    raise AssertionError(f"table {table.name}, row {row} can be read")


@cache
def _columns(kind: type) -> tuple[tuple[str, Reader], ...]:
    """The fields of a record, and what reads each from its column."""
    hints = get_type_hints(kind)
    return tuple(
        (field.name, _reader(kind, field.name, hints[field.name])) for field in fields(kind)
    )


def _reader(kind: type, name: str, hint: Any) -> Reader:
    kinds = get_args(hint) if NoneType in get_args(hint) else (hint,)
    read = _reader_of(kind, name, next(each for each in kinds if each is not NoneType))
    return _or_none(read) if NoneType in kinds else read


def _reader_of(kind: type, name: str, hint: Any) -> Reader:
    if name in _NAMES.get(kind, ()):
        return _name
    if name in _DIGESTS:
        return _digest
    if name in _TIMES:
        return _time
    if get_origin(hint) is Literal:
        return _one_of(get_args(hint))
    if hint is BlobRef:
        return _blob_ref
    if issubclass(hint, BaseModel):
        return _message(hint)
    if issubclass(hint, Enum):
        return _member(hint)
    return _PLAIN.get(hint, _text)


def _or_none(read: Reader) -> Reader:
    return lambda value: None if value is None else read(value)


def _one_of(words: Iterable[str]) -> Reader:
    known = frozenset(words)

    def read(value: Any) -> str:
        if _text(value) not in known:
            raise ValueError(f"{quoted(value)} is not one of {', '.join(sorted(known))}")
        return str(value)

    return read


def _member(kind: type[Enum]) -> Reader:
    return kind


def _message(model: type[BaseModel]) -> Reader:
    return lambda value: model.model_validate_json(_text(value))


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{_shown(value)} is no text")
    return value


@lru_cache(maxsize=4096)
def _name_in(text: str) -> str:
    if not is_name(text):
        raise ValueError(f"{quoted(text)} is no name: a name has letters, digits, '_', '-' and '.'")
    return text


def _name(value: Any) -> str:
    return _name_in(_text(value))


def _digest(value: Any) -> str:
    if not re.fullmatch(DIGEST_PATTERN, _text(value)):
        raise ValueError(f"{quoted(value)} is no digest of a blob")
    return str(value)


def _truth(value: Any) -> bool:
    if value not in {0, 1}:
        raise ValueError(f"{_shown(value)} is neither 0 nor 1")
    return bool(value)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError(f"{_shown(value)} is no count")
    return value


def _number(value: Any) -> float:
    if type(value) not in {int, float} or not math.isfinite(value):
        raise ValueError(f"{_shown(value)} is no number")
    return float(value)


def _time(value: Any) -> float:
    if not 0 <= _number(value) <= _LATEST:
        raise ValueError(f"{_shown(value)} is no time in seconds since the epoch")
    return float(value)


_PLAIN: Mapping[Any, Reader] = {bool: _truth, int: _count, float: _number}


def _shown(value: Any) -> str:
    return "nothing" if value is None else quoted(str(value))


@lru_cache(maxsize=256)
def _blob_ref_in(text: str) -> BlobRef:
    """The same few for all tasks of a round."""
    return BlobRef.model_validate_json(text)


def _blob_ref(value: Any) -> BlobRef:
    return _blob_ref_in(_text(value))


def to_row(record: object) -> dict[str, Any]:
    """A record, a dataclass whose fields are columns, as the values of its row."""
    names = [name for name, _ in _columns(type(record))]  # type: ignore[arg-type]  # a type is hashable
    return {name: _plain(getattr(record, name)) for name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump_json()
    return str(value.value) if isinstance(value, Enum) else value
