"""The whole numbers in the arguments of a constructor, and arguments with some of them changed.

A place is a path of names and numbers, such as ``hidden_size``, ``vision_config.hidden_size`` or
``dims.2``.
"""

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from fleet_protocol.errors import ConfigError
from fleet_protocol.spelling import did_you_mean

_DEEPEST = 6  # names in a path
_OPAQUE = (Tensor, nn.Module, type, FunctionType, ModuleType)


def sizes_of(arguments: Mapping[str, Any]) -> dict[str, int]:
    """Return the whole numbers above 1 by their places, in the order of the arguments.

    Example:
        >>> sizes_of({"dims": (40, 80), "drop": 0.1, "config": {"layers": 2, "biased": True}})
        {'dims.0': 40, 'dims.1': 80, 'config.layers': 2}
    """
    sizes: dict[str, int] = {}
    for place, value in _values_with_places("", arguments, 0):
        # A boolean is an int in Python, and 1 cannot shrink.
        if type(value) is int and value > 1:
            sizes[place] = value
    return sizes


def rates_of(arguments: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers above 0 and up to 1 by their places: those of dropout, for example.

    Example:
        >>> rates_of({"dims": (40, 80), "drop": 0.1, "config": {"layerdrop": 0.05, "eps": 2.0}})
        {'drop': 0.1, 'config.layerdrop': 0.05}
    """
    rates: dict[str, float] = {}
    for place, value in _values_with_places("", arguments, 0):
        if type(value) is float and 0 < value <= 1:
            rates[place] = value
    return rates


def _values_with_places(
    place: str,
    value: Any,
    depth: int,
) -> Iterator[tuple[str, Any]]:
    """Yield each value that is not a collection, with its place."""
    children = _children(value)
    if not children:
        yield place, value
        return
    # Configurations can refer to themselves.
    if depth == _DEEPEST:
        return
    for name, child in children.items():
        yield from _values_with_places(
            f"{place}.{name}" if place else name,
            child,
            depth + 1,
        )


def _children(value: Any) -> dict[str, Any]:
    """Return what a mapping, a list or a plain object holds, by name."""
    if isinstance(value, Mapping):
        return {str(name): child for name, child in value.items()}
    if isinstance(value, (list, tuple)):
        return {str(number): child for number, child in enumerate(value)}
    if isinstance(value, _OPAQUE) or not hasattr(value, "__dict__"):
        return {}
    # Private attributes are what an object computed from its arguments.
    public: dict[str, Any] = {}
    for name, child in vars(value).items():
        if not name.startswith("_"):
            public[name] = child
    return public


def with_sizes(arguments: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of arguments with other numbers at some places.

    Example:
        >>> with_sizes({"dims": (40, 80), "drop": 0.1}, {"dims.1": 60})
        {'dims': (40, 60), 'drop': 0.1}

    Raises:
        ConfigError: if the arguments have no such place.
    """
    # The caller builds the whole model from the same arguments.
    changed: dict[str, Any] = copy.deepcopy(dict(arguments))
    for place, size in sizes.items():
        changed = _replaced(changed, place, place.split("."), size)
    return changed


def _replaced(
    value: Any,
    place: str,
    path: list[str],
    size: Any,
) -> Any:
    """Return a value with another whole number at a path below it."""
    if not path:
        return size
    name, *below = path
    children = _children(value)
    if name not in children:
        raise ConfigError(
            f"there is no argument {place}{did_you_mean(name, children)}; there are "
            f"{', '.join(children) or 'none'}"
        )
    child = _replaced(children[name], place, below, size)
    if isinstance(value, MutableMapping):
        value[name] = child
    elif isinstance(value, list):
        value[int(name)] = child
    elif isinstance(value, tuple):
        entries = [*value]
        entries[int(name)] = child
        return _tuple_like(value, entries)
    else:
        # Also fields of frozen dataclasses.
        object.__setattr__(value, name, child)
    return value


def _tuple_like(value: tuple[Any, ...], entries: list[Any]) -> tuple[Any, ...]:
    """Return a tuple, or a named tuple, of the kind of another one."""
    # A named tuple takes its fields one by one.
    make = getattr(type(value), "_make", type(value))
    changed: tuple[Any, ...] = make(entries)
    return changed
