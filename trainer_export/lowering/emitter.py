"""Writes values into a graph: conversions between orders, broadcasts, element-wise operators,
reductions, reshapes.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
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
    numpy_dtype,
    onnx_dtype,
)


class Emitter:
    """Writes values into a graph: conversions between orders, broadcasts, operators, reductions,
    reshapes.

    `batch_source` is a graph input whose first dimension is the batch.
    """

    def __init__(self, graph: GraphBuilder, batch_source: str) -> None:
        self.graph = graph
        self.batch_source = batch_source
        self._bases: dict[
            str, tuple[str, Shape]
        ] = {}  # reshaped value -> what it was before any reshape

    # -- making values
    # ---------------------------------------------------------------------------------------------

    def value(
        self,
        name: str,
        shape: Sequence[Dim],
        dtype: torch.dtype = torch.float32,
        order: Sequence[int] | None = None,
    ) -> Value:
        """A complete value; ``shape`` is logical, ``order`` defaults to plain."""
        return Value(
            name,
            tuple(shape),
            dtype,
            tuple(shape),
            tuple(order or _identity(len(shape))),
        )

    def scalar(self, number: complex, dtype: torch.dtype) -> Value:
        """A constant of rank 0."""
        return self.value(self.graph.constant(np.array(number, numpy_dtype(dtype))), (), dtype)

    def full(self, value: Value) -> Value:
        """The value with its pending broadcast done."""
        if value.stored == value.shape:
            return value
        target = tuple(value.shape[i] for i in value.order)
        # Expand broadcasts both ways, so a size that stays may be given as 1: no shape arithmetic
        # at run time.
        wanted = tuple(1 if a == b else a for a, b in zip(target, value.physical, strict=True))
        name = self.graph.node("Expand", value.name, self.shape_tensor(wanted))
        return replace(value, name=name, stored=value.shape)

    def arranged(self, value: Value, order: Sequence[int]) -> str:
        """Name of the complete value lying in the given order of axes."""
        return self._arranged_stored(self.full(value), tuple(order))

    def plain(self, value: Value) -> str:
        """Name of the complete value in logical order."""
        return self.arranged(value, _identity(value.rank))

    def _arranged_stored(self, value: Value, order: tuple[int, ...]) -> str:
        if value.order == order:
            return value.name
        if value.lies(order):
            return self.reshaped(value.name, value.physical, tuple(value.stored[i] for i in order))
        return self._transposed(
            value.name, value.physical, [value.order.index(axis) for axis in order]
        )

    def _transposed(self, name: str, physical: Shape, perm: list[int]) -> str:
        """A Transpose that moves neighbours together as one axis: the runtime is ten times slower
        with each apart.
        """
        runs: list[list[int]] = []
        for axis in perm:
            if runs and runs[-1][-1] + 1 == axis:
                runs[-1].append(axis)
            else:
                runs.append([axis])
        if len(runs) == len(perm):
            return self.graph.node("Transpose", name, perm=perm)
        source = sorted(runs)
        joined = tuple(math.prod(physical[axis] for axis in run) for run in source)
        moved = self.graph.node(
            "Transpose",
            self.reshaped(name, physical, joined),
            perm=[source.index(run) for run in runs],
        )
        shape = tuple(joined[source.index(run)] for run in runs)
        return self.reshaped(moved, shape, tuple(physical[axis] for axis in perm))

    # -- shapes
    # ----------------------------------------------------------------------------------------------------

    def reshaped(self, name: str, physical: Shape, target: Shape) -> str:
        """A Reshape of an ONNX value: of what it was before earlier reshapes, and none if the sizes
        agree.
        """
        if tuple(physical) == tuple(target):
            return name
        base, shape = self._bases.get(name, (name, tuple(physical)))
        if shape == tuple(target):
            return base
        result = self.graph.node("Reshape", base, self._reshape_target(shape, tuple(target)))
        self._bases[result] = base, shape
        return result

    def unfolded(self, name: str, physical: Shape) -> tuple[str, Shape]:
        """The same rows as they lay before a reshape of the leading dimensions only, else the value
        itself.
        """
        base, shape = self._bases.get(name, (name, tuple(physical)))
        return (
            (base, shape)
            if shape and physical and shape[-1] == physical[-1]
            else (name, tuple(physical))
        )

    def _reshape_target(self, physical: Shape, target: Shape) -> str:
        dynamic = [i for i, size in enumerate(target) if not isinstance(size, int)]
        if len(dynamic) <= 1:
            return self.graph.ints(*(size if isinstance(size, int) else -1 for size in target))
        copied = [i for i in dynamic if i < len(physical) and physical[i] == target[i]]
        if len(dynamic) - len(copied) <= 1:
            return self.graph.ints(
                *(
                    0 if i in copied else s if isinstance(s, int) else -1
                    for i, s in enumerate(target)
                )
            )
        return self.shape_tensor(target)

    def shape_tensor(self, shape: Shape) -> str:
        """An int64 vector with the sizes, computed at run time where they depend on the batch."""
        if all(isinstance(size, int) for size in shape):
            return self.graph.ints(*shape)
        return self.graph.node("Concat", *(self.size(size) for size in shape), axis=0)

    def size(self, size: Dim) -> str:
        """One size as an int64 vector of length 1."""
        if isinstance(size, int) or size.is_Integer:
            return self.graph.ints(int(size))
        if size.is_Symbol:
            return self.graph.node("Shape", self.batch_source, start=0, end=1)
        if size.is_Pow and size.exp.is_Integer and size.exp > 0:
            return self._fold("Mul", [size.base] * int(size.exp))
        kinds = [
            ("Mul", size.is_Mul),
            ("Add", size.is_Add),
            ("Div", isinstance(size, FloorDiv)),
        ]
        for op_type, matches in kinds:
            if matches:
                return self._fold(op_type, list(size.args))
        raise ExportError(
            f"a tensor size depends on the batch as {size}; only sums, products and integer division can be exported"
        )

    def _fold(self, op_type: str, arguments: list[Any]) -> str:
        result = self.size(dim_of(arguments[0]))
        for argument in arguments[1:]:
            result = self.graph.node(op_type, result, self.size(dim_of(argument)))
        return result

    def size_as_float(self, size: Dim) -> Value:
        """A size as a float32 of rank 0."""
        if isinstance(size, int):
            return self.scalar(float(size), torch.float32)
        number, rest = (
            size.as_coeff_Mul()
        )  # of a layer and of the batch, whose nodes all layers then share
        scalar = self.graph.node("Squeeze", self.size(rest), self.graph.ints(0))
        value = self.value(self.graph.node("Cast", scalar, to=1), ())
        return (
            value
            if number == 1
            else self.pointwise("Mul", value, self.scalar(float(number), torch.float32))
        )

    # -- operators
    # -------------------------------------------------------------------------------------------------

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """The value in another element type."""
        if value.dtype == dtype:
            return value
        constant = self.graph.constant_value(value.name)
        if constant is not None:
            return replace(
                value,
                name=self.graph.constant(constant.astype(numpy_dtype(dtype))),
                dtype=dtype,
            )
        return replace(
            value,
            name=self.graph.node("Cast", value.name, to=onnx_dtype(dtype)),
            dtype=dtype,
        )

    def pointwise(
        self,
        op_type: str,
        *operands: Value,
        dtype: torch.dtype | None = None,
        **attributes: float,
    ) -> Value:
        """An element-wise operator with broadcasting.

        Works in the order in which the largest operand lies.

        The element type of the result is by default that of the first operand.
        """
        rank = max(v.rank for v in operands)
        shape = _broadcast([v.shape for v in operands], rank)
        stored = _broadcast([v.stored for v in operands], rank)
        candidates = [v for v in operands if v.rank == rank]
        # The largest operand keeps its order; among equals one that is not plain, because it came
        # from an operator that works in that order and its neighbours will too. Parameters and
        # their gradients are the exception: whatever order a gradient came in, parameter and state
        # are read and written plain, so it turns once.
        of_batch = any(not isinstance(size, int) for size in stored)
        order = max(candidates, key=lambda v: (hint(v.stored), v.is_plain != of_batch)).order
        names = [self._aligned(v, order, rank) for v in operands]
        result = Value("", shape, dtype or operands[0].dtype, stored, order)
        shapes = [self._aligned_shape(v, order, rank) for v in operands]
        wide = [
            self._widened(*operand, result.physical) for operand in zip(names, shapes, strict=True)
        ]
        names = [name for name, _ in wide]
        shapes = [shape for _, shape in wide]
        lifted = self._lifted(names, shapes, result.physical)
        if lifted is None:
            return replace(
                result,
                name=self.graph.nodes(op_type, *names, outputs=1, attributes=attributes)[0],
            )
        names, target = lifted
        name = self.graph.nodes(op_type, *names, outputs=1, attributes=attributes)[0]
        return replace(result, name=self.reshaped(name, target, result.physical))

    def _aligned_shape(self, value: Value, order: tuple[int, ...], rank: int) -> Shape:
        shape = (1,) * (rank - value.rank) + value.stored
        return tuple(shape[axis] for axis in order)

    def _widened(self, name: str, shape: Shape, whole: Shape) -> tuple[str, Shape]:
        """An operand for a tensor of a few channels, which lie last, repeated along the axis before
        them.

        A broadcast works on runs of what both have in one piece: on those of a row it is several
        times faster. What is repeated is no more than a quarter of the tensor.
        """
        row, count = whole[-2:] if len(whole) > 2 else (None, None)
        if (
            not isinstance(row, int)
            or shape[-2:] != (1, count)
            or not isinstance(count, int)
            or not 1 < count < _WIDE
        ):
            return name, shape
        repeated = (*shape[:-2], row, count)
        if row == 1 or 4 * hint(repeated) > hint(whole):
            return name, shape
        return self.graph.node(
            "Expand", name, self.graph.ints(*[1] * (len(shape) - 2), row, 1)
        ), repeated

    def _lifted(
        self, names: list[str], shapes: list[Shape], result: Shape
    ) -> tuple[list[str], Shape] | None:
        """Operands of an element-wise operator before a reshape that they share, so that it moves
        behind the operator.

        Chains of element-wise operators between matrix products then need no reshapes at all.
        """
        whole = [name for name, shape in zip(names, shapes, strict=True) if shape == result]
        origins = [self.unfolded(name, result)[1] for name in whole]
        target = next((origin for origin in origins if origin != result), None)
        if target is None or 2 * origins.count(target) < len(origins):
            return None
        lifted = []
        for name, shape in zip(names, shapes, strict=True):
            wanted = _lifted_shape(shape, result, target)
            if wanted is None:
                return None
            numbers = [size for size in shape if size != 1]
            lifted.append(name if not numbers else self.reshaped(name, shape, wanted))
        return lifted, target

    def _aligned(self, value: Value, order: tuple[int, ...], rank: int) -> str:
        """The stored part of an operand, lying so that it broadcasts against a tensor in ``order``."""
        if value.rank == rank:
            return self._arranged_stored(value, order)
        if order == _identity(rank):
            return self._arranged_stored(value, _identity(value.rank))
        missing = rank - value.rank
        lifted = Value(
            value.name,
            (1,) * missing + value.shape,
            value.dtype,
            (1,) * missing + value.stored,
            (*range(missing), *(i + missing for i in value.order)),
        )
        if value.stored == () or all(size == 1 for size in value.stored):
            return value.name
        flat = self.reshaped(value.name, value.physical, lifted.physical)
        return self._arranged_stored(replace(lifted, name=flat), order)

    def reduce(self, op_type: str, value: Value, axes: Sequence[int], *, keep: bool) -> Value:
        """A reduction (``ReduceSum``, ``ReduceMean``, ``ReduceMax``, ...) over logical axes."""
        value = self.full(value)
        axes = sorted({axis % value.rank for axis in axes}) if axes else list(range(value.rank))
        places = sorted(value.order.index(axis) for axis in axes)
        kept = [i for i in range(value.rank) if keep or i not in axes]
        shape = tuple(1 if i in axes else value.shape[i] for i in kept)
        order = tuple(kept.index(i) for i in value.order if i in kept)
        name = self._reduce_physical(
            op_type, value, places, tuple(shape[i] for i in order), keep=keep
        )
        return self.value(name, shape, value.dtype, order)

    def _reduce_physical(
        self,
        op_type: str,
        value: Value,
        places: list[int],
        result: Shape,
        *,
        keep: bool,
    ) -> str:
        """Reduce physical dimensions.

        Measured: over leading axes of a channels-last tensor the runtime is 5 to 20 times slower
        than when it first reduces inside each sample (in parallel over samples) and then over the
        batch.
        """
        node = self.graph.node
        ints = self.graph.ints
        if places == [value.rank - 1] and keep:
            name, shape = self.unfolded(value.name, value.physical)
            return self.reshaped(
                node(op_type, name, ints(len(shape) - 1), keepdims=1),
                (*shape[:-1], 1),
                result,
            )
        name = value.name
        shape = value.physical
        if places == [0] and value.rank == 2 and not keep and _factor(shape[0]) > 1:
            split = (-1, _factor(shape[0]), shape[1])
            name = self.reshaped(name, shape, split)
            shape = split
            places = [0, 1]
        if op_type in _ASSOCIATIVE and len(places) > 1 and places == list(range(len(shape) - 1)):
            inner = node(op_type, name, ints(*places[1:]), keepdims=int(keep))
            return node(op_type, inner, ints(0), keepdims=int(keep))
        return node(op_type, name, ints(*places), keepdims=int(keep))

    def view(self, value: Value, shape: Shape) -> Value:
        """The value with the same elements, in logical order, under another shape."""
        if value.shape == shape:
            return value
        value = self.full(value)
        swapped = self._view_of_swapped(value, shape)
        if swapped is not None:
            return swapped
        return self.value(self.reshaped(self.plain(value), value.shape, shape), shape, value.dtype)

    def _view_of_swapped(self, value: Value, shape: Shape) -> Value | None:
        """A view that only joins or splits leading axes keeps a lazy swap of the last two
        (attention's keys).
        """
        rank = value.rank
        if rank < 3 or len(shape) < 3 or value.shape[-2:] != shape[-2:] or 1 in shape[-2:]:
            return None
        if value.order.index(rank - 1) > value.order.index(rank - 2):
            return None
        swap = (*range(rank - 2), rank - 1, rank - 2)
        physical = tuple(value.shape[i] for i in swap)
        name = self.reshaped(
            self.arranged(value, swap), physical, (*shape[:-2], shape[-1], shape[-2])
        )
        size = len(shape)
        return self.value(name, shape, value.dtype, (*range(size - 2), size - 1, size - 2))


_WIDE = 256  # channels from which a broadcast along them runs at full speed
_ASSOCIATIVE = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin")


def _factor(size: Dim) -> int:
    """The number that multiplies the batch size in a size."""
    return 1 if isinstance(size, int) else int(size.as_coeff_Mul()[0])


def _lifted_shape(shape: Shape, result: Shape, target: Shape) -> Shape | None:
    """The shape of an operand of an element-wise operator once the result is reshaped to
    ``target``.
    """
    if shape == result:
        return target
    if all(size == 1 for size in shape):
        return ()
    if all(size == 1 for size in shape[:-1]) and shape[-1] == result[-1]:
        return (shape[-1],)
    return (*target[:-1], 1) if shape[-1] == 1 and shape[:-1] == result[:-1] else None


def _broadcast(shapes: Sequence[Shape], rank: int) -> Shape:
    result: list[Dim] = [1] * rank
    for shape in shapes:
        for i, size in enumerate(shape, rank - len(shape)):
            if size != 1:
                result[i] = size
    return tuple(result)


def _identity(rank: int) -> tuple[int, ...]:
    return tuple(range(rank))
