"""Traces the simultaneous step of mutual learning into one program that holds both models.

Tao Shen et al.: "Federated Mutual Learning", 2020, https://arxiv.org/abs/2006.16765; METHODS 5.1 and 5.3. The losses
and the step are those of `trainer_export.mutual`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from fleet_protocol.errors import ConfigError
from fleet_protocol.manifest import next_name, state_input
from fleet_protocol.mutual_manifest import SIDES, Side, loss_name, side_name
from trainer_export.graph import Port
from trainer_export.model_ports import (
    Signature,
    batch_ports,
    call_model,
    check_logits,
    model_noise,
    noise_ports,
    parameter_names,
    parameter_ports,
    prepared,
)
from trainer_export.mutual import Learner, mutual_step
from trainer_export.recipe import Recipe
from trainer_export.tracing import Trace, trace_program

__all__ = ["trace_mutual"]


@dataclass(frozen=True)
class _Half:
    """One of the two models with its part of the graph's inputs."""

    side: Side
    model: nn.Module
    names: list[str]
    noise: dict[str, tuple[int, ...]]
    parameters: tuple[Port, ...]
    states: tuple[Port, ...]

    @property
    def moved(self) -> tuple[Port, ...]:
        """What the step changes."""
        return (*self.parameters, *self.states)

    def call(self, signature: Signature, drawn: Sequence[Tensor]) -> Callable[[Sequence[Tensor], Tensor], Tensor]:
        """The model as a function of its parameters and a batch, with its noise given."""

        def run(parameters: Sequence[Tensor], x: Tensor) -> Tensor:
            logits: Tensor = call_model(
                self.model, self.names, parameters, x, dict(zip(self.noise, drawn, strict=True))
            )
            check_logits(logits, signature)
            return logits

        return run


def trace_mutual(personal: nn.Module, meme: nn.Module, signature: Signature, recipe: Recipe) -> Trace:
    """The mutual step of two models on one batch.

    Args:
        personal: the model that stays on the device; not changed.
        meme: the copy of the global model; not changed.
        signature: what both take and return.
        recipe: the optimizer of both.

    Returns:
        Inputs ``<side>.param.*`` and ``<side>.state.*`` of both, ``x``, ``y``, ``noise.<side>.*``, ``alpha``, ``beta``
        and ``lr``; outputs ``personal.loss``, ``meme.loss`` and the ``next.*``.

    Raises:
        ConfigError: the recipe has a proximal term, which mutual learning does not know.
        ExportError: a model cannot be traced with a dynamic batch, or returns other logits.
    """
    if recipe.proximal:
        raise ConfigError("mutual learning has no proximal term; export the pair with a recipe without one")
    halves = [_half(side, model, signature, recipe) for side, model in zip(SIDES, (personal, meme), strict=True)]

    def step(*tensors: Tensor) -> list[Tensor]:
        given = iter(tensors)
        moved = [[next(given) for _ in half.moved] for half in halves]
        x, y = next(given), next(given)
        drawn = [[next(given) for _ in half.noise] for half in halves]
        alpha, beta, lr = given
        learners = [
            Learner(
                half.call(signature, numbers),
                values[: len(half.parameters)],
                values[len(half.parameters) :],
                trust,
                lr,
                recipe,
            )
            for half, values, numbers, trust in zip(halves, moved, drawn, (alpha, beta), strict=True)
        ]
        learnt = mutual_step(learners[0], learners[1], x, y)
        return [*(new.loss for new in learnt), *(t for new in learnt for t in (*new.parameters, *new.states))]

    inputs = (
        *(port for half in halves for port in half.moved),
        *batch_ports(signature, "x", "y"),
        *(
            port
            for half in halves
            for port in noise_ports({side_name(half.side, path): shape for path, shape in half.noise.items()})
        ),
        *(Port(name, "float32", ()) for name in ("alpha", "beta", "lr")),
    )
    outputs = (
        *(Port(loss_name(side), "float32", ()) for side in SIDES),
        *(Port(next_name(port.name), port.dtype, port.shape) for half in halves for port in half.moved),
    )
    return trace_program("mutual", step, inputs, outputs)


def _half(side: Side, model: nn.Module, signature: Signature, recipe: Recipe) -> _Half:
    noise = model_noise(model, signature)
    model = prepared(model, "train", operators=True)
    names, ports = parameter_names(model), parameter_ports(model)
    states = [Port(state_input(name), p.dtype, p.shape) for name, p in zip(names, ports, strict=True)]
    parameters, kept = (
        tuple(Port(side_name(side, p.name), p.dtype, p.shape) for p in some)
        for some in (ports, states if recipe.has_state else [])
    )
    return _Half(side, model, names, noise, parameters, kept)
