"""Compares the step of a pair with PyTorch: two modules as they were written, autograd, and torch's own losses."""

import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fleet_protocol.manifest import CheckSpec, next_name, noise_input, parameter_input, state_input
from fleet_protocol.pair_manifest import SIDES, loss_name, side_name
from models.zoo.dropout import feed_noise
from models.zoo.layers import set_mode
from trainer_export.batches import SizedBatches
from trainer_export.check import Worst, open_session, repeated, run_session
from trainer_export.model_inputs import model_noise
from trainer_export.pair_step import PairRoutine
from trainer_export.recipe import Recipe
from trainer_export.reference import LEARNING_RATE, TorchOptimizer, in_float64


def check_pair(
    model: bytes, routine: PairRoutine, modules: tuple[nn.Module, nn.Module], recipe: Recipe, batches: SizedBatches
) -> CheckSpec:
    """Train both models with PyTorch, let the graph take each step from there, and compare losses and all tensors.

    The modules, the device's own and the one it was sent, are as their authors wrote them, and not changed. Returns the
    figures of the first run within the limit; an ExportError names the tensor that deviates in all.
    """
    session = open_session(model)
    shapes = [model_noise(module, batches.signature) for module in modules]

    def run(seeded: SizedBatches, exact: bool) -> CheckSpec:
        worst, reference = Worst(), _Reference(routine, modules, recipe)
        for number, (x, y) in enumerate(seeded.take(seeded.steps)):
            worst.sizes.append(len(y))
            noise = [seeded.noise(shape, len(y), 2 * number + i) for i, shape in enumerate(shapes)]
            feed = {**reference.snapshot(), "x": x.numpy(), "y": y.numpy(), "lr": np.array(LEARNING_RATE, np.float32)}
            feed |= {knob.name: np.array(knob.checked_with, np.float32) for knob in routine.knobs}
            for side, drawn in zip(SIDES, noise, strict=True):
                feed |= {noise_input(side_name(side, path)): numbers.numpy() for path, numbers in drawn.items()}
            outputs = run_session(session, feed)
            twin = in_float64(reference, x, y, noise) if exact else None
            for side, loss in zip(SIDES, reference.step(x, y, noise), strict=True):
                worst.compare(outputs, {loss_name(side): loss})
            expected = reference.snapshot()
            true = twin.snapshot() if twin else None
            values = {name: outputs.pop(next_name(name)) for name in expected}
            for side in SIDES:
                for kind in (parameter_input(""), state_input("")):
                    part = [name for name in expected if name.startswith(side_name(side, kind))]
                    worst.compare(values, {n: expected[n] for n in part}, true and {n: true[n] for n in part})
        return worst.report(f"onnx/{routine.name}", seeded.steps)

    return repeated(run, batches)


class _Reference:
    """PyTorch training both modules, neither of which sees the other's new weights."""

    def __init__(self, routine: PairRoutine, modules: tuple[nn.Module, nn.Module], recipe: Recipe) -> None:
        self._routine = routine
        self._modules = [set_mode(copy.deepcopy(module), "train") for module in modules]
        self._optimizers = [TorchOptimizer(recipe, module, underway=True) for module in self._modules]

    def step(self, x: Tensor, y: Tensor, noise: list[dict[str, Tensor]]) -> list[NDArray[Any]]:
        """One step of both; returns the losses."""
        logits = []
        for module, drawn in zip(self._modules, noise, strict=True):
            feed_noise(module, drawn)
            logits.append(module(x))
        losses = []
        for position, (knob, optimizer) in enumerate(zip(self._routine.knobs, self._optimizers, strict=True)):
            own, other = logits[position], logits[1 - position].detach()
            loss = self._routine.pytorch(own, other, y, knob.checked_with)
            losses.append(loss.detach().numpy())
            optimizer.step(loss, materialize=True)
        return losses

    def double(self) -> None:
        """Go on in float64."""
        for module, optimizer in zip(self._modules, self._optimizers, strict=True):
            module.double()
            optimizer.double()

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """All parameters and states by their names in the graph; the next step changes them."""
        values: dict[str, NDArray[Any]] = {}
        for side, module, optimizer in zip(SIDES, self._modules, self._optimizers, strict=True):
            named = {parameter_input(name): p.detach().numpy() for name, p in module.named_parameters()}
            named |= {state_input(name): value for name, value in optimizer.states().items()}
            values |= {side_name(side, name): value for name, value in named.items()}
        return values
