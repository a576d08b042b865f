"""Replace layers of a module that cannot be exported by their counterparts here, and say which.

Batch norm becomes static batch norm (Diao, Ding, Tarokh: "HeteroFL", ICLR 2021), dropout takes its
random numbers from outside, fused attention and recurrent layers with dropout inside become
separate steps, and activations write a new tensor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.utils.weight_norm import WeightNorm

from fleet_protocol.errors import ConfigError
from models.architecture import Architecture, call_builder, needs_values
from models.conversion_switch import unconverted_classes
from models.cut import Cut
from models.zoo.dropout import ChannelDropout, Dropout, SampleDropout
from models.zoo.layers import SpectralNorm, StaticBatchNorm
from models.zoo.origin import Origin, OriginalModule
from models.zoo.unfused_layers import Attention, RecurrentStack

_ORIGIN = "_shoal_origin"
"""Attribute of a converted model: how the state of the original follows from it."""


@dataclass(frozen=True)
class Replacement:
    """One layer that was replaced."""

    path: str
    old: str
    new: str


def convert(module: nn.Module) -> tuple[nn.Module, tuple[Replacement, ...]]:
    """Replace what cannot be exported, in place unless the module itself is such a layer.

    Weights and statistics are kept; those of attention and of recurrent layers get other names. The
    result also stores how the state of the original module follows from it, for `origin_of`.

    Returns:
        The converted module, and what was replaced.

    Raises:
        ConfigError: if a layer has settings that its counterpart lacks.
    """
    classes = unconverted_classes()
    if classes is not None:
        classes.append(type(module).__name__)
        return module, ()
    original = OriginalModule.record(module)
    conversion = _Conversion()
    converted_module = conversion.convert_layer(module, "")
    # A module that was converted before keeps that origin: it is that of the class as written.
    if conversion.replacements and _ORIGIN not in vars(converted_module):
        origin = original.describe(lambda _, layer: conversion.has_replaced(layer))
        vars(converted_module)[_ORIGIN] = origin
    return converted_module, tuple(conversion.replacements)


def converted(arch: Architecture) -> Architecture:
    """Return an architecture whose models are converted as they are built."""

    def build(cut: Any, **settings: Any) -> nn.Module:
        return convert(arch.build(cut, **settings))[0]

    cast("Any", build).__wrapped__ = arch.build
    return replace(arch, build=build)


def replacements(
    arch: Architecture, settings: Mapping[str, Any] | None = None
) -> tuple[Replacement, ...]:
    """Return what `converted` replaces in an architecture's global model.

    Raises:
        ConfigError: as `convert`, and if the builder fails.
    """
    try:
        with torch.device("meta"):
            return convert(call_builder(arch, Cut(), settings))[1]
    except ConfigError as error:
        if not needs_values(error):
            raise
    with torch.random.fork_rng(devices=[]):
        return convert(call_builder(arch, Cut(), settings))[1]


def convert_where_needed(
    arch: Architecture, settings: Mapping[str, Any] | None = None
) -> tuple[Architecture, tuple[Replacement, ...]]:
    """Return an architecture whose models can be exported, and what was replaced in them.

    An architecture of which nothing must be replaced stays the same object, so that its artifact
    sets stay the same, too.

    Raises:
        ConfigError: as `replacements`.
    """
    found = replacements(arch, settings)
    return (converted(arch), found) if found else (arch, ())


def origin_of(module: nn.Module) -> Origin | None:
    """Return how the state of the original module follows from a converted one.

    None if nothing was converted.
    """
    origin: Origin | None = vars(module).get(_ORIGIN)
    return origin


def is_replaced(layer: nn.Module) -> bool:
    """Return whether a conversion replaces a layer; errors are those of `convert`."""
    return _counterpart_of(layer) is not None


# ------------------------------------------------------------------------------ counterparts


class _Counterpart(NamedTuple):
    """What replaces a layer, and what that means for people."""

    layer: nn.Module
    meaning: str


def _static_batch_norm(layer: Any) -> nn.Module:
    """Make a static batch norm that has the tensors of a batch norm, not copies of them."""
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        raise ConfigError("a lazy batch norm cannot be converted; name its number of channels")
    norm = StaticBatchNorm(layer.num_features, layer.eps)
    if layer.affine:
        norm.weight = layer.weight
        norm.bias = layer.bias
    else:
        # The scale stays 1 and the shift 0, as of the norm that had neither.
        norm.requires_grad_(requires_grad=False)
    if layer.running_mean is not None:
        norm.running_mean = layer.running_mean
        norm.running_var = layer.running_var
    return norm


def _dropout(layer: Any) -> nn.Module:
    return Dropout(layer.p)


def _channel_dropout(layer: Any) -> nn.Module:
    return ChannelDropout(layer.p)


def _spectral_norm(layer: Any) -> nn.Module:
    return SpectralNorm(layer.dim)


def _recurrent_stack(layer: Any) -> nn.Module | None:
    return RecurrentStack(layer) if layer.dropout and layer.num_layers > 1 else None


class _Rule(NamedTuple):
    """How layers of a type are replaced: None leaves a layer as it is."""

    make: Callable[[Any], nn.Module | None]
    meaning: str


_CHANNEL_DROPOUT = _Rule(
    _channel_dropout, "ChannelDropout: its random numbers are an input of the graph"
)

_RULES: Mapping[type[nn.Module], _Rule] = MappingProxyType(
    {
        # of one to three dimensions, and the one over devices
        nn.modules.batchnorm._BatchNorm: _Rule(  # noqa: SLF001 - no public name
            _static_batch_norm,
            "StaticBatchNorm: statistics of the batch; asked from devices after a round",
        ),
        nn.Dropout: _Rule(_dropout, "Dropout: its random numbers are an input of the graph"),
        nn.Dropout1d: _CHANNEL_DROPOUT,
        nn.Dropout2d: _CHANNEL_DROPOUT,
        nn.Dropout3d: _CHANNEL_DROPOUT,
        nn.MultiheadAttention: _Rule(
            Attention, "Attention: a projection each for queries, keys and values"
        ),
        nn.utils.parametrizations._SpectralNorm: _Rule(  # noqa: SLF001 - no public name
            _spectral_norm, "SpectralNorm: its vectors are found anew each time"
        ),
        nn.RNNBase: _Rule(
            _recurrent_stack, "RecurrentStack: a layer each, with Dropout between them"
        ),
    }
)


def _counterpart_of(layer: nn.Module) -> _Counterpart | None:
    """Make what replaces a layer; None if nothing does."""
    sample_dropout = _sample_dropout(layer)
    if sample_dropout is not None:
        meaning = "SampleDropout: its random numbers are an input of the graph"
        return _Counterpart(sample_dropout, meaning)
    for kind, rule in _RULES.items():
        if isinstance(layer, kind):
            _refuse_changed_forward(layer, rule)
            counterpart = rule.make(layer)
            return None if counterpart is None else _Counterpart(counterpart, rule.meaning)
    return None


def _sample_dropout(layer: Any) -> nn.Module | None:
    """Replace stochastic depth, which is recognised by its name, as PyTorch has no class for it.

    timm, torchvision and many models have classes of this name.
    """
    if not type(layer).__name__.endswith(("DropPath", "StochasticDepth")):
        return None
    if getattr(layer, "mode", "row") != "row" or not getattr(layer, "scale_by_keep", True):
        return None
    if [*layer.children(), *layer.parameters()]:
        return None
    for name in ("drop_prob", "drop_rate", "p"):
        if hasattr(layer, name):
            rate = getattr(layer, name)
            return SampleDropout(rate) if isinstance(rate, float) else None
    return None


def _refuse_changed_forward(layer: nn.Module, rule: _Rule) -> None:
    """Refuse a layer of a user's subclass whose forward its counterpart would not have."""
    bases = (base for base in type(layer).__mro__ if base.__module__.startswith("torch."))
    base = next(bases)
    if getattr(type(layer), "forward", None) is not getattr(base, "forward", None):
        name = rule.meaning.partition(":")[0]
        raise ConfigError(
            f"{type(layer).__name__} has a forward of its own, which {name} would drop; hold the "
            f"{base.__name__} in a module beside it"
        )


