"""Values of a traced program while it is written as ONNX: logical shape, physical order of axes,
lazy broadcast.

Two things that cost time at run time are kept pending in a value. A transposed view is the same
tensor with another order of axes, so convolutions work channels-last and matrix products read their
operands as they lie, and a real Transpose is written only where an operator needs the logical
order. An expanded view keeps its small tensor, because element-wise operators broadcast anyway.
"""

import math
from collections.abc import Sequence
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
    """The default overload of an aten operator whose name starts with an underscore."""
    return getattr(torch.ops.aten, name).default


def numpy_dtype(dtype: torch.dtype) -> Any:
    """The numpy type of a torch element type."""
    if dtype not in _DTYPES:
        raise ExportError(
            f"element type {dtype} cannot be exported; use .float(), or .long() for whole numbers"
        )
    return _DTYPES[dtype]


def onnx_dtype(dtype: torch.dtype) -> int:
    """The ONNX number of a torch element type."""
    return int(helper.np_dtype_to_tensor_dtype(numpy_dtype(dtype)))


def dim_of(size: Any) -> Dim:
    """A size of a traced tensor as an int, or as an expression of the batch size."""
    if isinstance(size, int):
        return size
    if isinstance(size, torch.SymInt):
        size = size.node.expr
    expression = sympy.sympify(size)
    return int(expression) if expression.is_Integer else expression


def hint(shape: Sequence[Dim]) -> int:
    """Number of elements at the batch size that costs are compared at."""
    return math.prod(
        d if isinstance(d, int) else int(d.subs(dict.fromkeys(d.free_symbols, BATCH_HINT)))
        for d in shape
    )


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
    # sizes that are really there, in logical order: equal to ``shape`` or 1 where a broadcast is
    # pending
    stored: Shape
    order: tuple[int, ...]  # physical axis ``i`` of the ONNX value is logical axis ``order[i]``

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def physical(self) -> Shape:
        """Sizes of the ONNX value."""
        return tuple(self.stored[i] for i in self.order)

    @property
    def is_plain(self) -> bool:
        """Whether the ONNX value lies in logical order up to dimensions of size 1."""
        return self.lies(range(self.rank))

    def lies(self, order: Sequence[int]) -> bool:
        """Whether the ONNX value lies in an order up to dimensions of size 1."""
        return [axis for axis in self.order if self.stored[axis] != 1] == [
            i for i in order if self.stored[i] != 1
        ]


def channels_last(rank: int) -> tuple[int, ...]:
    """The order of axes convolutions work in: batch, space, channels."""
    return (0, *range(2, rank), 1)


def planes(rank: int) -> tuple[int, ...]:
    """The order of axes in which tensors of a few channels lie: channels, batch, space."""
    return (1, 0, *range(2, rank))
