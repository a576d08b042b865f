"""The order of the entries of axes in their dimensions.

The entries of an axis in a dimension are one or more maps, each with the same number of consecutive
entries for every place in a group. Entries between the maps of all axes are fixed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from models.axes import Axis, AxisKind
from models.cut import FIXED_PREFIX
from models.dims import Dim
from models.zoo.growth import Dimensions, Place
from models.zoo.permuting import Dims


@dataclass(frozen=True, order=True)
class Block:
    """A map of an axis in a dimension: `inner` consecutive entries for each place of a group."""

    start: int
    inner: int
    axis: str
    length: int

    @property
    def end(self) -> int:
        """Return the first entry after it."""
        return self.start + self.length


EntryOrder = dict[Place, list[Block]]
"""The maps of one axis in all its dimensions."""


def uniform_order(
    dimensions: Dimensions, axis: Axis, inner: int | None = None
) -> EntryOrder | None:
    """Lay the entries of an axis in the same order everywhere, in blocks.

    Args:
        dimensions: what the axis moves.
        axis: axis whose entries are meant.
        inner: consecutive entries of each place, a divisor of what it has anywhere; all of a unit's
            if omitted.

    Returns:
        The order, or None if entries of other axes share a dimension with it, as those could begin
        anywhere.
    """
    order: EntryOrder = {}
    for place in dimensions.places_of(axis):
        blocks = fill_dimension(dimensions, axis, place, inner)
        if blocks is None:
            return None
        order[place] = blocks
    return order


def fill_dimension(
    dimensions: Dimensions, axis: Axis, place: Place, inner: int | None
) -> list[Block] | None:
    """Lay blocks of an axis in its own dimension; return None if it shares the dimension."""
    growth = dimensions.growth[place]
    entries = growth[axis.name]
    size = dimensions.size(place)
    # No other axis may have entries in the dimension, and none may be fixed.
    if len(growth) > 1 or entries * axis.group_size != size:
        return None
    if inner is None:
        # The growth is that of one more unit in each group. Each of these units has its share of
        # it, unless the groups have their entries in common.
        inner = entries if entries % axis.groups else entries // axis.groups
    length = inner * axis.group_size
    return [Block(start, inner, axis.name, length) for start in range(0, size, length)]


def join_orders(
    dimensions: Dimensions, orders: Sequence[EntryOrder]
) -> dict[str, list[Dim | None]]:
    """Join the blocks of some axes to the dimensions of each parameter.

    A dimension is None if an axis moves it but has no blocks there, or if blocks overlap.
    """
    dims: dict[str, list[Dim | None]] = {}
    for name, shape in dimensions.shapes.items():
        dims[name] = []
        for position, size in enumerate(shape):
            blocks: list[Block] = []
            for order in orders:
                blocks += order.get((name, position), [])
            if blocks or (name, position) not in dimensions.growth:
                dims[name].append(_join_blocks(dimensions.axes, blocks, size))
            else:
                dims[name].append(None)
    return dims


def _join_blocks(axes: Mapping[str, Axis], blocks: Sequence[Block], size: int) -> Dim | None:
    """Return the dimension of blocks and fixed entries between them; None if blocks overlap."""
    segments: list[Dim] = []
    end = 0
    for block in sorted(blocks):
        if block.start < end:
            return None
        if block.start > end:
            segments.append(_fixed_segment(block.start - end))
        end = block.end
        segment = Dim(block.axis, block.inner, shared=axes[block.axis].groups > 1)
        # Equal maps of one axis that follow one another are one segment.
        if segments and segments[-1] == replace(segment, outer=segments[-1].outer):
            segments[-1] = replace(segment, outer=segments[-1].outer + 1)
        else:
            segments.append(segment)
    if size < end:
        return None
    if size > end:
        segments.append(_fixed_segment(size - end))
    for position, segment in enumerate(segments):
        # Blocks that are the groups of an axis, one after another, are the axis.
        if segment.shared and segment.outer == axes[segment.axis].groups:
            segments[position] = Dim(segment.axis, segment.inner)
    return replace(segments[0], more=tuple(segments[1:]))


def _fixed_segment(size: int) -> Dim:
    """Return entries that belong to no axis of the builder: an axis that is named by its size."""
    return Dim(f"{FIXED_PREFIX}{size}")


def with_fixed_axes(axes: Mapping[str, Axis], dims: Dims) -> dict[str, Axis]:
    """Add the axes of entries that belong to no axis which a builder asked for."""
    every = dict(axes)
    for row in dims.values():
        for dim in row:
            for segment in () if dim is None else dim.segments:
                if segment.axis not in every:
                    size = int(segment.axis.removeprefix(FIXED_PREFIX))
                    every[segment.axis] = Axis(segment.axis, size, AxisKind.FIXED)
    return every
