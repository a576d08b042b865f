"""The step of a pair: a device's own model and the one it was sent, trained in one graph.

The step is simultaneous: both models are run on the batch, then both are stepped; neither sees the
other's new weights. What each learns from the other is the loss of a routine
(`trainer_export.routines`), which is found there by its row in the module's table
``PAIR_ROUTINES``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fleet_protocol.discovery import discover
from fleet_protocol.errors import ConfigError, ExportError
from fleet_protocol.manifest import next_name
from fleet_protocol.pair_manifest import SIDES, Side, loss_name, side_name
from trainer_export.graph import Port
from trainer_export.losses.cross_entropy import MaskedCrossEntropy
from trainer_export.model_inputs import (
    Signature,
    batch_ports,
    call_model,
    check_output,
    model_noise,
    noise_ports,
    parameter_names,
    prepared,
    require_one_output,
)
from trainer_export.recipe import Recipe
from trainer_export.traced_program import Trace, trace_program
from trainer_export.update import Trained, changing_ports, update


@dataclass(frozen=True)
class Knob:
    """A number that a task sets for the loss of one of two models.

    Attributes:
        checked_with: its value while the graph is checked.
    """

    name: str
    checked_with: float


@dataclass(frozen=True)
class PairRoutine:
    """What two models make of each other's logits.

    Attributes:
        name: of the routine and of its graph.
        knobs: one for each model, in the order of `SIDES`.
        value_and_slope: loss of a model and its gradient with respect to its logits, from its
            logits, the other model's (constants), the labels, and the value of its knob; pure and
            traceable.
        pytorch: the same loss by PyTorch's own means, which every exported graph is compared with.
    """

    name: str
    knobs: tuple[Knob, Knob]
    value_and_slope: Callable[[Tensor, Tensor, Tensor, Tensor | float], tuple[Tensor, Tensor]]
    pytorch: Callable[[Tensor, Tensor, Tensor, float], Tensor]


def pair_routine(name: str | None = None) -> PairRoutine:
    """Return a routine of `trainer_export.routines` by its name; None if there is but one.

    Raises:
        ConfigError: there is no such routine, or several to choose from.
    """
    routines: Mapping[str, PairRoutine] = discover("trainer_export.routines", "PAIR_ROUTINES")
    if name is None and len(routines) == 1:
        return next(iter(routines.values()))
    if name is None or name not in routines:
        raise ConfigError(f"no routine {name!r} for a pair; name one of {', '.join(routines)}")
    return routines[name]


@dataclass(frozen=True)
class Learner:
    """One of the two models of a step.

    Attributes:
        call: computes logits [batch, classes] from the parameters and a batch.
        knob: value of its routine's knob.
        lr: learning rate, float [].
    """

    call: Callable[[Sequence[Tensor], Tensor], Tensor]
    trained: Trained
    knob: Tensor | float
    lr: Tensor
    recipe: Recipe


@dataclass(frozen=True)
class Learnt:
    """A model after a step: its loss before it, float [], and new parameters and states."""

    loss: Tensor
    trained: Trained


def pair_step(
    routine: PairRoutine,
    learners: tuple[Learner, Learner],
    x: Tensor,
    y: Tensor,
) -> tuple[Learnt, Learnt]:
    """Train both models, the device's own and the one it was sent, on one batch, simultaneously."""
    runs = [_run(learner, x) for learner in learners]
    # Before either is stepped, and without gradients: each learns from the other as it was.
    logits = [run.logits.detach() for run in runs]
    own = _step(routine, learners[0], runs[0], y, logits[1])
    sent = _step(routine, learners[1], runs[1], y, logits[0])
    return own, sent


@dataclass(frozen=True)
class _Run:
    """A model's logits for a batch, and the parameters that their gradient is taken of."""

    parameters: list[Tensor]
    logits: Tensor


def _run(learner: Learner, x: Tensor) -> _Run:
    parameters = []
    for parameter in learner.trained.parameters:
        parameters.append(parameter.detach().requires_grad_())
    return _Run(parameters, learner.call(parameters, x))


def _step(routine: PairRoutine, learner: Learner, run: _Run, y: Tensor, peer: Tensor) -> Learnt:
    """Return a model after a step, which reads the logits of its peer."""
    loss, slope = routine.value_and_slope(run.logits.detach(), peer, y, learner.knob)
    # A parameter that the loss does not depend on has the gradient zero: weight decay and momentum
    # still move it.
    gradients = torch.autograd.grad(
        run.logits,
        run.parameters,
        slope,
        allow_unused=True,
        materialize_grads=True,
    )
    before = Trained(
        [parameter.detach() for parameter in run.parameters],
        learner.trained.states,
        learner.trained.step,
    )
    return Learnt(loss, update(before, gradients, learner.lr, learner.recipe))


