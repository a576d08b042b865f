"""Adam, and AdamW, which decouples the weight decay from the gradient.

Diederik Kingma, Jimmy Ba: "Adam: A Method for Stochastic Optimization", ICLR 2015,
https://arxiv.org/abs/1412.6980, algorithm 1. Ilya Loshchilov, Frank Hutter: "Decoupled Weight Decay
Regularization", ICLR 2019, https://arxiv.org/abs/1711.05101, algorithm 2, whose decay is multiplied
by the learning rate, as in PyTorch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainer_export.numbers import Range, number
from trainer_export.optimizer import Optimizer, Slot, State

_FIRST = "exp_avg"
_SECOND = "exp_avg_sq"


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam."""

    name: ClassVar[str] = "adam"
    counts_steps: ClassVar[bool] = True
    torch_class: ClassVar[type[Any]] = torch.optim.Adam

    beta1: float = number(0.9, Range(below=1))  # decay rate of the mean of the gradient
    beta2: float = number(0.999, Range(below=1))  # decay rate of the mean of its square
    eps: float = number(1e-8, Range(positive=True))  # added to the root of that mean
    # factor of the parameter, added to the clipped gradient; 0 for none
    weight_decay: float = number(0.0, Range())

    @property
    def states(self) -> tuple[State, ...]:
        """The means of gradient and square."""
        return State(_FIRST, underway=0.0), State(_SECOND, underway=1e-6)

    def direction(self, slot: Slot) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean gradient over the root of the mean square, both bias-corrected."""
        gradient = slot.gradient
        if self.weight_decay:
            gradient = gradient + slot.parameter * self.weight_decay
        return self._adapted(slot, gradient)

    def _adapted(
        self,
        slot: Slot,
        gradient: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if slot.step is None:
            raise ValueError(f"{self.name} needs the step number")
        first = slot.states[_FIRST] * self.beta1 + gradient * (1 - self.beta1)
        second = slot.states[_SECOND] * self.beta2 + gradient * gradient * (1 - self.beta2)
        # The means start at zero; these are the total weights of gradients in them so far.
        first_share = 1 - torch.pow(self.beta1, slot.step)
        second_share = 1 - torch.pow(self.beta2, slot.step)
        mean = first / first_share
        root = torch.sqrt(second) / torch.sqrt(second_share)
        direction = mean / (root + self.eps)
        return direction, {_FIRST: first, _SECOND: second}

    def pytorch(
        self,
        parameters: Sequence[nn.Parameter],
        lr: float,
    ) -> torch.optim.Optimizer:
        """Create a `torch.optim.Adam` or `torch.optim.AdamW`."""
        settings = {
            "betas": (self.beta1, self.beta2),
            "eps": self.eps,
            "weight_decay": self.weight_decay,
        }
        optimizer: torch.optim.Optimizer = self.torch_class(parameters, lr=lr, **settings)
        return optimizer


@dataclass(frozen=True)
class AdamW(Adam):
    """AdamW."""

    name: ClassVar[str] = "adamw"
    torch_class: ClassVar[type[Any]] = torch.optim.AdamW

    # share of the parameter that a step subtracts, times the learning rate; 0 for none
    weight_decay: float = number(0.01, Range())

    def direction(self, slot: Slot) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the direction of Adam plus the decay."""
        direction, states = self._adapted(slot, slot.gradient)
        if self.weight_decay:
            direction = direction + slot.parameter * self.weight_decay
        return direction, states


OPTIMIZERS: Mapping[str, type[Optimizer]] = MappingProxyType(
    {kind.name: kind for kind in (Adam, AdamW)}
)
