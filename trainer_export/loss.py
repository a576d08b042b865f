"""What a loss is to the exporter: its target, its value and gradient, and its metrics.

Each lies in a module of its own in `trainer_export.losses` and is found there by its row in the
module's table ``LOSSES``.
"""

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fleet_protocol.discovery import discover
from fleet_protocol.recipe_spec import LossSpec
from trainer_export.numbers import check_numbers, make_record

Dtype = Literal["float32", "int64"]


@dataclass(frozen=True)
class Target:
    """What a sample's output is compared with."""

    dtype: Dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """What the outputs of a batch are compared with.

    Attributes:
        y: targets of the loss's own type, [batch, *shape].
        mask: 1 for labels that the device has, else 0, float32 [classes]; None for a loss that
            takes none.
    """

    y: Tensor
    mask: Tensor | None = None


@dataclass(frozen=True)
class Metric:
    """A sum over the samples (or labels) of a batch that the evaluation returns."""

    name: str
    dtype: Dtype = "float32"


LOSS_SUM = Metric("loss_sum")
"""What every loss returns first."""


@dataclass(frozen=True)
class Loss(ABC):
    """A loss with its numbers, fields of the dataclass that derives from this.

    Raises:
        ConfigError: a number is out of its range.
    """

    name: ClassVar[str]
    masked: ClassVar[bool] = False
    """Whether it takes a label mask."""
    metrics: ClassVar[tuple[Metric, ...]] = (LOSS_SUM,)
    bounds: ClassVar[tuple[float, float] | None] = None
    """Where targets that are numbers must lie; None for anywhere."""

    @property
    def ignored(self) -> int | None:
        """The label that counts for nothing; boards and server pass it to the graphs as -1."""
        return None

    def __post_init__(self) -> None:
        check_numbers(self)

    @abstractmethod
    def target(self, output: tuple[int, ...]) -> Target:
        """Return a sample's target, by the shape of the model's output for one sample."""

    @abstractmethod
    def value(self, output: Tensor, answer: Answer) -> Tensor:
        """Return the loss of a batch, float32 [], a mean over what counts.

        Pure and traceable. The output of the model is float32 [batch, ...].
        """

    def value_and_slope(self, output: Any, answer: Answer) -> tuple[Tensor, Any]:
        """Return the loss and its gradient with respect to the output.

        The gradient is traced, unless a loss writes it by hand. Of a model of several heads the
        output is their tuple or mapping. The gradient has the form of the output, or is of its
        heads one behind the other, None for one without.
        """
        with torch.enable_grad():
            leaves = tree_map(lambda head: head.detach().requires_grad_(), output)
            loss = self.value(leaves, answer)
            slopes = torch.autograd.grad(loss, tree_leaves(leaves), allow_unused=True)
        return loss.detach(), slopes

    @abstractmethod
    def sums(self, output: Tensor, answer: Answer) -> list[Tensor]:
        """Return each of its metrics for a batch, []; pure and traceable."""

    @abstractmethod
    def pytorch(self, output: Tensor, answer: Answer) -> Tensor:
        """Return what :meth:`value` must be, by PyTorch's own loss.

        Every exported graph is compared with it.
        """

    @abstractmethod
    def pytorch_sums(self, output: Tensor, answer: Answer) -> list[Tensor]:
        """Return what :meth:`sums` must be, by PyTorch's own means."""

    def decided(self, output: Tensor, answer: Answer) -> tuple[Tensor, Tensor] | None:
        """Return which classes output and answer stand for; None if the loss is not of classes.

        Both are float32 0 or 1, [..., classes]; all 0 where a label counts for nothing.
        """
        del output, answer
        return None

    def spec(self, output: tuple[int, ...], zeros: Any = None) -> LossSpec:
        """Return this loss as the manifest states it.

        Args:
            output: shape of the model's output for one sample.
            zeros: in the form of all its outputs for one sample, from which a loss of the user's
                finds its range.
        """
        del zeros
        settings = {}
        if self != type(self)():
            settings = json.loads(json.dumps(dataclasses.asdict(self)))
        return LossSpec(
            name=self.name,
            target=self.target(output).dtype,
            masked=self.masked,
            metrics=tuple(metric.name for metric in self.metrics),
            settings=settings,
            ignored=self.ignored,
            bounds=self.bounds,
        )


def loss_named(
    name: str,
    settings: Mapping[str, Any] | None = None,
    own: Mapping[str, type[Any]] = MappingProxyType({}),
) -> Loss:
    """Return a loss of `trainer_export.losses` or of the user's by its name.

    A number that is not set has its default.

    Raises:
        ConfigError: there is no such loss or number, or a number is out of its range.
    """
    classes: Mapping[str, type[Loss]] = discover("trainer_export.losses", "LOSSES")
    return make_record("loss", classes, name, settings, own)