# ------------------------------------------------------------------------ the walk over a module


class _Conversion:
    """Converts the layers of one module; one that is used in several places only once."""

    def __init__(self) -> None:
        self.replacements: list[Replacement] = []
        self._converted: dict[int, nn.Module] = {}  # by the id of the original

    def has_replaced(self, layer: nn.Module) -> bool:
        """Return whether a layer of the original has a counterpart instead."""
        return self._converted.get(id(layer), layer) is not layer

    def convert_layer(self, layer: nn.Module, path: str) -> nn.Module:
        """Convert a layer and all below it; return what belongs in its place."""
        if id(layer) in self._converted:
            return self._converted[id(layer)]
        counterpart = _counterpart_of(layer)
        if counterpart is not None:
            self._note(path, type(layer).__name__, counterpart.meaning)
            counterpart.layer.train(layer.training)
            self._converted[id(layer)] = counterpart.layer
            return counterpart.layer
        self._converted[id(layer)] = layer
        self._change_in_place(layer, path)
        # named_children would leave out the second name of a layer.
        for name, child in list(layer._modules.items()):  # noqa: SLF001
            if child is not None:
                below = f"{path}.{name}" if path else name
                setattr(layer, name, self.convert_layer(child, below))
        return layer

    def _change_in_place(self, layer: nn.Module, path: str) -> None:
        if _renew_weight_norms(layer):
            self._note(path, "weight_norm", "weight_norm of torch.nn.utils.parametrizations")
        if getattr(layer, "inplace", False) is True:
            cast("Any", layer).inplace = False
            old = f"{type(layer).__name__}(inplace=True)"
            self._note(path, old, "the same with a result of its own")
        if isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False  # its shortcut works with PyTorch's own attention only
        if isinstance(layer, (nn.TransformerEncoder, nn.TransformerDecoder)):
            layer.register_forward_pre_hook(_with_explicit_mask, with_kwargs=True)

    def _note(self, path: str, old: str, new: str) -> None:
        self.replacements.append(Replacement(path, old, new))


def _with_explicit_mask(
    layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Declare that a mask may have any content.

    A stack that must find out whether its mask is causal reads the mask's values, and a trace has
    none.
    """
    name = "is_causal" if isinstance(layer, nn.TransformerEncoder) else "tgt_is_causal"
    return args, {**kwargs, name: kwargs.get(name) or False}


def _renew_weight_norms(layer: nn.Module) -> bool:
    """Replace PyTorch's older weight norms, whose result no copy can have, by the newer ones.

    Returns:
        Whether there were any.
    """
    # A copy of the hooks: removing a weight norm removes its hook.
    hooks = list(layer._forward_pre_hooks.values())  # noqa: SLF001 - no public name
    was_renewed = False
    for hook in hooks:
        if isinstance(hook, WeightNorm):
            nn.utils.remove_weight_norm(layer, hook.name)
            nn.utils.parametrizations.weight_norm(layer, hook.name, hook.dim)
            was_renewed = True
    return was_renewed
