"""Losses of regression: squared, absolute and Huber's error.

Peter Huber: "Robust estimation of a location parameter", Annals of Mathematical Statistics 35,
1964.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from trainer_export.loss import Answer, Loss
from trainer_export.losses.elementwise import Elementwise
from trainer_export.numbers import Range, number


@dataclass(frozen=True)
class MeanSquaredError(Elementwise):
    """The squared error."""

    name: ClassVar[str] = "mean-squared-error"

    def errors(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the squares of the differences."""
        return (output - target) * (output - target)

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        """Return twice the difference."""
        return 2.0 * (output - target)

    def pytorch(self, output: Tensor, answer: Answer) -> Tensor:
        """Return `torch.nn.functional.mse_loss`."""
        return functional.mse_loss(output, answer.y.reshape(output.shape))


@dataclass(frozen=True)
class MeanAbsoluteError(Elementwise):
    """The absolute error."""

    name: ClassVar[str] = "mean-absolute-error"

    def errors(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the absolute differences."""
        return torch.abs(output - target)

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the sign of the difference."""
        # 0 at equality, as PyTorch's gradient is.
        return (output > target).to(torch.float32) - (output < target).to(torch.float32)

    def pytorch(self, output: Tensor, answer: Answer) -> Tensor:
        """Return `torch.nn.functional.l1_loss`."""
        return functional.l1_loss(output, answer.y.reshape(output.shape))


@dataclass(frozen=True)
class Huber(Elementwise):
    """Half the squared error up to a distance `delta`, and linear beyond it."""

    name: ClassVar[str] = "huber"

    delta: float = number(1.0, Range(positive=True))

    def errors(self, output: Tensor, target: Tensor) -> Tensor:
        """Return ``cut * (|difference| - cut / 2)``, with the difference cut at the distance."""
        size = torch.abs(output - target)
        # Beyond the distance, `cut` is constant, so the error grows linearly.
        cut = torch.clamp(size, max=self.delta)
        return cut * (size - 0.5 * cut)

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the difference, cut at the distance."""
        return torch.clamp(output - target, min=-self.delta, max=self.delta)

    def pytorch(self, output: Tensor, answer: Answer) -> Tensor:
        """Return `torch.nn.functional.huber_loss`."""
        return functional.huber_loss(output, answer.y.reshape(output.shape), delta=self.delta)


LOSSES: Mapping[str, type[Loss]] = MappingProxyType(
    {
        MeanSquaredError.name: MeanSquaredError,
        MeanAbsoluteError.name: MeanAbsoluteError,
        Huber.name: Huber,
    }
)
