"""Metrics for numeric targets, and the perplexity of a cross entropy.

The correlation is that of Pearson: "Note on regression and inheritance in the case of two parents",
Proceedings of the Royal Society of London 58, 1895.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from torch import Tensor

from fleet_protocol.errors import ConfigError
from trainer_export.loss import Answer, Loss
from trainer_export.losses.cross_entropy import MaskedCrossEntropy
from trainer_export.losses.elementwise import Elementwise
from trainer_export.losses.regression import MeanAbsoluteError, MeanSquaredError
from trainer_export.metric import Metric


@dataclass(frozen=True)
class _NumberMetric(Metric):
    error: ClassVar[Elementwise]

    def check(self, loss: Loss) -> None:
        """Require a loss that compares numbers."""
        if not isinstance(loss, Elementwise):
            raise ConfigError(
                f"the metric {self.name} needs a loss for numbers, such as huber, not {loss.name}"
            )

    def counts(
        self,
        loss: Loss,
        output: Tensor,
        answer: Answer,
    ) -> dict[str, Tensor]:
        """Sum the means of the samples."""
        del loss
        # The sum of a loss of the same name: both must agree where a recipe has both.
        return {self.sums[0]: self.error.sums(output, answer)[0]}

    def pytorch_counts(
        self,
        loss: Loss,
        output: Tensor,
        answer: Answer,
    ) -> dict[str, Tensor]:
        """Compute the same by PyTorch's own loss."""
        del loss
        return {self.sums[0]: self.error.pytorch_sums(output, answer)[0]}


@dataclass(frozen=True)
class Mae(_NumberMetric):
    """The mean absolute error."""

    name: ClassVar[str] = "mae"
    rule: ClassVar[str] = "ratio"
    sums: ClassVar[tuple[str, ...]] = ("absolute_errors", "examples")
    error: ClassVar[Elementwise] = MeanAbsoluteError()


@dataclass(frozen=True)
class Rmse(_NumberMetric):
    """The root of the mean squared error."""

    name: ClassVar[str] = "rmse"
    rule: ClassVar[str] = "root"
    sums: ClassVar[tuple[str, ...]] = ("squared_errors", "examples")
    error: ClassVar[Elementwise] = MeanSquaredError()


@dataclass(frozen=True)
class Pearson(Metric):
    """The linear correlation of outputs and targets, in [-1, 1]; of several outputs their mean.

    It is 0 if outputs or targets are all equal.
    """

    name: ClassVar[str] = "pearson"
    rule: ClassVar[str] = "pearson"
    sums: ClassVar[tuple[str, ...]] = (
        "outputs",
        "targets",
        "squared_outputs",
        "squared_targets",
        "products",
        "examples",
    )

    def check(self, loss: Loss) -> None:
        """Require a loss that compares numbers."""
        if not isinstance(loss, Elementwise):
            raise ConfigError(
                f"the metric {self.name} needs a loss for numbers, such as mean-squared-error, not"
                f" {loss.name}"
            )

    def counts(
        self,
        loss: Loss,
        output: Tensor,
        answer: Answer,
    ) -> dict[str, Tensor]:
        """Sum outputs, targets, their squares and their products, of each output."""
        del loss
        outputs = output.flatten(1)
        # Targets may lack the last dimension if there is one output.
        targets = answer.y.reshape(outputs.shape)
        columns = (outputs, targets, outputs * outputs, targets * targets, outputs * targets)
        counts: dict[str, Tensor] = {}
        for name, column in zip(self.sums[:-1], columns, strict=True):
            counts[name] = column.sum(0)
        return counts


@dataclass(frozen=True)
class Perplexity(Metric):
    """The exponential of the mean cross entropy, with its smoothing and weights."""

    name: ClassVar[str] = "perplexity"
    rule: ClassVar[str] = "exponential"
    sums: ClassVar[tuple[str, ...]] = ("loss_sum", "examples")

    def check(self, loss: Loss) -> None:
        """Require a cross entropy."""
        if not isinstance(loss, MaskedCrossEntropy):
            raise ConfigError(
                f"the metric perplexity needs the loss {MaskedCrossEntropy.name}, not {loss.name}"
            )


METRICS: Mapping[str, type[Metric]] = MappingProxyType(
    {
        Mae.name: Mae,
        Rmse.name: Rmse,
        Pearson.name: Pearson,
        Perplexity.name: Perplexity,
    }
)
