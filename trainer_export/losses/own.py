"""Losses that are functions of the user's file, for any outputs and targets; traced, and checked like all others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fleet_protocol.errors import ConfigError
from trainer_export.loss import Answer, Dtype, Loss, Target
from trainer_export.own_function import OwnFunction, record_of

__all__ = ["OwnLoss", "loss"]


@dataclass(frozen=True)
class OwnLoss(OwnFunction, Loss):
    """A loss that a function computes for each sample; its mean is made small.

    Boards and server hand targets over as float32, whole numbers included; the function gets the type it asked for.
    """

    kind: ClassVar[str] = "loss"
    join: ClassVar[str] = "mean"
    wanted: ClassVar[Target]
    """What a sample is compared with, as the function takes it."""

    def target(self, output: tuple[int, ...]) -> Target:
        """As the function's decorator says."""
        del output
        return Target("float32", self.wanted.shape)

    def targets(self, answer: Answer) -> Tensor:
        """What the function takes."""
        return answer.y.to(torch.int64) if self.wanted.dtype == "int64" else answer.y

    def drawn(self, count: int, generator: torch.Generator) -> Tensor:
        """Labels 0 and 1, or numbers from 0 to 1, which every loss takes."""
        shape = (count, *self.wanted.shape)
        if self.wanted.dtype == "int64":
            return torch.randint(0, 2, shape, generator=generator).to(torch.float32)
        return torch.rand(shape, generator=generator)

    def each(self, output: Any, answer: Answer) -> Tensor:
        """The loss of each sample, float32 [batch]."""
        return self.require_each(self.call(output, self.targets(answer)), answer.y.shape[0])

    def value(self, output: Tensor, answer: Answer) -> Tensor:
        """The mean over the samples."""
        return self.each(output, answer).mean()

    def sums(self, output: Tensor, answer: Answer) -> list[Tensor]:
        """The sum over the samples."""
        return [self.each(output, answer).sum()]

    def pytorch(self, output: Tensor, answer: Answer) -> Tensor:
        """The function as it was written, which autograd differentiates."""
        return self.value(output, answer)

    def pytorch_sums(self, output: Tensor, answer: Answer) -> list[Tensor]:
        """The same, summed."""
        return self.sums(output, answer)

    def try_out(self, output: Tensor, answer: Answer) -> None:
        """One number for each sample, of that sample alone, with a gradient that says where to go."""
        leaf = output.detach().requires_grad_()
        found = self.each(leaf, answer)
        if found.dim() != 1 or found.dtype != torch.float32:
            kind = f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"
            self.refuse(f"returned {kind}", "return one float32 number for each sample, as by .flatten(1).mean(1)")
        self.require_alone([found], lambda i: [self.each(output[i : i + 1], Answer(answer.y[i : i + 1]))])
        slope = None
        if found.requires_grad:
            (slope,) = torch.autograd.grad(found.sum(), leaf, allow_unused=True)
        if slope is None or not bool(slope.any()):
            self.refuse(
                "has no gradient with respect to the outputs",
                "use no detach, argmax, rounding or comparison between outputs and result",
            )
        if not bool(slope.isfinite().all()):
            self.refuse("has a gradient that is not finite", "add a small number under roots, and before quotients")


def loss(dtype: Dtype = "float32", shape: tuple[int, ...] = ()) -> Callable[[Callable[..., Any]], type[OwnLoss]]:
    """Make a function of (outputs, targets) a loss of the same name, which a recipe may name.

    The function takes what the model returns for a batch, and the targets ``[batch, *shape]``; it returns the loss of
    each sample, float32 ``[batch]``. Further arguments are the loss's numbers and have defaults.

    Args:
        dtype: of the targets: ``int64`` for labels.
        shape: of one sample's target; empty for one number.

    Returns:
        The decorator.

    Raises:
        ConfigError: the function takes something else.
    """
    if dtype not in ("float32", "int64"):
        raise ConfigError(f"targets are float32 or int64, not {dtype!r}; write loss('int64') for labels")
    return lambda function: record_of(function, OwnLoss, wanted=Target(dtype, tuple(shape)))
