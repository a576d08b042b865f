"""Cut a model inside its layers, where no argument of its constructor is a width.

Many packages fix the sizes of a network in their code, or round them, as in MobileNet and ResNet.
So a model gets further arguments, one for each of `PARTS`. While the constructor runs, every layer
gets this number of eighths, or of quarters, of the size that it asks for; the inputs of a layer
that takes the sample or a fixed table stay whole (`trainer_export.packages.first_layers`). Then a
tensor of another module, such as the scale of a residual, gets as many in each dimension that is as
large as a layer, and so do the sizes that a module notes for its forward, such as `head_dim` and
`in_channels`. Sizes that these parts do not divide stay whole, as do the labels. A wrong guess of
these is refused like any other axis: by the proof of layouts, and because narrow models must work.
"""

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import BoundArguments
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from trainer_export.packages.axis_forms import AxisForm, groups_form
from trainer_export.packages.first_layers import (
    SUMMING_LAYERS,
    FirstLayers,
    LayerCounter,
    find_first_layers,
)
from trainer_export.packages.layer_constructors import Place, make_model, watched_layers
from trainer_export.packages.package_model import PackageModel

LAYER_PARTS = "layer_parts"
"""The argument that is the size of all layers, in eighths."""

WHOLE = 8
"""The value of the argument for the whole model."""

PARTS: Mapping[str, int] = MappingProxyType({LAYER_PARTS: WHOLE, "layer_quarters": 4})
"""The arguments that are the size of all layers, with their values for the whole model.

The finest come first. Coarser ones cut sizes that eighths do not divide, such as 12.
"""

_SIZES: Mapping[type[nn.Module], tuple[str, ...]] = MappingProxyType(
    {
        nn.Linear: ("in_features", "out_features"),
        _ConvNd: ("in_channels", "out_channels", "groups"),
        _NormBase: ("num_features",),
        nn.LayerNorm: ("normalized_shape",),
        nn.RMSNorm: ("normalized_shape",),
        nn.GroupNorm: ("num_groups", "num_channels"),
        nn.Embedding: ("embedding_dim",),
        nn.PReLU: ("num_parameters",),
        nn.MultiheadAttention: ("embed_dim", "kdim", "vdim"),
        nn.RNNBase: ("input_size", "hidden_size", "proj_size"),
    }
)
"""The arguments of layers that are sizes; subclasses call the constructors of these classes."""

_LAYERS = tuple(_SIZES)

_LISTS = (nn.ParameterList, nn.ParameterDict)

_LEAST = 16
"""The smallest dimension of a tensor outside layers that is cut; others may count heads."""

_NOTED = re.compile(
    r"(^|_)([a-z]?dims?|channels?|chans|chs|c|features|planes|hidden|splits?|sections)($|_)"
)
"""Names of attributes that are sizes, or lists of them: `head_dim`, `channels`, `split_indices`."""

_BIAS = "bias"
"""Part of the name of a tensor; a table of these has one for each head, at each place."""

_SHAPE = "shape"
"""Name of an attribute that is the shape of a tensor."""

_GROUPS = "groups"
_INPUTS = ("in_features", "in_channels", "input_size")


def layer_parts_forms() -> list[AxisForm]:
    """Return the axes that cut all layers together, of which a model has at most one."""
    forms: list[AxisForm] = []
    for name, whole in PARTS.items():
        forms.append(groups_form({name: whole}, whole))
    return forms


def with_layer_parts(model: PackageModel) -> PackageModel:
    """Return a model that also takes the arguments of `PARTS`."""
    make = ScaledLayers(model)
    return replace(model, make=make, arguments={**model.arguments, **PARTS})


@dataclass(frozen=True)
class ScaledLayers:
    """Makes a model all of whose layers have a share of their sizes."""

    model: PackageModel

    @cached_property
    def first(self) -> FirstLayers:
        """The layers whose inputs stay whole."""
        return find_first_layers(self.model)

    def __call__(self, **arguments: Any) -> nn.Module:
        """Make the model with some eighths, or quarters, of the size of each layer."""
        scalings: list[_Scaling] = []
        for name, whole in PARTS.items():
            number = arguments.pop(name, whole)
            if number != whole:
                labels = arguments.get(self.model.labels)
                scalings.append(_Scaling(number, whole, labels, LayerCounter(self.first)))
        with ExitStack() as stack:
            for scaling in scalings:
                stack.enter_context(scaling.applied())
            module = make_model(self.model.make, arguments)
        for scaling in scalings:
            scaling.scale_tensors(module)
            scaling.scale_attributes(module)
        return module


