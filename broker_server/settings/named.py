"""Lists what a stored configuration names: files, programs, addresses and other free words.

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
_LONGEST = (
    4096  # characters of a name, as a path has them; the rest of a longer one decides nothing
)


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
    """List the names in a run's configuration, as JSON from a store.

    All of the text if it cannot be read.

    Raises:
        ConfigError: the configuration is nested too deeply to be read.
    """
    try:
        return tuple(_named(_read(text), ""))
    except ValueError:
        return (NamedSetting("(the configuration cannot be read)", "word", text[:1000]),)
    except RecursionError as error:
        raise ConfigError("its configuration is nested too deeply") from error


def _read(text: str) -> Any:
    try:
        return FleetConfig.stored(text)
    except (ValueError, ShoalError):  # from another version, or changed
        return json.loads(text)


def _named(value: Any, setting: str) -> Iterator[NamedSetting]:
    if isinstance(value, BaseModel):
        for name, field in type(value).model_fields.items():
            if not _is_choice(field.annotation):
                yield from _named(getattr(value, name), f"{setting}.{name}" if setting else name)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _named(each, f"{setting}.{key}" if setting else str(key))
    elif isinstance(value, list | tuple | set | frozenset):
        for number, each in enumerate(value):
            yield from _named(each, f"{setting}.{number}")
    elif isinstance(value, Path):
        yield NamedSetting(setting, "path", str(value))
    elif isinstance(value, str) and value and not isinstance(value, Enum):
        yield NamedSetting(setting, _kind(value), value)


def _is_choice(annotation: Any) -> bool:
    """Return whether a field has one of a few values that Shoal defines."""
    return any(get_origin(each) is Literal for each in (annotation, *get_args(annotation)))


def _kind(value: str) -> str:
    value = value[:_LONGEST]
    before, mark, _ = value.partition("://")
    if (mark and before[-1:].isalnum()) or _ADDRESS.fullmatch(value):
        return "address"
    if _PROGRAM.fullmatch(value):
        return "program"
    return "path" if "/" in value or "\\" in value else "word"
