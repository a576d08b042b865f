"""The base of every value that crosses a border: frozen, strict about unknown keys, JSON both ways."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    JsonValue,
    ValidationError,
    ValidationInfo,
)
from typing_extensions import Self

from fleet_protocol.errors import visible

_SHOWN = 200  # characters of a key


def _finite(value: JsonValue) -> JsonValue:
    for item in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        _finite(item)
    if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
        raise ValueError("a number that is not finite, or beyond what a float holds")
    return value


Free = Annotated[JsonValue, AfterValidator(_finite)]
"""JSON that somebody else reads, whose numbers are finite: a parser of JSON takes 1e999, and makes
infinity of it.
"""


STORED = MappingProxyType({"stored": True})
"""The context in which a stored configuration is read: earlier versions took keys without effect."""


class FrozenModel(BaseModel):
    """An immutable pydantic model that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def to_bytes(self) -> bytes:
        """The value as it travels; what is not there is left out, and read as not there."""
        return self.model_dump_json(exclude_none=True).encode()

    def refuse_idle(
        self, info: ValidationInfo, key: str, used: bool, *, where: str, instead: str
    ) -> None:
        """Refuse a key that says what is not the default where nothing uses it, with a ValueError.

        Args:
            info: of the validation; what a store has is taken as it is.
            key: its name.
            used: whether something uses it.
            where: it has no effect.
            instead: what to set.
        """
        idle = not used and getattr(self, key) != type(self).model_fields[key].default
        if idle and info.context != STORED:
            raise ValueError(f"{key} has no effect {where}; set {instead}, or remove it")

    def resolved(self, base: Path) -> Self:
        """The same with every relative path in it taken from a folder, usually that of its file."""
        return self.relocated(lambda path: base / path)

    def relocated(self, move: Callable[[Path], Path]) -> Self:
        """Apply a function to every path in the value.

        A model with other values that name files, such as ``file.py:function``, overrides this
        method.
        """
        replaced = {name: (value, _relocated(value, move)) for name, value in self}
        changed = {
            name: new for name, (old, new) in replaced.items() if new != old
        }  # unset values stay unset
        return self.model_copy(update=changed) if changed else self


def _relocated(value: Any, move: Callable[[Path], Path]) -> Any:
    if isinstance(value, Mapping):
        return {key: _relocated(item, move) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_relocated(item, move) for item in value)
    if isinstance(value, FrozenModel):
        return value.relocated(move)
    return move(value) if isinstance(value, Path) else value


def problems(error: ValidationError, whole: str, most: int = 3) -> str:
    """The first things that are wrong with a value, each with its place.

    `whole` is the place of what has none.

    A place may be a key that a stranger chose: it is shown short, and moves no cursor.
    """
    found = error.errors(include_url=False)[:most]
    return "; ".join(f"{_place(item['loc']) or whole}: {item['msg']}" for item in found)


def _place(parts: tuple[int | str, ...]) -> str:
    return ".".join(visible(str(part)[:_SHOWN], lines=False) for part in parts)
