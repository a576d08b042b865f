"""The exporter's interface of an optimizer: parameters, states for each tensor, and a rule.

Each optimizer is a module in `trainer_export.optimizers` with a row in the module's table
``OPTIMIZERS``. A step changes every parameter by ``- lr * direction``; the rule gives the
direction.
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
"""Name of the step counter, one number for the whole model."""
UNDERWAY = 20
"""Earlier steps that the comparison with PyTorch assumes, if a state has a value for that."""


@dataclass(frozen=True)
class State:
    """A tensor that an optimizer keeps for every parameter, in the parameter's shape.

    Attributes:
        name: its name in the state of PyTorch's optimizer.
        initial: value of every entry when a task begins.
        underway: value of every entry after `UNDERWAY` steps, for the comparison with PyTorch; None
            for initial. Otherwise a rule that divides by the state would enlarge the rounding error
            of a zero gradient to a whole step.
    """

    name: str
    initial: float = 0.0
    # Only for states by which a rule divides.
    underway: float | None = None


@dataclass(frozen=True)
class Slot:
    """The inputs of a rule for one tensor of the model.

    Attributes:
        parameter: value before the step, float32, any shape.
        gradient: gradient of the loss after clipping, of the same shape.
        states: states by name, of the same shape.
        step: number of this step, from 1, float32 []; None for an optimizer without a step counter.
    """

    parameter: Tensor
    gradient: Tensor
    states: Mapping[str, Tensor]
    # A tensor and not a number, because a graph counts its own steps.
    step: Tensor | None = None


@dataclass(frozen=True)
class Optimizer(ABC):
    """An update rule with its parameters, which are the fields of the derived dataclass.

    Raises:
        ConfigError: a parameter is out of range.
    """

    name: ClassVar[str]
    counts_steps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_numbers(self)

    @property
    def states(self) -> tuple[State, ...]:
        """Return the states that it keeps for every parameter."""
        return ()

    @abstractmethod
    def direction(self, slot: Slot) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the direction of the step, without the learning rate, and the new states.

        Pure and traceable.
        """

    @abstractmethod
    def pytorch(
        self,
        parameters: Sequence[nn.Parameter],
        lr: float,
    ) -> torch.optim.Optimizer:
        """Return PyTorch's own optimizer with the same parameters.

        Every exported graph is compared with it.
        """

    def state_specs(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[StateSpec, ...]:
        """Return the states of a model, in the order in which graphs take them.

        If an optimizer has only one state per parameter, the state has the parameter's name.
        """
        # A single state needs no name besides that of its parameter.
        alone = len(self.states) == 1 and not self.counts_steps
        specs = []
        # State by state, not parameter by parameter: boards keep the tensors in this order.
        for state in self.states:
            for name, shape in shapes.items():
                title = name if alone else f"{state.name}.{name}"
                specs.append(StateSpec(name=title, shape=shape, initial=state.initial))
        if self.counts_steps:
            specs.append(StateSpec(name=STEP, shape=()))
        return tuple(specs)

    def spec(self) -> OptimizerSpec:
        """Return this optimizer in the form of the manifest."""
        return OptimizerSpec(name=self.name, settings=dataclasses.asdict(self))


def optimizer_named(name: str, settings: Mapping[str, Any] | None = None) -> Optimizer:
    """Return an optimizer of `trainer_export.optimizers` by its name.

    Parameters that are not set have their defaults.

    Raises:
        ConfigError: there is no such optimizer or parameter, or a parameter is out of range.
    """
    classes: Mapping[str, type[Optimizer]] = discover("trainer_export.optimizers", "OPTIMIZERS")
    return make_record("optimizer", classes, name, settings)