@dataclass(frozen=True)
class _Half:
    """One of the two models with its part of the graph's inputs."""

    side: Side
    model: nn.Module
    noise: Mapping[str, tuple[int, ...]]
    changing: tuple[Port, ...]

    def call(
        self,
        signature: Signature,
        drawn: Sequence[Tensor],
    ) -> Callable[[Sequence[Tensor], Tensor], Tensor]:
        """Return the model as a function of its parameters and a batch, with its noise drawn."""
        names = parameter_names(self.model)

        def run(parameters: Sequence[Tensor], x: Tensor) -> Tensor:
            noise = dict(zip(self.noise, drawn, strict=True))
            logits: Tensor = call_model(self.model, names, parameters, x, noise)
            check_output(logits, signature)
            return logits

        return run


def trace_pair(
    routine: PairRoutine,
    models: tuple[nn.Module, nn.Module],
    signature: Signature,
    recipe: Recipe,
) -> Trace:
    """Trace the step of two models, the device's own and the one it was sent, on one batch.

    Neither is changed.

    Returns:
        Inputs ``<side>.param.*`` and ``<side>.state.*`` of both, ``x``, ``y``, ``noise.<side>.*``,
        the knobs and ``lr``; outputs ``own.loss``, ``sent.loss`` and the ``next.*``.

    Raises:
        ConfigError: the recipe has a proximal term or another loss than cross entropy, which no
            pair knows.
        ExportError: a model cannot be traced with a dynamic batch, or returns other logits.
    """
    if recipe.proximal or recipe.accumulate:
        raise ConfigError(
            "a pair has no proximal term and no batches in pieces; export it with a recipe without"
            " them"
        )
    if not isinstance(recipe.loss, MaskedCrossEntropy):
        raise ConfigError(
            f"a pair has the loss of its routine, not {recipe.loss.name}; leave the recipe's loss"
            " out"
        )
    require_one_output(signature, recipe.loss)
    halves = []
    for side, model in zip(SIDES, models, strict=True):
        halves.append(_half(side, model, signature, recipe))

    def step(*tensors: Tensor) -> list[Tensor]:
        inputs = iter(tensors)
        trained = []
        for half in halves:
            changing = [next(inputs) for _ in half.changing]
            trained.append(Trained.from_tensors(changing, recipe.optimizer))
        x = next(inputs)
        y = next(inputs)
        drawn = []
        for half in halves:
            drawn.append([next(inputs) for _ in half.noise])
        *knobs, lr = inputs
        own, sent = (
            Learner(half.call(signature, numbers), values, knob, lr, recipe)
            for half, values, numbers, knob in zip(halves, trained, drawn, knobs, strict=True)
        )
        learnt = pair_step(routine, (own, sent), x, y)
        outputs = [new.loss for new in learnt]
        for new in learnt:
            outputs += new.trained.tensors()
        return outputs

    inputs = _inputs(halves, signature, recipe)
    for knob in routine.knobs:
        inputs.append(Port(knob.name, "float32", ()))
    inputs.append(Port("lr", "float32", ()))
    return trace_program(routine.name, step, tuple(inputs), _outputs(halves), signature.known)


def _inputs(halves: Sequence[_Half], signature: Signature, recipe: Recipe) -> list[Port]:
    """Return what changes in both models, the batch, and the noise of both."""
    ports: list[Port] = []
    for half in halves:
        ports += half.changing
    ports += batch_ports(signature, recipe.loss)[:2]  # a pair has no label mask
    for half in halves:
        shapes = {}
        for path, shape in half.noise.items():
            shapes[side_name(half.side, path)] = shape
        ports += noise_ports(shapes)
    return ports


def _outputs(halves: Sequence[_Half]) -> tuple[Port, ...]:
    """Return the losses of both, and all that changes in them."""
    ports = []
    for side in SIDES:
        ports.append(Port(loss_name(side), "float32", ()))
    for half in halves:
        for port in half.changing:
            ports.append(Port(next_name(port.name), port.dtype, port.shape))
    return tuple(ports)


def _half(side: Side, model: nn.Module, signature: Signature, recipe: Recipe) -> _Half:
    """Return a model as one of a pair; it must not have frozen parameters."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            raise ExportError(
                f"parameter {name} of the model {side} is frozen, and a pair trains all there is:"
                " give it requires_grad = True, or use another method than that of pairs, which may"
                " have frozen parameters"
            )
    noise = model_noise(model, signature)
    model = prepared(model, "train", operators=True)
    shapes = {}
    for name, value in model.named_parameters():
        shapes[name] = tuple(value.shape)
    changing_of_side = []
    for port in changing_ports(shapes, recipe):
        changing_of_side.append(Port(side_name(side, port.name), port.dtype, port.shape))
    changing = tuple(changing_of_side)
    return _Half(side, model, noise, changing)
