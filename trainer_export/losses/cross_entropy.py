"""The label-masked cross entropy of HeteroFL (Diao, Ding, Tarokh, ICLR 2021; specification 1.5).

Logits of labels that a device does not have are set to zero, not to minus infinity.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError
from fleet_protocol.targets import choosing_loss
from trainer_export.loss import LOSS_SUM, Answer, Loss, Metric, Target
from trainer_export.numbers import Range, number

_TORCH_IGNORES = -100  # the label that PyTorch's cross entropy leaves out
_PIXELS = 4  # dimensions of logits [batch, classes, height, width]


def loss_and_logit_gradient(logits: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the mean cross entropy of a batch, and its gradient in closed form.

    Args:
        logits: float32 [batch, classes], or [batch, tokens, classes].
        y: labels, int64 [batch] or [batch, tokens]. Of several labels of a sample, negative ones
            do not count.
        mask: 1 for labels the device has, else 0, float32 [classes]; all ones for the plain loss.

    Returns:
        The loss, float32 [], a mean over the labels that count (0 if none does), and the gradient
        with respect to ``logits``: ``(softmax - one_hot) * mask / count``, 0 where the label does
        not count.
    """
    masked = logits * mask
    truth = one_hot(y, logits.shape[-1])
    log_probabilities = torch.log_softmax(masked, -1)
    losses = -(log_probabilities * truth).sum(-1)
    error = torch.softmax(masked, -1) - truth
    weights = label_weights(y)
    if weights is None:
        return losses.mean(), error / logits.shape[0] * mask
    return (losses * weights).sum(), error * weights[..., None] * mask


