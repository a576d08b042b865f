"""Checks the values of database columns as they are read, by the fields that they belong to.

A reader takes the value of a column and returns that of the field. It raises a ValueError if the
field cannot have the value.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from functools import cache, lru_cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from broker_server.store.configurations import is_name
from broker_server.store.records import (
    DeviceRecord,
    RoundRecord,
    RunRecord,
    VersionRecord,
)
from broker_server.store.task_records import TaskRecord
from fleet_protocol.digests import DIGEST_PATTERN
from fleet_protocol.foreign_files import quoted
from fleet_protocol.messages import BlobRef

Reader = Callable[[Any], Any]

_LARGEST_COUNT = 2**53  # a count that every reader of JSON can represent
_LATEST_TIME = 250_000_000_000.0  # seconds since the epoch that a calendar can represent

# Fields that become parts of paths, topics and commands.
_NAMES = {
    RunRecord: ("id", "fleet", "arch", "name"),
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


@dataclass(frozen=True)
class Column:
    """How a column of the database is read.

    Attributes:
        read: takes any value but NULL, and that too if the column may not be NULL.
        is_optional: whether NULL stands for a field without a value.
    """

    read: Reader
    is_optional: bool


@cache
def columns_of(kind: type) -> Mapping[str, Column]:
    """Return the columns of a kind of record by field, in the order of the fields."""
    hints = get_type_hints(kind)
    columns = {}
    for field in fields(kind):
        columns[field.name] = _column(kind, field.name, hints[field.name])
    return columns


def read_columns(columns: Iterable[Column], row: Iterable[Any]) -> list[Any]:
    """Return the values of the fields that are stored in a row, of which each has one column.

    Raises:
        ValueError: a column has a value that its field cannot have.
    """
    values: list[Any] = []
    # A server reads every task of a round twice, so nothing is called for an empty column.
    for column, value in zip(columns, row, strict=True):
        if value is None and column.is_optional:
            values.append(None)
        else:
            values.append(column.read(value))
    return values


def _column(kind: type, name: str, hint: Any) -> Column:
    types = get_args(hint)
    if NoneType not in types:
        return Column(_required_reader(kind, name, hint), is_optional=False)
    (value_type,) = (field_type for field_type in types if field_type is not NoneType)
    return Column(_required_reader(kind, name, value_type), is_optional=True)


def _required_reader(kind: type, name: str, hint: Any) -> Reader:
    """Return the reader of a field that must have a value: by its name, or else by its type."""
    if name in _NAMES.get(kind, ()):
        return _read_name
    if name in _DIGESTS:
        return _read_digest
    if name in _TIMES:
        return _read_time
    if get_origin(hint) is Literal:
        return _reader_of_words(get_args(hint))
    if hint is BlobRef:
        return _read_blob_ref
    if issubclass(hint, BaseModel):
        return _reader_of_message(hint)
    if issubclass(hint, Enum):
        return _reader_of_enum(hint)
    return _BY_TYPE.get(hint, _read_text)


def _reader_of_words(words: Iterable[str]) -> Reader:
    allowed = frozenset(words)

    def read(value: Any) -> str:
        if _read_text(value) not in allowed:
            raise ValueError(f"{quoted(value)} is not one of {', '.join(sorted(allowed))}")
        return str(value)

    return read


def _reader_of_enum(kind: type[Enum]) -> Reader:
    return kind


def _reader_of_message(model: type[BaseModel]) -> Reader:
    return lambda value: model.model_validate_json(_read_text(value))


def _read_text(value: Any) -> str:
    # Not isinstance: SQLite returns only the types themselves.
    if type(value) is not str:
        raise ValueError(f"{_shown(value)} is not text")
    return value


# The same few names are in all rows of a run.
@lru_cache(maxsize=4096)
def _read_name(value: Any) -> str:
    text = _read_text(value)
    if not is_name(text):
        raise ValueError(
            f"{quoted(text)} is not a valid name: a name has letters, digits, '_', '-' and '.'"
        )
    return text


def _read_digest(value: Any) -> str:
    if not re.fullmatch(DIGEST_PATTERN, _read_text(value)):
        raise ValueError(f"{quoted(value)} is not a digest of a blob")
    return str(value)


def _read_truth(value: Any) -> bool:
    if value not in {0, 1}:
        raise ValueError(f"{_shown(value)} is neither 0 nor 1")
    return bool(value)


def _read_count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST_COUNT:
        raise ValueError(f"{_shown(value)} is not a count")
    return value


def _read_number(value: Any) -> float:
    if type(value) not in {int, float} or not math.isfinite(value):
        raise ValueError(f"{_shown(value)} is not a number")
    return float(value)


def _read_time(value: Any) -> float:
    if not 0 <= _read_number(value) <= _LATEST_TIME:
        raise ValueError(f"{_shown(value)} is not a time in seconds since the epoch")
    return float(value)


# The same few blobs are in all tasks of a round.
@lru_cache(maxsize=256)
def _read_blob_ref(value: Any) -> BlobRef:
    return BlobRef.model_validate_json(_read_text(value))


def _shown(value: Any) -> str:
    return "nothing" if value is None else quoted(str(value))


_BY_TYPE: Mapping[Any, Reader] = {bool: _read_truth, int: _read_count, float: _read_number}
