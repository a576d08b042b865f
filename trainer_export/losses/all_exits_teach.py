"""The loss of DepthFL: every exit learns the labels, and from all other exits.

Minjae Kim, Sangyoon Yu, Suhyun Kim, Soo-Mook Moon: "DepthFL: Depthwise Federated Learning for
Heterogeneous Clients", ICLR 2023, https://openreview.net/forum?id=pf8RIZTMU58; specification 8.2.
With z_1 ... z_n the logits of the exits from the bottom, p_i the softmax of z_i / T, y the labels
and B the batch:

    L       = CE(z_n, y) + inner * sum_{i<n} CE(z_i, y)
              + distillation * T^2 / (n - 1) * sum_i sum_{j != i} KL(p_j || p_i)
    dL/dz_i = (1 or inner) * (softmax(z_i) - onehot) / B
              + distillation * T * n / (n - 1) * (p_i - mean_j p_j) / B

The teachers of an exit are constants, so the second line reaches an exit only as the one that
learns. Its closed form needs only the mean over the exits, not every pair.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from torch import Tensor

from trainer_export.knob import Knob
from trainer_export.loss import Answer, Loss
from trainer_export.losses.exits import (
    ExitsLoss,
    SoftenedOutputs,
    mask_of,
    mean_over_labels,
    shared_over_labels,
)
from trainer_export.numbers import Range, number


@dataclass(frozen=True)
class AllExitsTeach(ExitsLoss):
    """Cross entropy of every exit, and the divergence of each from all others.

    Attributes:
        distillation: weight of what exits learn from each other, unless the task sets it.
        inner: weight of the labels for all exits but the last, unless the task sets it.
    """

    name: ClassVar[str] = "all-exits-teach"

    distillation: float = number(1.0, Range())
    inner: float = number(1.0, Range())

    @property
    def knobs(self) -> tuple[Knob, ...]:
        """Both weights; see `Loss.knobs`."""
        return self._distillation, self._inner

    @property
    def _distillation(self) -> Knob:
        return Knob("distillation", checked_with=0.7, initial=self.distillation)

    @property
    def _inner(self) -> Knob:
        # Another value than that of the other knob, so that exchanged knobs are found.
        return Knob("inner", checked_with=0.6, initial=self.inner)

    def label_weights(
        self,
        count: int,
        answer: Answer,
    ) -> list[Tensor | float]:
        """Return `inner` for all exits but the last, which has 1."""
        # The last exit is the whole model's, so its labels always count fully.
        weights: list[Tensor | float] = [answer.number(self._inner)] * (count - 1)
        return [*weights, 1.0]

    def divergence(self, softened: SoftenedOutputs, answer: Answer) -> Tensor:
        """Return the weighted divergences of all pairs of exits."""
        # Over the exits i the terms <p_j, log p_j - log p_i> add up to n <p_j, log p_j - mean log>.
        differences = softened.log_shares.detach() - softened.log_shares.mean(0)
        terms = (softened.shares * differences).sum(-1).sum(0)
        weight = self._weight(
            softened.exits,
            answer,
            self.temperature**2 * softened.exits,
        )
        return mean_over_labels(terms, answer.y) * weight

    def divergence_slopes(
        self,
        softened: SoftenedOutputs,
        answer: Answer,
    ) -> list[Tensor | None]:
        """Return for each exit how far it is from the mean of all, weighted."""
        differences = (softened.shares - softened.shares.mean(0)) * mask_of(answer)
        weight = self._weight(softened.exits, answer, self.temperature * softened.exits)
        slopes = shared_over_labels(differences, answer.y) * weight
        return list(slopes.unbind(0))

    def pytorch_divergence(
        self,
        output: Sequence[Tensor],
        answer: Answer,
    ) -> Tensor:
        """Return the same, pair by pair."""
        total = output[-1].sum() * 0.0
        for learner in output:
            for teacher in output:
                if teacher is not learner:
                    total = total + self.pair_divergence(learner, teacher, answer)
        return total * self._weight(len(output), answer, 1.0)

    def _weight(
        self,
        count: int,
        answer: Answer,
        scale: float,
    ) -> Tensor | float:
        """Return the weight of one pair of some exits, times a scale."""
        return answer.number(self._distillation) * (scale / (count - 1))


LOSSES: Mapping[str, type[Loss]] = MappingProxyType({AllExitsTeach.name: AllExitsTeach})
