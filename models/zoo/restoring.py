"""Expresses the state of a module, as its author wrote it, in terms of the converted model that is
exported.

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
_LAYER = re.compile(r"_l(\d+)")


@dataclass(frozen=True)
class Part:
    """An entry of a layer's state, its name and its sources relative to the layer.

    ``../`` leads to the layer above.
    """

    name: str
    kind: Kind
    sources: tuple[str, ...] = ("",)
    dim: int = 0


@dataclass(frozen=True)
class Restored:
    """A description of a class, and its constant buffers, by the names of its state."""

    own: OwnClass
    constants: Mapping[str, Tensor]

    def arrays(self) -> Tensors:
        """The constants as numpy arrays."""
        return {
            name: value.cpu().contiguous().numpy().copy() for name, value in self.constants.items()
        }


@dataclass(frozen=True)
class Untouched:
    """A module as its author wrote it: its parts before any replacement."""

    layers: Mapping[str, nn.Module]  # by each of their paths
    state: Mapping[str, Any]  # including parameters
    first: Mapping[
        str, str
    ]  # maps names of parameters and paths of layers to the first of each, if there are several
    weight_norms: tuple[
        tuple[str, str], ...
    ]  # layer path and parameter name of PyTorch's older weight norm

    @classmethod
    def of(cls, module: nn.Module) -> "Untouched":
        """Record the parts of a module."""
        layers = dict(module.named_modules(remove_duplicate=False))
        of_layer = {id(layer): path for path, layer in module.named_modules()}
        of_value = {id(value): name for name, value in module.named_parameters()}
        first = {path: of_layer[id(layer)] for path, layer in layers.items()}
        for name, value in module.named_parameters(remove_duplicate=False):
            first[name] = of_value[id(value)]
        hooks = [
            (path, hook.name)
            for path, layer in layers.items()
            for hook in layer._forward_pre_hooks.values()  # noqa: SLF001 - no public name
            if isinstance(hook, WeightNorm)
        ]
        return cls(layers, module.state_dict(keep_vars=True), first, tuple(hooks))

    def restored(
        self, is_replaced: Callable[[str, nn.Module], bool], *, converted: bool = True
    ) -> Restored:
        """Return how the state follows from the tensors of the exported model.

        Args:
            is_replaced: tells, for a path of a layer, whether the exported model has a counterpart
                instead.
            converted: whether the exported model was converted at all.
        """
        parts = {part.name: part for part in self._parts(is_replaced, converted=converted)}
        entries: list[Entry] = []
        constants: dict[str, Tensor] = {}
        problem = self._problem(is_replaced)
        for name, value in self.state.items():
            part = parts.get(self.first.get(name, name), parts.get(name))
            if not isinstance(value, Tensor):
                problem = (
                    problem
                    or f"its state has {name}, which is a {type(value).__name__} and not a tensor"
                )
            elif part is not None:
                entries.append(Entry(name=name, kind=part.kind, sources=part.sources, dim=part.dim))
            elif isinstance(value, nn.Parameter):
                entries.append(Entry(name=name, kind="parameter", sources=(self.first[name],)))
            else:
                entries.append(Entry(name=name, kind="constant"))
            if isinstance(value, Tensor) and entries[-1].kind in {"constant", "count"}:
                constants[name] = value.detach()
        return Restored(OwnClass(entries=tuple(entries), problem=problem), constants)

    def _problem(self, is_replaced: Callable[[str, nn.Module], bool]) -> str:
        for path, layer in self.layers.items():
            if (
                isinstance(layer, _BATCH_NORM)
                and layer.running_mean is None
                and is_replaced(path, layer)
            ):
                return (
                    f"{path or 'the model itself'} is a {type(layer).__name__} with track_running_stats=False: it has"
                    " no place for the mean and variance that the run judges its versions with (running_mean and"
                    " running_var), and normalises by the rest of each batch; leave track_running_stats=False out of"
                    " the class, or use --format onnx"
                )
        return ""

    def _parts(
        self, is_replaced: Callable[[str, nn.Module], bool], *, converted: bool
    ) -> Iterator[Part]:
        """Return the entries that differ from a parameter of the same name in the exported model,
        by full names.
        """
        for path, layer in self.layers.items():
            rule = next((rule for kind, rule in _RULES.items() if isinstance(layer, kind)), None)
            if rule is None or not (isinstance(layer, StaticBatchNorm) or is_replaced(path, layer)):
                continue
            for part in rule(layer):
                sources = tuple(_below(self.first[path], source) for source in part.sources)
                yield Part(_below(path, part.name), part.kind, sources, part.dim)
        for path, name in self.weight_norms if converted else ():
            for suffix, original in (("g", "original0"), ("v", "original1")):
                source = _below(self.first[path], f"parametrizations.{name}.{original}")
                yield Part(_below(path, f"{name}_{suffix}"), "parameter", (source,))


def _below(path: str, name: str) -> str:
    """Resolve a name relative to a path; each leading ``../`` goes one layer up."""
    while name.startswith("../"):
        path = path.rpartition(".")[0]
        name = name.removeprefix("../")
    return f"{path}.{name}" if path and name else path or name


def _batch_norm(layer: Any) -> Iterator[Part]:
    if layer.running_mean is not None:
        yield Part("running_mean", "mean")
        yield Part("running_var", "variance")
    if getattr(layer, "num_batches_tracked", None) is not None:
        yield Part("num_batches_tracked", "count", ())


def _attention(layer: Any) -> Iterator[Part]:
    own = [name for name, _ in layer.named_parameters()]
    for name, queried in (("query", "q"), ("key", "k"), ("value", "v")):
        if f"{queried}_proj_weight" in own:
            yield Part(f"{queried}_proj_weight", "parameter", (f"{name}.weight",))
    for kind in ("weight", "bias"):
        if f"in_proj_{kind}" in own:
            yield Part(
                f"in_proj_{kind}",
                "parameter",
                (f"query.{kind}", f"key.{kind}", f"value.{kind}"),
            )
        if f"out_proj.{kind}" in own:
            yield Part(f"out_proj.{kind}", "parameter", (f"output.{kind}",))


def _recurrent(layer: Any) -> Iterator[Part]:
    for name, _ in layer.named_parameters():
        found = _LAYER.search(name)
        if found is not None:
            alone = name.replace(found[0], "_l0")
            yield Part(name, "parameter", (f"layers.{found[1]}.{alone}",))


def _spectral_norm(layer: Any) -> Iterator[Part]:
    if hasattr(layer, "_u"):  # a weight of one dimension has none
        yield Part("_u", "left", ("../original",), layer.dim)
        yield Part("_v", "right", ("../original",), layer.dim)


_RULES: Mapping[type[nn.Module], Callable[[Any], Iterator[Part]]] = MappingProxyType(
    {
        StaticBatchNorm: _batch_norm,
        _BATCH_NORM: _batch_norm,
        nn.MultiheadAttention: _attention,
        nn.RNNBase: _recurrent,
        _SPECTRAL_NORM: _spectral_norm,
    }
)
