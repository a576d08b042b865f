"""Trains the original module with PyTorch, as the reference of exported steps."""

import contextlib
import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fleet_protocol.manifest import anchor_input
from models.zoo.layers import set_mode
from models.zoo.noise_inputs import feed_noise
from trainer_export.loss import Answer
from trainer_export.optimizer import UNDERWAY
from trainer_export.proximal import proximal_loss
from trainer_export.recipe import Recipe

LEARNING_RATE = 0.01
MU = 0.5  # strength of the proximal term: large, so that it matters within a few steps

Arrays = dict[str, NDArray[Any]]


class TorchOptimizer:
    """PyTorch's optimizer and clipping, with states by the exporter's names.

    Args:
        recipe: the parameters of both.
        module: the module to train.
        base: names of its parameters that are not trained.
        underway: whether the states are those after `UNDERWAY` steps, not the initial ones.
    """

    def __init__(
        self,
        recipe: Recipe,
        module: nn.Module,
        base: Collection[str] = (),
        *,
        underway: bool = False,
    ) -> None:
        self._parameters = {}
        for name, value in module.named_parameters():
            if name not in base:
                self._parameters[name] = value
        self._recipe = recipe
        self._record = recipe.optimizer
        self._steps = 0
        self._optimizer = recipe.optimizer.pytorch(list(self._parameters.values()), LEARNING_RATE)
        if underway:
            # Some rules divide by a state: after no steps, rounding errors would be whole steps.
            self._put_steps_behind()

    def _put_steps_behind(self) -> None:
        """Set states to their values after some steps, if the optimizer defines these."""
        values = {}
        for state in self._record.states:
            if state.underway is not None:
                values[state.name] = state.underway
        if not values:
            return
        self._steps = UNDERWAY
        for parameter in self._parameters.values():
            states = {}
            for name, value in values.items():
                states[name] = torch.full_like(parameter, value)
            steps = torch.tensor(float(UNDERWAY))
            # PyTorch's optimizers count steps for each parameter.
            self._optimizer.state[parameter] = {"step": steps, **states}

    def step(self, loss: Tensor, *, materialize: bool = False) -> None:
        """Take a step along the gradient of a loss.

        Args:
            loss: float [].
            materialize: whether a parameter without influence on the loss gets a zero gradient, so
                that weight decay applies.
        """
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in self._parameters.values():
            if parameter.grad is None and materialize:
                parameter.grad = parameter.detach().new_zeros(parameter.shape)
        if self._recipe.clip_value is not None:
            # Entries before the norm, the order of the graph.
            nn.utils.clip_grad_value_(self._parameters.values(), self._recipe.clip_value)
        if self._recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters.values(), self._recipe.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()  # they would take memory that the graph needs
        self._steps += 1

    def double(self) -> None:
        """Continue in float64, like the module."""
        for states in self._optimizer.state.values():
            states.update({name: _doubled(value) for name, value in states.items()})

    def states(self) -> Arrays:
        """Return the states by their names in the graphs; the next step changes them."""
        shapes = {name: tuple(value.shape) for name, value in self._parameters.items()}
        values = []
        for state in self._record.states:
            for parameter in self._parameters.values():
                value = self._optimizer.state.get(parameter, {}).get(state.name)
                if value is None:  # before the first step
                    values.append(
                        np.full(
                            tuple(parameter.shape),
                            state.initial,
                            np.float32,
                        )
                    )
                else:
                    values.append(value.numpy())
        if self._record.counts_steps:
            values.append(np.array(self._steps, np.float32))
        specs = self._record.state_specs(shapes)
        names = [spec.name for spec in specs]
        return dict(zip(names, values, strict=True))


class Reference:
    """Trains a copy of the original module with PyTorch.

    The arguments are those of `TorchOptimizer`.
    """

    def __init__(
        self,
        module: nn.Module,
        recipe: Recipe,
        base: Collection[str] = (),
        *,
        underway: bool = False,
    ) -> None:
        self._module = set_mode(copy.deepcopy(module), "train")
        self._recipe = recipe
        self._base = base
        # The values of the original, which stays as it was sent while its copy is trained.
        self._sent = [parameter.detach() for parameter in module.parameters()]
        self._optimizer = TorchOptimizer(recipe, self._module, base, underway=underway)

    def step(
        self,
        x: Tensor,
        answer: Answer,
        noise: Mapping[str, Tensor] | None = None,
    ) -> NDArray[Any]:
        """Take one training step, and return the loss."""
        feed_noise(self._module, noise or {})
        loss = self._recipe.loss.pytorch(self._module(x), answer)
        whole = loss
        if self._recipe.proximal:
            # The device reports the loss without this term.
            whole = loss + proximal_loss(
                list(self._module.parameters()),
                self._sent,
                MU,
            )
        self._optimizer.step(whole)
        return loss.detach().numpy()

    def double(self) -> None:
        """Continue in float64."""
        self._module.double()
        self._optimizer.double()
        self._sent = [_doubled(value) for value in self._sent]

    def anchors(self) -> Arrays:
        """Return the initial weights, as inputs of the graph for the proximal term."""
        named = zip(self._module.named_parameters(), self._sent, strict=True)
        anchors = {}
        for (name, _), value in named:
            anchors[anchor_input(name)] = value.numpy()
        return anchors

    def snapshot(self) -> tuple[Arrays, Arrays]:
        """Return parameters and states by their names; the next step changes them."""
        parameters = {}
        for name, value in self._module.named_parameters():
            if name not in self._base:
                parameters[name] = value.detach().numpy()
        return parameters, self._optimizer.states()


class _Training(Protocol):
    def double(self) -> None: ...

    def step(self, *batch: Any) -> Any: ...


_T = TypeVar("_T", bound=_Training)


def in_float64(training: _T, *batch: Any) -> _T | None:
    """Return a copy after one step from here in float64.

    None if the module cannot run in float64, for example because it creates float32 tensors.
    """
    with contextlib.suppress(Exception):
        # The original goes on from the state before this step.
        twin = copy.deepcopy(training)
        twin.double()
        twin.step(*tree_map(_doubled, batch))
        return twin
    return None


def computed_in_float64(
    module: nn.Module, compute: Callable[..., dict[str, Tensor]], *batch: Tensor
) -> Arrays | None:
    """Return what a function of a module and a batch computes in float64; nothing is changed.

    None if the module cannot run in float64, for example because it creates float32 tensors.
    """
    with contextlib.suppress(Exception):
        # A copy, because a module's parameters may be shared with others.
        twin = copy.deepcopy(module).double()
        return numpy_arrays(compute(twin, *tree_map(_doubled, batch)))
    return None


def numpy_arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    """Return tensors as arrays by the same names."""
    arrays: Arrays = {}
    for name, value in tensors.items():
        arrays[name] = value.detach().numpy()
    return arrays


def _doubled(value: Any) -> Any:
    if isinstance(value, Answer):
        return Answer(_doubled(value.y), _doubled(value.mask), knobs=value.knobs)
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if is_float else value
