"""What a metric is to the exporter: sums over a batch, traced into the eval graph, and the rule
that makes a number.

Each lies in a module of its own in `trainer_export.metrics` and is found there by its row in the
module's table ``METRICS``. Metrics that need the same sums share them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from fleet_protocol.discovery import discover
from fleet_protocol.recipe_spec import MetricSpec
from trainer_export.loss import Answer, Loss
from trainer_export.model_inputs import Signature
from trainer_export.numbers import make_record


@dataclass(frozen=True)
class Metric(ABC):
    """A metric; a ConfigError where a number of it is out of its range."""

    name: ClassVar[str]
    rule: ClassVar[str]
    """One of `fleet_protocol.metrics.RULES`."""
    sums: ClassVar[tuple[str, ...]]
    """What the rule takes, in order: outputs of :meth:`counts` or of the loss, or ``examples``."""

    @abstractmethod
    def check(self, loss: Loss) -> None:
        """See that it goes with a loss; a ConfigError says with which it does."""

    def counts(self, loss: Loss, output: Tensor, answer: Answer) -> dict[str, Tensor]:
        """Its own sums over a batch, float32; pure and traceable.

        None where the loss has all it needs.
        """
        del loss, output, answer
        return {}

    def pytorch_counts(self, loss: Loss, output: Tensor, answer: Answer) -> dict[str, Tensor]:
        """The same by PyTorch's own means, where there are others.

        The witness of the exported graph.
        """
        return self.counts(loss, output, answer)

    @property
    def label(self) -> str:
        """What it is called in results."""
        return self.name

    def spec(self) -> MetricSpec:
        """This metric as the manifest states it."""
        return MetricSpec(name=self.label, rule=self.rule, sums=self.sums)


def counts(
    metrics: Sequence[Metric],
    loss: Loss,
    output: Tensor,
    answer: Answer,
    *,
    by_pytorch: bool = False,
) -> dict[str, Tensor]:
    """The sums of some metrics over a batch, without those of the loss.

    Or by PyTorch's own means, as a witness.
    """
    found: dict[str, Tensor] = {}
    for metric in metrics:
        found |= (metric.pytorch_counts if by_pytorch else metric.counts)(loss, output, answer)
    return found


def count_shapes(
    metrics: Sequence[Metric], loss: Loss, signature: Signature
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of those sums."""
    target = loss.target(signature.output)
    kind = torch.int64 if target.dtype == "int64" else torch.float32
    answer = Answer(torch.zeros((1, *target.shape), dtype=kind), torch.ones(signature.classes))
    found = counts(metrics, loss, signature.outputs(1), answer)
    return {name: tuple(value.shape) for name, value in found.items()}


def metric_named(
    name: str,
    settings: Mapping[str, object] | None = None,
    own: Mapping[str, type[Any]] = MappingProxyType({}),
) -> Metric:
    """A metric of `trainer_export.metrics` or of the user's, with its numbers.

    A ConfigError if there is none.
    """
    known: Mapping[str, type[Metric]] = discover("trainer_export.metrics", "METRICS")
    return make_record("metric", known, name, settings, own)
