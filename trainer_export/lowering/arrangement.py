"""Writes values in a given axis order and shape, with few transposes and reshapes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils._sympy.functions import FloorDiv

from fleet_protocol.errors import ExportError
from trainer_export.graph import GraphBuilder
from trainer_export.lowering.values import (
    Dim,
    Shape,
    Value,
    dim_of,
    hint,
    is_fixed,
    numpy_dtype,
    reorder,
)


@dataclass(frozen=True)
class StoredValue:
    """An ONNX value and its sizes in physical order."""

    name: str
    shape: Shape


class Arranger:
    """Writes orders of axes and shapes into a graph.

    Args:
        graph: the graph to write to.
        batch_source: a graph input whose first dimension is the batch.
        keeps_planes: whether feature maps in planes stay in planes if that costs nothing; true if
            depthwise convolutions produce them.
        keeps_maps: whether views of feature maps keep the order in which these lie; true if
            convolutions produce them.
        free_order: whether additions may have any order; otherwise a graph keeps its bits.
    """

    def __init__(
        self,
        graph: GraphBuilder,
        batch_source: str,
        *,
        keeps_planes: bool = False,
        keeps_maps: bool = False,
        free_order: bool = False,
    ) -> None:
        self.graph = graph
        self.batch_source = batch_source
        self.keeps_planes = keeps_planes
        self.keeps_maps = keeps_maps
        self.free_order = free_order
        # The methods of the graph that rules use most.
        self.node = graph.node
        self.nodes = graph.nodes
        self.ints = graph.ints
        self.constant = graph.constant
        # The original value of each reshaped value.
        self._bases: dict[str, StoredValue] = {}

    def value(
        self,
        name: str,
        shape: Sequence[Dim],
        dtype: torch.dtype = torch.float32,
        order: Sequence[int] | None = None,
    ) -> Value:
        """Return a complete value; ``shape`` is logical, ``order`` defaults to plain."""
        sizes = tuple(shape)
        return Value(
            name,
            sizes,
            dtype,
            sizes,
            tuple(order or identity(len(sizes))),
        )

    def scalar(self, number: complex, dtype: torch.dtype) -> Value:
        """Return a constant of rank 0."""
        return self.value(
            self.constant(np.array(number, numpy_dtype(dtype))),
            (),
            dtype,
        )

    def full(self, value: Value) -> Value:
        """Return the value with its pending broadcast done."""
        if value.stored == value.shape:
            return value
        target = reorder(value.shape, value.order)
        # Expand broadcasts in both directions, so a size that stays may be 1: no shape arithmetic
        # at run time.
        changed_sizes = []
        for size, stored in zip(target, value.physical, strict=True):
            changed_sizes.append(1 if size == stored else size)
        changed = tuple(changed_sizes)
        name = self.node("Expand", value.name, self.shape_tensor(changed))
        return replace(value, name=name, stored=value.shape)

    def arranged(self, value: Value, order: Sequence[int]) -> str:
        """Return the name of the complete value in an axis order."""
        return self._arranged_stored(self.full(value), tuple(order))

    def in_logical_order(self, value: Value) -> str:
        """Return the name of the complete value in logical order."""
        return self.arranged(value, identity(value.rank))

    def _arranged_stored(self, value: Value, order: tuple[int, ...]) -> str:
        """Return the name of the value in an axis order, with its broadcast still pending."""
        if value.order == order:
            return value.name
        # Only axes of size 1 move, so the bytes stay where they are.
        if value.lies(order):
            return self.reshaped(value.name, value.physical, reorder(value.stored, order))
        perm = [value.order.index(axis) for axis in order]
        return self._transposed(value.name, value.physical, perm)

    def _transposed(self, name: str, physical: Shape, perm: list[int]) -> str:
        """Transpose, and move neighbouring axes together as one.

        The runtime is ten times slower if it moves them separately.
        """
        # One transpose cannot be joined further.
        runs = _runs(perm)
        if len(runs) == len(perm):
            return self.node("Transpose", name, perm=perm)
        # Runs in the order in which they lie now.
        source = sorted(runs)
        joined = tuple(math.prod(physical[axis] for axis in run) for run in source)
        order = [source.index(run) for run in runs]
        flat = self.reshaped(name, physical, joined)
        moved = self.node("Transpose", flat, perm=order)
        shape = reorder(joined, order)
        return self.reshaped(moved, shape, reorder(physical, perm))

    def reshaped(self, name: str, physical: Shape, target: Shape) -> str:
        """Reshape an ONNX value, starting from its original; equal sizes need no node."""
        if tuple(physical) == tuple(target):
            return name
        # From the original value, so that a chain of reshapes becomes one.
        base = self._base(name, physical)
        if base.shape == tuple(target):
            return base.name
        sizes = self._reshape_target(base.shape, tuple(target))
        result = self.node("Reshape", base.name, sizes)
        # The base of a reshaped value is never itself a reshaped value.
        self._bases[result] = base
        return result

    def unfolded(self, name: str, physical: Shape) -> tuple[str, Shape]:
        """Return the rows before a reshape of only the leading dimensions.

        Otherwise return the value itself.
        """
        base = self._base(name, physical)
        # The rows stayed whole, so an operation on the last axis may use the original.
        if base.shape and physical and base.shape[-1] == physical[-1]:
            return base.name, base.shape
        return name, tuple(physical)

    def _base(self, name: str, physical: Shape) -> StoredValue:
        return self._bases.get(name, StoredValue(name, tuple(physical)))

    def _reshape_target(self, physical: Shape, target: Shape) -> str:
        """Return the sizes of a Reshape, constant if at most one of them must be computed.

        -1 leaves one size to the runtime, 0 copies the size at the same place.
        """
        dynamic = []
        for i, size in enumerate(target):
            if not isinstance(size, int):
                dynamic.append(i)
        copied: list[int] = []
        # One dynamic size is -1; only further ones have to be copied from the input.
        if len(dynamic) > 1:
            for i in dynamic:
                if i < len(physical) and physical[i] == target[i]:
                    copied.append(i)
        if len(dynamic) - len(copied) > 1:
            return self.shape_tensor(target)
        sizes = []
        for size in target:
            sizes.append(size if isinstance(size, int) else -1)
        for i in copied:
            sizes[i] = 0
        return self.ints(*sizes)

    def shape_tensor(self, shape: Shape) -> str:
        """Return the sizes as an int64 vector, computed at run time if the batch is in them."""
        if is_fixed(shape):
            return self.ints(*shape)
        return self.node(
            "Concat",
            *(self.size(size) for size in shape),
            axis=0,
        )

    def size(self, size: Dim) -> str:
        """Return one size as an int64 vector of length 1."""
        # A symbolic size may be a plain number by now.
        if isinstance(size, int) or size.is_Integer:
            return self.ints(int(size))
        # The batch is the only symbol.
        if size.is_Symbol:
            return self.node("Shape", self.batch_source, start=0, end=1)
        if size.is_Pow and size.exp.is_Integer and size.exp > 0:
            return self._fold("Mul", [size.base] * int(size.exp))
        if size.is_Mul:
            return self._fold("Mul", list(size.args))
        if size.is_Add:
            return self._fold("Add", list(size.args))
        if isinstance(size, FloorDiv):
            return self._fold("Div", list(size.args))
        raise ExportError(
            f"a tensor size depends on the batch size as {size}; only sums, products and integer"
            " divisions of it can be exported"
        )

    def _fold(self, op_type: str, arguments: list[Any]) -> str:
        """Write an operator of several sizes as a chain of binary operators, from the first on."""
        result = self.size(dim_of(arguments[0]))
        for argument in arguments[1:]:
            result = self.node(op_type, result, self.size(dim_of(argument)))
        return result

    def view(self, value: Value, shape: Shape) -> Value:
        """Return the value with the same elements, in logical order, in another shape."""
        if value.shape == shape:
            return value
        # Elements keep their logical order, so a pending broadcast must be done first.
        value = self.full(value)
        swapped = self._view_of_swapped(value, shape)
        if swapped is not None:
            return swapped
        as_it_lies = self._view_as_it_lies(value, shape)
        if as_it_lies is not None:
            return as_it_lies
        return self.value(
            self.reshaped(self.in_logical_order(value), value.shape, shape),
            shape,
            value.dtype,
        )

    def _view_of_swapped(self, value: Value, shape: Shape) -> Value | None:
        """Return a view that keeps a pending swap of the last two axes (attention's keys).

        Returns:
            None if the view does more than join or split leading axes, or if no swap is pending.
        """
        rank = value.rank
        size = len(shape)
        # A swap of the last two axes needs an axis before them, and sizes other than 1 tell them
        # apart.
        if rank < 3 or size < 3 or value.shape[-2:] != shape[-2:] or 1 in shape[-2:]:
            return None
        # The last axis lies after the one before it: no swap is pending.
        if value.order.index(rank - 1) > value.order.index(rank - 2):
            return None
        swap = _swapped(rank)
        physical = reorder(value.shape, swap)
        target = (*shape[:-2], shape[-1], shape[-2])
        name = self.reshaped(self.arranged(value, swap), physical, target)
        # The swap stays pending: MatMul can take it without a transpose.
        return self.value(name, shape, value.dtype, _swapped(size))

    def _view_as_it_lies(self, value: Value, shape: Shape) -> Value | None:
        """Return a view of a map that keeps its order; the places of a map are often tokens.

        Returns:
            None if the view joins axes that do not lie side by side, or if nothing is pending.
        """
        if value.is_plain or not self.keeps_maps:
            return None
        runs = _matching_runs(value.shape, shape)
        if runs is None:
            return None
        order: list[int] = []
        place = 0
        while place < value.rank:
            old, new = runs[value.order[place]]
            # An axis in the middle of a run lies apart from the first one.
            if value.order[place : place + len(old)] != old:
                return None
            order += new
            place += len(old)
        name = self.reshaped(value.name, value.physical, reorder(shape, order))
        return self.value(name, shape, value.dtype, order)


def _matching_runs(old: Shape, new: Shape) -> list[tuple[tuple[int, ...], tuple[int, ...]]] | None:
    """Return for every axis of a shape its run, and the run of another shape of the same elements.

    A run is the fewest neighbouring axes that hold as many elements as a run of the other shape.

    Returns:
        None if sizes of 1 at the end of a shape belong to no run.
    """
    runs: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    new_start = 0
    while len(runs) < len(old) and new_start < len(new):
        start = len(runs)
        end = start + 1
        new_end = new_start + 1
        while math.prod(old[start:end]) != math.prod(new[new_start:new_end]):
            is_shorter = hint(old[start:end]) < hint(new[new_start:new_end])
            if is_shorter and end < len(old):
                end += 1
            elif not is_shorter and new_end < len(new):
                new_end += 1
            else:
                return None
        run = (tuple(range(start, end)), tuple(range(new_start, new_end)))
        runs += [run] * (end - start)
        new_start = new_end
    return runs if len(runs) == len(old) and new_start == len(new) else None


def _runs(perm: Sequence[int]) -> list[list[int]]:
    """Return the axes of a permutation, with axes that stay neighbours in one list."""
    runs: list[list[int]] = []
    for axis in perm:
        if runs and runs[-1][-1] + 1 == axis:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    return runs


def identity(rank: int) -> tuple[int, ...]:
    """Return the logical order of axes."""
    return tuple(range(rank))


def _swapped(rank: int) -> tuple[int, ...]:
    """Return the order of axes with the last two exchanged."""
    return (*range(rank - 2), rank - 1, rank - 2)
