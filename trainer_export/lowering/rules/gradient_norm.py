"""Lowering of the norm of a kernel's gradient, from products of places."""

from collections.abc import Callable
from typing import Any

import torch

from trainer_export import late_gradients  # noqa: F401 - registers shoal::kernel_gradient_norm
from trainer_export.lowering.columns import columns_of, matrix_of
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.values import Spec, Value
from trainer_export.lowering.windows import Convolution


def _kernel_gradient_norm(
    emit: Emitter, _out: Spec, grad: Value, x: Value, weight: Value, *steps: Any
) -> Value:
    # |dY^T X|^2 = sum(dY dY^T * X X^T), where X are the columns of the convolution.
    stride, padding, dilation = steps
    convolution = Convolution(stride, padding, dilation, False, [0], 1)
    geometry = convolution.geometry(x.shape[2:], weight, grad.shape[2:])
    columns = columns_of(emit, emit.full(x), geometry, weight.shape[0])
    slopes = matrix_of(emit, emit.full(grad))
    # Each is [places, places].
    of_columns = emit.node(
        "Gemm",
        columns.name,
        columns.name,
        transA=columns.transposed,
        transB=1 - columns.transposed,
    )
    of_slopes = emit.node("Gemm", slopes, slopes, transB=1)
    products = emit.node("Mul", of_columns, of_slopes)
    total = emit.node("ReduceSum", products, emit.ints(0, 1), keepdims=0)
    # Rounding may make a sum of almost nothing negative.
    return emit.value(emit.node("Sqrt", emit.node("Relu", total)), ())


LOWERINGS: dict[Any, Callable[..., Any]] = {
    torch.ops.shoal.kernel_gradient_norm.default: _kernel_gradient_norm,
}
"""Lowerings of norms that are computed without the gradient."""
