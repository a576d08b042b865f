"""Models that look at the size of their batch: conditions on it, and `len`.

A program is traced with a symbol for the batch, on one side of each condition. This program is
valid for all sizes if the other side computes the same. To verify that, the function itself runs at
sizes on the other side, on random numbers.
"""

import builtins
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_aggregate
from typing_extensions import override

from trainer_export.graph import Port

_BATCH = "batch"  # in the shape of a port
_MOST_SIZES = 12
_LARGEST = 64  # samples of a run
_TOLERANCE = 1e-3  # of the largest entry; the sides differ by rounding, or by much more
_SEED = 5
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)  # noqa: SLF001


def agrees_at(
    sizes: Iterable[int],
    program: fx.GraphModule,
    function: Callable[..., list[Tensor]],
    ports: Sequence[Port],
) -> bool:
    """Return whether a described program computes what a function does at some sizes of the batch.

    Args:
        sizes: sizes of the batch.
        program: traced from the function, with expressions of the batch for sizes.
        function: takes a tensor for each port.
        ports: inputs of both.
    """
    smallest = sorted(sizes)[:_MOST_SIZES]
    for size in smallest:
        inputs = _random_inputs(ports, min(size, _LARGEST))
        try:
            expected = function(*inputs)
            outputs = _AtSizeInAnyOrder(program, size).run(*inputs)
        except Exception:  # noqa: BLE001 - a side that fails does not compute the same
            return False
        for value, reference in zip(outputs, expected, strict=True):
            if value.shape != reference.shape or not _is_close(value, reference):
                return False
    return not smallest or smallest[0] <= _LARGEST


def _is_close(value: Tensor, reference: Tensor) -> bool:
    if not reference.numel():
        return True
    scale = max(float(reference.abs().max()), 1e-6)
    return bool(((value - reference).abs() <= _TOLERANCE * scale).all())


class AtSize(fx.Interpreter):
    """Runs a described program at one size of its batch.

    Args:
        program: has expressions of the batch among the arguments of its nodes.
        size: samples of the batch.
    """

    def __init__(self, program: fx.GraphModule, size: int) -> None:
        super().__init__(program)
        self._size = size

    @override
    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        return map_aggregate(super().fetch_args_kwargs_from_env(n), self._number)

    def _number(self, value: Any) -> Any:
        """Return the number of an expression of the batch; anything else unchanged."""
        if isinstance(value, torch.SymInt):
            value = value.node.expr
        if isinstance(value, sympy.Basic):
            return int(value.subs(dict.fromkeys(value.free_symbols, self._size)))
        return value


class _AtSizeInAnyOrder(AtSize):
    """Runs it even if the entries of a tensor lie in an order that its trace did not have."""

    @override
    def call_function(
        self,
        target: Any,
        args: Any,
        kwargs: Any,
    ) -> Any:
        # Graphs have no strides, so passes over a program do not keep them.
        if target in _VIEWS:
            target = torch.ops.aten.reshape.default
        return super().call_function(target, args, kwargs)


def _random_inputs(ports: Sequence[Port], size: int) -> list[Tensor]:
    """Draw inputs of a graph: small numbers for matrices, positive ones for vectors."""
    generator = torch.Generator().manual_seed(_SEED)
    inputs: list[Tensor] = []
    for port in ports:
        shape: list[int] = []
        for length in port.shape:
            shape.append(size if length == _BATCH else int(length))
        if port.dtype == "int64":
            inputs.append(torch.zeros(shape, dtype=torch.int64))
        elif len(shape) > 1 and _BATCH not in port.shape:
            spread = math.sqrt(max(1, math.prod(shape[1:])))
            inputs.append(torch.randn(shape, generator=generator) / spread)
        else:
            inputs.append(torch.rand(shape, generator=generator) * 0.9 + 0.05)
    return inputs


@contextmanager
def symbols_as_lengths() -> Iterator[None]:
    """Let `len` of a traced tensor return its first size, which may be a symbol.

    Python converts the length of a tensor, and so the batch size, to a number. In a model whose
    code cannot be changed, only a replaced `len` avoids that.
    """
    plain = builtins.len

    def length(value: Any) -> Any:
        if isinstance(value, FakeTensor) and value.dim():
            return value.shape[0]
        return plain(value)

    builtins.len = length
    try:
        yield
    finally:
        builtins.len = plain
