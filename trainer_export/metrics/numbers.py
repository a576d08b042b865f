"""Metrics of numbers, MAE and RMSE, and the perplexity of a cross entropy."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from fleet_protocol.errors import ConfigError
from trainer_export.loss import Answer, Loss
from trainer_export.losses.cross_entropy import MaskedCrossEntropy
from trainer_export.losses.elementwise import Elementwise
from trainer_export.metric import Metric


@dataclass(frozen=True)
class _OfNumbers(Metric):
    def check(self, loss: Loss) -> None:
        """Only losses that compare numbers have differences."""
        if not isinstance(loss, Elementwise):
            raise ConfigError(f"the metric {self.name} is for losses of numbers, such as huber, not for {loss.name}")


def _differences(loss: Loss, output: Tensor, answer: Answer) -> Tensor:
    assert isinstance(loss, Elementwise)
    return (output - loss.matched(output, answer)).flatten(1)


@dataclass(frozen=True)
class Mae(_OfNumbers):
    """The mean absolute error."""

    name: ClassVar[str] = "mae"
    rule: ClassVar[str] = "ratio"
    sums: ClassVar[tuple[str, ...]] = ("absolute_errors", "examples")

    def counts(self, loss: Loss, output: Tensor, answer: Answer) -> dict[str, Tensor]:
        """The mean of each sample, summed."""
        return {"absolute_errors": _differences(loss, output, answer).abs().mean(1).sum()}

    def pytorch_counts(self, loss: Loss, output: Tensor, answer: Answer) -> dict[str, Tensor]:
        """`torch.nn.functional.l1_loss`."""
        del loss
        return {"absolute_errors": functional.l1_loss(output, answer.y.reshape(output.shape)) * len(output)}


@dataclass(frozen=True)
class Rmse(_OfNumbers):
    """The root of the mean squared error."""

    name: ClassVar[str] = "rmse"
    rule: ClassVar[str] = "root"
    sums: ClassVar[tuple[str, ...]] = ("squared_errors", "examples")

    def counts(self, loss: Loss, output: Tensor, answer: Answer) -> dict[str, Tensor]:
        """The mean of each sample, summed."""
        difference = _differences(loss, output, answer)
        return {"squared_errors": (difference * difference).mean(1).sum()}

    def pytorch_counts(self, loss: Loss, output: Tensor, answer: Answer) -> dict[str, Tensor]:
        """`torch.nn.functional.mse_loss`."""
        del loss
        return {"squared_errors": functional.mse_loss(output, answer.y.reshape(output.shape)) * len(output)}


@dataclass(frozen=True)
class Perplexity(Metric):
    """The exponential of the mean cross entropy; of a loss with smoothing or weights it is that of the whole loss."""

    name: ClassVar[str] = "perplexity"
    rule: ClassVar[str] = "exponential"
    sums: ClassVar[tuple[str, ...]] = ("loss_sum", "examples")

    def check(self, loss: Loss) -> None:
        """Only a cross entropy has one."""
        if not isinstance(loss, MaskedCrossEntropy):
            raise ConfigError(f"the metric perplexity is for {MaskedCrossEntropy.name}, not for {loss.name}")


METRICS: Mapping[str, type[Metric]] = MappingProxyType({kind.name: kind for kind in (Mae, Rmse, Perplexity)})
