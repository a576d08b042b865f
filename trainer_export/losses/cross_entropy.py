"""The label-masked cross entropy of HeteroFL (Diao, Ding, Tarokh, ICLR 2021; specification 1.5).

Logits of labels that a device does not have are set to zero, as in the released code. Where the
paper gives these labels the probability zero, the loss can do so, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError
from fleet_protocol.recipe_spec import LossSpec
from fleet_protocol.targets import choosing_loss
from trainer_export.loss import LOSS_SUM, Answer, Loss, Metric, Target
from trainer_export.numbers import Range, number

_TORCH_IGNORES = -100  # the label that PyTorch's cross entropy ignores
_PIXELS = 4  # dimensions of logits [batch, classes, height, width]

_ROUNDING = 1e-4  # largest deviation from 1 of a sum of probabilities

# The logit of a label with probability zero. It is finite, because minus infinity times the zeros
# of a one-hot row is not a number; exp of it is exactly 0.
_IMPOSSIBLE = -1e6


def masked_logits(
    logits: Tensor,
    mask: Tensor,
    *,
    zero_probability: bool = False,
) -> Tensor:
    """Return logits without the information of labels that a device does not have.

    Args:
        logits: float32 [..., classes].
        mask: 1 for labels the device has, else 0, float32 [classes].
        zero_probability: give absent labels the probability zero instead of the logit zero.
    """
    masked = logits * mask
    if not zero_probability:
        # A masked label keeps the logit 0, so it still takes part in the softmax.
        return masked
    return masked + (1.0 - mask) * _IMPOSSIBLE


def loss_and_logit_gradient(
    logits: Tensor,
    y: Tensor,
    mask: Tensor,
    *,
    zero_probability: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the mean cross entropy of a batch, and its gradient in closed form.

    Args:
        logits: float32 [batch, classes], or [batch, tokens, classes].
        y: labels, int64 [batch] or [batch, tokens]. If a sample has several labels, negative ones
            are ignored.
        mask: 1 for labels the device has, else 0, float32 [classes]; all ones for the plain loss.
        zero_probability: whether absent labels get probability zero, as in `masked_logits`.

    Returns:
        The loss, float32 [], a mean over the labels that are not ignored (0 if there are none), and
        the gradient with respect to ``logits``: ``(softmax - one_hot) * mask / count``, 0 for an
        ignored label.
    """
    masked = masked_logits(logits, mask, zero_probability=zero_probability)
    truth = one_hot(y, logits.shape[-1])
    log_probabilities = torch.log_softmax(masked, -1)
    losses = -(log_probabilities * truth).sum(-1)
    error = torch.softmax(masked, -1) - truth
    weights = label_weights(y)
    # With one label per sample the mean is plain, and the graph needs no weights.
    if weights is None:
        # The last factor is the derivative of the masked logits.
        return losses.mean(), error / logits.shape[0] * mask
    return (losses * weights).sum(), error * weights[..., None] * mask


def loss_sum(
    logits: Tensor,
    y: Tensor,
    mask: Tensor,
    *,
    zero_probability: bool = False,
) -> Tensor:
    """Sum the cross entropies of a batch, float32 [].

    Arguments as for `loss_and_logit_gradient`.
    """
    masked = masked_logits(logits, mask, zero_probability=zero_probability)
    log_probabilities = torch.log_softmax(masked, -1)
    # Ignored labels have no entry 1, so they add nothing.
    losses = log_probabilities * one_hot(y, logits.shape[-1])
    return -losses.sum()


def correct_count(
    logits: Tensor,
    y: Tensor,
    mask: Tensor,
    *,
    zero_probability: bool = False,
) -> Tensor:
    """Count the labels whose masked logit is the largest at their place, int64 [].

    Arguments as for `loss_and_logit_gradient`.
    """
    masked = masked_logits(logits, mask, zero_probability=zero_probability)
    # A negative label never equals a position, so it never counts as correct.
    return (masked.argmax(-1) == y).to(torch.int64).sum()


def one_hot(y: Tensor, classes: int) -> Tensor:
    """Return labels as float32 [batch, classes] or [batch, tokens, classes].

    All are zero where a label is negative.
    """
    return (y[..., None] == torch.arange(classes)).to(torch.float32)


def label_weights(y: Tensor) -> Tensor | None:
    """Return the weight of each label in the mean of a batch, float32 of the shape of y.

    A negative label has the weight 0, and all others have 1 over their number. With one label per
    sample all weights are equal, and the result is None.
    """
    if y.dim() == 1:
        return None
    counted = (y >= 0).to(torch.float32)
    # At least 1, so that a batch of ignored labels has the loss 0 and not 0/0.
    return counted / torch.clamp(counted.sum(), min=1.0)


