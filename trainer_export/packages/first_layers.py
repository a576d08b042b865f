"""Find the layers of a model whose inputs no other layer computes.

The first layer takes a sample, and a later one may take a fixed table, such as the sines of
positions. No layer has units for their inputs, which stay whole in a narrow model. A norm or a
depthwise convolution keeps its inputs apart, so the layer behind it takes the same ones.

A run of the whole model shows these layers: their inputs depend on no parameter of another layer.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from inspect import BoundArguments
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils.hooks import RemovableHandle

from models.zoo.builds import SkippedInitialization
from models.zoo.package_call import adapt_call
from trainer_export.packages.layer_constructors import Place, make_model, watched_layers
from trainer_export.packages.package_model import PackageModel
from trainer_export.packages.sizes import with_sizes

SUMMING_LAYERS = (nn.Linear, _ConvNd, nn.RNNBase)
"""Layers whose units are sums over their inputs."""

NORMS = (_NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
"""Layers with as many units as inputs."""

_SAMPLES = 2

Known = Mapping[Place, list[bool]]
"""For each layer of a place, in the order in which they are made, whether it is of a kind."""


@dataclass(frozen=True)
class FirstLayers:
    """The layers whose inputs stay whole.

    Attributes:
        fixed: whether the inputs come from no other layer.
        tables: whether they do not come from the sample either.
    """

    fixed: Known = field(default_factory=dict)
    tables: Known = field(default_factory=dict)


@dataclass
class LayerCounter:
    """Says of each layer that a constructor makes whether it is a first one."""

    first: FirstLayers
    made: dict[Place, int] = field(default_factory=dict)

    def next_at(self, place: Place) -> tuple[bool, bool]:
        """Return whether the next layer of a place has fixed inputs, and whether of a table."""
        number = self.made.get(place, 0)
        self.made[place] = number + 1
        has_fixed_inputs = _entry(self.first.fixed, place, number)
        is_table = _entry(self.first.tables, place, number)
        return has_fixed_inputs, is_table


def _entry(known: Known, place: Place, number: int) -> bool:
    entries = known.get(place)
    if not entries:
        return False
    # A deeper model has more of the last kind.
    last = len(entries) - 1
    return entries[min(number, last)]


def find_first_layers(model: PackageModel) -> FirstLayers:
    """Run a whole model for its first layers; there are none if it does not run."""
    for device in ("meta", "cpu"):
        made: list[tuple[Place, nn.Module]] = []

        def note(
            layer: nn.Module,
            _arguments: BoundArguments,
            place: Place,
            made: list[tuple[Place, nn.Module]] = made,
        ) -> None:
            made.append((place, layer))

        try:
            with _building(device), watched_layers((*SUMMING_LAYERS, *NORMS), note):
                arguments = with_sizes(model.arguments, {})
                own = make_model(model.make, arguments)
                module = adapt_call(own, model.call, model.output)
            fixed = _layers_with_fixed_inputs(module, model, device, traced=False)
            tables = _layers_with_fixed_inputs(module, model, device, traced=True)
            return FirstLayers(
                _by_place(made, fixed),
                _by_place(made, tables),
            )
        except Exception:  # noqa: BLE001, S112 - a package's model raises anything
            continue
    return FirstLayers()


@contextmanager
def _building(device: str) -> Iterator[None]:
    """Build models whose values do not matter on a device."""
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.device(device))
        stack.enter_context(SkippedInitialization())
        yield


def _layers_with_fixed_inputs(
    module: nn.Module, model: PackageModel, device: str, *, traced: bool
) -> set[nn.Module]:
    """Return the layers whose inputs depend on no parameter of another layer.

    Args:
        module: the whole model, made on the device.
        model: describes its samples.
        device: where it runs.
        traced: whether inputs that depend on the sample count as those of another layer, too.
    """
    _trace_mixing_layers(module)
    fixed: dict[nn.Module, bool] = {}

    def note(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        first = inputs[0] if inputs else None
        if not isinstance(first, Tensor):
            return
        if not first.is_floating_point():
            return
        # A layer may be called several times.
        so_far = fixed.get(layer, True)
        fixed[layer] = so_far and not first.requires_grad

    hooks: list[RemovableHandle] = []
    for layer in module.modules():
        hook = layer.register_forward_pre_hook(note)
        hooks.append(hook)
    sample = model.input_shape or ()
    shape = (_SAMPLES, *sample)
    try:
        with torch.random.fork_rng(devices=[]), torch.device(device), torch.enable_grad():
            if model.input_dtype == "int64":
                samples = torch.ones(shape, dtype=torch.int64)
            else:
                samples = torch.randn(shape, requires_grad=traced)
            module.eval()
            module(samples)
    finally:
        for hook in hooks:
            hook.remove()
    chosen: set[nn.Module] = set()
    for layer, is_fixed in fixed.items():
        if is_fixed:
            chosen.add(layer)
    return chosen


def _trace_mixing_layers(module: nn.Module) -> None:
    """Let outputs of layers need a gradient, except of those that keep their inputs apart."""
    for layer in module.modules():
        keeps_apart = isinstance(layer, NORMS) or _is_depthwise(layer)
        for parameter in layer.parameters(recurse=False):
            is_number = parameter.is_floating_point()
            parameter.requires_grad_(is_number and not keeps_apart)


def _is_depthwise(layer: nn.Module) -> bool:
    """Return whether a layer is a convolution of each channel by itself."""
    if not isinstance(layer, _ConvNd):
        return False
    return layer.groups == layer.in_channels > 1


def _by_place(made: list[tuple[Place, nn.Module]], chosen: set[nn.Module]) -> Known:
    places: defaultdict[Place, list[bool]] = defaultdict(list)
    for place, layer in made:
        places[place].append(layer in chosen)
    return dict(places)