def loss_sum(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Sum the cross entropies of a batch, float32 [].

    Arguments as for `loss_and_logit_gradient`.
    """
    log_probabilities = torch.log_softmax(logits * mask, -1)
    losses = log_probabilities * one_hot(y, logits.shape[-1])
    return -losses.sum()


def correct_count(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Count the labels that are the largest masked logit of their place, int64 []."""
    return ((logits * mask).argmax(-1) == y).to(torch.int64).sum()


def one_hot(y: Tensor, classes: int) -> Tensor:
    """Return labels as float32 [batch, classes] or [batch, tokens, classes].

    All are zero where a label is negative.
    """
    return (y[..., None] == torch.arange(classes)).to(torch.float32)


def label_weights(y: Tensor) -> Tensor | None:
    """Return the weight of each label in the mean of a batch, float32 of the shape of y.

    A negative label has the weight 0, and all others have 1 over their number. With one label per
    sample all count alike, and the result is None.
    """
    if y.dim() == 1:
        return None
    counted = (y >= 0).to(torch.float32)
    return counted / torch.clamp(counted.sum(), min=1.0)


def torch_cross_entropy(
    logits: Tensor,
    y: Tensor,
    reduction: str = "mean",
    *,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return PyTorch's cross entropy over the labels that count, float32 [].

    Args:
        logits: float32 [batch, classes] or [batch, tokens, classes].
        y: labels, int64 [batch] or [batch, tokens]; negative ones do not count.
        reduction: ``mean`` or ``sum``.
        weight: of each class.
        label_smoothing: as in PyTorch.
    """
    counted = torch.where(y < 0, _TORCH_IGNORES, y)
    return nn.functional.cross_entropy(
        logits.flatten(0, -2),
        counted.flatten(),
        weight=weight,
        ignore_index=_TORCH_IGNORES,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def classes_last(logits: Tensor) -> Tensor:
    """Move the classes of logits to the last dimension; those of pixels are in the second."""
    return logits.movedim(1, -1) if logits.dim() >= _PIXELS else logits


def _classes_back(slope: Tensor) -> Tensor:
    """Move the classes of a slope to where the output has them."""
    return slope.movedim(-1, 1) if slope.dim() >= _PIXELS else slope


@dataclass(frozen=True)
class MaskedCrossEntropy(Loss):
    """Cross entropy of the logits times the label mask; its metric counts the right answers.

    Attributes:
        label_smoothing: share of each label's weight that is spread evenly over all labels.
        class_weights: of each label, as in PyTorch: the mean divides by the weights of the true
            labels; empty for ones.
        ignore_label: a label that does not count, as negative ones of several do not; None if
            all others count.

    Raises:
        ConfigError: if a number is out of its range.
    """

    name: ClassVar[str] = "masked-cross-entropy"
    masked: ClassVar[bool] = True
    metrics: ClassVar[tuple[Metric, ...]] = (LOSS_SUM, Metric("correct", "int64"))

    label_smoothing: float = number(0.0, Range(below=1))
    class_weights: tuple[float, ...] = ()
    ignore_label: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        has_negative = any(weight < 0 for weight in self.class_weights)
        are_all_zero = self.class_weights and not any(self.class_weights)
        if has_negative or are_all_zero:
            raise ConfigError(
                f"class_weights {list(self.class_weights)} must not be negative, nor all 0"
            )
        if self.ignore_label is not None and self.ignore_label != int(self.ignore_label):
            raise ConfigError(f"ignore_label {self.ignore_label} is no label; give a whole number")

    @property
    def ignored(self) -> int | None:
        """See `Loss.ignored`."""
        return self.ignore_label

    @property
    def _is_plain(self) -> bool:
        """Whether every label that counts does so with weight 1 and without smoothing."""
        return not self.label_smoothing and not self.class_weights and self.ignore_label is None

    def target(self, output: tuple[int, ...]) -> Target:
        """Ask for a label for each place that has logits."""
        if len(output) >= _PIXELS - 1:
            classes, *places = output
        else:
            *places, classes = output
        if classes == 1:
            raise ConfigError(
                "the cross entropy of one logit is always 0, so nothing would be learnt; for "
                f"numbers {choosing_loss('mean-squared-error')}, for yes or no "
                f"{choosing_loss('binary-cross-entropy')}, or give the model more classes"
            )
        if self.class_weights and len(self.class_weights) != classes:
            raise ConfigError(
                f"class_weights has {len(self.class_weights)} numbers, the model {classes} classes"
            )
        return Target("int64", tuple(places))

    def value(self, output: Tensor, answer: Answer) -> Tensor:
        """Return the mean over the labels that count."""
        return self.value_and_slope(output, answer)[0]

    def _truth(self, classes: int, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted probabilities that are right, and the weight of each label.

        Returns:
            Float32 [..., classes] and [...].
        """
        weights = torch.tensor(self.class_weights or (1.0,) * classes, dtype=torch.float32)
        truth = one_hot(y, classes)
        counted = truth.sum(-1, keepdim=True)  # 0 for a label that does not count
        smooth = truth * (1 - self.label_smoothing) + counted * (self.label_smoothing / classes)
        return smooth * weights, (truth * weights).sum(-1)

    def value_and_slope(self, output: Tensor, answer: Answer) -> tuple[Tensor, Tensor]:
        """Compute both in closed form, so that no graph needs the gradient of a softmax."""
        mask = _mask(answer)
        logits = classes_last(output)
        if self._is_plain:
            loss, slope = loss_and_logit_gradient(logits, answer.y, mask)
            return loss, _classes_back(slope)
        truth, weights = self._truth(logits.shape[-1], answer.y)
        masked = logits * mask
        total = torch.clamp(weights.sum(), min=1e-12)
        losses = torch.log_softmax(masked, -1) * truth
        loss = -losses.sum() / total
        # A truth sums to 1 only without class weights, and to 0 for a label that does not count.
        probabilities = torch.softmax(masked, -1) * truth.sum(-1, keepdim=True)
        slope = (probabilities - truth) / total * mask
        return loss, _classes_back(slope)

    def sums(self, output: Tensor, answer: Answer) -> list[Tensor]:
        """Sum the losses, and count the right answers."""
        mask = _mask(answer)
        logits = classes_last(output)
        if self._is_plain:
            losses = loss_sum(logits, answer.y, mask)
        else:
            truth, _ = self._truth(logits.shape[-1], answer.y)
            losses = -(torch.log_softmax(logits * mask, -1) * truth).sum()
        return [losses, correct_count(logits, answer.y, mask)]

    def decided(self, output: Tensor, answer: Answer) -> tuple[Tensor, Tensor]:
        """Return the largest masked logit, and the label."""
        logits = classes_last(output) * _mask(answer)
        classes = logits.shape[-1]
        truth = one_hot(answer.y, classes)
        return one_hot(logits.argmax(-1), classes) * truth.sum(-1, keepdim=True), truth

    def pytorch(self, output: Tensor, answer: Answer) -> Tensor:
        """Return `torch.nn.functional.cross_entropy` of the masked logits."""
        return self._torch(classes_last(output) * _mask(answer), answer.y, "mean")

    def _torch(self, logits: Tensor, y: Tensor, reduction: str) -> Tensor:
        weight = None
        if self.class_weights:
            weight = torch.tensor(self.class_weights, dtype=torch.float32)
        return torch_cross_entropy(
            logits, y, reduction, weight=weight, label_smoothing=self.label_smoothing
        )

    def pytorch_sums(self, output: Tensor, answer: Answer) -> list[Tensor]:
        """Sum the same losses, and count the right answers."""
        logits = classes_last(output) * _mask(answer)
        return [
            self._torch(logits, answer.y, "sum"),
            (logits.argmax(-1) == answer.y).sum(),
        ]


def _mask(answer: Answer) -> Tensor:
    if answer.mask is None:
        raise ValueError("the masked cross entropy needs a label mask; all ones stand for none")
    return answer.mask


LOSSES: Mapping[str, type[Loss]] = MappingProxyType(
    {"cross-entropy": MaskedCrossEntropy, MaskedCrossEntropy.name: MaskedCrossEntropy}
)
