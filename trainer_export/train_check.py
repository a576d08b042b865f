"""Compares the graph of a training step with PyTorch, step by step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fleet_protocol.manifest import (
    CheckSpec,
    knob_input,
    next_name,
    noise_input,
    parameter_input,
    state_input,
)
from trainer_export.batches import SizedBatches
from trainer_export.check import Session, WorstDeviation, run_session
from trainer_export.double_graph import deviation_on, repeated_on
from trainer_export.loss import Answer
from trainer_export.model_inputs import model_noise
from trainer_export.recipe import Recipe
from trainer_export.reference import LEARNING_RATE, MU, Reference, in_float64
from trainer_export.repeated_check import Run

Shape = tuple[int, ...]


def check_train(
    model: bytes | Session,
    module: nn.Module,
    recipe: Recipe,
    batches: SizedBatches,
    *,
    graph: str = "onnx/train",
) -> CheckSpec:
    """Train with PyTorch, and run the graph from PyTorch's state for each step.

    All outputs are compared. The module is the original one, and is not changed.

    Returns:
        The figures of the first run within the limit.

    Raises:
        ExportError: a tensor deviates in all runs; the message names it.
    """
    noise = model_noise(module, batches.signature)

    def on(session: Session) -> Run:
        check = _TrainCheck(session, graph, module, recipe, batches.signature.base, noise)
        return check.run

    return repeated_on(model, on, batches)


@dataclass(frozen=True)
class _Batch:
    """The inputs of the check of one step."""

    x: Tensor
    answer: Answer
    mask: Tensor
    noise: Mapping[str, Tensor]


@dataclass(frozen=True)
class _TrainCheck:
    """A graph of a training step and its PyTorch reference."""

    session: Session
    graph: str
    module: nn.Module
    recipe: Recipe
    base: Sequence[str]
    noise_shapes: Mapping[str, Shape]

    def run(self, batches: SizedBatches, exact: bool) -> CheckSpec:
        """Check some steps; with `exact`, also compare with PyTorch's steps in float64."""
        worst = deviation_on(self.session)
        reference = Reference(self.module, self.recipe, base=self.base, underway=True)
        for number, (x, y) in enumerate(batches.draw(batches.steps)):
            worst.sizes.append(len(y))
            mask = batches.mask()
            noise = batches.noise(self.noise_shapes, len(y), number)
            answer = Answer(y, mask, knobs=self.recipe.loss.checked_numbers())
            self._check_step(reference, _Batch(x, answer, mask, noise), worst, exact)
            if worst.is_refused(exact=exact):
                break
        return worst.report(self.graph, batches.steps)

    def _check_step(
        self, reference: Reference, batch: _Batch, worst: WorstDeviation, exact: bool
    ) -> None:
        """Take one step with the graph and with PyTorch."""
        step_inputs = (batch.x, batch.answer, batch.noise)
        # Graph and copy first, while the reference still has the common initial state.
        outputs = run_session(self.session, self._feed(reference, batch))
        twin = in_float64(reference, *step_inputs) if exact else None
        worst.compare(outputs, {"loss": reference.step(*step_inputs)})
        exact_values = twin.snapshot() if twin else (None, None)
        for kind, expected, exact_value in zip(
            (parameter_input, state_input), reference.snapshot(), exact_values, strict=True
        ):
            next_values: dict[str, NDArray[Any]] = {}
            for name in expected:
                next_values[name] = outputs.pop(next_name(kind(name)))
            worst.compare(next_values, expected, exact_value, kind(""))

    def _feed(self, reference: Reference, batch: _Batch) -> dict[str, NDArray[Any]]:
        """Return the inputs of the graph from PyTorch's state."""
        parameters, states = reference.snapshot()
        feed: dict[str, NDArray[Any]] = {}
        for name, value in parameters.items():
            feed[parameter_input(name)] = value
        for name in self.base:
            feed[parameter_input(name)] = self.module.get_parameter(name).detach().numpy()
        for name, value in states.items():
            feed[state_input(name)] = value
        feed["x"] = batch.x.numpy()
        feed["y"] = batch.answer.y.numpy()
        feed["mask"] = batch.mask.numpy()
        numbers = {"lr": LEARNING_RATE, "mu": MU, "share": 1.0, "last": 1.0}
        for name, number in numbers.items():
            feed[name] = np.array(number, np.float32)
        for name, setting in batch.answer.knobs.items():
            feed[knob_input(name)] = np.array(setting, np.float32)
        # States that PyTorch lacks are sums of gradients, which start at 0.
        specs = self.recipe.state_specs({name: value.shape for name, value in parameters.items()})
        for spec in specs:
            if spec.name not in states:
                feed[state_input(spec.name)] = np.zeros(spec.shape, np.float32)
        feed |= reference.anchors()
        for path, drawn in batch.noise.items():
            feed[noise_input(path)] = drawn.numpy()
        return feed
