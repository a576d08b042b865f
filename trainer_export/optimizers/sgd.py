"""Stochastic gradient descent with PyTorch's semantics of momentum and weight decay."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError
from trainer_export.numbers import Range, number
from trainer_export.optimizer import Optimizer, Slot, State

_BUFFER = "momentum_buffer"


@dataclass(frozen=True)
class Sgd(Optimizer):
    """SGD.

    Attributes:
        momentum: momentum of the gradient; 0 for none, which needs no state.
        weight_decay: factor of the parameter, added to the clipped gradient; 0 for none.
        nesterov: whether to use Nesterov's momentum, in the form of Sutskever, Martens, Dahl,
            Hinton: "On the importance of initialization and momentum in deep learning", ICML 2013.

    Raises:
        ConfigError: a parameter is out of range, or Nesterov's momentum is 0.
    """

    name: ClassVar[str] = "sgd"

    momentum: float = number(0.9, Range(below=1))
    weight_decay: float = number(5e-4, Range())
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov needs a momentum above 0; set momentum, or omit nesterov")

    @property
    def states(self) -> tuple[State, ...]:
        """The momentum, if there is any."""
        return (State(_BUFFER),) if self.momentum else ()

    def direction(self, slot: Slot) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the gradient with weight decay, plus the momentum of earlier gradients."""
        update = slot.gradient
        if self.weight_decay:
            update = update + slot.parameter * self.weight_decay
        if not self.momentum:
            return update, {}
        buffer = slot.states[_BUFFER] * self.momentum + update
        direction = update + buffer * self.momentum if self.nesterov else buffer
        return direction, {_BUFFER: buffer}

    def pytorch(
        self,
        parameters: Sequence[nn.Parameter],
        lr: float,
    ) -> torch.optim.Optimizer:
        """Create a `torch.optim.SGD`."""
        return torch.optim.SGD(
            parameters,
            lr=lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
        )


OPTIMIZERS: Mapping[str, type[Optimizer]] = MappingProxyType({Sgd.name: Sgd})