@dataclass
class _Scaling:
    """Changes the sizes that constructors of layers are called with."""

    parts: int
    whole: int  # the number of all parts
    labels: int | None
    counter: LayerCounter
    sizes: set[int] = field(default_factory=set)  # that were cut so far
    tables: set[nn.Module] = field(default_factory=set)  # layers that take fixed tables
    tensors: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)  # with those cut

    def applied(self) -> AbstractContextManager[None]:
        """Return a context in which the layers that are made are scaled."""
        return watched_layers(_SIZES, self._scale_layer)

    def scale_tensors(self, model: nn.Module) -> None:
        """Scale the tensors beside the layers, once all sizes of layers are known."""
        own: set[nn.Parameter] = set()  # of layers, which compute their shapes from cut sizes
        for layer in model.modules():
            if isinstance(layer, _LAYERS):
                own.update(layer.parameters())
        for module in model.modules():
            # A parametrization of torch has a tensor of the layer that it belongs to.
            if _is_of_torch(module) and not isinstance(module, _LISTS):
                continue
            tensors = module.named_parameters(
                recurse=False,
                remove_duplicate=False,
            )
            for name, value in [*tensors]:
                if value in own or _stays_whole(name, value):
                    continue
                scaled = self._scale_tensor(value)
                setattr(module, name, scaled)

    def scale_attributes(self, model: nn.Module) -> None:
        """Scale the sizes that modules other than layers noted when they were made.

        Their `forward` splits what layers return by them: into heads, or into queries and keys.
        """
        for module in model.modules():
            # The sizes of a layer are those that it was made with.
            if isinstance(module, _LAYERS) or _is_of_torch(module):
                continue
            # Its forward makes a table of fixed size.
            if not self.tables.isdisjoint(module.children()):
                continue
            for name, value in vars(module).items():
                if _NOTED.search(name):
                    setattr(module, name, self._scale_noted(value))
                elif name == _SHAPE and isinstance(value, tuple):
                    setattr(module, name, tuple(map(self._scale_dimension, value)))

    def _scale_layer(self, layer: nn.Module, bound: BoundArguments, place: Place) -> None:
        """Change the sizes that a layer is made with."""
        arguments = bound.arguments
        has_fixed_inputs, is_table = self.counter.next_at(place)
        if is_table:
            self.tables.add(layer)
        groups = arguments.get(_GROUPS, 1)
        # Each group of a sample's channels, and each entry of a norm, belongs to fixed inputs.
        keeps_apart = groups > 1 or not isinstance(layer, SUMMING_LAYERS)
        if has_fixed_inputs and keeps_apart:
            return
        whole: list[str] = []
        if has_fixed_inputs:
            whole += _INPUTS
        if _has_groups_to_cut_inside(arguments, self.whole):
            whole.append(_GROUPS)
        for name in _sizes_of(layer):
            if name in arguments and name not in whole:
                arguments[name] = self._scale(arguments[name])

    def _scale_tensor(self, value: nn.Parameter) -> nn.Parameter:
        """Return a tensor with a share of each dimension that is as large as a layer."""
        # Several modules may have one tensor.
        if value in self.tensors:
            return self.tensors[value]
        scaled = value.detach()
        for position, size in enumerate(value.shape):
            length = self._scale_dimension(size)
            if length != size:
                # A larger model, too, has some entries: its proof draws others.
                entries = torch.arange(length, device=value.device) % size
                scaled = scaled.index_select(position, entries)
        changed = nn.Parameter(scaled.clone(), value.requires_grad)
        self.tensors |= {value: changed, changed: changed}
        return changed

    def _scale(self, size: Any) -> Any:
        """Return the share of a size."""
        if isinstance(size, (tuple, list)) and len(size) == 1:
            return [self._scale(size[0])]
        if not isinstance(size, int) or size == self.labels or size % self.whole:
            return size
        self.sizes.add(size)
        return self._share_of(size)

    def _scale_dimension(self, size: Any) -> Any:
        """Return the share of a dimension of a tensor, if it is as large as a layer."""
        is_cut = type(size) is int and size >= _LEAST and size in self.sizes
        return self._share_of(size) if is_cut else size

    def _scale_noted(self, value: Any) -> Any:
        """Return the share of a size that a module noted, or of each in a list."""
        if type(value) in {tuple, list}:
            return type(value)(map(self._scale_noted, value))
        is_size = type(value) is int and value != self.labels
        return self._share_of(value) if is_size else value

    def _share_of(self, size: int) -> int:
        """Return the share of a size; the size if the parts do not divide it."""
        return size if size % self.whole else size // self.whole * self.parts


def _sizes_of(layer: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of a layer that are sizes."""
    return next(names for kind, names in _SIZES.items() if isinstance(layer, kind))


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _stays_whole(name: str, value: nn.Parameter) -> bool:
    """Return whether a tensor beside the layers has no dimension to cut."""
    if nn.parameter.is_lazy(value):
        return True
    return _BIAS in name and value.dim() > 1


def _has_groups_to_cut_inside(arguments: Mapping[str, Any], parts: int) -> bool:
    """Return whether a convolution has groups whose channels can be cut, so that all groups stay.

    Other grouped convolutions, such as depthwise ones, keep some of their groups as a whole.

    Args:
        arguments: those of the convolution.
        parts: the number of parts that channels are cut into.
    """
    groups = arguments.get(_GROUPS, 1)
    if groups == 1:
        return False
    channels: int = arguments["in_channels"] // groups
    return channels % parts == 0
