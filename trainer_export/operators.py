"""Torch operators that represent a whole layer in a traced program, so that a lowering finds it.

Static batch norm (Diao, Ding, Tarokh: "HeteroFL", ICLR 2021) written in PyTorch gives about thirty
element-wise nodes in a traced step, most of them in its gradient. As one operator with a gradient
in closed form, it lowers to seven passes over the activations in each direction. Only the exported
graphs use it; they are compared with the original module.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor


def _dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _column(vector: Tensor, x: Tensor) -> Tensor:
    return vector.view(
        1,
        -1,
        *([1] * (x.dim() - 2)),
    )


@torch.library.custom_op("shoal::static_batch_norm", mutates_args=())
def static_batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> Tensor:
    """Normalise each channel with the statistics of the batch.

    Input and output are float32 [batch, channels, ...]; scale and shift are float32 [channels], and
    `eps` is added to the biased variance.
    """
    centred = x - x.mean(_dims(x), keepdim=True)
    variance = (centred * centred).mean(_dims(x), keepdim=True)
    scale = torch.rsqrt(variance + eps) * _column(weight, x)
    return centred * scale + _column(bias, x)


@torch.library.custom_op("shoal::static_batch_norm_backward", mutates_args=())
def static_batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of :func:`static_batch_norm`: of ``x``, ``weight`` and ``bias``.

    With ``d = x - mean``, ``r = 1 / sqrt(var + eps)`` and means over batch and space:
    ``grad_x = w r (g - mean(g) - d r^2 mean(g d))``.
    """
    dims = _dims(x)
    centred = x - x.mean(dims, keepdim=True)
    variance = (centred * centred).mean(dims, keepdim=True)
    inverse = torch.rsqrt(variance + eps)
    product = grad * centred
    slope = inverse * inverse * product.mean(dims, keepdim=True)
    scale = _column(weight, x) * inverse
    projected = grad - grad.mean(dims, keepdim=True) - centred * slope
    grad_x = scale * projected
    grad_weight = product.sum(dims, keepdim=True) * inverse
    return grad_x, grad_weight.flatten(), grad.sum(dims)


def _fake_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> Tensor:
    del weight, bias, eps
    return torch.empty_like(x)


def _fake_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    del grad, eps
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    x, weight, _, ctx.eps = inputs
    # The gradient does not depend on the shift.
    ctx.save_for_backward(x, weight)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    x, weight = ctx.saved_tensors
    return (*static_batch_norm_backward(grad, x, weight, ctx.eps), None)


static_batch_norm.register_fake(_fake_forward)
static_batch_norm_backward.register_fake(_fake_backward)
static_batch_norm.register_autograd(_gradient, setup_context=_save)


@torch.library.custom_op("shoal::take", mutates_args=())
def take(x: Tensor, dim: int, index: Sequence[int]) -> Tensor:
    """Return elements along a dimension by constant places.

    The dimension is counted from 0; the place -1 gives zeros.
    """
    # Constants of the graph, since the places are known when it is traced.
    places = torch.tensor(index, device=x.device)
    shape = []
    for axis in range(x.dim()):
        shape.append(-1 if axis == dim else 1)
    # A look-up of -1 reads place 0, and its row is set to zero afterwards.
    rows = x.index_select(dim, places.clamp(min=0))
    present = (places >= 0).to(x.dtype)
    return rows * present.view(shape)


@take.register_fake
def _fake_take(x: Tensor, dim: int, index: Sequence[int]) -> Tensor:
    return x.new_empty(
        [
            *x.shape[:dim],
            len(index),
            *x.shape[dim + 1 :],
        ]
    )


