"""Describes how to derive the state of an original module from the exported model.

A conversion keeps most parameters under their names. This module reverses its replacements: each
kind of layer lists the parameters or statistics of its counterpart from which the entries of its
own state come.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm

from models.own_class import Entry, Kind, OwnClass
from models.slicing import Tensors
from models.zoo.layers import StaticBatchNorm

_BATCH_NORM = nn.modules.batchnorm._BatchNorm  # noqa: SLF001 - no public name
_SPECTRAL_NORM = nn.utils.parametrizations._SpectralNorm  # noqa: SLF001 - no public name
_LAYER_NUMBER = re.compile(r"_l(\d+)")

IsReplaced = Callable[[str, nn.Module], bool]
"""Whether the exported model has a counterpart instead of the layer at a path."""


@dataclass(frozen=True)
class Origin:
    """The sources of the state of a module."""

    own_class: OwnClass
    constants: Mapping[str, Tensor]  # buffers that never change, by their names in the state

    def constant_arrays(self) -> Tensors:
        """Return copies of the constants as numpy arrays."""
        arrays = {}
        for name, value in self.constants.items():
            arrays[name] = value.cpu().contiguous().numpy().copy()
        return arrays


@dataclass(frozen=True)
class LayerEntry:
    """An entry of a layer's state that has another name, or other content, in the exported model.

    Names are relative to the layer; ``../`` leads to the layer above.
    """

    name: str
    kind: Kind
    sources: tuple[str, ...] = ("",)
    dim: int = 0


@dataclass(frozen=True)
class OriginalModule:
    """The original module, recorded before any replacement."""

    layers: Mapping[str, nn.Module]  # by each of their paths
    state: Mapping[str, Any]  # including parameters
    # the first name of each parameter and the first path of each layer, if there are several
    first_names: Mapping[str, str]
    # path of the layer and name of the parameter, for PyTorch's older weight norm
    weight_norms: tuple[tuple[str, str], ...]

    @classmethod
    def record(cls, module: nn.Module) -> "OriginalModule":
        """Record the layers and the state of a module."""
        layers = dict(module.named_modules(remove_duplicate=False))
        first_paths = {id(layer): path for path, layer in module.named_modules()}
        first_parameters = {id(value): name for name, value in module.named_parameters()}
        first_names = {path: first_paths[id(layer)] for path, layer in layers.items()}
        for name, value in module.named_parameters(remove_duplicate=False):
            first_names[name] = first_parameters[id(value)]
        weight_norms: list[tuple[str, str]] = []
        for path, layer in layers.items():
            hooks = layer._forward_pre_hooks.values()  # noqa: SLF001 - no public name
            for hook in hooks:
                if isinstance(hook, WeightNorm):
                    weight_norms.append((path, hook.name))
        state = module.state_dict(keep_vars=True)
        return cls(layers, state, first_names, tuple(weight_norms))

    def describe(self, is_replaced: IsReplaced, *, converted: bool = True) -> Origin:
        """Return how to derive the state from the tensors of the exported model.

        Args:
            is_replaced: whether the exported model has a counterpart of a layer instead.
            converted: whether the exported model was converted at all.
        """
        changed: dict[str, LayerEntry] = {}
        for layer_entry in self._layer_entries(is_replaced, converted=converted):
            changed[layer_entry.name] = layer_entry
        entries: list[Entry] = []
        constants: dict[str, Tensor] = {}
        problem = self._problem(is_replaced)
        for name, value in self.state.items():
            if not isinstance(value, Tensor):
                reason = f"its state has {name}, which is a {type(value).__name__} and not a tensor"
                problem = problem or reason
                continue
            entry = self._entry(name, value, changed)
            entries.append(entry)
            if entry.kind in {"constant", "count"}:
                constants[name] = value.detach()
        return Origin(OwnClass(entries=tuple(entries), problem=problem), constants)

    def _entry(self, name: str, value: Tensor, changed: Mapping[str, LayerEntry]) -> Entry:
        """Describe one tensor of the state."""
        entry = changed.get(self.first_names.get(name, name), changed.get(name))
        if entry is not None:
            return Entry(name=name, kind=entry.kind, sources=entry.sources, dim=entry.dim)
        if isinstance(value, nn.Parameter):
            return Entry(name=name, kind="parameter", sources=(self.first_names[name],))
        return Entry(name=name, kind="constant")

    def _problem(self, is_replaced: IsReplaced) -> str:
        """Return why no weights of a run can be loaded into the class; empty if they can."""
        for path, layer in self.layers.items():
            if not isinstance(layer, _BATCH_NORM) or layer.running_mean is not None:
                continue
            if is_replaced(path, layer):
                return (
                    f"{path or 'the model itself'} is a {type(layer).__name__} with"
                    " track_running_stats=False: it has no place for the mean and variance with"
                    " which the run evaluates versions (running_mean and running_var), and"
                    " normalises with each batch's own statistics; remove"
                    " track_running_stats=False from the class, or use --format onnx"
                )
        return ""

    def _layer_entries(self, is_replaced: IsReplaced, *, converted: bool) -> Iterator[LayerEntry]:
        """Yield entries that differ from a parameter of the same name, with full names."""
        for path, layer in self.layers.items():
            rule = _rule_of(layer)
            if rule is None:
                continue
            # A static batch norm has statistics whether or not anything was replaced.
            if not isinstance(layer, StaticBatchNorm) and not is_replaced(path, layer):
                continue
            first = self.first_names[path]
            for entry in rule(layer):
                name = _resolve(path, entry.name)
                sources = tuple(_resolve(first, source) for source in entry.sources)
                yield LayerEntry(name, entry.kind, sources, entry.dim)
        if converted:
            yield from self._weight_norm_entries()

    def _weight_norm_entries(self) -> Iterator[LayerEntry]:
        for path, name in self.weight_norms:
            first = self.first_names[path]
            for suffix, original in (("g", "original0"), ("v", "original1")):
                source = _resolve(first, f"parametrizations.{name}.{original}")
                yield LayerEntry(_resolve(path, f"{name}_{suffix}"), "parameter", (source,))


def _resolve(path: str, name: str) -> str:
    """Resolve a name relative to a path; each leading ``../`` goes one layer up."""
    while name.startswith("../"):
        path = path.rpartition(".")[0]
        name = name.removeprefix("../")
    return f"{path}.{name}" if path and name else path or name


def _batch_norm(layer: Any) -> Iterator[LayerEntry]:
    if layer.running_mean is not None:
        yield LayerEntry("running_mean", "mean")
        yield LayerEntry("running_var", "variance")
    if getattr(layer, "num_batches_tracked", None) is not None:
        yield LayerEntry("num_batches_tracked", "count", ())


def _attention(layer: Any) -> Iterator[LayerEntry]:
    own = [name for name, _ in layer.named_parameters()]
    for name, letter in (("query", "q"), ("key", "k"), ("value", "v")):
        if f"{letter}_proj_weight" in own:
            yield LayerEntry(f"{letter}_proj_weight", "parameter", (f"{name}.weight",))
    for kind in ("weight", "bias"):
        if f"in_proj_{kind}" in own:
            sources = (f"query.{kind}", f"key.{kind}", f"value.{kind}")
            yield LayerEntry(f"in_proj_{kind}", "parameter", sources)
        if f"out_proj.{kind}" in own:
            yield LayerEntry(f"out_proj.{kind}", "parameter", (f"output.{kind}",))


def _recurrent(layer: Any) -> Iterator[LayerEntry]:
    for name, _ in layer.named_parameters():
        number = _LAYER_NUMBER.search(name)
        if number is not None:
            name_in_layer = name.replace(number[0], "_l0")
            yield LayerEntry(name, "parameter", (f"layers.{number[1]}.{name_in_layer}",))


def _spectral_norm(layer: Any) -> Iterator[LayerEntry]:
    if hasattr(layer, "_u"):  # a weight of one dimension has no vectors
        yield LayerEntry("_u", "left", ("../original",), layer.dim)
        yield LayerEntry("_v", "right", ("../original",), layer.dim)


_Rule = Callable[[Any], Iterator[LayerEntry]]

_RULES: Mapping[type[nn.Module], _Rule] = MappingProxyType(
    {
        StaticBatchNorm: _batch_norm,
        _BATCH_NORM: _batch_norm,
        nn.MultiheadAttention: _attention,
        nn.RNNBase: _recurrent,
        _SPECTRAL_NORM: _spectral_norm,
    }
)


def _rule_of(layer: nn.Module) -> _Rule | None:
    for kind, rule in _RULES.items():
        if isinstance(layer, kind):
            return rule
    return None
