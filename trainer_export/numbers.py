"""Records of a recipe by name, and their numbers with the range they must lie in."""

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
    """Where a number must lie."""

    low: float = 0.0  # the smallest allowed
    below: float = math.inf  # what it must be less than; infinity for any finite number
    positive: bool = False  # whether it must be above 0

    def __contains__(self, value: float) -> bool:
        return self.low <= value < self.below and (value > 0 or not self.positive)

    def __str__(self) -> str:
        return f"({0:g}, {self.below:g})" if self.positive else f"[{self.low:g}, {self.below:g})"


def number(default: float | None, allowed: Range) -> Any:
    """A field of a frozen dataclass that holds a number."""
    return dataclasses.field(default=default, metadata={_KEY: allowed})


def check_numbers(record: Any) -> None:
    """See that each :func:`number` of a dataclass is in its range or None.

    A ConfigError names one that is not.
    """
    for item in dataclasses.fields(record):
        allowed = item.metadata.get(_KEY)
        value = getattr(record, item.name)
        if allowed is None or value is None:
            continue
        if not isinstance(value, (int, float)):
            raise ConfigError(f"{item.name} {value!r} is not a number")
        if value not in allowed:
            raise ConfigError(f"{item.name} {value} is outside {allowed}")


def made(
    kind: str,
    known: Mapping[str, type[RecordT]],
    name: str,
    settings: Mapping[str, Any] | None,
    own: Mapping[str, type[Any]] = MappingProxyType({}),
) -> RecordT:
    """Make a record of a recipe.

    The kind is for messages; `own` are further classes, of the user's file, of this kind and
    others.

    Raises:
        ConfigError: there is no such record or number, a number is out of its range, or two records
            share a name.
    """
    added = {key: item for key, item in own.items() if item.kind == kind}
    if name in known and name in added:
        raise ConfigError(
            f"your {kind} {name} has the name of one that comes with Shoal; rename its function"
        )
    known = {**known, **added}
    if name not in known:
        raise ConfigError(
            f"no {kind} {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}"
        )
    defaults = {item.name: item.default for item in dataclasses.fields(known[name])}  # type: ignore[arg-type]
    numbers = [*defaults]
    given = freeze(dict(settings or {}))
    for key in given:
        if key not in numbers:
            has = f"it has {', '.join(numbers)}" if numbers else "it has no settings"
            raise ConfigError(
                f"the {kind} {name} has no {key!r}{did_you_mean(key, numbers)}; {has}"
            )
        if not _alike(given[key], defaults[key]):
            wanted = {bool: "true or false", tuple: "a list of numbers"}.get(
                type(defaults[key]), "a number"
            )
            raise ConfigError(
                f"{key} of the {kind} {name} is {given[key]!r}, not {wanted}; write it without quotes"
            )
    return known[name](**given)


def _alike(value: Any, default: Any) -> bool:
    """Whether a setting is of the kind of its default: yes or no, a list of numbers, or a number."""
    if isinstance(default, tuple):
        return isinstance(value, tuple) and all(
            isinstance(item, tuple) or _alike(item, 0) for item in value
        )
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    return isinstance(value, (int, float)) or (value is None and default is None)
