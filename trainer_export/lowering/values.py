"""Values of a traced program during lowering: shape, axis order, pending broadcast.

A value defers two operations that cost time at run time. A transposed view is the same tensor with
another axis order: convolutions work channels-last, matrix products read their operands in physical
order, and a Transpose is written only if an operator needs the logical order. An expanded view
keeps its small tensor, because element-wise operators broadcast anyway.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy  # type: ignore[import-untyped]
import torch
from onnx import helper

from fleet_protocol.errors import ExportError

BATCH_HINT = 32  # batch size for comparing the costs of lowerings

Dim = Any  # int, or a sympy expression of the batch size
Shape = tuple[Dim, ...]

_DTYPES = {
    getattr(torch, name): np.dtype(name)
    for name in ("float32", "int64", "int32", "bool", "float64")
}


def overload(name: str) -> Any:
    """Return the default overload of an aten operator whose name starts with an underscore."""
    return getattr(torch.ops.aten, name).default


def numpy_dtype(dtype: torch.dtype) -> Any:
    """Return the numpy type of a torch element type."""
    if dtype not in _DTYPES:
        raise ExportError(
            f"element type {dtype} cannot be exported; convert with .float(), or with"
            " .long() for whole numbers"
        )
    return _DTYPES[dtype]


def onnx_dtype(dtype: torch.dtype) -> int:
    """Return the ONNX number of a torch element type."""
    return int(helper.np_dtype_to_tensor_dtype(numpy_dtype(dtype)))


def dim_of(size: Any) -> Dim:
    """Return a size of a traced tensor as an int, or as an expression of the batch size."""
    if isinstance(size, int):
        return size
    if isinstance(size, torch.SymInt):
        size = size.node.expr
    expression = sympy.sympify(size)
    return int(expression) if expression.is_Integer else expression


def hint(shape: Sequence[Dim]) -> int:
    """Return the number of elements at the batch size that costs are compared at."""
    count = 1
    for size in shape:
        if isinstance(size, int):
            count *= size
        else:
            count *= int(size.subs(dict.fromkeys(size.free_symbols, BATCH_HINT)))
    return count


def reorder(sizes: Sequence[Dim], order: Iterable[int]) -> Shape:
    """Return sizes in an axis order, or only those of some axes."""
    return tuple(sizes[axis] for axis in order)


def without(axis: int, rank: int) -> list[int]:
    """Return all axes but one."""
    axes = list(range(rank))
    axes.remove(axis)
    return axes


def is_fixed(sizes: Iterable[Dim]) -> bool:
    """Return whether no size depends on the batch."""
    return all(isinstance(size, int) for size in sizes)


def is_single(sizes: Iterable[Dim]) -> bool:
    """Return whether a tensor of these sizes has one element."""
    return all(size == 1 for size in sizes)


@dataclass(frozen=True)
class Spec:
    """The result of a traced operator: logical shape and element type."""

    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class Value:
    """A tensor of the traced program."""

    name: str  # the ONNX value that holds it
    shape: Shape  # logical sizes
    dtype: torch.dtype  # torch element type
    # Stored sizes in logical order: equal to ``shape``, or 1 for a pending broadcast.
    stored: Shape
    order: tuple[int, ...]  # physical axis ``i`` of the ONNX value is logical axis ``order[i]``

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def physical(self) -> Shape:
        """Sizes of the ONNX value."""
        return reorder(self.stored, self.order)

    @property
    def is_plain(self) -> bool:
        """Return whether the ONNX value is in logical order, up to dimensions of size 1."""
        return self.lies(range(self.rank))

    def lies(self, order: Sequence[int]) -> bool:
        """Return whether the ONNX value is in an axis order, up to dimensions of size 1."""
        return self._axes_that_lie(self.order) == self._axes_that_lie(order)

    def _axes_that_lie(self, order: Iterable[int]) -> list[int]:
        lying = []
        for axis in order:
            if self.stored[axis] != 1:
                lying.append(axis)
        return lying


def channels_last(rank: int) -> tuple[int, ...]:
    """Return the axis order of convolutions: batch, space, channels."""
    return (0, *range(2, rank), 1)


def planes(rank: int) -> tuple[int, ...]:
    """Return the axis order of tensors with few channels: channels, batch, space."""
    return (1, 0, *range(2, rank))
