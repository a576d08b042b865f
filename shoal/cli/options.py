"""Parses values of options: lists of numbers, durations, settings and heads.

Each error shows the expected form.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from fleet_protocol.configuration import load_config
from fleet_protocol.data.terms import ContractTerms
from fleet_protocol.errors import ConfigError, PlanError
from fleet_protocol.recipe import RecipeTable
from models.tier import HEAD_NAME, HEAD_SHARE, Tier

NameT = TypeVar("NameT", bound=str)

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parse_floats(option: str, text: str) -> tuple[float, ...]:
    """Read ``1,0.5,1/16``.

    Raises:
        ConfigError: the text has another form; the same applies to the functions below.
    """
    return tuple(_parse_float(option, number.strip()) for number in text.split(","))


def _parse_float(option: str, text: str, example: str = "1,0.5,1/16") -> float:
    """Read a decimal number or a fraction."""
    numerator, slash, denominator = text.partition("/")
    try:
        if slash:
            # A missing denominator counts as 1, so "1/" is 1.
            return float(numerator) / float(denominator or 1.0)
        return float(numerator)
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{option}: {text!r} is not a number; for example, write {example}"
        ) from error


def parse_shares(option: str, text: str) -> tuple[float, ...]:
    """Read ``1,0.5,head``: shares of blocks that a tier trains."""
    example = f"1,0.5,{HEAD_NAME}"
    shares: list[float] = []
    for word in text.split(","):
        name = word.strip()
        if name == HEAD_NAME:
            shares.append(HEAD_SHARE)
            continue
        share = _parse_float(option, name, example)
        if not 0 < share <= 1:
            raise ConfigError(
                f"{option}: {name} is not a share in (0, 1]; for example, write {example}"
            )
        shares.append(share)
    return tuple(shares)


def parse_names(option: str, text: str, known: Sequence[NameT]) -> tuple[NameT, ...] | None:
    """Read some of the known names, in their order; None for an empty text.

    Raises:
        ConfigError: a name is unknown.
    """
    if not text:
        return None
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            kind = option.removeprefix("--").removesuffix("s")
            raise ConfigError(f"{option}: unknown {kind} {name!r}; choose from {', '.join(known)}")
    return tuple(name for name in known if name in names)


def parse_ints(option: str, text: str) -> tuple[int, ...]:
    """Read ``2,4``."""
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"{option}: {text!r} is not a list of whole numbers; for example, write 2,4"
        ) from error


def parse_memory_bounds(option: str, text: str) -> tuple[float, ...]:
    """Read ``96,48``, in MB, as bytes."""
    bounds: list[float] = []
    for megabytes in parse_ints(option, text):
        if megabytes < 1:
            raise ConfigError(
                f"{option}: {megabytes} MB is not a bound of memory; write whole numbers from 1,"
                " such as 96,48"
            )
        bounds.append(1e6 * megabytes)
    return tuple(bounds)


def parse_seconds(option: str, text: str) -> float:
    """Read ``90m`` or ``8h``, or ``30s``, as seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if match is None:
        raise ConfigError(f"{option}: {text!r} is not a duration; for example, write 90m or 8h")
    count, unit = match.groups()
    return float(count) * _SECONDS[unit]


def parse_settings(option: str, values: Sequence[str]) -> dict[str, Any]:
    """Read settings such as ``channels=32,64`` as values by name.

    A value is a number, a comma list, true, false, text, or JSON in braces. A list may be in
    brackets.
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

    Without a path, return the default recipe.

    Raises:
        ConfigError: the file cannot be read, or the table is invalid.
    """
    if path is None:
        return RecipeTable()
    return load_config(path, _Document).model.recipe


def read_contract_terms(path: Path | None) -> ContractTerms | None:
    """Read ``[contract]`` of a ``fleet.toml``; None without a path or such a table.

    Raises:
        ConfigError: the file cannot be read, or the table is invalid.
    """
    return None if path is None else load_config(path, _Document).contract


class _Model(BaseModel):
    recipe: RecipeTable = RecipeTable()


class _Document(BaseModel):
    """The parts of a configuration that an export reads; other keys are ignored."""

    model: _Model = _Model()
    contract: ContractTerms | None = None


def _list_in_brackets(text: str) -> tuple[Any, ...]:
    """Return the list that Python and JSON write in brackets; texts in it need no quotes."""
    try:
        listed = json.loads(text)
    except ValueError:
        return tuple(_value(entry.strip()) for entry in text[1:-1].split(","))
    return tuple(map(_without_lists, listed))


def _without_lists(value: Any) -> Any:
    """Return a JSON value whose lists are tuples."""
    if isinstance(value, list):
        return tuple(map(_without_lists, value))
    return value


def _value(text: str) -> Any:
    """Return the value of a setting."""
    if text.startswith("[") and text.endswith("]"):
        return _list_in_brackets(text)
    # JSON may contain commas, so a value in braces is not a list.
    if "," in text and not text.startswith("{"):
        entries = [entry.strip() for entry in text.split(",")]
        # A comma at the end makes a list of one value.
        return tuple(_value(entry) for entry in entries if entry)
    try:
        return json.loads(text)
    except ValueError:
        # Text without quotes is not JSON.
        return text
