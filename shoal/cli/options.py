"""Option values that need parsing: lists of numbers, settings, each with an error that shows the
form.
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


def parse_floats(option: str, text: str) -> tuple[float, ...]:
    """Read ``1,0.5,1/16``; what is none is a ConfigError that shows the form, here and below."""
    values = []
    for part in text.split(","):
        try:
            numerator, _, denominator = part.strip().partition("/")
            values.append(float(numerator) / (float(denominator) if denominator else 1.0))
        except (ValueError, ZeroDivisionError) as error:
            raise ConfigError(
                f"{option}: {part.strip()!r} is not a number; write for example 1,0.5,1/16"
            ) from error
    return tuple(values)


def parse_ints(option: str, text: str) -> tuple[int, ...]:
    """Read ``2,4``."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"{option}: {text!r} is not a list of whole numbers; write for example 2,4"
        ) from error


def parse_seconds(option: str, text: str) -> float:
    """Read ``90m`` or ``8h``, or ``30s``, as seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if found is None:
        raise ConfigError(f"{option}: {text!r} is not a duration; write for example 90m or 8h")
    return float(found[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0}[found[2]]


def parse_settings(option: str, values: Sequence[str]) -> dict[str, Any]:
    """Read ``channels=32,64`` and the like: a number, a comma list, true, false, text, or JSON in
    braces by name.
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
    return RecipeTable() if path is None else load_config(path, _Document).model.recipe


class _Model(BaseModel):
    recipe: RecipeTable = RecipeTable()


class _Document(BaseModel):
    """A configuration of which only the recipe is read; the rest is checked by whoever uses it."""

    model: _Model = _Model()


def _value(text: str) -> Any:
    if "," in text and not text.startswith("{"):
        return tuple(_value(part.strip()) for part in text.split(",") if part.strip())
    try:
        return json.loads(text)
    except ValueError:
        return text
