"""Binary cross entropy of logits: yes or no for each output.

A sample may have any number of labels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from trainer_export.loss import LOSS_SUM, Answer, Loss, Metric
from trainer_export.losses.elementwise import Elementwise


@dataclass(frozen=True)
class BinaryCrossEntropy(Elementwise):
    """Binary cross entropy, a mean over outputs and samples.

    ``correct`` is the share of correct outputs.
    """

    name: ClassVar[str] = "binary-cross-entropy"
    metrics: ClassVar[tuple[Metric, ...]] = (LOSS_SUM, Metric("correct"))
    bounds: ClassVar[tuple[float, float] | None] = (0.0, 1.0)

    def errors(self, output: Tensor, target: Tensor) -> Tensor:
        """Compute the errors without the overflow of the exponential of a large logit."""
        # max(x, 0) - x * y + log(1 + exp(-|x|)), whose exponent is never positive.
        linear = torch.relu(output) - output * target
        return linear + torch.log1p(torch.exp(-torch.abs(output)))

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the probability minus the target."""
        return torch.sigmoid(output) - target

    def sums(self, output: Tensor, answer: Answer) -> list[Tensor]:
        """Sum the loss, and the share of each sample's correct outputs."""
        # A logit above 0 is a probability above one half.
        is_predicted = output > 0
        # Targets may lie between 0 and 1, so they are rounded to no or yes.
        is_present = self.matched(output, answer) > 0.5
        right = (is_predicted == is_present).to(torch.float32)
        sums = super().sums(output, answer)
        shares = right.flatten(1).mean(1)
        return [*sums, shares.sum()]

    def decided(
        self,
        output: Tensor,
        answer: Answer,
    ) -> tuple[Tensor, Tensor]:
        """Return positive logits and targets; a single output has the classes no and yes."""
        predicted = (output > 0).to(torch.float32)
        truth = (self.matched(output, answer) > 0.5).to(torch.float32)
        # Counts of one class only would leave out what the model says no to.
        if output.shape[1:].numel() == 1:
            predicted = torch.cat([1 - predicted, predicted], -1)
            truth = torch.cat([1 - truth, truth], -1)
        return predicted, truth

    def pytorch(self, output: Tensor, answer: Answer) -> Tensor:
        """Return `torch.nn.functional.binary_cross_entropy_with_logits`."""
        return functional.binary_cross_entropy_with_logits(output, answer.y.reshape(output.shape))

    def pytorch_sums(self, output: Tensor, answer: Answer) -> list[Tensor]:
        """Sum the same loss, and the share of probabilities on the target's side of one half."""
        # By probabilities, so that the comparison of logits above has an independent check.
        is_predicted = output.sigmoid() > 0.5
        is_present = answer.y.reshape(output.shape) > 0.5
        share = (is_predicted == is_present).float().mean()
        return [*super().pytorch_sums(output, answer), share * len(output)]


LOSSES: Mapping[str, type[Loss]] = MappingProxyType({BinaryCrossEntropy.name: BinaryCrossEntropy})
