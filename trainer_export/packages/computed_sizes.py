"""Compares the sizes that a narrow model computes with those of the whole model.

Fewer heads of a stream of the same size are larger heads: all parameters keep their shapes, but
their rows belong to other heads, so a narrow model and the whole one would train them for different
purposes. The proof of layouts does not see this, since it permutes units within one model. Such a
size grows where the width shrinks, which nothing does in a model whose units are only left out.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from models.cut import Cut
from models.zoo.builds import ModelBuilder, SkippedInitialization
from models.zoo.layers import set_mode
from models.zoo.randomized_model import random_samples

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Computed:
    """A result that a model computes."""

    function: str  # its name
    shape: Shape


class _Sizes(TorchFunctionMode):
    """Records the shape of every tensor that a function returns."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[Computed] = []

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Properties, such as a shape, are functions here, too.
        if isinstance(result, Tensor):
            name = getattr(func, "__name__", "")
            shape = tuple(result.shape)
            self.computed.append(Computed(name, shape))
        return result


def size_that_grows(builder: ModelBuilder, width: float) -> str:
    """Return a size that is larger in a narrow model than in the whole one; "" if none is.

    Args:
        builder: builds the models, which run on the samples of its architecture.
        width: the width of the narrow model.
    """
    whole = _computed(builder, 1.0)
    narrow = _computed(builder, width)
    if len(whole) != len(narrow):
        return ""
    grown = ""
    for before, after in zip(whole, narrow, strict=True):
        # Other functions, such as those of other layers, cannot be compared.
        if before.function != after.function:
            return ""
        if not grown and _grows(before.shape, after.shape):
            whole_shape = list(before.shape)
            narrow_shape = list(after.shape)
            grown = (
                f"the whole model computes {whole_shape} where that of width {width:g} computes"
                f" {narrow_shape}, so what remains has another meaning"
            )
    return grown


def _grows(before: Shape, after: Shape) -> bool:
    """Return whether a size of the second shape is larger."""
    if len(before) != len(after):
        return False
    return any(new > old for old, new in zip(before, after, strict=True))


def _computed(builder: ModelBuilder, width: float) -> list[Computed]:
    """Return the sizes that a model computes, without values if it runs so."""
    try:
        return _computed_on_meta(builder, width)
    except Exception:  # noqa: BLE001 - a package's model that needs values raises anything
        with torch.random.fork_rng(devices=[]), SkippedInitialization():
            module = builder.build(Cut(width))
        return _recorded(module, random_samples(module, builder.row))


def _computed_on_meta(builder: ModelBuilder, width: float) -> list[Computed]:
    with torch.device("meta"), SkippedInitialization():
        module = builder.build(Cut(width))
    samples = random_samples(module, builder.row).to("meta")
    with torch.device("meta"):
        return _recorded(module, samples)


def _recorded(module: nn.Module, samples: Tensor) -> list[Computed]:
    sizes = _Sizes()
    with sizes, torch.no_grad():
        set_mode(module, "fused")(samples)
    return sizes.computed
