"""The architecture of a package's model: a builder that asks a cut for the axes that were found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import nn

from models.architecture import Architecture
from models.cut import CLASSES, Cut
from models.zoo.conversion_plan import converted
from trainer_export.packages.axis_forms import AxisForm
from trainer_export.packages.package_model import PackageModel


@dataclass(frozen=True)
class PackageBuilder:
    """Builds a package's model that is cut along some axes."""

    model: PackageModel
    forms: Sequence[AxisForm]
    fixed: Mapping[str, int]  # further sizes that differ from the whole model's, in every tier

    def __call__(
        self,
        cut: Cut,
        *,
        input_shape: Any,
        classes: int = 0,
    ) -> nn.Module:
        """Build the model of a tier."""
        del input_shape  # the graphs read it from the settings
        return self.model.build(self.sizes(cut, classes))

    def sizes(self, cut: Cut, classes: int = 0) -> dict[str, int]:
        """Return the arguments that a cut changes, by their places.

        Args:
            cut: the tier's cut.
            classes: number of labels, for a model that has labels.
        """
        sizes = dict(self.fixed)
        for form in self.forms:
            asked = replace(form, size=classes) if form.kind == CLASSES else form
            sizes |= asked.sizes(cut)
        return sizes


def architecture_of(
    model: PackageModel, forms: Sequence[AxisForm], fixed: Mapping[str, int] | None = None
) -> Architecture:
    """Return the architecture of a package's model that is cut along some axes.

    Args:
        model: the model.
        forms: its axes.
        fixed: further sizes that differ from the whole model's, in every tier.
    """
    settings: dict[str, Any] = {"input_shape": model.input_shape}
    for form in forms:
        if form.kind == CLASSES:
            settings[CLASSES] = form.size
    return Architecture(
        model.name,
        PackageBuilder(model, forms, dict(fixed or {})),
        model.input_dtype,
        MappingProxyType(settings),
        MappingProxyType({}),
    )


def exportable(
    model: PackageModel, forms: Sequence[AxisForm], fixed: Mapping[str, int] | None = None
) -> Architecture:
    """Return the architecture with its layers converted, as an export builds it.

    Its models do not know the weights of the package's own class, because no tier is made of them.
    """
    return converted(architecture_of(model, forms, fixed), records_origin=False)
