"""Metrics that are functions of the user's file: numbers of each sample, which add up, and a rule
for their sums.
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

_PAIR = 2  # sums of the rules that make a quotient of two numbers
_MOST_NUMBERS = 4096  # that a device may report of each sum


@dataclass(frozen=True)
class OwnMetric(OwnFunction, Metric):
    """A metric whose sums a function computes for each sample.

    The rule is one that boards and server know.
    """

    kind: ClassVar[str] = "metric"
    join: ClassVar[str] = "sum"

    def check(self, loss: Loss) -> None:
        """It goes with every loss whose targets it can read, which only trying tells."""

    def each(self, loss: Loss, output: Any, answer: Answer) -> list[Tensor]:
        """What the rule takes, of each sample: float32 [batch, ...]."""
        found = self.call(output, loss.targets(answer) if isinstance(loss, OwnLoss) else answer.y)
        parts = list(found) if isinstance(found, (tuple, list)) else [found]
        if len(parts) == 1 and len(self.sums) == _PAIR:
            parts.append(
                torch.ones_like(self.require_each(parts[0], answer.y.shape[0]), dtype=torch.float32)
            )
        if len(parts) != len(self.sums):
            self.refuse(
                f"returned {len(parts)} tensors",
                f"the rule {self.rule} takes {len(self.sums)}",
            )
        return [self.require_each(part, answer.y.shape[0]).to(torch.float32) for part in parts]

    def counts(self, loss: Loss, output: Tensor, answer: Answer) -> dict[str, Tensor]:
        """Its numbers, summed over the samples."""
        parts = self.each(loss, output, answer)
        return {name: part.sum(0) for name, part in zip(self.sums, parts, strict=True)}

    def try_out(self, loss: Loss, output: Tensor, answer: Answer) -> None:
        """Numbers of each sample alone, as many as the rule takes and a board may report."""
        parts = self.each(loss, output, answer)
        pair = len(self.sums) == _PAIR
        if len({part.shape for part in parts}) > 1 or parts[0].dim() != (1 if pair else 2):
            wanted = "numbers of samples [batch]" if pair else "tensors [batch, classes], all alike"
            self.refuse(
                f"returned {', '.join(str(list(part.shape)) for part in parts)}",
                f"return {wanted}",
            )
        if parts[0][0].numel() > _MOST_NUMBERS:
            self.refuse(
                f"has {parts[0][0].numel()} numbers a sample",
                f"{_MOST_NUMBERS} are the most",
            )
        self.require_alone(
            parts,
            lambda i: self.each(loss, one_of(output, i), Answer(answer.y[i : i + 1])),
        )


def metric(rule: str = "ratio") -> Callable[[Callable[..., Any]], type[OwnMetric]]:
    """Make a function of (outputs, targets) a metric of the same name, which a recipe may name.

    The function takes what the model returns for a batch, and the targets as the recipe's loss
    takes them; it returns what the rule takes, for each sample. Sums over all samples of all boards
    are then judged by the rule.

    Args:
        rule: ``ratio`` of two sums, or its ``root`` or ``exponential``: two tensors ``[batch]``,
            the second of ones if it is left out; ``f1``, ``iou`` or ``matthews``: three tensors
            ``[batch, classes]``, what is predicted rightly, predicted, and present.

    Raises:
        ConfigError: the function takes something else, or there is no such rule.
    """
    if rule not in RULES:
        raise ConfigError(
            f"no rule {rule!r} for a metric{did_you_mean(rule, RULES)}; there are {', '.join(RULES)}"
        )
    count = len(inspect.signature(RULES[rule]).parameters)

    def decorate(function: Callable[..., Any]) -> type[OwnMetric]:
        sums = tuple(f"sum.{function.__name__}.{number}" for number in range(count))
        return record_of(function, OwnMetric, rule=rule, sums=sums)

    return decorate
