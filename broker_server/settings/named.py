"""Lists the names in a stored configuration: files, programs, addresses and other free words.

The module walks the configuration, so the list includes settings that are added later.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from broker_server.settings.fleet import FleetConfig
from fleet_protocol.errors import ConfigError, ShoalError

_ADDRESS = re.compile(r"[\w.-]+:\d+", re.ASCII)
_PROGRAM = re.compile(r".*[^:/\\]:[A-Za-z_]\w*")
_LONGEST = 4096  # characters of a name that are examined, as many as a path may have


@dataclass(frozen=True)
class NamedSetting:
    """A setting whose value is a name.

    Attributes:
        setting: its name, such as ``evaluation.data.path``.
        kind: ``path``, ``address``, ``program`` or ``word``.
        value: the value as written.
    """

    setting: str
    kind: str
    value: str


def list_named_settings(text: str) -> tuple[NamedSetting, ...]:
    """List the names in a run's configuration.

    Args:
        text: JSON from a store. If it cannot be read, its beginning is the only name.

    Raises:
        ConfigError: the configuration is nested too deeply to be read.
    """
    try:
        return tuple(_walk(_read(text), ""))
    except ValueError:
        return (NamedSetting("(the configuration cannot be read)", "word", text[:1000]),)
    except RecursionError as error:
        raise ConfigError("its configuration is nested too deeply") from error


def _read(text: str) -> Any:
    try:
        return FleetConfig.stored(text)
    except (ValueError, ShoalError):  # from another version, or changed
        return json.loads(text)


def _walk(value: Any, setting: str) -> Iterator[NamedSetting]:
    """Yield the names in a value, in the order of its settings."""
    if isinstance(value, Path):
        yield NamedSetting(setting, "path", str(value))
    elif isinstance(value, str):
        # A value of an enumeration is one of a few that Shoal defines.
        if value and not isinstance(value, Enum):
            yield NamedSetting(setting, _kind(value), value)
    else:
        for name, inner in _inner_values(value):
            yield from _walk(inner, f"{setting}.{name}" if setting else name)


def _inner_values(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values in a table or a list, by their names in it."""
    if isinstance(value, BaseModel):
        for name, field in type(value).model_fields.items():
            if not _is_choice(field.annotation):
                yield name, getattr(value, name)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key), inner
    elif isinstance(value, list | tuple | set | frozenset):
        for number, inner in enumerate(value):
            yield str(number), inner


def _is_choice(annotation: Any) -> bool:
    """Return whether a field has one of a few values that Shoal defines."""
    types = (annotation, *get_args(annotation))
    return any(get_origin(kind) is Literal for kind in types)


def _kind(value: str) -> str:
    value = value[:_LONGEST]  # the further characters do not affect the result
    before, mark, _ = value.partition("://")
    if (mark and before[-1:].isalnum()) or _ADDRESS.fullmatch(value):
        return "address"
    if _PROGRAM.fullmatch(value):
        return "program"
    return "path" if "/" in value or "\\" in value else "word"
