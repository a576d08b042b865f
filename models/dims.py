"""Dimensions: which entries of a tensor's dimension belong to which unit of which axis.

An axis may have many entries for each unit, and they may lie in any of the orders that tensor
programs produce: side by side (a flattened feature map), one map of all units behind the other (the
gates of a recurrent layer, fused queries, keys and values, a map flattened with its channels last).
Maps of several axes may follow one another (a concatenation). All of these are loops around one
another, and slicing knows no other form.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import PlanError
from models.axes import Axis

_LOOPS = ("inner", "outer")


@dataclass(frozen=True)
class Dim:
    """One dimension of a tensor.

    The entries of an axis are counted by two loops: `outer` times over its units, `inner` entries
    for each. So a flattened feature map of 25 places is ``Dim("conv", inner=25)``, with channels
    last ``Dim("conv", outer=25)``, and ``cat([x, y])`` of two axes ``Dim("x", more=(Dim("y"),))``.

    Example:
        >>> Dim("hidden", outer=2).entries({"hidden": Axis("hidden", 3)}, {"hidden": np.array([0, 2])})
        array([0, 2, 3, 5])
    """

    axis: str  # name of the axis it carries; of a concatenation, the first
    inner: int = 1  # consecutive entries of each unit
    outer: int = 1  # maps of the whole axis, one behind the other
    # whether the units are counted by their place in a group alone, for a grouped axis: each map
    # has an entry for each place. So are the inputs of a grouped convolution, and maps that lie
    # within or across the groups
    shared: bool = False
    more: "tuple[Dim, ...]" = ()  # what follows in the same dimension, each without more of its own

    @property
    def segments(self) -> "tuple[Dim, ...]":
        """What the dimension is a concatenation of; itself if it carries one axis."""
        return (replace(self, more=()), *self.more) if self.more else (self,)

    @property
    def is_plain(self) -> bool:
        """Whether the dimension carries one axis, with the entries of each unit side by side."""
        return self == Dim(self.axis, self.inner)

    def length(self, axes: Mapping[str, Axis], width: float) -> int:
        """Count its entries in a sub-model of a width."""
        return sum(
            _count(part, axes[part.axis].kept(width), axes[part.axis]) for part in self.segments
        )

    def entries(
        self, axes: Mapping[str, Axis], kept: Mapping[str, NDArray[np.int64]]
    ) -> NDArray[np.int64]:
        """List the entries that the kept units have, int64, in their local order.

        Axes that are not named are whole.

        Raises:
            PlanError: groups that share their entries do not keep the same places.
        """
        found = []
        start = 0
        for part in self.segments:
            axis = axes[part.axis]
            units = kept.get(part.axis)
            found.append(
                start + _places(part, axis, np.arange(axis.size) if units is None else units)
            )
            start += _count(part, axis.size, axis)
        return np.concatenate(found)

    def to_json(self) -> Any:
        """The dimension as a JSON value; ``[axis, inner]`` where that says it all."""
        return (
            [self.axis, self.inner] if self.is_plain else [_record(part) for part in self.segments]
        )

    @classmethod
    def from_json(cls, value: Any) -> "Dim":
        """Read a dimension back.

        Raises:
            TypeError, ValueError, KeyError: the value is none that `to_json` writes.
        """
        if isinstance(value[0], str):
            axis, inner = value
            return cls(axis, int(inner))
        loops = [[int(item.get(key, 1)) for key in _LOOPS] for item in value]
        first, *more = [
            cls(str(item["axis"]), inner, outer, bool(item.get("shared", False)))
            for item, (inner, outer) in zip(value, loops, strict=True)
        ]
        return replace(first, more=tuple(more))

    def __str__(self) -> str:
        return " + ".join(_text(part) for part in self.segments)


def _count(part: Dim, kept: int, axis: Axis) -> int:
    return (kept // axis.groups if part.shared else kept) * part.inner * part.outer


def _places(part: Dim, axis: Axis, units: NDArray[np.int64]) -> NDArray[np.int64]:
    """Entries of some units within this segment."""
    span = axis.size
    if part.shared:
        rows = units.reshape(axis.groups, -1)
        span = axis.group_size
        if (rows != rows[0] + np.arange(axis.groups)[:, None] * span).any():
            raise PlanError(
                f"axis {axis.name}: its {axis.groups} groups share entries, so each must keep the same places of its"
                " own; choose a window whose heads are 'preserving'"
            )
        units = rows[0]
    found = (np.arange(part.outer)[:, None] * span + units).reshape(-1, 1)
    return (found * part.inner + np.arange(part.inner)).reshape(-1)


def _record(part: Dim) -> dict[str, Any]:
    loops = {key: getattr(part, key) for key in _LOOPS if getattr(part, key) != 1}
    return {"axis": part.axis, **loops, **({"shared": True} if part.shared else {})}


def _text(part: Dim) -> str:
    name = f"{part.axis}/group" if part.shared else part.axis
    return (
        (f"{part.outer}*" if part.outer > 1 else "")
        + name
        + (f"*{part.inner}" if part.inner > 1 else "")
    )