def torch_cross_entropy(
    logits: Tensor,
    y: Tensor,
    reduction: str = "mean",
    *,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return PyTorch's cross entropy over the labels that are not ignored, float32 [].

    Args:
        logits: float32 [batch, classes] or [batch, tokens, classes].
        y: labels, int64 [batch] or [batch, tokens]; negative ones are ignored.
        reduction: ``mean`` or ``sum``.
        weight: weight of each class.
        label_smoothing: share of label smoothing, as in PyTorch.
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
    """Move the classes of logits to the last dimension; for pixels they are in the second."""
    return logits.movedim(1, -1) if logits.dim() >= _PIXELS else logits


def classes_back(slope: Tensor) -> Tensor:
    """Move the classes of a gradient to the dimension of the output's classes."""
    return slope.movedim(-1, 1) if slope.dim() >= _PIXELS else slope


@dataclass(frozen=True)
class MaskedCrossEntropy(Loss):
    """Cross entropy of the logits times the label mask; its metric counts correct predictions.

    Attributes:
        label_smoothing: share of each label's weight that is spread evenly over all labels.
        class_weights: weight of each label, as in PyTorch: the mean divides by the weights of the
            true labels; empty for ones.
        ignore_label: a label to ignore, in addition to negative ones among several; None for no
            other label.
        zero_probability: whether labels that the device does not have get the probability zero in
            training, instead of the logit zero.
        tests_zero_probability: the same in evaluations, which then never predict such a label.

    Raises:
        ConfigError: if a number is out of its range, or smoothing would give a share to labels of
            probability zero.
    """

    name: ClassVar[str] = "masked-cross-entropy"
    masked: ClassVar[bool] = True
    metrics: ClassVar[tuple[Metric, ...]] = (LOSS_SUM, Metric("correct", "int64"))

    label_smoothing: float = number(0.0, Range(below=1))
    class_weights: tuple[float, ...] = ()
    ignore_label: int | None = None
    zero_probability: bool = False
    tests_zero_probability: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        has_negative = any(weight < 0 for weight in self.class_weights)
        are_all_zero = self.class_weights and not any(self.class_weights)
        if has_negative or are_all_zero:
            raise ConfigError(
                f"class_weights {list(self.class_weights)} must not be negative, nor all 0"
            )
        if self.ignore_label is not None and self.ignore_label != int(self.ignore_label):
            raise ConfigError(
                f"ignore_label {self.ignore_label} is not a label; give a whole number"
            )
        if self.label_smoothing and (self.zero_probability or self.tests_zero_probability):
            raise ConfigError(
                "label_smoothing gives every label a share, which a label of probability zero"
                " cannot have; remove it, or zero_probability and tests_zero_probability"
            )

    @property
    def ignored(self) -> int | None:
        """See `Loss.ignored`."""
        return self.ignore_label

    @property
    def _is_plain(self) -> bool:
        """Return whether every label has weight 1 and there is no smoothing."""
        return not self.label_smoothing and not self.class_weights and self.ignore_label is None

    def target(self, output: tuple[int, ...]) -> Target:
        """Require a label for each place with logits."""
        # Logits of maps have their classes first, all others have them last.
        if len(output) >= _PIXELS - 1:
            classes, *places = output
        else:
            *places, classes = output
        if classes == 1:
            raise ConfigError(
                "the cross entropy of one logit is always 0, so the model would not learn; for"
                f" numeric targets {choosing_loss('mean-squared-error')}, for yes or no"
                f" {choosing_loss('binary-cross-entropy')}, or give the model more classes"
            )
        if self.class_weights and len(self.class_weights) != classes:
            raise ConfigError(
                f"class_weights has {len(self.class_weights)} numbers, but the model has"
                f" {classes} classes"
            )
        return Target("int64", tuple(places))

    def output_warning(self, output: Any) -> str | None:
        """See `Loss.output_warning`: the loss applies softmax, so a model should not."""
        # `require_outputs` refuses several outputs later, and says what helps.
        if not isinstance(output, Tensor):
            return None
        scores = classes_last(output)
        sums = scores.sum(-1)
        add_up_to_one = torch.allclose(sums, torch.ones_like(sums), atol=_ROUNDING)
        if not add_up_to_one or bool((scores < 0).any()):
            return None
        return (
            f"the model returns probabilities, but the loss {self.name} applies softmax itself, so"
            " the model would learn slowly or not at all; return the logits, without the softmax"
            " at the end of forward"
        )

    def value(self, output: Tensor, answer: Answer) -> Tensor:
        """Return the mean over the labels that are not ignored."""
        return self.value_and_slope(output, answer)[0]

    def _truth(self, classes: int, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted target probabilities, and the weight of each label.

        Returns:
            Float32 [..., classes] and [...].
        """
        weights = torch.tensor(self.class_weights or (1.0,) * classes, dtype=torch.float32)
        truth = one_hot(y, classes)
        counted = truth.sum(-1, keepdim=True)  # 0 for an ignored label
        smooth = truth * (1 - self.label_smoothing) + counted * (self.label_smoothing / classes)
        return smooth * weights, (truth * weights).sum(-1)

    def value_and_slope(
        self,
        output: Tensor,
        answer: Answer,
    ) -> tuple[Tensor, Tensor]:
        """Compute both in closed form, so that no graph needs the gradient of a softmax."""
        mask = _mask(answer)
        logits = classes_last(output)
        if self._is_plain:
            loss, slope = loss_and_logit_gradient(
                logits, answer.y, mask, zero_probability=self.zero_probability
            )
            return loss, classes_back(slope)
        truth, weights = self._truth(logits.shape[-1], answer.y)
        masked = self._trained(logits, mask)
        # PyTorch returns NaN if all labels are ignored; here the loss is 0.
        total = torch.clamp(weights.sum(), min=1e-12)
        losses = torch.log_softmax(masked, -1) * truth
        loss = -losses.sum() / total
        # A truth sums to 1 only without class weights, and to 0 for an ignored label.
        probabilities = torch.softmax(masked, -1) * truth.sum(-1, keepdim=True)
        slope = (probabilities - truth) / total * mask
        return loss, classes_back(slope)

    def sums(self, output: Tensor, answer: Answer) -> list[Tensor]:
        """Sum the losses, and count the correct predictions."""
        mask = _mask(answer)
        logits = classes_last(output)
        if self._is_plain:
            losses = loss_sum(logits, answer.y, mask, zero_probability=self.tests_zero_probability)
        else:
            truth, _ = self._truth(logits.shape[-1], answer.y)
            masked = self._tested(logits, mask)
            losses = -(torch.log_softmax(masked, -1) * truth).sum()
        correct = correct_count(
            logits, answer.y, mask, zero_probability=self.tests_zero_probability
        )
        return [losses, correct]

    def decided(
        self,
        output: Tensor,
        answer: Answer,
    ) -> tuple[Tensor, Tensor]:
        """Return the largest masked logit, and the label."""
        logits = self._tested(classes_last(output), _mask(answer))
        classes = logits.shape[-1]
        truth = one_hot(answer.y, classes)
        return one_hot(logits.argmax(-1), classes) * truth.sum(-1, keepdim=True), truth

    def pytorch(self, output: Tensor, answer: Answer) -> Tensor:
        """Return `torch.nn.functional.cross_entropy` of the masked logits."""
        logits = self._trained(classes_last(output), _mask(answer))
        return self._torch(logits, answer.y, "mean")

    def _torch(
        self,
        logits: Tensor,
        y: Tensor,
        reduction: str,
    ) -> Tensor:
        weight = None
        if self.class_weights:
            weight = torch.tensor(self.class_weights, dtype=torch.float32)
        return torch_cross_entropy(
            logits, y, reduction, weight=weight, label_smoothing=self.label_smoothing
        )

    def pytorch_sums(self, output: Tensor, answer: Answer) -> list[Tensor]:
        """Sum the same losses, and count the correct predictions."""
        logits = self._tested(classes_last(output), _mask(answer))
        return [
            self._torch(logits, answer.y, "sum"),
            (logits.argmax(-1) == answer.y).sum(),
        ]

    def spec(self, output: tuple[int, ...], zeros: Any = None) -> LossSpec:
        """Return this loss in the form of the manifest."""
        spec = super().spec(output, zeros)
        settings = dict(spec.settings)
        # Manifests that were written before these existed keep their digests.
        for name in ("zero_probability", "tests_zero_probability"):
            if not getattr(self, name):
                settings.pop(name, None)
        return spec.model_copy(update={"settings": settings})

    def _trained(self, logits: Tensor, mask: Tensor) -> Tensor:
        """Return the logits whose loss is minimised."""
        return masked_logits(logits, mask, zero_probability=self.zero_probability)

    def _tested(self, logits: Tensor, mask: Tensor) -> Tensor:
        """Return the logits that evaluations count."""
        return masked_logits(logits, mask, zero_probability=self.tests_zero_probability)


def _mask(answer: Answer) -> Tensor:
    if answer.mask is None:
        raise ValueError("the masked cross entropy needs a label mask; pass ones to mask nothing")
    return answer.mask


LOSSES: Mapping[str, type[Loss]] = MappingProxyType(
    # Manifests have the longer name (`fleet_protocol.recipe`).
    {"cross-entropy": MaskedCrossEntropy, MaskedCrossEntropy.name: MaskedCrossEntropy}
)
