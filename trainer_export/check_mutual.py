"""Compares a mutual graph with PyTorch: two modules as they were written, autograd, and torch's own losses."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fleet_protocol.manifest import CheckSpec, next_name, noise_input, parameter_input, state_input
from fleet_protocol.mutual_manifest import SIDES, loss_name, side_name
from models.zoo.dropout import feed_noise
from models.zoo.layers import set_mode
from trainer_export.check import (
    LEARNING_RATE,
    SizedBatches,
    Worst,
    cross_entropy,
    open_session,
    repeated,
    run_session,
)
from trainer_export.model_ports import model_noise
from trainer_export.recipe import Recipe

__all__ = ["ALPHA", "BETA", "GRAPH", "check_mutual"]

ALPHA, BETA = 0.3, 0.8
GRAPH = "onnx/mutual"
_STEPS = 6


def check_mutual(
    model: bytes, personal: nn.Module, meme: nn.Module, recipe: Recipe, batches: SizedBatches
) -> CheckSpec:
    """Train both models with the graph and with PyTorch from the same start and compare losses and all tensors.

    Args:
        model: the serialized mutual graph.
        personal: the personal model as its author wrote it; not changed.
        meme: the meme, likewise.
        recipe: what the graph was made for.
        batches: what to train on.

    Returns:
        The figures of the first run within the limit.

    Raises:
        ExportError: the graph deviates; the message names the tensor.
    """
    session = open_session(model)
    modules = (personal, meme)
    shapes = [model_noise(module, batches.signature) for module in modules]

    def run(seeded: SizedBatches) -> CheckSpec:
        worst, reference = Worst(), _Reference(modules, recipe)
        values = reference.snapshot()
        for number, (x, y) in enumerate(seeded.take(_STEPS)):
            worst.sizes.append(len(y))
            noise = [seeded.noise(shape, len(y), 2 * number + i) for i, shape in enumerate(shapes)]
            feed = {**values, "x": x.numpy(), "y": y.numpy()}
            scalars = {"alpha": ALPHA, "beta": BETA, "lr": LEARNING_RATE}
            feed |= {name: np.array(value, np.float32) for name, value in scalars.items()}
            for side, drawn in zip(SIDES, noise, strict=True):
                feed |= {noise_input(side_name(side, path)): numbers.numpy() for path, numbers in drawn.items()}
            outputs = run_session(session, feed)
            for side, loss in zip(SIDES, reference.step(x, y, noise), strict=True):
                worst.compare(outputs, {loss_name(side): loss})
            values = {name: outputs[next_name(name)] for name in values}
            expected = reference.snapshot()
            for side in SIDES:
                for kind in (parameter_input(""), state_input("")):
                    part = {n: v for n, v in expected.items() if n.startswith(side_name(side, kind))}
                    worst.compare(values, part)
        return worst.report(GRAPH, _STEPS)

    return repeated(run, batches)


class _Reference:
    """PyTorch training both modules, neither of which sees the other's new weights."""

    def __init__(self, modules: tuple[nn.Module, nn.Module], recipe: Recipe) -> None:
        self._modules = [set_mode(copy.deepcopy(module), "train") for module in modules]
        self._recipe = recipe
        self._optimizers = [
            torch.optim.SGD(
                module.parameters(), lr=LEARNING_RATE, momentum=recipe.momentum, weight_decay=recipe.weight_decay
            )
            for module in self._modules
        ]

    def step(self, x: Tensor, y: Tensor, noise: list[dict[str, Tensor]]) -> list[NDArray[Any]]:
        """One mutual step; returns the losses."""
        logits = []
        for module, drawn in zip(self._modules, noise, strict=True):
            feed_noise(module, drawn)
            logits.append(module(x))
        losses = []
        for position, trust in enumerate((ALPHA, BETA)):
            own, other = logits[position], logits[1 - position].detach()
            loss = trust * cross_entropy(own, y) + (1 - trust) * _divergence(own, other, y)
            losses.append(loss.detach().numpy())
            self._optimizers[position].zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        for module, optimizer in zip(self._modules, self._optimizers, strict=True):
            for parameter in module.parameters():
                if parameter.grad is None:  # outside the loss: a gradient of zero, which weight decay adds to
                    parameter.grad = torch.zeros_like(parameter)
            if self._recipe.clip_norm is not None:
                nn.utils.clip_grad_norm_(module.parameters(), self._recipe.clip_norm)
            optimizer.step()
        return losses

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """Copies of all parameters and states by their names in the graph."""
        values: dict[str, NDArray[Any]] = {}
        for side, module, optimizer in zip(SIDES, self._modules, self._optimizers, strict=True):
            for name, parameter in module.named_parameters():
                values[side_name(side, parameter_input(name))] = parameter.detach().numpy().copy()
                if self._recipe.has_state:
                    buffer = optimizer.state.get(parameter, {}).get("momentum_buffer")
                    kept = torch.zeros_like(parameter) if buffer is None else buffer
                    values[side_name(side, state_input(name))] = kept.detach().numpy().copy()
        return values


def _divergence(own: Tensor, other: Tensor, y: Tensor) -> Tensor:
    """KL(other || own), a mean over the labels that count."""
    each = nn.functional.kl_div(
        torch.log_softmax(own, -1), torch.log_softmax(other, -1), reduction="none", log_target=True
    ).sum(-1)
    return each[y >= 0].mean()
