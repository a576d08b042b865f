"""The common parts of losses of models with several exits: outputs, answers and figures.

A model returns the logits of its exits as a list, from the shallowest to the deepest. Its answer in
an evaluation is the mean of their logits, or the last exit's.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fleet_protocol.errors import ChoiceError, ConfigError
from fleet_protocol.recipe_spec import MetricSpec
from fleet_protocol.targets import choosing_loss
from trainer_export.loss import LOSS_SUM, Answer, Loss, Metric, Target
from trainer_export.losses.cross_entropy import (
    MaskedCrossEntropy,
    classes_back,
    classes_last,
    correct_count,
    label_weights,
)
from trainer_export.numbers import Range, number

CROSS_ENTROPY = MaskedCrossEntropy()
"""The loss of one exit."""

_MOST_EXITS = 24  # an evaluation has at most 32 metrics


@dataclass(frozen=True)
class ExitsLoss(Loss):
    """A loss of the labels for every exit, and of what the exits learn from each other.

    Attributes:
        temperature: divides the logits that exits compare with each other.
        ensemble: whether the mean of the exits' logits is the answer of the model in an evaluation;
            otherwise the last exit is.
    """

    # Exits have one label mask, because they predict the same labels.
    masked: ClassVar[bool] = True
    metrics: ClassVar[tuple[Metric, ...]] = (LOSS_SUM, Metric("correct", "int64"))
    takes_several: ClassVar[bool] = True
    # Teachers are constants: no gradient flows into what an exit learns from.
    has_constants: ClassVar[bool] = True

    temperature: float = number(1.0, Range(positive=True))
    ensemble: bool = True

    @abstractmethod
    def label_weights(
        self,
        count: int,
        answer: Answer,
    ) -> list[Tensor | float]:
        """Return the weight of the labels for each of some exits; 1.0 for the plain loss."""

    @abstractmethod
    def divergence(self, softened: "SoftenedOutputs", answer: Answer) -> Tensor:
        """Return what several exits learn from each other, weighted, float32 []; traceable."""

    @abstractmethod
    def divergence_slopes(
        self,
        softened: "SoftenedOutputs",
        answer: Answer,
    ) -> list[Tensor | None]:
        """Return the gradient of `divergence` by exit, classes last; None for an exit without."""

    @abstractmethod
    def pytorch_divergence(
        self,
        output: Sequence[Tensor],
        answer: Answer,
    ) -> Tensor:
        """Return the expected result of `divergence`, from `pair_divergence`."""

    def require_outputs(self, outputs: Mapping[str, tuple[int, ...]]) -> None:
        """Require a list of exits of equal shape.

        Raises:
            ExportError: the model has one output, exits of several shapes, or too many exits.
        """
        if not outputs:
            raise ChoiceError(
                f"the loss {self.name} needs a model with exits: return the logits of all exits"
                " from forward as a list, of a single exit as a list of one (--arch exit_resnet"
                " has exits), or choose another loss"
            )
        # Divergence compares exits label by label, so their shapes must agree.
        if len(set(outputs.values())) > 1 or len(outputs) > _MOST_EXITS:
            shapes = ", ".join(f"{name} {list(shape)}" for name, shape in outputs.items())
            raise ChoiceError(
                f"the loss {self.name} takes at most {_MOST_EXITS} exits with logits of one shape,"
                f" but the model returns {shapes}"
            )

    def target(self, output: tuple[int, ...]) -> Target:
        """Require a label for each place with logits, of at least two classes."""
        try:
            return CROSS_ENTROPY.target(output)
        except ConfigError as error:
            # The remedies for a model with one output would lead back here.
            raise ConfigError(
                f"the loss {self.name} compares exits class by class, but each exit of this model"
                " has one logit; give the exits more classes (two for yes or no), or for numeric"
                " targets return only the last exit from forward, and"
                f" {choosing_loss('mean-squared-error')}"
            ) from error

    def value(self, output: Any, answer: Answer) -> Tensor:
        """Return the loss of all exits."""
        # Without a zero to start from: an addition of 0 would be a node of every graph.
        total: Tensor | None = None
        weights = self.label_weights(len(output), answer)
        for logits, weight in zip(output, weights, strict=True):
            value = _weighted(CROSS_ENTROPY.value(logits, answer), weight)
            total = value if total is None else total + value
        assert total is not None
        # One exit has no other to learn from.
        if len(output) == 1:
            return total
        return total + self.divergence(
            SoftenedOutputs.from_outputs(output, answer, self.temperature), answer
        )

    def value_and_slope(
        self,
        output: Any,
        answer: Answer,
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute both in closed form, so that no graph needs the gradient of a softmax."""
        total: Tensor | None = None
        slopes: list[Tensor] = []
        weights = self.label_weights(len(output), answer)
        for logits, weight in zip(output, weights, strict=True):
            plain_value, plain_slope = CROSS_ENTROPY.value_and_slope(logits, answer)
            value = _weighted(plain_value, weight)
            total = value if total is None else total + value
            slopes.append(_weighted(plain_slope, weight))
        assert total is not None
        # A sub-model with one exit has no other exit to learn from.
        if len(output) == 1:
            return total, slopes
        softened = SoftenedOutputs.from_outputs(output, answer, self.temperature)
        total = total + self.divergence(softened, answer)
        for place, slope in enumerate(self.divergence_slopes(softened, answer)):
            if slope is not None:
                # Divergence has the classes last; models have them second.
                slopes[place] = slopes[place] + classes_back(slope)
        return total, slopes

    def sums(self, output: Any, answer: Answer) -> list[Tensor]:
        """Sum the cross entropies of the model's answer, and count its correct predictions."""
        return CROSS_ENTROPY.sums(self._answer_logits(output), answer)

    def further_sums(
        self,
        output: Any,
        answer: Answer,
    ) -> dict[str, Tensor]:
        """Count the correct predictions of each exit."""
        mask = mask_of(answer)
        sums: dict[str, Tensor] = {}
        for place, logits in enumerate(output, 1):
            count = correct_count(classes_last(logits), answer.y, mask)
            # Sums of metrics are float32 in every graph, also counts.
            sums[_correct_name(place)] = count.to(torch.float32)
        return sums

    def pytorch_further_sums(
        self,
        output: Any,
        answer: Answer,
    ) -> dict[str, Tensor]:
        """Count the same by the sums of PyTorch's cross entropy."""
        sums: dict[str, Tensor] = {}
        for place, logits in enumerate(output, 1):
            sums[_correct_name(place)] = CROSS_ENTROPY.pytorch_sums(logits, answer)[1].float()
        return sums

    def figures(self, outputs: Any) -> tuple[MetricSpec, ...]:
        """Return the accuracy of each exit, ``exit1`` from the bottom."""
        figures: list[MetricSpec] = []
        for place in range(1, len(outputs) + 1):
            # As the accuracy of other models: correct predictions by examples.
            sums = (_correct_name(place), "examples")
            figures.append(
                MetricSpec(
                    name=f"exit{place}",
                    rule="ratio",
                    sums=sums,
                )
            )
        return tuple(figures)

    def answering(self, outputs: Any) -> tuple[int, ...]:
        """Return all exits, or only the last."""
        count = len(outputs)
        return tuple(range(count)) if self.ensemble else (count - 1,)

    def decided(
        self,
        output: Any,
        answer: Answer,
    ) -> tuple[Tensor, Tensor]:
        """Return what the model's answer decides, and the label."""
        return CROSS_ENTROPY.decided(self._answer_logits(output), answer)

    def pytorch(self, output: Any, answer: Answer) -> Tensor:
        """Return the sum of `torch.nn.functional.cross_entropy` and of `kl_div`, pair by pair."""
        total = torch.zeros(())
        weights = self.label_weights(len(output), answer)
        for logits, weight in zip(output, weights, strict=True):
            total = total + weight * CROSS_ENTROPY.pytorch(logits, answer)
        if len(output) == 1:
            return total
        return total + self.pytorch_divergence(output, answer)

    def pytorch_sums(self, output: Any, answer: Answer) -> list[Tensor]:
        """Sum the same losses of the answer, and count its correct predictions."""
        return CROSS_ENTROPY.pytorch_sums(self._answer_logits(output), answer)

    def pair_divergence(
        self,
        learner: Tensor,
        teacher: Tensor,
        answer: Answer,
    ) -> Tensor:
        """Return ``T^2 KL(teacher || learner)`` by PyTorch's own function, a mean over the batch.

        The teacher is constant.
        """
        mask = mask_of(answer)
        logs: list[Tensor] = []
        # The mask multiplies logits and does not remove them, as in the graph.
        for logits in (learner, teacher.detach()):
            logs.append(torch.log_softmax(classes_last(logits) * mask / self.temperature, -1))
        terms = nn.functional.kl_div(
            logs[0],
            logs[1],
            reduction="none",
            log_target=True,
        ).sum(-1)
        if label_weights(answer.y) is not None:
            terms = terms[answer.y >= 0]
        # The mean of no terms is NaN; the graph gives 0, with a gradient of 0.
        if terms.numel() == 0:
            return learner.sum() * 0.0
        return self.temperature**2 * terms.mean()

    def _answer_logits(self, output: Sequence[Tensor]) -> Tensor:
        """Return the logits with which the model answers."""
        if not self.ensemble:
            return output[-1]
        # The mean of logits and not of shares, so that the loss of an evaluation is a cross entropy
        # of it.
        return torch.stack(list(output)).mean(0)


