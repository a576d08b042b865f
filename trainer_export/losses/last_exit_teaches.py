"""The loss of ScaleFL: every exit learns the labels, and from the last exit.

Fatih Ilhan, Gong Su, Ling Liu: "ScaleFL: Resource-Adaptive Federated Learning with Heterogeneous
Clients", CVPR 2023; specification 8.5. With the symbols of `trainer_export.losses.all_exits_teach`
and c_i = 2 i / (n (n + 1)), whose sum is 1:

    L       = sum_i c_i * CE(z_i, y) + distillation * T^2 * sum_{i<n} c_i * KL(p_n || p_i)
    dL/dz_i = c_i * ((softmax(z_i) - onehot) + [i < n] * distillation * T * (p_i - p_n)) / B

The last exit is constant where it teaches.
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
class LastExitTeaches(ExitsLoss):
    """Cross entropy of every exit, weighted by its depth, and its divergence from the last.

    Attributes:
        distillation: weight of what exits learn from the last one, unless the task sets it.
    """

    name: ClassVar[str] = "last-exit-teaches"

    temperature: float = number(3.0, Range(positive=True))
    ensemble: bool = False
    distillation: float = number(0.05, Range())

    @property
    def knobs(self) -> tuple[Knob, ...]:
        """The weight of the last exit's lessons; see `Loss.knobs`."""
        return (self._distillation,)

    @property
    def _distillation(self) -> Knob:
        # Checked with a value other than the default, so that a graph that ignores the knob is
        # found.
        return Knob("distillation", checked_with=0.7, initial=self.distillation)

    def label_weights(
        self,
        count: int,
        answer: Answer,
    ) -> list[Tensor | float]:
        """Return weights that grow with the depth and add up to 1."""
        del answer
        weights: list[Tensor | float] = []
        for place in range(1, count + 1):
            weights.append(2.0 * place / (count * (count + 1)))
        return weights

    def divergence(self, softened: SoftenedOutputs, answer: Answer) -> Tensor:
        """Return the weighted divergences of all exits from the last."""
        # The last exit teaches and does not learn, so it is constant here.
        log_last = softened.log_shares[-1].detach()
        weights = self.label_weights(softened.exits, answer)
        total = None
        for log_shares, weight in zip(softened.log_shares[:-1], weights[:-1], strict=True):
            terms = (softened.shares[-1] * (log_last - log_shares)).sum(-1)
            value = mean_over_labels(terms, answer.y) * weight
            total = value if total is None else total + value
        assert total is not None
        return total * (answer.number(self._distillation) * self.temperature**2)

    def divergence_slopes(
        self,
        softened: SoftenedOutputs,
        answer: Answer,
    ) -> list[Tensor | None]:
        """Return for each exit how far it is from the last, weighted."""
        shares = softened.shares
        weights = self.label_weights(softened.exits, answer)
        slopes: list[Tensor | None] = []
        for own, weight in zip(shares[:-1], weights[:-1], strict=True):
            differences = (own - shares[-1]) * mask_of(answer)
            factor = answer.number(self._distillation) * (self.temperature * weight)
            slopes.append(shared_over_labels(differences, answer.y) * factor)
        # None for the last exit, to which no slope is added: not even zeros.
        return [*slopes, None]

    def pytorch_divergence(
        self,
        output: Sequence[Tensor],
        answer: Answer,
    ) -> Tensor:
        """Return the same, exit by exit."""
        # Zero, but connected to the output: a single exit must still have a gradient.
        total = output[-1].sum() * 0.0
        weights = self.label_weights(len(output), answer)
        for learner, weight in zip(output[:-1], weights[:-1], strict=True):
            total = total + weight * self.pair_divergence(
                learner,
                output[-1],
                answer,
            )
        return total * answer.number(self._distillation)


LOSSES: Mapping[str, type[Loss]] = MappingProxyType({LastExitTeaches.name: LastExitTeaches})
