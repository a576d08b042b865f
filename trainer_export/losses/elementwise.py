"""Losses that compare each output with one target number, and average over all outputs."""

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from trainer_export.loss import Answer, Loss, Target


@dataclass(frozen=True)
class Elementwise(Loss):
    """A loss for numeric targets in the shape of the output.

    A model with one output has one target number per sample.
    """

    @property
    def takes_numbers(self) -> bool:
        """Return True: each output has a target number."""
        return True

    @abstractmethod
    def errors(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each output, float32 [batch, ...], in its shape."""

    @abstractmethod
    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the gradient of each error with respect to its output.

        Arguments as for :meth:`errors`.
        """

    def target(self, output: tuple[int, ...]) -> Target:
        """Require a number for each output."""
        # One output per sample matches a plain number per sample.
        return Target("float32", output[:-1] if output == (1,) else output)

    def matched(self, output: Tensor, answer: Answer) -> Tensor:
        """Return the targets in the shape of the output."""
        return answer.y if answer.y.dim() == output.dim() else answer.y[:, None]

    def value(self, output: Tensor, answer: Answer) -> Tensor:
        """Return the mean over all outputs of a batch."""
        target = self.matched(output, answer)
        return self.errors(output, target).mean()

    def value_and_slope(
        self,
        output: Tensor,
        answer: Answer,
    ) -> tuple[Tensor, Tensor]:
        """Compute both in closed form, so that no graph needs gradients of the errors."""
        target = self.matched(output, answer)
        # The mean over outputs and samples divides each slope by their number.
        count = output.shape[0] * output[0].numel()
        value = self.errors(output, target).mean()
        slope = self.slope(output, target) / count
        return value, slope

    def sums(self, output: Tensor, answer: Answer) -> list[Tensor]:
        """Sum the means of the samples."""
        errors = self.errors(output, self.matched(output, answer))
        # A mean per sample, so that the sum over batches divides by the number of samples.
        means = errors.flatten(1).mean(1)
        return [means.sum()]

    def pytorch_sums(self, output: Tensor, answer: Answer) -> list[Tensor]:
        """Return PyTorch's mean times the number of samples."""
        return [self.pytorch(output, answer) * len(output)]