@dataclass(frozen=True)
class SoftenedOutputs:
    """The softened outputs of all exits.

    Attributes:
        log_shares: logarithms of the softened shares, float32 [exits, batch, ..., classes].
        shares: the shares themselves, constant.
    """

    log_shares: Tensor
    shares: Tensor

    @property
    def exits(self) -> int:
        """The number of exits."""
        return self.shares.shape[0]

    @classmethod
    def from_outputs(
        cls,
        output: Sequence[Tensor],
        answer: Answer,
        temperature: float,
    ) -> "SoftenedOutputs":
        """Soften the masked logits of every exit."""
        stacked = torch.stack([classes_last(logits) for logits in output])
        masked = stacked * mask_of(answer)
        # A temperature of 1 adds no operator to the graph.
        scaled = masked if temperature == 1.0 else masked / temperature
        log_shares = torch.log_softmax(scaled, -1)
        # From the logarithms, so that shares and logarithms agree to the last bit.
        return cls(log_shares, torch.exp(log_shares.detach()))


def mean_over_labels(terms: Tensor, y: Tensor) -> Tensor:
    """Return the mean of terms, float32 of the shape of y, over the labels that count."""
    weights = label_weights(y)
    return terms.mean() if weights is None else (terms * weights).sum()


def shared_over_labels(slopes: Tensor, y: Tensor) -> Tensor:
    """Return gradients of terms, [..., *shape of y, classes], as those of `mean_over_labels`."""
    weights = label_weights(y)
    # Weights of labels already contain the division by their number.
    return slopes / y.shape[0] if weights is None else slopes * weights[..., None]


def mask_of(answer: Answer) -> Tensor:
    """Return the label mask of an answer."""
    if answer.mask is None:
        raise ValueError("a loss of exits needs a label mask; pass ones to mask nothing")
    return answer.mask


def _weighted(value: Tensor, weight: Tensor | float) -> Tensor:
    """Multiply by a weight; a plain 1.0 adds no operator to the graph."""
    is_plain = isinstance(weight, float) and weight == 1.0
    return value if is_plain else value * weight


def _correct_name(place: int) -> str:
    return f"exit{place}_correct"
