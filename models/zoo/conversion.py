"""Replaces layers that cannot be exported by their counterparts, and lists them.

Batch norm becomes static batch norm (Diao, Ding, Tarokh: "HeteroFL", ICLR 2021), dropout takes its
random numbers from outside, fused attention and recurrent layers with dropout inside become
separate steps, and activations write a new tensor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.utils.weight_norm import WeightNorm

from fleet_protocol.errors import ModelError
from models.conversion_switch import unconverted_classes
from models.zoo.dropout import ChannelDropout, Dropout, SampleDropout
from models.zoo.layers import SpectralNorm, StaticBatchNorm
from models.zoo.origin import Origin, OriginalModule
from models.zoo.own_forward_norm import OwnForwardNorm, keep_forward
from models.zoo.unfused_layers import Attention, RecurrentStack

_PLAIN = (bool, int, float, str, tuple, type(None), torch.dtype)
"""Types of the attributes that a counterpart takes over."""

ORIGIN = "_shoal_origin"
"""Attribute of a converted model: how the state of the original follows from it."""


@dataclass(frozen=True)
class Replacement:
    """One layer that was replaced."""

    path: str
    old: str
    new: str


def convert(
    module: nn.Module, *, records_origin: bool = True
) -> tuple[nn.Module, tuple[Replacement, ...]]:
    """Replace layers that cannot be exported, in place unless the module itself is one.

    Weights and statistics are kept; those of attention and recurrent layers get other names.

    Args:
        module: the module.
        records_origin: whether the result stores how to derive the state of the original module,
            for `origin_of`; that takes as long as the conversion.

    Returns:
        The converted module, and the replacements.

    Raises:
        ConfigError: a layer has settings that its counterpart lacks.
    """
    classes = unconverted_classes()
    if classes is not None:
        classes.append(type(module).__name__)
        return module, ()
    original = OriginalModule.record(module) if records_origin else None
    conversion = _Conversion()
    converted_module = conversion.convert_layer(module, "")
    if original is None:
        return converted_module, tuple(conversion.replacements)
    # A module that was converted before keeps its origin, which is the class as written.
    if conversion.replacements and ORIGIN not in vars(converted_module):
        origin = original.describe(lambda _, layer: conversion.has_replaced(layer))
        vars(converted_module)[ORIGIN] = origin
    return converted_module, tuple(conversion.replacements)


def origin_of(module: nn.Module) -> Origin | None:
    """Return how to derive the state of the original module from a converted one.

    None if nothing was converted.
    """
    origin: Origin | None = vars(module).get(ORIGIN)
    return origin


def is_replaced(layer: nn.Module) -> bool:
    """Return whether a conversion replaces a layer; raises the errors of `convert`."""
    return _counterpart_of(layer) is not None


# ------------------------------------------------------------------------------ counterparts


class _Counterpart(NamedTuple):
    """The replacement of a layer, and its description."""

    layer: nn.Module
    meaning: str


def _static_batch_norm(layer: Any) -> nn.Module:
    """Create a static batch norm that shares the tensors of a batch norm."""
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        raise ModelError("a lazy batch norm cannot be converted; give its number of channels")
    norm = StaticBatchNorm(layer.num_features, layer.eps)
    if layer.affine:
        norm.weight = layer.weight
        norm.bias = layer.bias
    else:
        # The scale stays 1 and the shift 0, because the norm had neither.
        norm.requires_grad_(requires_grad=False)
    if layer.running_mean is not None:
        norm.running_mean = layer.running_mean
        norm.running_var = layer.running_var
    return norm if _base_with_forward(layer) is None else keep_forward(layer, norm)


def _dropout(layer: Any) -> nn.Module:
    return Dropout(layer.p)


def _channel_dropout(layer: Any) -> nn.Module:
    return ChannelDropout(layer.p)


def _spectral_norm(layer: Any) -> nn.Module:
    return SpectralNorm(layer.dim)


def _recurrent_stack(layer: Any) -> nn.Module | None:
    return RecurrentStack(layer) if layer.dropout and layer.num_layers > 1 else None


class _Rule(NamedTuple):
    """The replacements by type of layer; a function returns None to keep a layer."""

    make: Callable[[Any], nn.Module | None]
    meaning: str
    keeps_forward: bool = False  # whether what is made has the forward of a user's subclass


_CHANNEL_DROPOUT = _Rule(
    _channel_dropout, "ChannelDropout: its random numbers are an input of the graph"
)

_RULES: Mapping[type[nn.Module], _Rule] = MappingProxyType(
    {
        # of one to three dimensions, and the one over devices
        nn.modules.batchnorm._BatchNorm: _Rule(  # noqa: SLF001 - no public name
            _static_batch_norm,
            "StaticBatchNorm: statistics of the batch; asked from devices after a round",
            keeps_forward=True,
        ),
        nn.Dropout: _Rule(_dropout, "Dropout: its random numbers are an input of the graph"),
        nn.Dropout1d: _CHANNEL_DROPOUT,
        nn.Dropout2d: _CHANNEL_DROPOUT,
        nn.Dropout3d: _CHANNEL_DROPOUT,
        nn.MultiheadAttention: _Rule(
            Attention, "Attention: separate projections for queries, keys and values"
        ),
        nn.utils.parametrizations._SpectralNorm: _Rule(  # noqa: SLF001 - no public name
            _spectral_norm, "SpectralNorm: its vectors are recomputed each time"
        ),
        nn.RNNBase: _Rule(
            _recurrent_stack, "RecurrentStack: separate layers, with Dropout between them"
        ),
    }
)


def _counterpart_of(layer: nn.Module) -> _Counterpart | None:
    """Create the replacement of a layer; None if it needs none."""
    sample_dropout = _sample_dropout(layer)
    if sample_dropout is not None:
        meaning = "SampleDropout: its random numbers are an input of the graph"
        return _Counterpart(_with_attributes_of(layer, sample_dropout), meaning)
    for kind, rule in _RULES.items():
        if isinstance(layer, kind) and not isinstance(layer, StaticBatchNorm):
            base = _base_with_forward(layer)
            if base is not None and not rule.keeps_forward:
                name = rule.meaning.partition(":")[0]
                raise ModelError(
                    f"{type(layer).__name__} has its own forward, which {name} would drop;"
                    f" hold the {base.__name__} in a module beside it"
                )
            counterpart = rule.make(layer)
            if counterpart is None:
                return None
            return _Counterpart(_with_attributes_of(layer, counterpart), rule.meaning)
    return None


def _with_attributes_of(layer: nn.Module, counterpart: nn.Module) -> nn.Module:
    """Give a counterpart the attributes of a layer that it does not have, and return it.

    Models read them: the rate of a dropout layer, or the number of features of a norm.
    """
    for name, value in vars(layer).items():
        if isinstance(value, _PLAIN) and not hasattr(counterpart, name):
            setattr(counterpart, name, value)
    return counterpart


def _sample_dropout(layer: Any) -> nn.Module | None:
    """Replace stochastic depth, recognised by its name because PyTorch has no class for it.

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


