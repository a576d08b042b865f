"""Layers written as other layers: bags of embeddings, norms of single samples, activations.

Layers that cannot be exported are refused here.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fleet_protocol.errors import ExportError
from trainer_export.operators import take

_SQUARE = 2  # dimensions of tokens [batch, length]

# Arguments of embedding_bag after max_norm, in PyTorch's order.
_BAG_SETTINGS = (
    "norm_type",
    "scale_grad_by_freq",
    "mode",
    "sparse",
    "per_sample_weights",
    "include_last_offset",
    "padding_idx",
)


def _embedding_bag(
    tokens: Tensor,
    weight: Tensor,
    offsets: Any = None,
    max_norm: Any = None,
    *positional: Any,
    **keywords: Any,
) -> Any:
    # PyTorch passes these by position or by name.
    settings = {**dict(zip(_BAG_SETTINGS, positional, strict=False)), **keywords}
    has_limits = max_norm is not None or settings.get("scale_grad_by_freq")
    # With offsets, the bags of a batch have different lengths.
    if tokens.dim() != _SQUARE or offsets is not None or has_limits:
        raise ExportError(
            "embedding_bag with offsets, max_norm or scale_grad_by_freq cannot be exported; pass"
            " tokens [batch, length] and omit these arguments"
        )
    mode = settings.get("mode")
    padding = settings.get("padding_idx")
    shares = settings.get("per_sample_weights")
    rows = functional.embedding(tokens, weight, padding_idx=padding)
    if mode == "max":
        # The maximum of an empty bag is not defined by a sum or a mask.
        if padding is not None:
            raise ExportError(
                "embedding_bag(mode='max', padding_idx=...) cannot be exported; use mode='mean' or "
                "'sum'"
            )
        return rows.amax(1)
    if shares is not None:
        rows = rows * shares.unsqueeze(-1)
    if padding is None:
        return rows.sum(1) if mode == "sum" else rows.mean(1)
    kept = (tokens != padding).to(rows.dtype).unsqueeze(-1)
    total = (rows * kept).sum(1)
    # A bag of padding only counts as one row of zeros, as in PyTorch.
    return total if mode == "sum" else total / kept.sum(1).clamp(min=1)


def _instance_norm(
    x: Tensor,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    # Momentum matters for running statistics only.
    del momentum
    if running_mean is not None or running_var is not None or not use_input_stats:
        raise ExportError(
            "instance norm with running statistics cannot be exported; use "
            "track_running_stats=False"
        )
    # Mean and variance of each channel of each sample, over its places.
    axes = tuple(range(2, x.dim()))
    centred = x - x.mean(axes, keepdim=True)
    normal = centred * torch.rsqrt((centred * centred).mean(axes, keepdim=True) + eps)
    shape = (1, -1, *(1,) * len(axes))
    if weight is not None:
        normal = normal * weight.view(shape)
    if bias is not None:
        normal = normal + bias.view(shape)
    return normal


def _gelu(x: Tensor, *, approximate: str = "none") -> Any:
    if approximate == "none":
        # NotImplemented leaves the call to PyTorch's own operator, which has a lowering.
        return NotImplemented
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    # PyTorch's function uses -1 for the norm over all dimensions.
    axes = list(range(v.dim())) if dim == -1 else _other_axes(v, dim)
    return v * (g / torch.sqrt((v * v).sum(axes, keepdim=True)))


def _other_axes(x: Tensor, dim: int) -> list[int]:
    axes: list[int] = []
    for axis in range(x.dim()):
        if axis != dim % x.dim():
            axes.append(axis)
    return axes


def _one_hot(labels: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:
        raise ExportError(
            "one_hot without num_classes cannot be exported; pass the number of classes"
        )
    # Like PyTorch, the look-up fails for labels outside the classes. The table has one column,
    # because a vocabulary may be large.
    table = torch.arange(num_classes, dtype=torch.float32).unsqueeze(-1)
    classes = functional.embedding(labels, table)
    return (classes == torch.arange(num_classes)).to(torch.int64)


def _bilinear(left: Tensor, right: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # x W y for each output is a linear map of all products of two entries.
    products = (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2)
    return functional.linear(products, weight.flatten(1), bias)


def _unfold(x: Tensor, dimension: int, size: int, step: int) -> Any:
    dim = dimension % x.dim()
    length = x.shape[dimension]
    # A dynamic dimension has no fixed windows.
    if not isinstance(length, int):
        return NotImplemented
    starts = range(0, length - size + 1, step)
    places: list[int] = []
    for start in starts:
        places += range(start, start + size)
    windows = take(x, dim, places)
    # PyTorch appends the axis of a window's entries at the end.
    return windows.unflatten(dim, (len(starts), size)).movedim(dim + 1, -1)


def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    square = x.movedim((dim1, dim2), (-2, -1))
    rows: Any = square.shape[-2]
    columns: Any = square.shape[-1]
    if not isinstance(rows, int) or not isinstance(columns, int):
        return NotImplemented
    places: list[int] = []
    for row in range(rows):
        column = row + offset
        if 0 <= column < columns:
            places.append(row * columns + column)
    return take(square.flatten(-2), square.dim() - 2, places)


def _renorm(x: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    # The norm of each slice along `dim`, over all its other axes.
    norm = torch.linalg.vector_norm(x, p, _other_axes(x, dim), keepdim=True)
    # PyTorch adds this small number, too.
    return x * torch.where(norm > maxnorm, maxnorm / (norm + 1e-7), 1.0)


def _diag_embed(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    if offset or (dim1, dim2) != (-2, -1):
        return NotImplemented
    # Only the last two axes and the main diagonal are supported here.
    return x.unsqueeze(-1) * torch.eye(x.shape[-1])


def _cdist(left: Tensor, right: Tensor, p: float = 2.0, compute_mode: Any = None) -> Tensor:
    # Ways to compute that PyTorch chooses by size; the result is the same up to rounding.
    del compute_mode
    distance: Tensor = torch.linalg.vector_norm(left.unsqueeze(-2) - right.unsqueeze(-3), p, dim=-1)
    return distance


def _embedding(
    tokens: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *_: Any,
    **__: Any,
) -> Any:
    del tokens, weight, padding_idx
    if max_norm is None:
        return NotImplemented
    raise ExportError(
        "embedding with max_norm cannot be exported, because it changes its table when it reads;"
        " omit max_norm, and scale the rows that you read: rows * (max_norm / rows.norm(dim=-1,"
        " keepdim=True).clamp(min=max_norm))"
    )


def _gaussian_nll(
    mean: Tensor,
    target: Tensor,
    var: Any,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Any:
    var = torch.as_tensor(var)
    var = var if var.dim() in (0, mean.dim()) else var.unsqueeze(-1)
    # PyTorch bounds the variance in this way, without a gradient through the bound. It also checks
    # values, which a trace does not have.
    var = var + (var.clamp(min=eps) - var).detach()
    # `full` adds the constant term of the density.
    losses = 0.5 * (var.log() + (mean - target) ** 2 / var + full * math.log(2 * math.pi))
    return losses if reduction == "none" else getattr(losses, reduction)()


def _multilabel_margin(
    x: Tensor,
    target: Tensor,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    del size_average, reduce
    # The labels of a sample end at the first negative one.
    listed = (target < 0).to(torch.int64).cumsum(1) == 0
    labels = target.clamp(min=0)
    is_label = (labels.unsqueeze(-1) == torch.arange(x.shape[1])) * listed.unsqueeze(-1)
    # Only classes that are not a label of the sample give a margin.
    absent = is_label.sum(1) == 0
    margins = (1 - x.gather(1, labels).unsqueeze(2) + x.unsqueeze(1)).clamp(min=0)
    losses = (margins * listed.unsqueeze(2) * absent.unsqueeze(1)).sum((1, 2)) / x.shape[1]
    return losses if reduction == "none" else getattr(losses, reduction)()


def _slices(x: Tensor, dim: Any) -> Sequence[Tensor] | None:
    """Return the slices along a dimension of fixed size; None for other dimensions."""
    return x.unbind(dim) if isinstance(dim, int) and isinstance(x.shape[dim], int) else None


def _prod(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    slices = _slices(x, dim)
    if slices is None or dtype is not None:
        return NotImplemented
    product = functools.reduce(torch.mul, slices)
    return product.unsqueeze(dim) if keepdim else product


def _cumprod(x: Tensor, dim: Any, *, dtype: Any = None) -> Any:
    slices = _slices(x, dim)
    if slices is None or dtype is not None:
        return NotImplemented
    return torch.stack([*itertools.accumulate(slices, torch.mul)], dim)


def _median(x: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
    if dim is None:
        return NotImplemented
    values, places = x.sort(dim=dim, stable=True)
    # PyTorch takes the lower of two middle values.
    middle = (x.shape[dim] - 1) // 2
    value = values.narrow(dim, middle, 1)
    place = places.narrow(dim, middle, 1)
    if not keepdim:
        value = value.squeeze(dim)
        place = place.squeeze(dim)
    return torch.return_types.median((value, place))


def _batch_norm(
    x: Tensor,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    # With a batch of one, models use the norm to standardise the rows of weights.
    # Then the statistics of the batch are those of the sample.
    if training and running_mean is running_var is None and x.shape[0] == 1:
        return _instance_norm(x, None, None, weight, bias, True, momentum, eps)
    raise ExportError(
        "batch norm cannot be exported, because running averages of different sub-models cannot"
        " be merged; `shoal export --convert` replaces it with StaticBatchNorm of"
        " models.zoo.layers, or use GroupNorm or LayerNorm"
    )


def _dropout(
    x: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    title: str = "dropout",
) -> Any:
    del x, inplace
    if not training or p == 0:
        return NotImplemented
    raise ExportError(
        f"{title} that draws its own random numbers cannot be exported, because a graph takes"
        " them as an input; use nn.Dropout and `shoal export --convert` (in a builder,"
        " `convert` of models.zoo.conversion), or Dropout of models.zoo.dropout"
    )


def _take_along_dim(x: Tensor, index: Tensor, dim: int | None = None) -> Any:
    if dim is None or x.dim() != index.dim():
        return NotImplemented
    # gather broadcasts nothing, and take_along_dim does.
    is_alike = all(x.shape[axis] == index.shape[axis] for axis in _other_axes(x, dim))
    return x.gather(dim, index) if is_alike else NotImplemented


def _alpha_dropout(x: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:
    return _dropout(x, p, training, inplace, title="alpha dropout")


FUNCTIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        functional.embedding_bag: _embedding_bag,
        functional.instance_norm: _instance_norm,
        functional.gelu: _gelu,
        torch._weight_norm: _weight_norm,  # noqa: SLF001 - what torch.nn.utils.weight_norm calls
        functional.one_hot: _one_hot,
        functional.bilinear: _bilinear,
        functional.gaussian_nll_loss: _gaussian_nll,
        functional.multilabel_margin_loss: _multilabel_margin,
        torch.Tensor.unfold: _unfold,
        **dict.fromkeys((torch.diagonal, torch.Tensor.diagonal), _diagonal),
        torch.diag_embed: _diag_embed,
        **dict.fromkeys((torch.renorm, torch.Tensor.renorm), _renorm),
        **dict.fromkeys((torch.take_along_dim, torch.Tensor.take_along_dim), _take_along_dim),
        torch.cdist: _cdist,
        functional.batch_norm: _batch_norm,
        functional.embedding: _embedding,
        **dict.fromkeys((torch.prod, torch.Tensor.prod), _prod),
        **dict.fromkeys((torch.cumprod, torch.Tensor.cumprod), _cumprod),
        **dict.fromkeys((torch.median, torch.Tensor.median), _median),
        **dict.fromkeys(
            (
                functional.dropout,
                functional.dropout1d,
                functional.dropout2d,
                functional.dropout3d,
            ),
            _dropout,
        ),
        functional.alpha_dropout: _alpha_dropout,
        functional.feature_alpha_dropout: _alpha_dropout,
    }
)
