"""Values of a traced program on their way to ONNX: shape, order of axes, pending broadcast.

Two things that cost time at run time are kept pending in a value. A transposed view is the same
tensor with another order of axes, so convolutions work channels-last and matrix products read their
operands as they lie, and a real Transpose is written only where an operator needs the logical
order. An expanded view keeps its small tensor, because element-wise operators broadcast anyway.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy  # type: ignore[import-untyped]
import torch
from onnx import helper

from fleet_protocol.errors import ExportError

BATCH_HINT = 32  # samples assumed wherever the cost of two lowerings is compared

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
            f"element type {dtype} cannot be exported; use .float(), or .long() for whole numbers"
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
    """Return sizes in an order of axes, or those of some axes alone."""
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
    """Return whether a tensor of these sizes is one number."""
    return all(size == 1 for size in sizes)


@dataclass(frozen=True)
class Spec:
    """What a traced operator returns: logical shape and element type."""

    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class Value:
    """A tensor of the traced program."""

    name: str  # the ONNX value that holds it
    shape: Shape  # logical sizes
    dtype: torch.dtype  # torch element type
    # Sizes that are really there, in logical order: equal to ``shape``, or 1 where a broadcast is
    # pending.
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
        """Whether the ONNX value lies in logical order up to dimensions of size 1."""
        return self.lies(range(self.rank))

    def lies(self, order: Sequence[int]) -> bool:
        """Return whether the ONNX value lies in an order, up to dimensions of size 1."""
        return self._axes_that_lie(self.order) == self._axes_that_lie(order)

    def _axes_that_lie(self, order: Iterable[int]) -> list[int]:
        lying = []
        for axis in order:
            if self.stored[axis] != 1:
                lying.append(axis)
        return lying


def channels_last(rank: int) -> tuple[int, ...]:
    """Return the order of axes that convolutions work in: batch, space, channels."""
    return (0, *range(2, rank), 1)


def planes(rank: int) -> tuple[int, ...]:
    """Return the order in which tensors of a few channels lie: channels, batch, space."""
    return (1, 0, *range(2, rank))
