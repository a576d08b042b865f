"""Losses that compare each output with one number of the target, and are the mean over all."""

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from trainer_export.loss import Answer, Loss, Target


@dataclass(frozen=True)
class Elementwise(Loss):
    """A loss of numbers in the shape of the output.

    The targets of a model with one output are one number for each sample.
    """

    @abstractmethod
    def errors(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each output, float32 [batch, ...], in its shape."""

    @abstractmethod
    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the gradient of each error with respect to its output.

        Arguments as for :meth:`errors`.
        """

    def target(self, output: tuple[int, ...]) -> Target:
        """Ask for a number for each output."""
        return Target("float32", output[:-1] if output == (1,) else output)

    def matched(self, output: Tensor, answer: Answer) -> Tensor:
        """Return the targets in the shape of the output."""
        return answer.y if answer.y.dim() == output.dim() else answer.y[:, None]

    def value(self, output: Tensor, answer: Answer) -> Tensor:
        """Return the mean over all outputs of a batch."""
        target = self.matched(output, answer)
        return self.errors(output, target).mean()

    def value_and_slope(self, output: Tensor, answer: Answer) -> tuple[Tensor, Tensor]:
        """Compute both in closed form, so that no graph needs gradients of the errors."""
        target = self.matched(output, answer)
        count = output.shape[0] * output[0].numel()
        value = self.errors(output, target).mean()
        slope = self.slope(output, target) / count
        return value, slope

    def sums(self, output: Tensor, answer: Answer) -> list[Tensor]:
        """Sum the means of the samples."""
        errors = self.errors(output, self.matched(output, answer))
        means = errors.flatten(1).mean(1)
        return [means.sum()]

    def pytorch_sums(self, output: Tensor, answer: Answer) -> list[Tensor]:
        """Return PyTorch's mean times the number of samples."""
        return [self.pytorch(output, answer) * len(output)]
