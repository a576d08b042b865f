"""Metrics of classes: F1, intersection over union, and the correlation of Matthews.

They are computed from how often each class is predicted, present, and both.

Jan Gorodkin: "Comparing two K-category assignments by a K-category correlation coefficient",
Computational Biology and Chemistry 28, 2004, for the correlation of more than two classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from fleet_protocol.errors import ConfigError
from trainer_export.loss import Answer, Loss
from trainer_export.losses.binary_cross_entropy import BinaryCrossEntropy
from trainer_export.losses.cross_entropy import MaskedCrossEntropy
from trainer_export.metric import Metric

_MOST_CLASSES = 4096  # largest size of a sum that a device may report


@dataclass(frozen=True)
class _ClassMetric(Metric):
    sums: ClassVar[tuple[str, ...]] = ("hits", "predicted", "present")

    def check(self, loss: Loss) -> None:
        """Require a loss for classes, which defines the class of an output."""
        # Asked of the class, because nothing has been computed yet.
        if type(loss).decided is Loss.decided:
            raise ConfigError(
                f"the metric {self.name} counts classes, but the loss {loss.name} has none; use"
                f" it with {MaskedCrossEntropy.name} or {BinaryCrossEntropy.name}"
            )

    def counts(
        self,
        loss: Loss,
        output: Tensor,
        answer: Answer,
    ) -> dict[str, Tensor]:
        """Count how often each class is predicted correctly, predicted, and present."""
        decided = loss.decided(output, answer)
        if decided is None:
            raise ConfigError(f"the loss {loss.name} has no classes")
        predicted = decided[0].flatten(0, -2)
        present = decided[1].flatten(0, -2)
        if predicted.shape[-1] > _MOST_CLASSES:
            raise ConfigError(f"the metric {self.name} supports at most {_MOST_CLASSES} classes")
        hits = predicted * present  # both are 0 or 1
        sums = (hits.sum(0), predicted.sum(0), present.sum(0))
        return dict(zip(self.sums, sums, strict=True))

    def pytorch_counts(
        self,
        loss: Loss,
        output: Tensor,
        answer: Answer,
    ) -> dict[str, Tensor]:
        """Count the same by `torch.bincount` of the decisions."""
        decided = loss.decided(output, answer)
        assert decided is not None
        predicted = decided[0].flatten(0, -2).bool()
        present = decided[1].flatten(0, -2).bool()
        sums = (
            _count_by_class(predicted & present),
            _count_by_class(predicted),
            _count_by_class(present),
        )
        return dict(zip(self.sums, sums, strict=True))


def _count_by_class(decisions: Tensor) -> Tensor:
    """Count decisions, bool [places, classes], for each class, float32 [classes]."""
    classes = decisions.shape[-1]
    # Another way than the sums of the graph, so that an error is not in both.
    return torch.bincount(decisions.nonzero()[:, 1], minlength=classes).float()


@dataclass(frozen=True)
class F1(_ClassMetric):
    """F1, the mean over the classes that occur or are predicted (macro)."""

    name: ClassVar[str] = "f1"
    rule: ClassVar[str] = "f1"


@dataclass(frozen=True)
class MeanIou(_ClassMetric):
    """Intersection over union, the mean over the classes that occur or are predicted."""

    name: ClassVar[str] = "mean-iou"
    rule: ClassVar[str] = "iou"


@dataclass(frozen=True)
class Matthews(_ClassMetric):
    """The correlation of predictions and labels, in [-1, 1].

    It is 0 if predictions or labels are all equal.
    """

    name: ClassVar[str] = "matthews"
    rule: ClassVar[str] = "matthews"

    def counts(
        self,
        loss: Loss,
        output: Tensor,
        answer: Answer,
    ) -> dict[str, Tensor]:
        """Count the same, of samples that have exactly one class each."""
        if isinstance(loss, BinaryCrossEntropy) and output.shape[1:].numel() > 1:
            raise ConfigError(
                "the metric matthews needs exactly one label per sample; with several labels"
                " use f1 or mean-iou"
            )
        return super().counts(loss, output, answer)


METRICS: Mapping[str, type[Metric]] = MappingProxyType(
    {F1.name: F1, MeanIou.name: MeanIou, Matthews.name: Matthews}
)
