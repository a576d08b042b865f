"""What an optimizer is to the exporter: a record of numbers, of states per parameter, and of a
rule.

Each lies in a module of its own in `trainer_export.optimizers` and is found there by its row in the
module's table ``OPTIMIZERS``. A step moves every parameter by ``- lr * direction``; the rule gives
the direction.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fleet_protocol.discovery import discover
from fleet_protocol.manifest import StateSpec
from fleet_protocol.recipe_spec import OptimizerSpec
from trainer_export.numbers import check_numbers, make_record

STEP = "step"
"""Name of the counter of steps, one number for the whole model."""
UNDERWAY = 20
"""Steps that a training compared with PyTorch has behind it, where a state has a value for that."""


@dataclass(frozen=True)
class State:
    """A tensor that an optimizer keeps for every parameter, in the parameter's shape."""

    name: str  # as PyTorch's optimizer has it in its state
    initial: float = 0.0  # what every entry is when a task begins
    # what every entry is after `UNDERWAY` steps of a training that is compared with PyTorch, None
    # for initial. A rule that divides by the state would otherwise blow the rounding of a gradient
    # of zero up to a whole step
    underway: float | None = None


@dataclass(frozen=True)
class Slot:
    """What a rule is given of one tensor of the model."""

    parameter: Tensor  # now, float32, any shape
    gradient: Tensor  # of the loss after clipping, of the same shape
    states: Mapping[str, Tensor]  # by name, of the same shape
    # number of this step, 1 at the first, float32 []; None for an optimizer that counts none
    step: Tensor | None = None


@dataclass(frozen=True)
class Optimizer(ABC):
    """An update rule with its numbers, fields of the dataclass that derives from it.

    A ConfigError if one is wrong.
    """

    name: ClassVar[str]
    counts_steps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_numbers(self)

    @property
    def states(self) -> tuple[State, ...]:
        """What it keeps for every parameter."""
        return ()

    @abstractmethod
    def direction(self, slot: Slot) -> tuple[Tensor, dict[str, Tensor]]:
        """What is subtracted from a parameter, times the learning rate, and the new states.

        Pure and traceable.
        """

    @abstractmethod
    def pytorch(self, parameters: Sequence[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """PyTorch's own optimizer of the same numbers, which every exported graph is compared with."""

    def state_specs(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[StateSpec, ...]:
        """The states of a model, in the order in which graphs take them.

        An optimizer with one state per parameter and nothing else names it after the parameter.
        """
        alone = len(self.states) == 1 and not self.counts_steps
        specs = [
            StateSpec(
                name=name if alone else f"{state.name}.{name}",
                shape=shape,
                initial=state.initial,
            )
            for state in self.states
            for name, shape in shapes.items()
        ]
        return (
            *specs,
            *([StateSpec(name=STEP, shape=())] if self.counts_steps else []),
        )

    def spec(self) -> OptimizerSpec:
        """This optimizer as the manifest states it."""
        return OptimizerSpec(name=self.name, settings=dataclasses.asdict(self))


def optimizer_named(name: str, settings: Mapping[str, Any] | None = None) -> Optimizer:
    """An optimizer of `trainer_export.optimizers` by its name.

    Of its numbers a missing one has its default.

    Raises:
        ConfigError: there is no such optimizer or number, or a number is out of its range.
    """
    known: Mapping[str, type[Optimizer]] = discover("trainer_export.optimizers", "OPTIMIZERS")
    return make_record("optimizer", known, name, settings)
