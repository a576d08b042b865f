"""Dimensions: the assignment of a dimension's entries to the units of axes.

An axis may have several entries for each unit, in any order that tensor programs produce: side by
side (a flattened feature map), or one map of all units after another (the gates of a recurrent
layer, fused queries, keys and values, a map flattened with its channels last). Maps of several axes
may follow each other (a concatenation). All of these are nested loops, and slicing supports no
other form.
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

    Two loops enumerate the entries of an axis: `outer` times over its units, with `inner` entries
    each. So a flattened feature map of 25 places is ``Dim("conv", inner=25)``, with channels last
    ``Dim("conv", outer=25)``, and ``cat([x, y])`` of two axes ``Dim("x", more=(Dim("y"),))``.

    Example:
        >>> axes = {"hidden": Axis("hidden", 3)}
        >>> Dim("hidden", outer=2).entries(axes, {"hidden": np.array([0, 2])})
        array([0, 2, 3, 5])
    """

    axis: str  # name of its axis; for a concatenation, the first
    inner: int = 1  # consecutive entries of each unit
    outer: int = 1  # maps of the whole axis, one after another
    # for a grouped axis, whether only the place in a group identifies a unit, so that each map has
    # one entry for each place. Examples are the inputs of a grouped convolution, and maps that lie
    # within or across the groups
    shared: bool = False
    more: "tuple[Dim, ...]" = ()  # following parts of the dimension, each without further parts

    @property
    def segments(self) -> "tuple[Dim, ...]":
        """Return the concatenated parts, each of one axis."""
        if not self.more:
            return (self,)
        first = replace(self, more=())
        return (first, *self.more)

    @property
    def is_plain(self) -> bool:
        """Return whether it carries one axis, with the entries of each unit side by side."""
        return self == Dim(self.axis, self.inner)

    def length(
        self,
        axes: Mapping[str, Axis],
        width: float,
    ) -> int:
        """Count its entries in a sub-model of a width."""
        length = 0
        for segment in self.segments:
            axis = axes[segment.axis]
            length += _count(segment, axis.kept(width), axis)
        return length

    def entries(
        self, axes: Mapping[str, Axis], kept: Mapping[str, NDArray[np.int64]]
    ) -> NDArray[np.int64]:
        """List the entries that the kept units have, int64, in their local order.

        Args:
            axes: all axes of the dimension.
            kept: kept units by axis; other axes are whole.

        Raises:
            PlanError: groups that share entries keep different places.
        """
        entries = []
        start = 0
        for segment in self.segments:
            axis = axes[segment.axis]
            units = kept.get(segment.axis)
            if units is None:
                units = np.arange(axis.size)
            entries.append(start + _entries_of_units(segment, axis, units))
            start += _count(segment, axis.size, axis)
        return np.concatenate(entries)

    def to_json(self) -> Any:
        """Return the dimension as a JSON value, ``[axis, inner]`` if it is plain."""
        if self.is_plain:
            return [self.axis, self.inner]
        return [_segment_to_json(segment) for segment in self.segments]

    @classmethod
    def from_json(cls, value: Any) -> "Dim":
        """Read a dimension back.

        Raises:
            TypeError, ValueError, KeyError: if `to_json` does not write such a value.
        """
        if isinstance(value[0], str):  # a plain dimension; others are lists of segments
            axis, inner = value
            return cls(axis, _whole(inner))
        first, *more = map(_segment_from_json, value)
        return replace(first, more=tuple(more))

    def __str__(self) -> str:
        return " + ".join(map(_text, self.segments))


def _count(
    segment: Dim,
    kept: int,
    axis: Axis,
) -> int:
    """Count the entries of a segment with some number of units of its axis."""
    units = kept // axis.groups if segment.shared else kept
    return units * segment.inner * segment.outer


def _entries_of_units(
    segment: Dim,
    axis: Axis,
    units: NDArray[np.int64],
) -> NDArray[np.int64]:
    """List the entries of some units within a segment."""
    map_size = axis.size
    if segment.shared:
        rows = units.reshape(axis.groups, -1)
        map_size = axis.group_size
        first_entries = np.arange(axis.groups)[:, None] * map_size
        expected = rows[0] + first_entries
        if (rows != expected).any():
            raise PlanError(
                f"axis {axis.name}: its {axis.groups} groups share entries, so all must keep the"
                " same places; choose a window with heads = 'preserving'"
            )
        units = rows[0]
    # Repetitions of the axis outside, units within, and then the entries of one unit.
    first_units = np.arange(segment.outer)[:, None] * map_size
    starts = (first_units + units).reshape(-1, 1)
    entries = starts * segment.inner + np.arange(segment.inner)
    return entries.reshape(-1)


def _segment_to_json(segment: Dim) -> dict[str, Any]:
    record: dict[str, Any] = {"axis": segment.axis}
    for loop in _LOOPS:
        if getattr(segment, loop) != 1:
            record[loop] = getattr(segment, loop)
    if segment.shared:
        record["shared"] = True
    return record


def _segment_from_json(record: Any) -> Dim:
    inner, outer = (_whole(record.get(loop, 1)) for loop in _LOOPS)
    return Dim(
        str(record["axis"]),
        inner,
        outer,
        bool(record.get("shared", False)),
    )


def _whole(value: Any) -> int:
    """Return a whole number from 1 on; a ValueError for others, such as the infinity of 1e999."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} is not a whole number from 1 on")
    return value


def _text(segment: Dim) -> str:
    name = f"{segment.axis}/group" if segment.shared else segment.axis
    outer = f"{segment.outer}*" if segment.outer > 1 else ""
    inner = f"*{segment.inner}" if segment.inner > 1 else ""
    return f"{outer}{name}{inner}"
