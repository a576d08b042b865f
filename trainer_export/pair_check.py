"""Checks the step of a pair: compares the graph with PyTorch's training of both models."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fleet_protocol.manifest import (
    CheckSpec,
    next_name,
    noise_input,
    parameter_input,
    state_input,
)
from fleet_protocol.pair_manifest import SIDES, loss_name, side_name
from models.zoo.layers import set_mode
from models.zoo.noise_inputs import feed_noise
from trainer_export.batches import SizedBatches
from trainer_export.check import Session, WorstDeviation, run_session
from trainer_export.double_graph import deviation_on, repeated_on
from trainer_export.model_inputs import model_noise
from trainer_export.pair_step import PairRoutine
from trainer_export.recipe import Recipe
from trainer_export.reference import LEARNING_RATE, TorchOptimizer, in_float64
from trainer_export.repeated_check import Run

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class _Batch:
    """A batch, and the random numbers of each model's layers for it."""

    x: Tensor
    y: Tensor
    noise: list[dict[str, Tensor]]

    def feed(self, routine: PairRoutine) -> Arrays:
        """Return the inputs of a step other than parameters and states."""
        feed = {
            "x": self.x.numpy(),
            "y": self.y.numpy(),
            "lr": np.array(LEARNING_RATE, np.float32),
        }
        for knob in routine.knobs:
            # Not the default, which a graph could contain as a constant.
            feed[knob.name] = np.array(knob.checked_with, np.float32)
        for side, drawn in zip(SIDES, self.noise, strict=True):
            for path, numbers in drawn.items():
                feed[noise_input(side_name(side, path))] = numbers.numpy()
        return feed


def check_pair(
    model: bytes,
    routine: PairRoutine,
    modules: tuple[nn.Module, nn.Module],
    recipe: Recipe,
    batches: SizedBatches,
) -> CheckSpec:
    """Train both models with PyTorch, run the graph from the same state for each step, and compare.

    Args:
        model: the graph.
        routine: the routine.
        modules: the original personal model and the model that the server sent; they are not
            changed.
        recipe: the recipe of both.
        batches: the training batches.

    Returns:
        The figures of the first run within the limit, for losses and all tensors.

    Raises:
        ExportError: a tensor deviates in all runs; the message names it.
    """
    shapes = [model_noise(module, batches.signature) for module in modules]

    def on(session: Session) -> Run:
        return _PairCheck(session, routine, modules, recipe, shapes).run

    return repeated_on(model, on, batches)


@dataclass(frozen=True)
class _PairCheck:
    """A graph of a pair's step and its PyTorch reference."""

    session: Session
    routine: PairRoutine
    modules: tuple[nn.Module, nn.Module]
    recipe: Recipe
    noise_shapes: Sequence[Mapping[str, tuple[int, ...]]]

    def run(self, batches: SizedBatches, exact: bool) -> CheckSpec:
        """Check some steps; with `exact`, also compare with PyTorch's steps in float64."""
        worst = deviation_on(self.session)
        reference = _Reference(self.routine, self.modules, self.recipe)
        for number, (x, y) in enumerate(batches.draw(batches.steps)):
            worst.sizes.append(len(y))
            noise = []
            for i, shape in enumerate(self.noise_shapes):
                # Both models draw their own numbers, so each has its own seed in a step.
                noise.append(batches.noise(shape, len(y), 2 * number + i))
            batch = _Batch(x, y, noise)
            feed = {**reference.snapshot(), **batch.feed(self.routine)}
            outputs = run_session(self.session, feed)
            # Before the reference steps, because its copy takes the same step in float64.
            twin = in_float64(reference, x, y, noise) if exact else None
            for side, loss in zip(SIDES, reference.step(x, y, noise), strict=True):
                worst.compare(outputs, {loss_name(side): loss})
            _compare_tensors(worst, outputs, reference, twin)
            if worst.is_refused(exact=exact):
                break
        return worst.report(f"onnx/{self.routine.name}", batches.steps)


def _compare_tensors(
    worst: WorstDeviation,
    outputs: Arrays,
    reference: "_Reference",
    twin: "_Reference | None",
) -> None:
    """Compare parameters and states separately for each side, because their sizes may differ."""
    expected = reference.snapshot()
    exact = twin.snapshot() if twin else None
    values = {}
    for name in expected:
        values[name] = outputs.pop(next_name(name))
    for side in SIDES:
        for kind in (parameter_input(""), state_input("")):
            # Parameters and states apart, too: an optimizer's state may be much smaller than a
            # weight.
            names = []
            for name in expected:
                if name.startswith(side_name(side, kind)):
                    names.append(name)
            exact_values = exact and _selected(exact, names)
            worst.compare(values, _selected(expected, names), exact_values)


def _selected(arrays: Arrays, names: list[str]) -> Arrays:
    return {name: arrays[name] for name in names}


class _Reference:
    """Trains both modules with PyTorch; neither sees the other's new weights."""

    def __init__(
        self,
        routine: PairRoutine,
        modules: tuple[nn.Module, nn.Module],
        recipe: Recipe,
    ) -> None:
        self._routine = routine
        self._modules = [set_mode(copy.deepcopy(module), "train") for module in modules]
        # The graph starts from the states of the reference, which are those of a step in a run.
        self._optimizers = [
            TorchOptimizer(recipe, module, underway=True) for module in self._modules
        ]

    def step(
        self,
        x: Tensor,
        y: Tensor,
        noise: list[dict[str, Tensor]],
    ) -> list[NDArray[Any]]:
        """Train both models on a batch, and return the losses."""
        logits = []
        for module, drawn in zip(self._modules, noise, strict=True):
            feed_noise(module, drawn)
            # Both before either is updated, as in the graph.
            logits.append(module(x))
        losses = []
        pairs = zip(self._routine.knobs, self._optimizers, strict=True)
        for position, (knob, optimizer) in enumerate(pairs):
            # The other one of two.
            peer = logits[1 - position].detach()
            loss = self._routine.pytorch(logits[position], peer, y, knob.checked_with)
            losses.append(loss.detach().numpy())
            optimizer.step(loss, materialize=True)
        return losses

    def double(self) -> None:
        """Continue in float64."""
        for module, optimizer in zip(self._modules, self._optimizers, strict=True):
            module.double()
            optimizer.double()

    def snapshot(self) -> Arrays:
        """Return all parameters and states by their names in the graph.

        The next step changes them in place.
        """
        values: Arrays = {}
        for side, module, optimizer in zip(SIDES, self._modules, self._optimizers, strict=True):
            for name, parameter in module.named_parameters():
                values[side_name(side, parameter_input(name))] = parameter.detach().numpy()
            for name, state in optimizer.states().items():
                values[side_name(side, state_input(name))] = state
        return values
