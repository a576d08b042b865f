"""What an optimizer is to the exporter: numbers, states for each parameter, and a rule.

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
    """A tensor that an optimizer keeps for every parameter, in the parameter's shape.

    Attributes:
        name: as PyTorch's optimizer has it in its state.
        initial: every entry when a task begins.
        underway: every entry after `UNDERWAY` steps of a training that is compared with PyTorch;
            None for initial. A rule that divides by the state would otherwise blow the rounding of
            a gradient of zero up to a whole step.
    """

    name: str
    initial: float = 0.0
    underway: float | None = None


@dataclass(frozen=True)
class Slot:
    """What a rule reads of one tensor of the model.

    Attributes:
        parameter: before the step, float32, any shape.
        gradient: of the loss after clipping, of the same shape.
        states: by name, of the same shape.
        step: number of this step, 1 at the first, float32 []; None for an optimizer that counts
            none.
    """

    parameter: Tensor
    gradient: Tensor
    states: Mapping[str, Tensor]
    step: Tensor | None = None


@dataclass(frozen=True)
class Optimizer(ABC):
    """An update rule with its numbers, fields of the dataclass that derives from it.

    Raises:
        ConfigError: a number is out of its range.
    """

    name: ClassVar[str]
    counts_steps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_numbers(self)

    @property
    def states(self) -> tuple[State, ...]:
        """Tensors that it keeps for every parameter."""
        return ()

    @abstractmethod
    def direction(self, slot: Slot) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what is subtracted from a parameter, times the learning rate, and the new states.

        Pure and traceable.
        """

    @abstractmethod
    def pytorch(self, parameters: Sequence[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """Return PyTorch's own optimizer of the same numbers.

        Every exported graph is compared with it.
        """

    def state_specs(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[StateSpec, ...]:
        """Return the states of a model, in the order in which graphs take them.

        An optimizer with one state per parameter and nothing else names it after the parameter.
        """
        alone = len(self.states) == 1 and not self.counts_steps
        specs = []
        for state in self.states:
            for name, shape in shapes.items():
                title = name if alone else f"{state.name}.{name}"
                specs.append(StateSpec(name=title, shape=shape, initial=state.initial))
        if self.counts_steps:
            specs.append(StateSpec(name=STEP, shape=()))
        return tuple(specs)

    def spec(self) -> OptimizerSpec:
        """Return this optimizer as the manifest states it."""
        return OptimizerSpec(name=self.name, settings=dataclasses.asdict(self))


def optimizer_named(name: str, settings: Mapping[str, Any] | None = None) -> Optimizer:
    """Return an optimizer of `trainer_export.optimizers` by its name.

    A number that is not set has its default.

    Raises:
        ConfigError: there is no such optimizer or number, or a number is out of its range.
    """
    classes: Mapping[str, type[Optimizer]] = discover("trainer_export.optimizers", "OPTIMIZERS")
    return make_record("optimizer", classes, name, settings)
