"""Layers whose behaviour depends on the purpose of a graph: static batch norm and Scaler.

Diao, Ding, Tarokh: "HeteroFL: Computation and communication efficient federated learning for
heterogeneous clients", ICLR 2021. A static batch norm keeps no running averages while it trains,
because averages of unequal sub-models cannot be merged; devices measure its statistics after
training. A Scaler compensates for the missing units of a narrower model.

Each such layer has a `mode`, set for a whole model by `set_mode`; PyTorch's own `train()` and
`eval()` select the first and the last:

    ============  =============================  ==========================
    mode          StaticBatchNorm                Scaler
    ============  =============================  ==========================
    train         statistics of the batch        divides by the width share
    statistics    the same, and keeps them       identity
    fused         the same, in one step          identity
    eval          statistics in its buffers      identity
    ============  =============================  ==========================

A proof compares runs of one model, which take less time in the mode ``fused``; no graph has it.
"""

from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Self, override

from fleet_protocol.errors import ConfigError
from models.own_class import SPECTRAL_STEPS

Mode = Literal["train", "statistics", "fused", "eval"]
Norm = Literal["sbn", "none", "instance", "layer", "group"]
_MODES = ("train", "statistics", "fused", "eval")
_GROUPS = 4  # of a `GroupNorm`, as in table 4 of HeteroFL

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class _LayerWithMode(nn.Module):
    """A layer with a mode, which follows PyTorch's training flag until it is set."""

    mode: Mode

    @override
    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.mode = "train" if mode else "eval"
        return self


class StaticBatchNorm(_LayerWithMode):
    """Batch normalisation without running averages, written out by hand.

    `torch.nn.functional.batch_norm` is avoided, since exporters silently turn it into inference
    mode.

    Attributes:
        mode: see the table of this module.
        eps: added to the variance.
        weight: scale, float32 [channels].
        bias: shift, float32 [channels].
        running_mean: mean used in mode eval, float32 [channels].
        running_var: unbiased variance used in mode eval, float32 [channels].
        last_mean: mean of the last batch in mode statistics.
        last_var: unbiased variance of the last batch in mode statistics.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        """Make the layer with scale 1 and shift 0."""
        super().__init__()
        self.mode: Mode = "train"
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.last_mean: Tensor | None = None
        self.last_var: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that PyTorch's has
        """Normalise each channel, float32 [batch, channels, ...], and scale and shift it."""
        return self.normalise(input)

    def normalise(self, x: Tensor) -> Tensor:
        """Compute what `forward` returns; a subclass with another forward calls it, too."""
        shape = (1, -1) + (1,) * (x.dim() - 2)
        if self.mode == "eval":
            scale = self.weight * torch.rsqrt(self.running_var + self.eps)
            centred = x - self.running_mean.view(shape)
            return centred * scale.view(shape) + self.bias.view(shape)
        if self.mode == "fused":
            # Below torch.nn.functional, which refuses a batch with one value for each channel.
            return torch.batch_norm(
                x, self.weight, self.bias, None, None, True, 0.0, self.eps, False
            )
        dims = [0, *range(2, x.dim())]
        mean = x.mean(dims, keepdim=True)
        centred = x - mean
        squares = centred * centred
        variance = squares.mean(dims, keepdim=True)
        if self.mode == "statistics":
            # Only the kept variance is unbiased; as in PyTorch, a batch is normalised by the biased
            # one.
            count = x.numel() // x.shape[1]
            self.last_mean = mean.flatten()
            self.last_var = squares.sum(dims) / (count - 1)
        scale = self.weight.view(shape) * torch.rsqrt(variance + self.eps)
        return centred * scale + self.bias.view(shape)


class SampleNorm(nn.Module):
    """Normalises every sample separately, written out like `StaticBatchNorm`.

    Attributes:
        over_channels: whether all channels are normalised together (layer norm) or each separately
            (instance norm).
        eps: added to the variance.
        weight: scale, float32 [channels].
        bias: shift, float32 [channels].
    """

    def __init__(self, channels: int, *, over_channels: bool, eps: float = 1e-5) -> None:
        """Make the layer with scale 1 and shift 0."""
        super().__init__()
        self.over_channels = over_channels
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, float32 [batch, channels, ...], and scale and shift each channel."""
        shape = (1, -1) + (1,) * (x.dim() - 2)
        dims = list(range(1 if self.over_channels else 2, x.dim()))
        centred = x - x.mean(dims, keepdim=True)
        variance = (centred * centred).mean(dims, keepdim=True)
        scale = self.weight.view(shape) * torch.rsqrt(variance + self.eps)
        return centred * scale + self.bias.view(shape)


