"""Arranging: reads off in which order the entries of an axis lie in a dimension, however they got
there.

All entries of the dimensions in question are made alike, so that they stay as they are when the
units of the axis change places in the parameters that are clear. The model then computes the same,
and the gradients of the dimensions in question have changed places exactly as the units lie in
them. So one look shows where each map of the axis begins, and how many entries each unit has in it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.axes import Axis, AxisKind
from models.cut import FIXED_PREFIX
from models.dims import Dim
from models.zoo.exchange import Dims, Subject, exchanged, turned
from models.zoo.probing import Growth, Place, Shapes

_COLUMNS = 8
_ALIKE, _MOVED = 3e-5, 1e-3  # of the largest gradient

Floats = NDArray[np.float32]


@dataclass(frozen=True, order=True)
class Block:
    """A map of an axis in a dimension: `inner` consecutive entries for each place of a group."""

    start: int
    inner: int
    axis: str
    length: int


Arranged = dict[Place, list[Block]]
"""The maps of one axis in every dimension that it moves."""


def arranged(
    shapes: Shapes, axis: Axis, growth: Growth, inner: int | None = None
) -> Arranged | None:
    """Arrange an axis in the same order everywhere, in blocks.

    None if other entries share a dimension with it.

    Each place has `inner` consecutive entries, a divisor of what it has anywhere; by default all of
    a unit's. Other entries could begin anywhere.
    """
    found: Arranged = {}
    for (name, position), moved in growth.items():
        if axis.name not in moved:
            continue
        found_here = _filled(axis, shapes[name][position], moved, inner)
        if found_here is None:
            return None
        found[name, position] = found_here
    return found


def _filled(
    axis: Axis, size: int, moved: Mapping[str, int], inner: int | None
) -> list[Block] | None:
    """Blocks of an axis that has a dimension for itself."""
    entries = moved[axis.name]
    if len(moved) > 1 or entries * axis.group_size != size:
        return None
    if inner is None:
        inner = entries if entries % axis.groups else entries // axis.groups
    length = inner * axis.group_size
    return [Block(start, inner, axis.name, length) for start in range(0, size, length)]


def read(
    subject: Subject,
    shapes: Shapes,
    axes: Mapping[str, Axis],
    axis: Axis,
    growth: Growth,
    styles: Sequence[int],
) -> Iterator[Arranged]:
    """Orders of an axis read off the model, the likely one first, where the growth says which
    dimensions the axes move.

    The styles are numbers of consecutive entries to suppose where the gradients show no order.
    """
    places = [place for place, moved in growth.items() if axis.name in moved]
    whole = {place: _filled(axis, shapes[place[0]][place[1]], growth[place], 1) for place in places}
    clear = {
        place: row for place, row in whole.items() if row is not None and len(row) == axis.groups
    }
    anchors: list[Arranged] = [clear]
    if not clear:
        # Its units are alone in no dimension, so the order in one of them is a matter of choice.
        first = next((place for place, row in whole.items() if row is not None), None)
        filled = (
            [_filled(axis, shapes[first[0]][first[1]], growth[first], style) for style in styles]
            if first
            else []
        )
        anchors = [{first: row} for row in filled if first and row]
    for anchor in anchors:
        found = anchor
        shown = anchor
        while shown and len(found) < len(
            places
        ):  # what is known tells more: behind gates their states, say
            shown = _seen(subject, shapes, axes, axis, growth, found)
            found = {**found, **shown}
        alike: dict[tuple[Any, ...], list[Block]] = {
            tuple(growth[place].items()): row for place, row in found.items()
        }
        alike |= {
            _beside(place, growth): row for place, row in found.items()
        }  # a bias, say, of keys, has no gradient
        for style in styles:
            rest = {
                place: alike.get(_beside(place, growth))
                or alike.get(tuple(growth[place].items()))
                or _filled(axis, shapes[place[0]][place[1]], growth[place], style)
                for place in places
                if place not in found
            }
            if None not in rest.values():
                yield found | {place: row for place, row in rest.items() if row is not None}
            if not rest:
                break


def _beside(place: Place, growth: Growth) -> tuple[Any, ...]:
    """What a dimension shares with those of the same layer that lie as it does."""
    return place[0].rpartition(".")[0], place[1], *growth[place].items()


def _seen(
    subject: Subject,
    shapes: Shapes,
    axes: Mapping[str, Axis],
    axis: Axis,
    growth: Growth,
    clear: Arranged,
) -> Arranged:
    """The blocks of an axis in all dimensions where the gradients show them."""
    open_ = [place for place, moved in growth.items() if axis.name in moved and place not in clear]
    state = dict(subject.state)
    for name, position in open_:
        state[name] = state[name].index_select(
            position, torch.zeros(state[name].shape[position], dtype=torch.int64)
        )
    dims = dims_of(shapes, axes, growth, [clear])
    units = turned(axis, 0)
    whole = whole_axes(axes, dims)
    before = subject.run(state).gradients
    moved = subject.run(exchanged(state, dims, whole, {axis.name: units})).gradients
    after = exchanged(moved, dims, whole, {axis.name: units}, back=True)
    found: Arranged = {}
    for name, position in open_:
        others = [at for other, at in open_ if other == name and at != position]
        columns = [_columns(value[name], position, others) for value in (before, after)]
        scale = max(float(np.abs(columns[0]).max()), 1e-30)
        row = _blocks(
            columns[0] / scale,
            columns[1] / scale,
            axis,
            units[: axis.group_size],
            growth[name, position][axis.name],
        )
        if row is not None:
            found[name, position] = row
    return found


def _columns(gradient: Tensor, position: int, others: list[int]) -> Floats:
    """A few numbers for each entry of a dimension, that tell it from others."""
    if others:
        gradient = gradient.sum(others, keepdim=True)
    rows = gradient.movedim(position, 0).flatten(1) if gradient.dim() > 1 else gradient[:, None]
    if rows.shape[1] > _COLUMNS:
        rows = rows @ torch.randn(
            (rows.shape[1], _COLUMNS), generator=torch.Generator().manual_seed(0)
        )
    return rows.numpy()


def _blocks(
    before: Floats, after: Floats, axis: Axis, places: NDArray[np.int64], entries: int
) -> list[Block] | None:
    """Walk along a dimension and take every map of the axis that has moved as its units did."""
    found: list[Block] = []
    start = 0
    left = entries
    while left and start < len(before):
        inner = next(_inner(before, after, start, places, left), 0)
        if inner:
            found.append(Block(start, inner, axis.name, inner * axis.group_size))
            left -= inner
        start += inner * axis.group_size or 1
    return None if left else found


def _inner(
    before: Floats, after: Floats, start: int, places: NDArray[np.int64], most: int
) -> Iterator[int]:
    """Numbers of entries for each place with which a map could begin here."""
    most = min(most, (len(before) - start) // len(places))
    counts = np.arange(1, most + 1)
    likely = counts[
        np.abs(before[start + places[0] * counts] - after[start]).max(1, initial=0) < _ALIKE
    ]
    for inner in likely.tolist():
        moved = start + (places[:, None] * inner + np.arange(inner)).reshape(-1)
        piece = slice(start, start + len(moved))
        if (
            np.abs(before[moved] - after[piece]).max() < _ALIKE
            and np.abs(before[moved] - before[piece]).max() > _MOVED
        ):
            yield inner


def dims_of(
    shapes: Shapes, axes: Mapping[str, Axis], growth: Growth, orders: Sequence[Arranged]
) -> dict[str, list[Dim | None]]:
    """Join the blocks of some axes to the dimensions of each parameter.

    It is None for one that an axis moves but that has no blocks, or has them across one another.
    """
    found: dict[str, list[Dim | None]] = {}
    for name, shape in shapes.items():
        found[name] = []
        for position, size in enumerate(shape):
            blocks = [block for order in orders for block in order.get((name, position), ())]
            known = bool(blocks) or (name, position) not in growth
            found[name].append(_joined(axes, blocks, size) if known else None)
    return found


def whole_axes(axes: Mapping[str, Axis], dims: Dims) -> dict[str, Axis]:
    """Add the axes of entries that belong to none which a builder asked for."""
    found = dict(axes)
    for part in (
        part for row in dims.values() for dim in row if dim is not None for part in dim.segments
    ):
        if part.axis not in found:
            found[part.axis] = Axis(
                part.axis, int(part.axis.removeprefix(FIXED_PREFIX)), AxisKind.FIXED
            )
    return found


def _joined(axes: Mapping[str, Axis], blocks: Sequence[Block], size: int) -> Dim | None:
    """The dimension that some blocks make, and fixed entries between them.

    None if they lie across one another.
    """
    parts: list[Dim] = []
    end = 0
    for block in [*sorted(blocks), Block(size, 1, "", 0)]:
        if block.start < end:
            return None
        if block.start > end:
            parts.append(Dim(f"{FIXED_PREFIX}{block.start - end}"))
        end = block.start + block.length
        if not block.axis:
            continue
        part = Dim(block.axis, block.inner, shared=axes[block.axis].groups > 1)
        if parts and parts[-1] == replace(part, outer=parts[-1].outer):
            parts[-1] = replace(part, outer=parts[-1].outer + 1)
        else:
            parts.append(part)
    # Blocks that are the groups of an axis, one behind the other, are the axis.
    parts = [
        Dim(part.axis, part.inner) if part.shared and part.outer == axes[part.axis].groups else part
        for part in parts
    ]
    return replace(parts[0], more=tuple(parts[1:]))
