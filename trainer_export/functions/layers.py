"""Layers of other layers: bags of embeddings, norms of single samples, activations.

And those that cannot be had.
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

_SQUARE = 2


def _embedding_bag(
    tokens: Tensor,
    weight: Tensor,
    offsets: Any = None,
    max_norm: Any = None,
    *rest: Any,
    **settings: Any,
) -> Any:
    names = (
        "norm_type",
        "scale_grad_by_freq",
        "mode",
        "sparse",
        "per_sample_weights",
        "include_last_offset",
    )
    chosen = {**dict(zip((*names, "padding_idx"), rest, strict=False)), **settings}
    mode, padding, shares = (
        chosen.get(name) for name in ("mode", "padding_idx", "per_sample_weights")
    )
    if (
        tokens.dim() != _SQUARE
        or offsets is not None
        or max_norm is not None
        or chosen.get("scale_grad_by_freq")
    ):
        raise ExportError(
            "embedding_bag with offsets, max_norm or scale_grad_by_freq cannot be exported; give it tokens"
            " [batch, length] and leave those settings out"
        )
    found = functional.embedding(tokens, weight, padding_idx=padding)
    if mode == "max":
        if padding is not None:
            raise ExportError(
                "embedding_bag(mode='max', padding_idx=...) cannot be exported; use mode='mean' or 'sum'"
            )
        return found.amax(1)
    if shares is not None:
        found = found * shares.unsqueeze(-1)
    if padding is None:
        return found.sum(1) if mode == "sum" else found.mean(1)
    kept = (tokens != padding).to(found.dtype).unsqueeze(-1)
    total = (found * kept).sum(1)
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
    del momentum
    if running_mean is not None or running_var is not None or not use_input_stats:
        raise ExportError(
            "instance norm with running statistics cannot be exported; use track_running_stats=False"
        )
    axes = tuple(range(2, x.dim()))
    centred = x - x.mean(axes, keepdim=True)
    normal = centred * torch.rsqrt((centred * centred).mean(axes, keepdim=True) + eps)
    shape = (1, -1, *(1,) * len(axes))
    normal = normal if weight is None else normal * weight.view(shape)
    return normal if bias is None else normal + bias.view(shape)


def _gelu(x: Tensor, *, approximate: str = "none") -> Any:
    if approximate == "none":
        return NotImplemented
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    axes = (
        [axis for axis in range(v.dim()) if axis != dim % v.dim()]
        if dim != -1
        else list(range(v.dim()))
    )
    return v * (g / torch.sqrt((v * v).sum(axes, keepdim=True)))


def _one_hot(labels: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:
        raise ExportError(
            "one_hot without num_classes cannot be exported; name the number of classes"
        )
    # A table has no row for other labels; as few numbers as there are labels, of which a vocabulary
    # may have many.
    known = functional.embedding(
        labels, torch.arange(num_classes, dtype=torch.float32).unsqueeze(-1)
    )
    return (known == torch.arange(num_classes)).to(torch.int64)


def _bilinear(left: Tensor, right: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(
        (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2), weight.flatten(1), bias
    )


def _unfold(x: Tensor, dimension: int, size: int, step: int) -> Any:
    dim = dimension % x.dim()
    length = x.shape[dimension]
    if not isinstance(length, int):
        return NotImplemented
    starts = range(0, length - size + 1, step)
    windows = take(x, dim, [start + place for start in starts for place in range(size)])
    return windows.unflatten(dim, (len(starts), size)).movedim(dim + 1, -1)


def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    square = x.movedim((dim1, dim2), (-2, -1))
    sizes: tuple[Any, ...] = square.shape[-2:]
    rows, columns = sizes
    if not isinstance(rows, int) or not isinstance(columns, int):
        return NotImplemented
    places = [row * columns + row + offset for row in range(rows) if 0 <= row + offset < columns]
    return take(square.flatten(-2), square.dim() - 2, places)


def _renorm(x: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    axes = [axis for axis in range(x.dim()) if axis != dim % x.dim()]
    norm = torch.linalg.vector_norm(x, p, axes, keepdim=True)
    return x * torch.where(norm > maxnorm, maxnorm / (norm + 1e-7), 1.0)


def _diag_embed(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    return (
        NotImplemented
        if offset or (dim1, dim2) != (-2, -1)
        else x.unsqueeze(-1) * torch.eye(x.shape[-1])
    )


def _cdist(left: Tensor, right: Tensor, p: float = 2.0, compute_mode: Any = None) -> Tensor:
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
        "embedding with max_norm cannot be exported, as it changes its table while it reads; leave it out, and divide"
        " what was read: rows * (max_norm / rows.norm(dim=-1, keepdim=True).clamp(min=max_norm))"
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
    var = (
        var + (var.clamp(min=eps) - var).detach()
    )  # torch's own looks at values first, and bounds them so
    found = 0.5 * (var.log() + (mean - target) ** 2 / var + full * math.log(2 * math.pi))
    return found if reduction == "none" else getattr(found, reduction)()


def _multilabel_margin(
    x: Tensor,
    target: Tensor,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    del size_average, reduce
    listed = (target < 0).to(torch.int64).cumsum(
        1
    ) == 0  # what torch takes apart goes on behind the end of the list
    places = target.clamp(min=0)
    others = ((places.unsqueeze(-1) == torch.arange(x.shape[1])) * listed.unsqueeze(-1)).sum(1) == 0
    margins = (1 - x.gather(1, places).unsqueeze(2) + x.unsqueeze(1)).clamp(min=0)
    found = (margins * listed.unsqueeze(2) * others.unsqueeze(1)).sum((1, 2)) / x.shape[1]
    return found if reduction == "none" else getattr(found, reduction)()


def _parts(x: Tensor, dim: Any) -> Sequence[Tensor] | None:
    """The slices along a dimension whose size is known."""
    return x.unbind(dim) if isinstance(dim, int) and isinstance(x.shape[dim], int) else None


def _prod(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    parts = _parts(x, dim)
    if parts is None or dtype is not None:
        return NotImplemented
    found = functools.reduce(torch.mul, parts)
    return found.unsqueeze(dim) if keepdim else found


def _cumprod(x: Tensor, dim: Any, *, dtype: Any = None) -> Any:
    parts = _parts(x, dim)
    if parts is None or dtype is not None:
        return NotImplemented
    return torch.stack([*itertools.accumulate(parts, torch.mul)], dim)


def _median(x: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
    if dim is None:
        return NotImplemented
    value, place = (
        part.narrow(dim, (x.shape[dim] - 1) // 2, 1) for part in x.sort(dim=dim, stable=True)
    )
    return torch.return_types.median(
        (value, place) if keepdim else (value.squeeze(dim), place.squeeze(dim))
    )


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
    if (
        training and running_mean is running_var is None and x.shape[0] == 1
    ):  # a way to standardise the rows of weights
        return _instance_norm(x, None, None, weight, bias, True, momentum, eps)
    raise ExportError(
        "batch norm cannot be exported: running averages of unequal sub-models cannot be merged; `shoal export"
        " --convert` replaces it by StaticBatchNorm of models.zoo.layers, or use GroupNorm or LayerNorm"
    )


def _dropout(
    x: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    what: str = "dropout",
) -> Any:
    del x, inplace
    if not training or p == 0:
        return NotImplemented
    raise ExportError(
        f"{what} that draws its own numbers cannot be exported: a graph takes them as an input; use nn.Dropout and"
        " `shoal export --convert` (in a builder `convert` of models.zoo.conversion), or Dropout of models.zoo.dropout"
    )


def _take_along_dim(x: Tensor, index: Tensor, dim: int | None = None) -> Any:
    same = (
        dim is not None
        and x.dim() == index.dim()
        and all(x.shape[i] == index.shape[i] for i in range(x.dim()) if i != dim % x.dim())
    )
    return x.gather(dim, index) if dim is not None and same else NotImplemented


def _alpha_dropout(x: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:
    return _dropout(x, p, training, inplace, what="alpha dropout")


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
