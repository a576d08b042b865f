"""Turns records and views of a store into JSON values, and settings into a flat mapping."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from broker_server.store.records import RunRecord
from broker_server.store.rows import config_json


def to_json_values(value: Any) -> Any:
    """Return a record, a view, or a list of them as JSON values."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_json_values(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_values(entry) for entry in value]
    if is_dataclass(value):
        return _record_values(value)
    # Other values are JSON values already.
    return str(value) if isinstance(value, Path) else value


def _record_values(record: Any) -> dict[str, Any]:
    values = {}
    for field in fields(record):
        values[field.name] = to_json_values(getattr(record, field.name))
    if isinstance(record, RunRecord):
        # The record has its configuration as text.
        values["config"] = config_json(record)
    return values


def flat_settings(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings in tables within tables, by dotted key.

    Args:
        value: a setting, or a table of settings.
        key: the key of the table; empty for the outermost.
    """
    if not isinstance(value, dict):
        yield key, value
        return
    for name, entry in value.items():
        yield from flat_settings(entry, f"{key}.{name}" if key else name)
