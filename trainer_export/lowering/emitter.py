"""Writes operators into a graph: casts, element-wise operators with broadcasting, reductions."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from trainer_export.lowering.arrangement import Arranger, StoredValue, identity
from trainer_export.lowering.broadcasting import (
    batch_factor,
    broadcast_shape,
    leading_order,
    lifted_shape,
)
from trainer_export.lowering.values import (
    Dim,
    Shape,
    Value,
    hint,
    is_single,
    numpy_dtype,
    onnx_dtype,
    reorder,
)

_WIDE = 256  # number of channels from which on a broadcast along them is fast
_ASSOCIATIVE = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin")


class Emitter(Arranger):
    """Writes operators on values; every lowering rule uses it."""

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """Return the value in another element type; a constant is converted immediately."""
        if value.dtype == dtype:
            return value
        # A Cast of a constant would be computed again in every step of every board.
        constant = self.graph.constant_value(value.name)
        if constant is not None:
            name = self.constant(constant.astype(numpy_dtype(dtype)))
        else:
            name = self.node("Cast", value.name, to=onnx_dtype(dtype))
        return replace(value, name=name, dtype=dtype)

    def size_as_float(self, size: Dim) -> Value:
        """Return a size as a float32 of rank 0."""
        if isinstance(size, int):
            return self.scalar(float(size), torch.float32)
        # A number of the layer times the batch size, so that all layers share the nodes.
        number, of_batch = size.as_coeff_Mul()
        scalar = self.node("Squeeze", self.size(of_batch), self.ints(0))
        value = self.value(self.node("Cast", scalar, to=1), ())
        if number == 1:
            return value
        return self.pointwise("Mul", value, self.scalar(float(number), torch.float32))

    def add(self, a: Value, b: Value) -> Value:
        """Return a sum."""
        return self.pointwise("Add", a, b)

    def sub(self, a: Value, b: Value) -> Value:
        """Return a difference."""
        return self.pointwise("Sub", a, b)

    def mul(self, a: Value, b: Value) -> Value:
        """Return a product, element by element."""
        return self.pointwise("Mul", a, b)

    def div(self, a: Value, b: Value) -> Value:
        """Return a quotient."""
        return self.pointwise("Div", a, b)

    def mean(self, value: Value, axes: Sequence[int]) -> Value:
        """Return the mean over logical axes, which stay with size 1."""
        return self.reduce("ReduceMean", value, axes, keep=True)

    def pointwise(
        self,
        op_type: str,
        *operands: Value,
        dtype: torch.dtype | None = None,
        **attributes: float,
    ) -> Value:
        """Write an element-wise operator with broadcasting.

        It uses the axis order of the largest operand.

        Args:
            op_type: operator of ONNX.
            operands: the operands in order.
            dtype: element type of the result; by default that of the first operand.
            attributes: attributes of the node.
        """
        rank = max(value.rank for value in operands)
        # The stored part may be smaller than the logical shape, because repeated values are not
        # copied.
        shape, stored = broadcast_shape(operands, rank)
        result = Value(
            "",
            shape,
            dtype or operands[0].dtype,
            stored,
            leading_order(operands, rank, stored),
        )
        physical = result.physical
        # Align all operands before widening any: names of values follow the order of their nodes.
        aligned = []
        for value in operands:
            aligned.append(self._aligned(value, result.order))
        widened = []
        for operand in aligned:
            widened.append(self._widened(operand, physical))
        names = [operand.name for operand in widened]
        target = physical
        # First the saving of whole reshapes, then that of short runs: both change the shape that is
        # worked in.
        lifted = self._lifted(widened, physical)
        if lifted is not None:
            names, target = lifted
        elif self.keeps_planes or self.free_order:
            names, target = self._shortened(widened, physical)
        (name,) = self.nodes(op_type, *names, outputs=1, attributes=attributes)
        return replace(result, name=self.reshaped(name, target, physical))

    def _aligned(self, value: Value, order: tuple[int, ...]) -> StoredValue:
        """Return the stored part of an operand, arranged to broadcast in an axis order."""
        rank = len(order)
        missing = rank - value.rank
        stored = (1,) * missing + value.stored
        shape = reorder(stored, order)
        if not missing:
            return StoredValue(self._arranged_stored(value, order), shape)
        if order == identity(rank):  # the runtime adds missing leading axes itself
            return StoredValue(self._arranged_stored(value, identity(value.rank)), shape)
        # One number broadcasts from any position.
        if is_single(value.stored):
            return StoredValue(value.name, shape)
        lifted = Value(
            value.name,
            (1,) * missing + value.shape,
            value.dtype,
            stored,
            (*range(missing), *(axis + missing for axis in value.order)),
        )
        flat = self.reshaped(value.name, value.physical, lifted.physical)
        return StoredValue(self._arranged_stored(replace(lifted, name=flat), order), shape)

    def _widened(self, operand: StoredValue, whole: Shape) -> StoredValue:
        """Return an operand with few channels in the last axis, repeated along the axis before it.

        A broadcast works on contiguous runs of both operands, and is several times faster on runs
        of a whole row. The repeated operand has at most a quarter of the tensor's size.
        """
        if len(whole) <= 2:
            return operand
        row, channels = whole[-2:]
        if not isinstance(row, int) or not isinstance(channels, int):
            return operand
        shape = operand.shape
        if shape[-2:] != (1, channels) or not 1 < channels < _WIDE:
            return operand
        repeated = (*shape[:-2], row, channels)
        if row == 1 or 4 * hint(repeated) > hint(whole):
            return operand
        repeats = self.ints(
            *[1] * (len(shape) - 2),
            row,
            1,
        )
        return StoredValue(self.node("Expand", operand.name, repeats), repeated)

    def _shortened(self, operands: list[StoredValue], result: Shape) -> tuple[list[str], Shape]:
        """Return operands and result without common trailing axes of size 1.

        The runtime broadcasts along runs that end at the last axis, and these would have one
        number.
        """
        rank = len(result)
        while rank > 1 and result[rank - 1] == 1:
            rank -= 1
        if rank == len(result) or all(operand.shape == result for operand in operands):
            return [operand.name for operand in operands], result
        names = []
        for operand in operands:
            if is_single(operand.shape):
                names.append(operand.name)
                continue
            dropped = len(result) - rank
            shape = operand.shape[: len(operand.shape) - dropped]
            names.append(self.reshaped(operand.name, operand.shape, shape))
        return names, result[:rank]

    def _lifted(self, operands: list[StoredValue], result: Shape) -> tuple[list[str], Shape] | None:
        """Return operands before a common reshape, which moves after the operator.

        Then chains of element-wise operators between matrix products need no reshapes.

        Returns:
            Names of the operands, and the shape of the result before the reshape; None if too few
            share one.
        """
        whole = []
        for operand in operands:
            if operand.shape == result:
                whole.append(operand.name)
        origins = []
        for name in whole:
            origins.append(self.unfolded(name, result)[1])
        target = next((origin for origin in origins if origin != result), None)
        # Operands of another origin would need a reshape each, so at least half must share it.
        if target is None or 2 * origins.count(target) < len(origins):
            return None
        names = []
        for operand in operands:
            shape = lifted_shape(operand.shape, result, target)
            if shape is None:
                return None
            if is_single(operand.shape):
                names.append(operand.name)
            else:
                names.append(self.reshaped(operand.name, operand.shape, shape))
        return names, target

    def reduce(self, op_type: str, value: Value, axes: Sequence[int], *, keep: bool) -> Value:
        """Write a reduction (``ReduceSum``, ``ReduceMean``, ...) over logical axes.

        Args:
            op_type: operator of ONNX.
            value: the value to reduce.
            axes: the axes; empty for all.
            keep: whether the axes stay with size 1.
        """
        value = self.full(value)
        reduced = {axis % value.rank for axis in axes} if axes else set(range(value.rank))
        # Where the axes lie in memory: the runtime reduces the physical tensor.
        places = sorted(value.order.index(axis) for axis in reduced)
        kept = []
        for axis in range(value.rank):
            if keep or axis not in reduced:
                kept.append(axis)
        kept_sizes = []
        for axis in kept:
            kept_sizes.append(1 if axis in reduced else value.shape[axis])
        shape = tuple(kept_sizes)
        kept_order = []
        for axis in value.order:
            if axis in kept:
                kept_order.append(kept.index(axis))
        order = tuple(kept_order)
        # Softmax and layer norms: their rows are looked up behind a reshape, which then goes.
        if places == [value.rank - 1] and keep:
            name = self._reduce_rows(op_type, value, reorder(shape, order))
        else:
            name = self._reduce_places(op_type, value, places, keep=keep)
        return self.value(name, shape, value.dtype, order)

    def _reduce_rows(self, op_type: str, value: Value, result: Shape) -> str:
        """Reduce the last physical axis of rows before a reshape."""
        rows, shape = self.unfolded(value.name, value.physical)
        axis = self.ints(len(shape) - 1)
        reduced = self.node(op_type, rows, axis, keepdims=1)
        return self.reshaped(reduced, (*shape[:-1], 1), result)

    def _reduce_places(self, op_type: str, value: Value, places: list[int], *, keep: bool) -> str:
        """Reduce physical axes.

        Measured: over leading axes of a channels-last tensor the runtime is 5 to 20 times slower
        than when it first reduces inside each sample (in parallel over samples) and then over the
        batch.
        """
        name = value.name
        shape = value.physical
        factor = batch_factor(shape[0]) if shape else 1
        if places == [0] and value.rank == 2 and not keep and factor > 1:
            # Split the rows into samples and rows of a sample; both axes are reduced.
            split = (-1, factor, shape[1])
            name = self.reshaped(name, shape, split)
            shape = split
            places = [0, 1]
        leading = places == list(range(len(shape) - 1))
        if op_type in _ASSOCIATIVE and len(places) > 1 and leading:
            inside = self.ints(*places[1:])
            name = self.node(op_type, name, inside, keepdims=int(keep))
            places = [0]
        return self.node(op_type, name, self.ints(*places), keepdims=int(keep))
