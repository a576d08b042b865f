"""The training recipe: loss, optimizer, clipping and proximal term, all in the train graph."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from fleet_protocol.manifest import StateSpec
from fleet_protocol.recipe import RecipeTable
from fleet_protocol.recipe_spec import RecipeSpec
from trainer_export.loss import Answer, Loss, loss_named
from trainer_export.losses.cross_entropy import MaskedCrossEntropy
from trainer_export.losses.own import OwnLoss
from trainer_export.metric import Metric, metric_named
from trainer_export.metrics.own import OwnMetric
from trainer_export.numbers import Range, check_numbers, number
from trainer_export.optimizer import Optimizer, optimizer_named
from trainer_export.optimizers.sgd import Sgd

_SGD = Sgd()
_CROSS_ENTROPY = MaskedCrossEntropy()


@dataclass(frozen=True)
class Recipe:
    """The recipe of a training step; learning rate and label mask are inputs of the graph.

    Example:
        >>> Recipe(Sgd(momentum=0.5), clip_norm=None).optimizer.states
        (State(name='momentum_buffer', initial=0.0),)

    Attributes:
        optimizer: the update rule with its parameters.
        loss: the loss to minimise.
        clip_norm: largest global norm of the gradient; None for no clipping.
        clip_value: largest absolute value of each entry of the gradient, applied before the norm;
            None for no limit.
        accumulate: whether a step may receive a batch in micro-batches, with a sum of gradients for
            every parameter.
        proximal: whether the graph takes anchors and the strength mu of FedProx's proximal term.
        metrics: metrics that an evaluation reports besides the loss.

    Raises:
        ConfigError: a parameter is out of range, or a metric is incompatible with the loss.
    """

    optimizer: Optimizer = _SGD
    loss: Loss = _CROSS_ENTROPY
    clip_norm: float | None = number(1.0, Range(positive=True))
    proximal: bool = False
    metrics: tuple[Metric, ...] = ()
    clip_value: float | None = number(None, Range(positive=True))
    accumulate: bool = False

    def __post_init__(self) -> None:
        check_numbers(self)
        for metric in self.metrics:
            metric.check(self.loss)

    @classmethod
    def from_table(
        cls,
        table: RecipeTable,
        own: Mapping[str, type[Any]] = MappingProxyType({}),
    ) -> "Recipe":
        """Return the recipe that a table describes.

        Args:
            table: the table of a configuration.
            own: losses and metrics from the registry of the user's file.

        Raises:
            ConfigError: there is no such optimizer, loss or parameter, or a parameter is out of
                range.
        """
        metrics = tuple(metric_named(metric.name, metric.settings, own) for metric in table.metrics)
        return cls(
            optimizer_named(table.optimizer.name, table.optimizer_settings),
            loss_named(table.loss.name, table.loss.settings, own),
            # A table has no None, so 0 turns clipping off.
            clip_norm=table.clip_norm or None,
            proximal=table.proximal,
            clip_value=table.clip_value or None,
            accumulate=table.accumulate,
            metrics=metrics,
        )

    @property
    def has_own(self) -> bool:
        """Return whether the loss or a metric comes from the user."""
        records = (self.loss, *self.metrics)
        return any(isinstance(record, (OwnLoss, OwnMetric)) for record in records)

    def try_out(self, output: Tensor, answer: Answer) -> None:
        """Run the user's losses and metrics on a batch of a model.

        Raises:
            ExportError: a loss or metric fails; the message names function and line.
        """
        if isinstance(self.loss, OwnLoss):
            self.loss.try_out(output, answer)
        for metric in self.metrics:
            if isinstance(metric, OwnMetric):
                metric.try_out(self.loss, output, answer)

    def state_specs(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[StateSpec, ...]:
        """Return the state that a device keeps between steps besides the parameters.

        The order is that of the graphs' inputs.
        """
        specs = self.optimizer.state_specs(shapes)
        if not self.accumulate:
            return specs
        sums = []
        for name, shape in shapes.items():
            # After the optimizer's states, as inputs of the graph.
            sums.append(StateSpec(name=f"gradient_sum.{name}", shape=shape))
        return (*specs, *sums)

    def spec(
        self,
        output: tuple[int, ...],
        zeros: Any = None,
    ) -> RecipeSpec:
        """Return this recipe in the manifest's form; the arguments are those of `Loss.spec`."""
        return RecipeSpec(
            optimizer=self.optimizer.spec(),
            loss=self.loss.spec(output, zeros),
            clip_norm=self.clip_norm,
            proximal=self.proximal,
            clip_value=self.clip_value,
            # Absent if off, so that sets without micro-batches keep their digests.
            accumulate=self.accumulate or None,
            metrics=tuple(metric.spec() for metric in self.metrics),
        )
