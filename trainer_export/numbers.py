"""Records of a recipe by name, and the ranges of their parameters."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from fleet_protocol.errors import ConfigError
from fleet_protocol.spelling import did_you_mean
from models.layout import freeze

RecordT = TypeVar("RecordT")

_KEY = "range"


@dataclass(frozen=True)
class Range:
    """The valid range of a number."""

    low: float = 0.0  # smallest allowed value
    below: float = math.inf  # exclusive upper bound; infinity for any finite number
    positive: bool = False  # whether 0 is excluded

    def __contains__(self, value: float) -> bool:
        return self.low <= value < self.below and (value > 0 or not self.positive)

    def __str__(self) -> str:
        return f"({0:g}, {self.below:g})" if self.positive else f"[{self.low:g}, {self.below:g})"


def number(default: float | None, allowed: Range) -> Any:
    """Return a field of a frozen dataclass for a number."""
    return dataclasses.field(default=default, metadata={_KEY: allowed})


def check_numbers(record: Any) -> None:
    """Check that each :func:`number` of a dataclass is None or in its range.

    Raises:
        ConfigError: a number is out of range; the message names it.
    """
    for field in dataclasses.fields(record):
        allowed = field.metadata.get(_KEY)
        value = getattr(record, field.name)
        if allowed is None or value is None:
            continue
        if not isinstance(value, (int, float)):
            raise ConfigError(f"{field.name} {value!r} is not a number")
        if value not in allowed:
            raise ConfigError(f"{field.name} {value} is outside {allowed}")


def make_record(
    kind: str,
    known: Mapping[str, type[RecordT]],
    name: str,
    settings: Mapping[str, Any] | None,
    own: Mapping[str, type[Any]] = MappingProxyType({}),
) -> RecordT:
    """Create a record of a recipe.

    Args:
        kind: kind of record, for messages and for the choice among `own`.
        known: classes that come with Shoal, by name.
        name: name of the record.
        settings: its parameters that differ from the defaults.
        own: further classes from the user's file, of this kind and others.

    Raises:
        ConfigError: there is no such record or parameter, a parameter is out of range, or two
            records share a name.
    """
    record = _class_of(kind, known, name, own)
    defaults = {}
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        defaults[field.name] = field.default
    chosen = freeze(dict(settings or {}))
    for key in chosen:
        if key not in defaults:
            has = (
                f"its parameters are {', '.join(defaults)}" if defaults else "it has no parameters"
            )
            raise ConfigError(
                f"the {kind} {name} has no parameter {key!r}{did_you_mean(key, defaults)}; {has}"
            )
        if not _alike(chosen[key], defaults[key]):
            raise ConfigError(
                f"{key} of the {kind} {name} is {chosen[key]!r}, not {_expected(defaults[key])};"
                " write it without quotes"
            )
    return record(**chosen)


def _class_of(
    kind: str,
    known: Mapping[str, type[RecordT]],
    name: str,
    own: Mapping[str, type[Any]],
) -> type[RecordT]:
    """Return the class of a record, Shoal's or the user's."""
    added = {}
    for key, record in own.items():
        if record.kind == kind:
            added[key] = record
    if name in known and name in added:
        raise ConfigError(f"your {kind} {name} has the name of a built-in one; rename its function")
    classes = {**known, **added}
    if name not in classes:
        raise ConfigError(
            f"unknown {kind} {name!r}{did_you_mean(name, classes)}; choose from"
            f" {', '.join(classes)}"
        )
    return classes[name]


def _expected(default: Any) -> str:
    """Return a description of the valid values of a setting, from its default."""
    if isinstance(default, bool):
        return "true or false"
    return "a list of numbers" if isinstance(default, tuple) else "a number"


def _alike(value: Any, default: Any) -> bool:
    """Return whether a setting has the kind of its default.

    The kinds are bool, a list of numbers, and a number.
    """
    if isinstance(default, tuple):
        if not isinstance(value, tuple):
            return False
        return all(isinstance(entry, tuple) or _alike(entry, 0) for entry in value)
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    return isinstance(value, (int, float)) or (value is None and default is None)