def _save_take(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    x, ctx.dim, ctx.index = inputs
    ctx.size = int(x.shape[ctx.dim])


def _gradient_of_take(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    """Return the first use of each element, plus the second, and so on.

    Each of these is again a look-up in the gradient.
    """
    # Look-ups, whose sum has a fixed order; a scatter adds in an order of its runtime.
    uses: list[list[int]] = [[] for _ in range(ctx.size)]
    for place, source in enumerate(ctx.index):
        if source >= 0:
            uses[source].append(place)
    # At least one look-up, which gives zeros if no element was used.
    most = max(1, *map(len, uses))
    slopes = []
    for i in range(most):
        places = []
        for use in uses:
            places.append(use[i] if i < len(use) else -1)
        slopes.append(take(grad, ctx.dim, places))
    return functools.reduce(torch.add, slopes), None, None


take.register_autograd(_gradient_of_take, setup_context=_save_take)


def _group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *sizes: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Group normalisation in simpler operators.

    PyTorch's own decomposition uses operators outside the core set.
    """
    batch, _, _, groups, eps = sizes
    grouped = x.reshape(batch, groups, -1)
    mean = grouped.mean(2, keepdim=True)
    centred = grouped - mean
    variance = (centred * centred).mean(2, keepdim=True)
    inverse = torch.rsqrt(variance + eps)
    normal = (centred * inverse).reshape(x.shape)
    if weight is not None:
        # The mean and its inverse deviation are results, too, because the gradient operator takes
        # them.
        normal = normal * _column(weight, x)
    if bias is not None:
        normal = normal + _column(bias, x)
    return normal, mean.squeeze(2), inverse.squeeze(2)


def _remainder(x: Tensor, divisor: Any) -> Tensor:
    # fmod has the sign of x, the remainder that of the divisor.
    truncated = torch.fmod(x, divisor)
    return torch.where(truncated * divisor < 0, truncated + divisor, truncated)


def _eye(
    rows: int,
    columns: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    **_: Any,
) -> Tensor:
    """Return an identity matrix; PyTorch's decomposition uses bytes, which graphs lack."""
    row = torch.arange(rows).unsqueeze(1)
    column = torch.arange(rows if columns is None else columns)
    places = row == column
    return places.to(dtype or torch.get_default_dtype())


def _triangle(
    rows: int,
    columns: int,
    offset: int = 0,
    *,
    upper: bool,
    **_: Any,
) -> Tensor:
    """Return places on and below a diagonal, or on and above it, int64 [2, places]."""
    places = []
    for i in range(rows):
        for j in range(columns):
            if j - i == offset or (j - i > offset) == upper:
                places.append((i, j))
    return torch.tensor(places, dtype=torch.int64).view(-1, 2).t()


def _atan2(y: Tensor, x: Tensor) -> Tensor:
    # The quotient gives the angle up to half a turn, and is undefined if x is 0.
    divisor = torch.where(x == 0, 1, x)
    angle = torch.atan(y / divisor)
    behind = angle + torch.where(
        y < 0,
        -math.pi,
        math.pi,
    )
    is_upright = x == 0
    upright = torch.sign(y) * (math.pi / 2)
    slanted = torch.where(x < 0, behind, angle)
    return torch.where(is_upright, upright, slanted)


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        torch.ops.aten.native_group_norm.default: _group_norm,
        torch.ops.aten.eye.default: _eye,
        torch.ops.aten.eye.m: _eye,
        torch.ops.aten.trunc.default: lambda x: torch.sign(x) * torch.floor(torch.abs(x)),
        torch.ops.aten.atan2.default: _atan2,
        torch.ops.aten.hypot.default: lambda x, y: torch.sqrt(x * x + y * y),
        torch.ops.aten.log2.default: lambda x: torch.log(x) * (1 / math.log(2)),
        torch.ops.aten.log10.default: lambda x: torch.log(x) * (1 / math.log(10)),
        torch.ops.aten.exp2.default: lambda x: torch.exp(x * math.log(2)),
        torch.ops.aten.isinf.default: lambda x: torch.abs(x) == math.inf,
        # A comparison with NaN is false, so a NaN of x gives y.
        torch.ops.aten.fmax.default: lambda x, y: torch.where((x >= y) | y.isnan(), x, y),
        torch.ops.aten.fmin.default: lambda x, y: torch.where((x <= y) | y.isnan(), x, y),
        # -0.0 counts as positive.
        torch.ops.aten.copysign.Tensor: lambda x, y: torch.where(y < 0, -x.abs(), x.abs()),
        torch.ops.aten.tril_indices.default: functools.partial(_triangle, upper=False),
        torch.ops.aten.triu_indices.default: functools.partial(_triangle, upper=True),
        torch.ops.aten.erfc.default: lambda x: 1 - torch.erf(x),
        torch.ops.aten.remainder.Scalar: _remainder,
        torch.ops.aten.remainder.Tensor: _remainder,
    }
)
"""Operators to decompose during tracing, in addition to PyTorch's core decompositions."""