def _base_with_forward(layer: nn.Module) -> type | None:
    """Return the PyTorch class whose forward a subclass has changed; None if there is none."""
    bases = (base for base in type(layer).__mro__ if base.__module__.startswith("torch."))
    base = next(bases)
    is_changed = getattr(type(layer), "forward", None) is not getattr(base, "forward", None)
    return base if is_changed else None


# ------------------------------------------------------------------------ the walk over a module


class _Conversion:
    """Converts the layers of one module; converts a layer with several uses once."""

    def __init__(self) -> None:
        self.replacements: list[Replacement] = []
        self._converted: dict[int, nn.Module] = {}  # by the id of the original

    def has_replaced(self, layer: nn.Module) -> bool:
        """Return whether a layer of the original has a counterpart instead."""
        return self._converted.get(id(layer), layer) is not layer

    def convert_layer(self, layer: nn.Module, path: str) -> nn.Module:
        """Convert a layer and its sublayers; return the replacement."""
        if id(layer) in self._converted:
            return self._converted[id(layer)]
        counterpart = _counterpart_of(layer)
        if counterpart is not None:
            self._note(path, type(layer).__name__, counterpart.meaning)
            counterpart.layer.train(layer.training)
            self._converted[id(layer)] = counterpart.layer
            if isinstance(counterpart.layer, OwnForwardNorm):
                self._convert_children(counterpart.layer, path)
            return counterpart.layer
        self._converted[id(layer)] = layer
        self._change_in_place(layer, path)
        self._convert_children(layer, path)
        return layer

    def _convert_children(self, layer: nn.Module, path: str) -> None:
        # named_children would leave out the second name of a layer.
        for name, child in list(layer._modules.items()):  # noqa: SLF001
            if child is not None:
                below = f"{path}.{name}" if path else name
                setattr(layer, name, self.convert_layer(child, below))

    def _change_in_place(self, layer: nn.Module, path: str) -> None:
        if _renew_weight_norms(layer):
            self._note(path, "weight_norm", "weight_norm of torch.nn.utils.parametrizations")
        if getattr(layer, "inplace", False) is True:
            cast("Any", layer).inplace = False
            old = f"{type(layer).__name__}(inplace=True)"
            self._note(path, old, "the same with a separate result")
        if isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False  # its shortcut works only with PyTorch's attention
        if isinstance(layer, (nn.TransformerEncoder, nn.TransformerDecoder)):
            layer.register_forward_pre_hook(_with_explicit_mask, with_kwargs=True)

    def _note(self, path: str, old: str, new: str) -> None:
        self.replacements.append(Replacement(path, old, new))


def _with_explicit_mask(
    layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Declare that a mask may have any content.

    A stack that checks whether its mask is causal reads the mask's values, which a trace does not
    have.
    """
    name = "is_causal" if isinstance(layer, nn.TransformerEncoder) else "tgt_is_causal"
    return args, {**kwargs, name: kwargs.get(name) or False}


def _renew_weight_norms(layer: nn.Module) -> bool:
    """Replace PyTorch's older weight norms, which cannot be copied, by the newer ones.

    Returns:
        Whether any was replaced.
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
