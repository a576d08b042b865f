"""Keep the scaling of low-rank adapters of other packages, such as peft, in every sub-model.

Such a layer computes ``W x + s * B (A x)`` with s = alpha / rank of the rank it was built with. In
a sub-model of half the rank, s would be twice as large, so the same column of B with its row of A
would count twice as much, and could not be merged with those of the whole (see
`models.zoo.adapters`).
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from models.cut import Cut
from models.zoo.builds import build_for_shapes

Scalings = dict[tuple[str, str], float]
"""The scaling of each adapter, by the path of its layer and its name there, if it has one."""

_FACTORS = ("lora_A", "lora_embedding_A", "lora_a")  # of a layer with one adapter
# Any width but 1 shows whether the scaling follows from the rank.
_NARROW = 0.5


def scalings_of(module: nn.Module) -> Scalings:
    """Return the scaling of every low-rank adapter of a model.

    A layer is recognised by its attributes, the factors and the scaling, since packages have their
    own classes.
    """
    scalings: Scalings = {}
    for path, layer in module.named_modules():
        # Packages store one scaling for each adapter, or a single number.
        scaling = getattr(layer, "scaling", None)
        if isinstance(scaling, Mapping):
            for name in sorted(_adapters_of(layer) & scaling.keys()):
                scalings[path, name] = float(scaling[name])
        elif isinstance(scaling, (int, float)) and any(hasattr(layer, name) for name in _FACTORS):
            scalings[path, ""] = float(scaling)
    return scalings


def _adapters_of(layer: nn.Module) -> set[str]:
    """Return the names of the adapters of a layer, which has dictionaries of their factors."""
    names: set[str] = set()
    for child in layer.children():
        if isinstance(child, (nn.ModuleDict, nn.ParameterDict)):
            names.update(child.keys())
    return names


def set_scalings(module: nn.Module, scalings: Scalings) -> None:
    """Give the adapters of a sub-model the scaling that they have in the whole model, in place."""
    for path, name in scalings_of(module):
        layer: Any = module.get_submodule(path)
        if name:
            layer.scaling[name] = scalings[path, name]
        else:
            layer.scaling = scalings[path, name]


def changed_scaling(build: Callable[[Cut], nn.Module], whole: Scalings) -> str:
    """Describe the first adapter whose scaling changes with the width; empty if none does.

    Args:
        build: builds the model of a cut.
        whole: the scalings of the whole model.
    """
    if not whole:
        return ""
    narrow = scalings_of(build_for_shapes(Cut(_NARROW), build))
    for (path, name), scaling in narrow.items():
        # An adapter that the whole model lacks cannot be compared.
        expected = whole.get((path, name), scaling)
        if scaling != expected:
            return f"{path} ({expected:g} in the whole model, {scaling:g} at width {_NARROW:g})"
    return ""
