"""Parses values of options: lists of numbers, durations, settings and heads.

Each error shows the form that is expected.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fleet_protocol.configuration import load_config
from fleet_protocol.errors import ConfigError, PlanError
from fleet_protocol.recipe import RecipeTable
from models.tier import Tier

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parse_floats(option: str, text: str) -> tuple[float, ...]:
    """Read ``1,0.5,1/16``.

    Raises:
        ConfigError: it is none of this form; so do the functions below.
    """
    return tuple(_parse_float(option, number.strip()) for number in text.split(","))


def _parse_float(option: str, text: str) -> float:
    """Read a decimal number or a fraction."""
    numerator, slash, denominator = text.partition("/")
    try:
        if slash:
            return float(numerator) / float(denominator or 1.0)
        return float(numerator)
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{option}: {text!r} is not a number; write for example 1,0.5,1/16"
        ) from error


def parse_ints(option: str, text: str) -> tuple[int, ...]:
    """Read ``2,4``."""
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"{option}: {text!r} is not a list of whole numbers; write for example 2,4"
        ) from error


def parse_seconds(option: str, text: str) -> float:
    """Read ``90m`` or ``8h``, or ``30s``, as seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if match is None:
        raise ConfigError(f"{option}: {text!r} is not a duration; write for example 90m or 8h")
    count, unit = match.groups()
    return float(count) * _SECONDS[unit]


def parse_settings(option: str, values: Sequence[str]) -> dict[str, Any]:
    """Read settings such as ``channels=32,64`` as values by name.

    A value is a number, a comma list, true, false, text, or JSON in braces.
    """
    settings = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigError(
                f"{option}: {text!r} is not of the form name=value, for example channels=32,64"
            )
        settings[name.strip()] = _value(value.strip())
    return settings


def parse_heads(option: str, values: Sequence[str]) -> dict[Tier, int]:
    """Read ``w1.00-d2=5`` and the like."""
    heads = {}
    for text in values:
        tier, _, labels = text.partition("=")
        try:
            heads[Tier.parse(tier.strip())] = int(labels)
        except (PlanError, ValueError) as error:
            raise ConfigError(
                f"{option}: {text!r} is not of the form tier=labels, for example w1.00-d2=5"
            ) from error
    return heads


def read_recipe(path: Path | None) -> RecipeTable:
    """Read ``[model.recipe]`` of a ``fleet.toml`` or ``sim.toml``.

    Without a path it is the default recipe.

    Raises:
        ConfigError: the file cannot be read, or the table is wrong.
    """
    if path is None:
        return RecipeTable()
    return load_config(path, _Document).model.recipe


class _Model(BaseModel):
    recipe: RecipeTable = RecipeTable()


class _Document(BaseModel):
    """A configuration of which only the recipe is read and checked."""

    model: _Model = _Model()


def _value(text: str) -> Any:
    """Return the value of a setting."""
    if "," in text and not text.startswith("{"):
        entries = [entry.strip() for entry in text.split(",")]
        return tuple(_value(entry) for entry in entries if entry)
    try:
        return json.loads(text)
    except ValueError:
        return text