class GroupNorm(nn.Module):
    """Normalises every sample in four groups of its channels, written out like `SampleNorm`.

    A narrower model has four narrower groups, as in HeteroFL's released code, so its channels are
    in other groups than those of the whole model. A layer with fewer channels has one for each.

    Attributes:
        groups: number of groups.
        eps: added to the variance.
        weight: scale, float32 [channels].
        bias: shift, float32 [channels].
    """

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        """Make the layer with scale 1 and shift 0.

        Raises:
            ConfigError: the channels cannot be split evenly.
        """
        super().__init__()
        self.groups = min(_GROUPS, channels)
        if channels % self.groups:
            raise ConfigError(
                f"{channels} channels cannot be split into {self.groups} equal groups; choose a"
                f" multiple of {_GROUPS}, or another norm"
            )
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, float32 [batch, channels, ...], and scale and shift each channel."""
        grouped = x.reshape(x.shape[0], self.groups, -1)
        centred = grouped - grouped.mean(2, keepdim=True)
        variance = (centred * centred).mean(2, keepdim=True)
        normal = (centred * torch.rsqrt(variance + self.eps)).reshape(x.shape)
        shape = (1, -1) + (1,) * (x.dim() - 2)
        return normal * self.weight.view(shape) + self.bias.view(shape)


class SpectralNorm(nn.Module):
    """Divides a weight by its largest singular value, as a parametrization.

    PyTorch's own continues from stored vectors with a place for each unit, which are not
    parameters; here the vectors are computed from the norms of the rows each time. Miyato et al.:
    "Spectral normalization for generative adversarial networks", 2018.
    """

    def __init__(self, dim: int = 0) -> None:
        """Make the layer for weights with their outputs in a dimension."""
        super().__init__()
        self.dim = dim

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight, of any shape, divided."""
        rows = weight.movedim(self.dim, 0).flatten(1)
        # Gradients flow only through the last products, not through the iteration.
        fixed = rows.detach()
        left = fixed.square().sum(1).sqrt()
        for _ in range(SPECTRAL_STEPS):
            right = functional.normalize(fixed.t() @ left, dim=0)
            left = functional.normalize(fixed @ right, dim=0)
        return weight / (left @ (rows @ right))


class Scaler(_LayerWithMode):
    """Divides by the width share, in (0, 1], in training.

    So the inputs of the next layer have the same scale in narrow and wide models.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.mode: Mode = "train"
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Return x / rate in training, x otherwise; any shape."""
        # A full-width model has no such operation in its graph at all.
        return x / self.rate if self.mode == "train" and self.rate != 1.0 else x


@dataclass(frozen=True)
class NormStyle:
    """The norm of a network's layers, and the divisor of the Scalers before them."""

    # ``sbn`` for static batch norm, a `SampleNorm`, ``group`` for a `GroupNorm`, ``none`` for none
    norm: Norm
    rate: float  # width share for the Scalers; 1 for none

    @property
    def is_grouped(self) -> bool:
        """Return whether channels have places in groups, so that only leading ones may be kept."""
        return self.norm == "group"

    def layer(self, channels: int) -> nn.Module:
        """Make a norm for a number of channels."""
        if self.norm == "group":
            return GroupNorm(channels)
        if self.norm == "sbn":
            return StaticBatchNorm(channels)
        if self.norm == "none":
            return nn.Identity()
        return SampleNorm(channels, over_channels=self.norm == "layer")


def set_mode(module: ModuleT, mode: Mode) -> ModuleT:
    """Set the mode of every layer of a model in place, and torch's own training flag with it.

    Returns:
        The model.

    Raises:
        ConfigError: the mode is unknown.
    """
    if mode not in _MODES:
        raise ConfigError(f"unknown mode {mode!r}; choose one of {', '.join(_MODES)}")
    module.train(mode == "train")
    for layer in module.modules():
        if isinstance(layer, (StaticBatchNorm, Scaler)):
            layer.mode = mode
    return module


def zero_linear_biases(module: nn.Module) -> None:
    """Start the biases of all linear layers at zero, as HeteroFL does.

    All other parameters keep torch's initialisation.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
