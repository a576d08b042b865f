"""Binary cross entropy of logits: yes or no for each output, so that any number of labels may hold
for a sample.
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

    ``correct`` is the share of outputs that are right.
    """

    name: ClassVar[str] = "binary-cross-entropy"
    metrics: ClassVar[tuple[Metric, ...]] = (LOSS_SUM, Metric("correct"))
    bounds: ClassVar[tuple[float, float] | None] = (0.0, 1.0)

    def errors(self, output: Tensor, target: Tensor) -> Tensor:
        """Without the overflow that an exponential of a large logit has."""
        return torch.relu(output) - output * target + torch.log1p(torch.exp(-torch.abs(output)))

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        """Probability less truth."""
        return torch.sigmoid(output) - target

    def sums(self, output: Tensor, answer: Answer) -> list[Tensor]:
        """The loss, and of each sample the share of the outputs that are right."""
        right = ((output > 0) == (self.matched(output, answer) > 0.5)).to(torch.float32)
        return [*super().sums(output, answer), right.flatten(1).mean(1).sum()]

    def decided(self, output: Tensor, answer: Answer) -> tuple[Tensor, Tensor]:
        """Positive logits, and what holds; of one output the classes are no and yes."""
        pair = [
            (output > 0).to(torch.float32),
            (self.matched(output, answer) > 0.5).to(torch.float32),
        ]
        if output.shape[1:].numel() == 1:
            pair = [torch.cat([1 - item, item], -1) for item in pair]
        return pair[0], pair[1]

    def pytorch(self, output: Tensor, answer: Answer) -> Tensor:
        """`torch.nn.functional.binary_cross_entropy_with_logits`."""
        return functional.binary_cross_entropy_with_logits(output, answer.y.reshape(output.shape))

    def pytorch_sums(self, output: Tensor, answer: Answer) -> list[Tensor]:
        """The same times the samples, and the share of probabilities on the side of the truth,
        likewise.
        """
        right = (output.sigmoid() > 0.5) == (answer.y.reshape(output.shape) > 0.5)
        return [
            *super().pytorch_sums(output, answer),
            right.float().mean() * len(output),
        ]


LOSSES: Mapping[str, type[Loss]] = MappingProxyType({BinaryCrossEntropy.name: BinaryCrossEntropy})
