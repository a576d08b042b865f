"""Small models of the kinds that users bring, each with its source; some are to be refused.

A file has one architecture, written as its users write it. `ALONE = False` says that its units are
coupled by a norm or a scale, so that a narrow model is not the whole one with units of zeros;
`CONVERT = True` that it is exported with `--convert`; `LOSS` is its own, where no other will do;
`REFUSED` is what the message of a refusal must match.
"""

import importlib
import pkgutil
from dataclasses import dataclass

from models import Architecture
from models.zoo.conversion_plan import converted
from trainer_export.recipe import Recipe

__all__ = ["GALLERY", "Model"]


@dataclass(frozen=True)
class Model:
    """One file of the gallery.

    Attributes:
        arch: its architecture.
        kind: the first line of its docstring.
        source: where it comes from.
        alone: whether its units compute alone.
        refused: pattern of the refusal; empty if it is exported.
        recipe: what it is trained by.
    """

    arch: Architecture
    kind: str
    source: str
    alone: bool
    refused: str
    recipe: Recipe


def _model(name: str) -> Model:
    module = importlib.import_module(f"{__name__}.{name}")
    kind, source = (module.__doc__ or "").strip().split("\n\n")
    arch = getattr(module, name)
    return Model(
        converted(arch) if getattr(module, "CONVERT", False) else arch,
        " ".join(kind.split()),
        " ".join(source.removeprefix("Source: ").split()),
        getattr(module, "ALONE", True),
        getattr(module, "REFUSED", ""),
        Recipe(loss=getattr(module, "LOSS", Recipe().loss)),
    )


GALLERY = {
    item.name: _model(item.name)
    for item in pkgutil.iter_modules(__path__)
    if item.name != "table" and not item.name.startswith("test_")
}
