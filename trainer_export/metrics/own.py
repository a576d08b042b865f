"""Metrics that are functions in the user's file.

A function returns numbers for each sample. They are summed, and a rule computes the metric from the
sums.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fleet_protocol.errors import ConfigError
from fleet_protocol.metrics import RULES
from fleet_protocol.spelling import did_you_mean
from trainer_export.loss import Answer, Loss
from trainer_export.losses.own import OwnLoss
from trainer_export.metric import Metric
from trainer_export.own_function import OwnFunction, one_of, record_of

_PAIR = 2  # sums of the rules that divide two numbers
_MOST_NUMBERS = 4096  # largest size of a sum that a device may report


@dataclass(frozen=True)
class OwnMetric(OwnFunction, Metric):
    """A metric whose sums a function computes for each sample.

    Boards and server implement the rule.
    """

    kind: ClassVar[str] = "metric"
    join: ClassVar[str] = "sum"

    def check(self, loss: Loss) -> None:
        """Accept every loss; the trial run of the metric checks whether it can read the targets."""

    def each(
        self,
        loss: Loss,
        output: Any,
        answer: Answer,
    ) -> list[Tensor]:
        """Return the numbers that the rule takes, of each sample: float32 [batch, ...]."""
        targets = loss.targets(answer) if isinstance(loss, OwnLoss) else answer.y
        returned = self.call(output, targets)
        numbers = list(returned) if isinstance(returned, (tuple, list)) else [returned]
        batch = answer.y.shape[0]
        if len(numbers) == 1 and len(self.sums) == _PAIR:
            # A mean over the samples; the second sum counts them.
            first = self.require_each(numbers[0], batch)
            numbers.append(torch.ones_like(first, dtype=torch.float32))
        if len(numbers) != len(self.sums):
            self.refuse(
                f"returned {len(numbers)} tensors",
                f"the rule {self.rule} takes {len(self.sums)}",
            )
        converted: list[Tensor] = []
        for tensor in numbers:
            converted.append(self.require_each(tensor, batch).to(torch.float32))
        return converted

    def counts(
        self,
        loss: Loss,
        output: Tensor,
        answer: Answer,
    ) -> dict[str, Tensor]:
        """Sum its numbers over the samples."""
        counts: dict[str, Tensor] = {}
        for name, numbers in zip(self.sums, self.each(loss, output, answer), strict=True):
            counts[name] = numbers.sum(0)
        return counts

    def try_out(
        self,
        loss: Loss,
        output: Tensor,
        answer: Answer,
    ) -> None:
        """Require numbers that depend only on their sample, and that rule and boards accept."""
        numbers = self.each(loss, output, answer)
        dimensions = 2
        expected = "tensors [batch, classes] of equal shape"
        if len(self.sums) == _PAIR:
            dimensions = 1
            expected = "numbers of samples [batch]"
        shapes = [list(tensor.shape) for tensor in numbers]
        are_alike = all(shape == shapes[0] for shape in shapes)
        if not are_alike or len(shapes[0]) != dimensions:
            self.refuse(f"returned {', '.join(map(str, shapes))}", f"return {expected}")
        count = numbers[0][0].numel()
        if count > _MOST_NUMBERS:
            self.refuse(f"has {count} numbers per sample", f"return at most {_MOST_NUMBERS}")
        self.require_alone(
            numbers,
            lambda i: self.each(loss, one_of(output, i), Answer(answer.y[i : i + 1])),
        )


def metric(rule: str = "ratio") -> Callable[[Callable[..., Any]], type[OwnMetric]]:
    """Turn a function of (outputs, targets) into a metric with its name, for use in a recipe.

    The function takes the model's outputs for a batch, and the targets in the form of the recipe's
    loss. It returns the inputs of the rule for each sample. The rule is applied to the sums over
    all samples of all boards.

    Args:
        rule: ``ratio`` of two sums, or its ``root`` or ``exponential``: two tensors ``[batch]``,
            where the second is ones by default; ``f1``, ``micro-f1``, ``iou`` or ``matthews``:
            three tensors ``[batch, classes]``: predicted correctly, predicted, and present;
            ``pearson``: six tensors ``[batch, outputs]``: outputs, targets, the squares of both,
            their products, and ones.

    Raises:
        ConfigError: the function has other arguments, or there is no such rule.
    """
    if rule not in RULES:
        raise ConfigError(
            f"unknown rule {rule!r} of a metric{did_you_mean(rule, RULES)}; choose from"
            f" {', '.join(RULES)}"
        )
    count = len(inspect.signature(RULES[rule]).parameters)

    def decorate(function: Callable[..., Any]) -> type[OwnMetric]:
        sums = tuple(f"sum.{function.__name__}.{number}" for number in range(count))
        return record_of(function, OwnMetric, rule=rule, sums=sums)

    return decorate
