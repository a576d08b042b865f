"""The exporter's interface of a metric: sums over a batch in the eval graph, and their rule.

Each metric is a module in `trainer_export.metrics` with a row in the module's table ``METRICS``.
Metrics that need the same sums share them.
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
    """A metric with its parameters, which are the fields of the derived dataclass.

    Raises:
        ConfigError: a parameter is out of range.
    """

    name: ClassVar[str]
    rule: ClassVar[str]
    """One of `fleet_protocol.metrics.RULES`."""
    sums: ClassVar[tuple[str, ...]]
    """Arguments of the rule, in order: outputs of :meth:`counts` or the loss, or ``examples``."""

    @abstractmethod
    def check(self, loss: Loss) -> None:
        """Check that the metric is compatible with a loss.

        Raises:
            ConfigError: it is not; the message names compatible losses.
        """

    def counts(
        self,
        loss: Loss,
        output: Tensor,
        answer: Answer,
    ) -> dict[str, Tensor]:
        """Return its own sums over a batch, float32; pure and traceable.

        They are empty if the sums of the loss suffice.
        """
        del loss, output, answer
        return {}

    def pytorch_counts(
        self,
        loss: Loss,
        output: Tensor,
        answer: Answer,
    ) -> dict[str, Tensor]:
        """Return the same sums from PyTorch's own functions, as the graph's reference."""
        # A metric that is only sums of PyTorch's operators is its own reference.
        return self.counts(loss, output, answer)

    @property
    def label(self) -> str:
        """The name in results."""
        return self.name

    def spec(self) -> MetricSpec:
        """Return this metric in the form of the manifest."""
        return MetricSpec(name=self.label, rule=self.rule, sums=self.sums)


def counts(
    metrics: Sequence[Metric],
    loss: Loss,
    output: Tensor,
    answer: Answer,
    *,
    by_pytorch: bool = False,
) -> dict[str, Tensor]:
    """Return the sums of some metrics over a batch, and those of the loss's figures.

    With PyTorch's own functions they are the reference.
    """
    further = loss.pytorch_further_sums if by_pytorch else loss.further_sums
    # Figures of the loss first: the order of sums is that of the graph's outputs.
    sums = further(output, answer)
    for metric in metrics:
        count = metric.pytorch_counts if by_pytorch else metric.counts
        sums |= count(loss, output, answer)
    return sums


def count_shapes(
    metrics: Sequence[Metric],
    loss: Loss,
    signature: Signature,
) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of those sums."""
    target = loss.target(signature.output)
    kind = torch.int64 if target.dtype == "int64" else torch.float32
    # Any labels do, since shapes of sums do not depend on them.
    answer = Answer(torch.zeros((1, *target.shape), dtype=kind), torch.ones(signature.classes))
    sums = counts(metrics, loss, signature.outputs(1), answer)
    shapes = {}
    for name, value in sums.items():
        shapes[name] = tuple(value.shape)
    return shapes


def metric_named(
    name: str,
    settings: Mapping[str, object] | None = None,
    own: Mapping[str, type[Any]] = MappingProxyType({}),
) -> Metric:
    """Return a metric of `trainer_export.metrics` or of the user, with its parameters.

    Raises:
        ConfigError: there is no such metric or parameter, or a parameter is out of range.
    """
    classes: Mapping[str, type[Metric]] = discover("trainer_export.metrics", "METRICS")
    return make_record("metric", classes, name, settings, own)
