"""Computes the shapes of element-wise operators on fake tensors without PyTorch's rules for them.

A trace runs thousands of element-wise operators. With a symbol for the batch, PyTorch decomposes
each of them into checks of broadcasts, types and strides, which takes a third of the trace. For the
usual case the result is evident: float32 operands stored row by row, of which one has the shape of
the result. All other cases are left to PyTorch.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from typing_extensions import override

_CPU = torch.device("cpu")

_NAMES = (
    "abs.default",
    "add.Tensor",
    "add.Scalar",
    "clamp.default",
    "clamp_min.default",
    "cos.default",
    "div.Scalar",
    "div.Tensor",
    "erf.default",
    "exp.default",
    "hardsigmoid.default",
    "hardswish.default",
    "hardswish_backward.default",
    "hardtanh.default",
    "leaky_relu.default",
    "log.default",
    "mul.Scalar",
    "mul.Tensor",
    "neg.default",
    "pow.Tensor_Scalar",
    "reciprocal.default",
    "relu.default",
    "rsqrt.default",
    "sigmoid.default",
    "sigmoid_backward.default",
    "sin.default",
    "sqrt.default",
    "sub.Scalar",
    "sub.Tensor",
    "tanh.default",
    "tanh_backward.default",
    "threshold_backward.default",
)


def _operators() -> frozenset[Any]:
    """Return the operators that return float32 for float32, element by element."""
    operators: set[Any] = set()
    for name in _NAMES:
        packet, overload = name.split(".")
        operators.add(getattr(getattr(torch.ops.aten, packet), overload))
    return frozenset(operators)


_ELEMENTWISE = _operators()


class ShapeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A mode of fake tensors that knows the results of element-wise operators."""

    @override
    def dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] = MappingProxyType({}),
    ) -> object:
        if not kwargs and func in _ELEMENTWISE:
            result = self._elementwise(args)
            if result is not None:
                return result
        return super().dispatch(func, types, args, kwargs)

    def _elementwise(self, operands: Sequence[object]) -> FakeTensor | None:
        """Return the result of an element-wise operator; None if PyTorch must find it."""
        tensors: list[FakeTensor] = []
        for operand in operands:
            if type(operand) is FakeTensor:
                if not self._is_plain(operand):
                    return None
                tensors.append(operand)
            # A symbol among the numbers is left to PyTorch.
            elif type(operand) not in (int, float, bool, type(None)):
                return None
        if not tensors:
            return None
        largest = max(tensors, key=torch.Tensor.dim)
        shape = largest.shape
        for tensor in tensors:
            if tensor is not largest and not _fits(tensor.shape, shape):
                return None
        return FakeTensor(self, torch.empty(shape, dtype=torch.float32, device="meta"), _CPU)

    def _is_plain(self, tensor: FakeTensor) -> bool:
        """Return whether a tensor of this mode is float32, on the CPU, and stored by rows."""
        if tensor.dtype != torch.float32 or tensor.fake_mode is not self:
            return False
        # The value of a constant is computed, too.
        if tensor.constant is not None or tensor.fake_device != _CPU:
            return False
        return _is_stored_by_rows(tensor)


def _fits(shape: Sequence[Any], whole: Sequence[Any]) -> bool:
    """Return whether a tensor evidently broadcasts to a shape that has at least as many sizes."""
    for size, target in zip(reversed(shape), reversed(whole), strict=False):
        if type(size) is not type(target):
            # A size of 1 broadcasts, also to a symbol.
            if type(size) is not int or size != 1:
                return False
        elif type(size) is int:
            if size not in {1, target}:
                return False
        elif size.node.expr != target.node.expr:
            return False
    return True


def _is_stored_by_rows(tensor: FakeTensor) -> bool:
    """Return whether the strides are evidently those of a contiguous tensor."""
    expected: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if type(stride) is not int or stride != expected:
            return False
        # A symbol has to be the first size; the strides before it would be symbols.
        expected = expected * size if type(size) is int else None
    return True
