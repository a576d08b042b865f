"""Reads the order of an axis' entries in a dimension from the gradients of a model.

An anchor is a dimension with a known order, because each unit has one entry there. In all other
dimensions of the axis, the entries are set equal, so that permuting the units in the anchors does
not change them. The model then gives the same results, and the gradients of the other dimensions
are permuted by the order of their units. So one pair of runs shows where each map of the axis
begins and how many entries each unit has in it. Each order that was read becomes an anchor in turn.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.axes import Axis
from models.zoo.entry_order import Block, EntryOrder, fill_dimension, join_orders, with_fixed_axes
from models.zoo.growth import Dimensions, Place
from models.zoo.permuting import Units, derangement_of, permute
from models.zoo.randomized_model import RandomizedModel

_COLUMNS = 8
# Shares of the largest gradient: entries that differ by less are the same, and one that changed
# places differs by more. Rounding is two orders below the first.
_SAME = 3e-5
_MOVED = 1e-3

Floats = NDArray[Any]

Signature = tuple[Any, ...]
"""The common properties of dimensions that probably have the same order."""


def read_orders(
    model: RandomizedModel, dimensions: Dimensions, axis: Axis, styles: Sequence[int]
) -> Iterator[EntryOrder]:
    """Yield orders of the entries of an axis, the likely ones first.

    Args:
        model: computes the gradients.
        dimensions: what the axis moves.
        axis: axis whose entries are looked for.
        styles: numbers of consecutive entries to suppose where the gradients show no order.
    """
    reader = _Reader(model, dimensions, axis)
    for anchor in reader.anchors(styles):
        order = reader.read_from(anchor)
        for style in styles:
            supposed = reader.suppose_remaining(order, style)
            if supposed is not None:
                yield order | supposed
            if supposed == {}:
                break


@dataclass(frozen=True)
class _Reader:
    """Reads the order of one axis."""

    model: RandomizedModel
    dimensions: Dimensions
    axis: Axis

    def anchors(self, styles: Sequence[int]) -> list[EntryOrder]:
        """Return initial dimensions: all with a known order, or else guesses for one."""
        alone: EntryOrder = {}
        for place in self.dimensions.places_of(self.axis):
            filled = fill_dimension(self.dimensions, self.axis, place, 1)
            if filled is not None:
                alone[place] = filled
        groups = self.axis.groups
        clear: EntryOrder = {}
        for place, blocks in alone.items():
            if len(blocks) == groups:
                clear[place] = blocks
        if clear:
            return [clear]
        if not alone:
            return []
        # No dimension has one entry for each unit, so the order in one of them is a choice.
        first = next(iter(alone))
        guesses: list[EntryOrder] = []
        for style in styles:
            guess = fill_dimension(self.dimensions, self.axis, first, style)
            if guess:
                guesses.append({first: guess})
        return guesses

    def read_from(self, anchor: EntryOrder) -> EntryOrder:
        """Read all orders that follow from an anchor.

        Each order reveals more: for instance, gates reveal the states that they gate.
        """
        order = anchor
        newest = anchor
        wanted = len(self.dimensions.places_of(self.axis))
        while newest and len(order) < wanted:
            newest = self._read_once(order)
            order = {**order, **newest}
        return order

    def suppose_remaining(self, order: EntryOrder, style: int) -> EntryOrder | None:
        """Suppose blocks in the dimensions that the gradients did not show.

        A bias of keys, for instance, has no gradient. Its order is that of a dimension beside it,
        else that of one with the same growth, else the style.
        """
        growth = self.dimensions.growth
        read: dict[Signature, list[Block]] = {}
        for place, blocks in order.items():
            read[tuple(growth[place].items())] = blocks
        for place, blocks in order.items():
            read[self._signature_beside(place)] = blocks
        supposed: EntryOrder = {}
        for place in self.dimensions.places_of(self.axis):
            if place in order:
                continue
            blocks_here = (
                read.get(self._signature_beside(place))
                or read.get(tuple(growth[place].items()))
                or fill_dimension(self.dimensions, self.axis, place, style)
            )
            if blocks_here is None:
                return None
            supposed[place] = blocks_here
        return supposed

    def _signature_beside(self, place: Place) -> Signature:
        """Return what a dimension shares with those of its layer at the same position."""
        name, position = place
        return name.rpartition(".")[0], position, *self.dimensions.growth[place].items()

    def _read_once(self, clear: EntryOrder) -> EntryOrder:
        """Read the blocks in all dimensions whose gradients move as the clear dimensions do."""
        unclear: list[Place] = []
        for place in self.dimensions.places_of(self.axis):
            if place not in clear:
                unclear.append(place)
        # All entries along an unclear dimension get the values of its first entry, so that the
        # model computes the same whatever their order is.
        parameters = dict(self.model.parameters)
        for name, position in unclear:
            first_entries = torch.zeros(parameters[name].shape[position], dtype=torch.int64)
            parameters[name] = parameters[name].index_select(position, first_entries)
        dims = join_orders(self.dimensions, [clear])
        axes = with_fixed_axes(self.dimensions.axes, dims)
        units = derangement_of(self.axis, 0)
        moves = {self.axis.name: units}
        before = self.model.run(parameters).gradients
        moved = self.model.run(permute(parameters, dims, axes, moves)).gradients
        after = permute(moved, dims, axes, moves, back=True)
        order: EntryOrder = {}
        for place in unclear:
            columns = _Columns.of_gradients(before, after, place, unclear)
            blocks = self._find_blocks(columns, units[: self.axis.group_size], place)
            if blocks is not None:
                order[place] = blocks
        return order

    def _find_blocks(self, columns: "_Columns", units: Units, place: Place) -> list[Block] | None:
        """Walk along a dimension and collect every map that moved as the units did."""
        blocks: list[Block] = []
        start = 0
        missing = self.dimensions.growth[place][self.axis.name]
        if not columns.moved_before[-1]:
            return None
        while missing and start < len(columns.before):
            inner = next(columns.block_sizes(start, units, missing), 0)
            length = inner * self.axis.group_size
            if inner:
                blocks.append(Block(start, inner, self.axis.name, length))
                missing -= inner
            start += length or 1
        return None if missing else blocks


@dataclass(frozen=True)
class _Columns:
    """A few numbers for each entry of a dimension, which tell it from other entries."""

    before: Floats  # [entries, columns], as a share of the largest
    after: Floats  # the same when units changed places
    moved_before: NDArray[np.int64]  # [entries + 1]: entries before each one that changed

    @classmethod
    def of_gradients(
        cls,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        place: Place,
        unclear: Sequence[Place],
    ) -> "_Columns":
        """Summarise the gradients of a parameter for each entry of one dimension.

        Sums over its other unclear dimensions do not depend on the order there.
        """
        name, position = place
        summed: list[int] = []
        for unclear_name, unclear_position in unclear:
            if unclear_name == name and unclear_position != position:
                summed.append(unclear_position)
        first = _summarise(before[name], position, summed)
        second = _summarise(after[name], position, summed)
        scale = max(float(np.abs(first).max()), 1e-30)
        first = first / scale
        second = second / scale
        # A map that follows the units has an entry that changed by this, so others are ruled out.
        moved = np.abs(first - second).max(1) > _MOVED - _SAME
        return cls(first, second, np.concatenate([[0], np.cumsum(moved)]))

    def block_sizes(self, start: int, units: Units, most: int) -> Iterator[int]:
        """Yield numbers of entries for each place with which a map could begin at an entry."""
        before = self.before
        most = min(most, (len(before) - start) // len(units))
        counts = np.arange(1, most + 1)
        ends = self.moved_before[start + len(units) * counts]
        counts = counts[ends > self.moved_before[start]]
        # The first entry rules out most of the numbers.
        distances = np.abs(before[start + units[0] * counts] - self.after[start])
        likely = counts[distances.max(1, initial=0) < _SAME]
        for inner in likely.tolist():
            moved = start + (units[:, None] * inner + np.arange(inner)).reshape(-1)
            block = slice(start, start + len(moved))
            follows = np.abs(before[moved] - self.after[block]).max() < _SAME
            # Equal entries would follow any permutation.
            if follows and np.abs(before[moved] - before[block]).max() > _MOVED:
                yield inner


def _summarise(gradient: Tensor, position: int, summed: list[int]) -> Floats:
    """Return at most `_COLUMNS` numbers for each entry of one dimension of a gradient."""
    if summed:
        gradient = gradient.sum(summed, keepdim=True)
    rows = gradient.movedim(position, 0).flatten(1) if gradient.dim() > 1 else gradient[:, None]
    if rows.shape[1] > _COLUMNS:
        generator = torch.Generator().manual_seed(0)
        rows = rows @ torch.randn((rows.shape[1], _COLUMNS), generator=generator).to(rows.dtype)
    return rows.numpy()
