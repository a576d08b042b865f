"""Low-rank adapters for the linear layers of a frozen model; a width cuts their rank.

Hu et al.: "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022,
https://arxiv.org/abs/2106.09685: a layer computes ``W x + s * up (down x)`` with W frozen. Tiers of
unequal width train unequal ranks of one adapter, as in Cho et al. (EMNLP 2024). A unit of the rank
is a column of ``up`` and a row of ``down``, and must mean the same in every tier, so s is alpha /
rank of the WHOLE adapter in every tier: with alpha / rank of the tier, the same units would have a
    larger weight in a narrow tier than in a wide one, and neither entries nor products could be
    merged.
"""

import itertools
import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fleet_protocol.errors import ConfigError
from models.cut import Cut


@dataclass(frozen=True)
class Adapters:
    """The layers of a model that get adapters, and the kind of adapters.

    Attributes:
        rank: rank of the whole adapter; the axis ``adapter`` that a tier's width cuts.
        alpha: numerator of the scale.
        targets: patterns of paths of linear layers, such as ``blocks.*.query``; ``*`` also matches
            dots.
        trained: patterns of names of further parameters that train, such as ``head.*``; all others
            are frozen.

    Raises:
        ConfigError: the rank is below 1, or alpha is not positive.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    trained: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0:
            raise ConfigError(
                f"adapters of rank {self.rank} and alpha {self.alpha:g}: both must be positive"
            )

    @property
    def scale(self) -> float:
        """Return the factor of an adapter's output, the same in every tier."""
        return self.alpha / self.rank


class LoraLinear(nn.Linear):
    """A linear layer with an adapter.

    The layer's own parameters keep their names, so that stored weights fit. An adapter whose `up`
    is zero adds nothing, so the model starts unchanged.

    Attributes:
        down: float32 [rank, in_features], drawn at random.
        up: float32 [out_features, rank], zeros at first.
    """

    def __init__(self, linear: nn.Linear, rank: int, scale: float) -> None:
        """Take over the parameters of a layer."""
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias
        self.down = nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        self.up = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))
        self.scale = scale
        # The draw of PyTorch's linear layers, as in the authors' code.
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Compute float32 [..., out_features] from [..., in_features]."""
        return super().forward(x) + functional.linear(
            functional.linear(x, self.down) * self.scale, self.up
        )


class LoraConv1D(nn.Module):
    """A layer as transformers' `Conv1D`, whose weight is transposed, with an adapter.

    Attributes:
        weight: float32 [in_features, out_features].
        bias: float32 [out_features].
        nf: out_features.
        down: the factor `down`, as in `LoraLinear`.
        up: the factor `up`, as in `LoraLinear`.
    """

    def __init__(self, layer: Any, rank: int, scale: float) -> None:
        """Take over the parameters of a layer."""
        super().__init__()
        self.nf = layer.nf
        self.nx = layer.weight.shape[0]
        self.weight = layer.weight
        self.bias = layer.bias
        self.down = nn.Parameter(layer.weight.new_empty(rank, self.nx))
        self.up = nn.Parameter(layer.weight.new_zeros(self.nf, rank))
        self.scale = scale
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Compute float32 [..., out_features] from [..., in_features]."""
        return functional.linear(x, self.weight.t(), self.bias) + functional.linear(
            functional.linear(x, self.down) * self.scale, self.up
        )


def _is_conv1d(layer: nn.Module) -> bool:
    """Return whether a layer is transformers' `Conv1D`, recognised by its form."""
    if type(layer).__name__ != "Conv1D" or not hasattr(layer, "nf"):
        return False
    weight = getattr(layer, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[1] == layer.nf


def with_adapters(model: nn.Module, adapters: Adapters, cut: Cut) -> nn.Module:
    """Add adapters to layers of a model in place, freeze the rest, and return the model.

    Build the model with ``cut.whole()``, so that it is the same in every tier, and load its weights
    before or after.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> chosen = Adapters(rank=4, alpha=8, targets=("0",), trained=("2.*",))
        >>> adapted = with_adapters(model, chosen, Cut(0.5))
        >>> [name for name, p in adapted.named_parameters() if p.requires_grad]
        ['0.down', '0.up', '2.weight', '2.bias']
        >>> tuple(model[0].up.shape)
        (8, 2)

    Raises:
        ConfigError: a pattern matches nothing; the message lists the names.
    """
    rank = cut.width("adapter", adapters.rank)
    # PyTorch's fast path reads the weights of its encoders past these layers.
    torch.backends.mha.set_fastpath_enabled(False)
    # Not of a subclass: PyTorch's attention reads the weight of its own and never calls it, and
    # others have a forward that would be lost.
    layers: dict[str, nn.Module] = {}
    for path, layer in model.named_modules():
        if type(layer) is nn.Linear or _is_conv1d(layer):
            layers[path] = layer
    names = [name for name, _ in model.named_parameters()]
    targets = _match(adapters.targets, list(layers))
    trained = _match(adapters.trained, names)
    # A model that is built without its blocks, while a layout is inferred, lacks their layers.
    if not cut.is_bare:
        _require_matches("linear layer", targets, list(layers))
        _require_matches("parameter", trained, names)
    trained_names = set(itertools.chain(*trained.values()))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained_names)
    # A layer that several patterns name gets one adapter. The order is that of the patterns, and
    # decides which random numbers an adapter starts with.
    for path in dict.fromkeys(itertools.chain(*targets.values())):
        layer = layers[path]
        if isinstance(layer, nn.Linear):
            model.set_submodule(path, LoraLinear(layer, rank, adapters.scale))
        else:
            model.set_submodule(path, LoraConv1D(layer, rank, adapters.scale))
    return model


def _match(patterns: tuple[str, ...], names: list[str]) -> dict[str, list[str]]:
    """Return the names that match, by pattern."""
    matches: dict[str, list[str]] = {}
    for pattern in patterns:
        matches[pattern] = []
        for name in names:
            if fnmatchcase(name, pattern):
                matches[pattern].append(name)
    return matches


def _require_matches(kind: str, matches: dict[str, list[str]], names: list[str]) -> None:
    for pattern, matched in matches.items():
        if not matched:
            raise ConfigError(
                f"adapters: no {kind} matches {pattern!r}; choose from {', '.join(names[:40])}"
            )
