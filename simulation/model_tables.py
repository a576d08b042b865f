"""The tables of ``sim.toml`` for models: the one that the fleet trains, and devices' own ones."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fleet_protocol.frozen import FrozenModel
from fleet_protocol.recipe import RecipeTable
from models.tier import HEAD_SHARE
from simulation.clock_settings import Width

Count = Annotated[int, Field(ge=1)]
Label = Annotated[int, Field(ge=-1)]
"""The device's label for a label of the data set; -1 for none."""


class ModelTable(FrozenModel):
    """``[model]``: the model to train.

    Attributes:
        arch: name of an architecture in the zoo or in the file ``models``.
        settings: settings of the architecture; by default, input shape, classes and vocabulary come
            from the data.
        models: Python file with your own architectures.
        weights: safetensors file with the initial global weights; by default, they are drawn with
            the seed.
        widths: widths of the tiers, relative to the global model.
        depths: depths of the tiers in blocks; None for only the full depth.
        trained: shares of the blocks that tiers train, counted from the top; ``head`` trains no
            block.
        windows: whether to also export each trained share at every other position, for a
            ``strategy.window`` other than ``top``.
        recipe: recipe of a training step.
    """

    arch: str
    settings: Mapping[str, Any] = Field(default_factory=dict)
    models: Path | None = None
    weights: Path | None = None
    widths: tuple[Width, ...] = Field(default=(1.0,), min_length=1)
    depths: tuple[Count, ...] | None = Field(default=None, min_length=1)
    trained: tuple[Width | Literal["head"], ...] = Field(default=(1.0,), min_length=1)
    windows: bool = False
    recipe: RecipeTable = RecipeTable()

    @property
    def shares(self) -> tuple[float, ...]:
        """Return the trained shares as numbers."""
        shares: list[float] = []
        for share in self.trained:
            shares.append(HEAD_SHARE if share == "head" else share)
        return tuple(shares)


class OwnModel(FrozenModel):
    """One entry of ``[[own_models.models]]``.

    Attributes:
        arch: name of an architecture in the zoo or in the file ``model.models``.
        settings: settings of the architecture; values that come from the data may be omitted.
        labels: labels of the device's own task: for each label of the data set, the device's label
            (counted from 0), or -1 if the device's samples do not have the label. The personal
            model and the copy of the global model then have different classes, so the parts that
            the strategy shares must exclude everything that depends on the classes.
    """

    arch: str
    settings: Mapping[str, Any] = Field(default_factory=dict)
    labels: tuple[Label, ...] | None = None

    @property
    def classes(self) -> int | None:
        """Return the number of labels of its own task; None without one."""
        if self.labels is None:
            return None
        return max(self.labels) + 1

    @model_validator(mode="after")
    def _has_labels(self) -> "OwnModel":
        if self.labels is None:
            return self
        largest = max(self.labels, default=-1)
        # -1 stands for labels outside the task.
        own_labels = set(self.labels) - {-1}
        # A gap would make a class that no sample has.
        if own_labels != set(range(largest + 1)):
            raise ValueError("labels must use every label from 0 to its largest")
        if largest < 1:
            raise ValueError("labels must define a task of at least two labels")
        return self


class OwnModelsTable(FrozenModel):
    """``[own_models]``: personal models that stay on devices, trained with the sent model.

    See specification 5.

    Attributes:
        models: the personal models, which are assigned to the devices in turn.
    """

    models: tuple[OwnModel, ...] = Field(min_length=1)
