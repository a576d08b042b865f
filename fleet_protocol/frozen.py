"""The base class of every value that is sent or stored.

It is frozen, refuses unknown keys, and can be read from and written as JSON.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
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


def _check_finite(value: JsonValue) -> JsonValue:
    """Check that all numbers in a value are finite."""
    if isinstance(value, dict):
        for entry in value.values():
            _check_finite(entry)
    elif isinstance(value, list):
        for entry in value:
            _check_finite(entry)
    # Not finite are infinity, NaN, and whole numbers beyond all floats.
    elif isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
        raise ValueError("a number that is not finite, or beyond what a float holds")
    return value


FiniteJson = Annotated[JsonValue, AfterValidator(_check_finite)]
"""Any JSON, whose numbers are finite.

A parser of JSON accepts 1e999 and returns infinity.
"""


STORED = MappingProxyType({"stored": True})
"""The context in which a stored configuration is read.

Earlier versions accepted keys without effect.
"""


class FrozenModel(BaseModel):
    """An immutable pydantic model that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def to_bytes(self) -> bytes:
        """Return the value as JSON, without keys that are None."""
        return self.model_dump_json(exclude_none=True).encode()

    def refuse_idle(
        self, info: ValidationInfo, key: str, used: bool, *, where: str, instead: str
    ) -> None:
        """Refuse a key that is set although nothing uses it.

        Args:
            info: result of the validation; a stored value is accepted as it is.
            key: its name.
            used: whether anything uses it.
            where: the circumstances in which it has no effect, for the message.
            instead: what to set, for the message.

        Raises:
            ValueError: it is not used, and its value differs from its default.
        """
        is_default = getattr(self, key) == type(self).model_fields[key].default
        if not used and not is_default and info.context != STORED:
            raise ValueError(f"{key} has no effect {where}; set {instead}, or remove it")

    def python_files(self) -> Iterable[Path]:
        """Return the Python files of the user that this value itself names, and that will run.

        Every table that names one overrides this method, see `fleet_protocol.own_code`.
        """
        return ()

    def resolved(self, base: Path) -> Self:
        """Return the value with relative paths joined to a folder, usually that of its file."""
        return self.relocated(lambda path: base / path)

    def relocated(self, move: Callable[[Path], Path]) -> Self:
        """Return the value with a function applied to every path in it.

        A model with other values that name files, such as ``file.py:function``, overrides this
        method.
        """
        changed = {}
        for name, value in self:
            new = _relocate(value, move)
            if new != value:  # a value that was not set must not count as set
                changed[name] = new
        return self.model_copy(update=changed) if changed else self


def _relocate(value: Any, move: Callable[[Path], Path]) -> Any:
    if isinstance(value, Mapping):
        return {key: _relocate(entry, move) for key, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(_relocate(entry, move) for entry in value)
    if isinstance(value, FrozenModel):
        return value.relocated(move)
    return move(value) if isinstance(value, Path) else value


def problems(
    error: ValidationError,
    whole: str,
    most: int = 3,
) -> str:
    """Describe the first problems of a value, each with its place.

    A stranger may have chosen a key: it is shown short, and without control characters.

    Args:
        error: error of the validation.
        whole: place of a problem that concerns the whole value.
        most: problems that are described.
    """
    descriptions = []
    for problem in error.errors(include_url=False)[:most]:
        place = _describe_place(problem["loc"]) or whole
        descriptions.append(f"{place}: {problem['msg']}")
    return "; ".join(descriptions)


def _describe_place(location: tuple[int | str, ...]) -> str:
    return ".".join(visible(str(key)[:_SHOWN], lines=False) for key in location)
