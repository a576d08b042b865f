"""The step of a pair: trains a device's personal model and the sent model in one graph.

The step is simultaneous: both models run on the batch, then both are updated; neither sees the
    other's new weights. The loss of a routine (`trainer_export.routines`) defines what each learns
    from the other; a routine is a row in a module's table ``PAIR_ROUTINES``.
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
from trainer_export.knob import Knob
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
)
from trainer_export.recipe import Recipe
from trainer_export.traced_program import Trace, trace_program
from trainer_export.update import TrainedTensors, changing_ports, update


@dataclass(frozen=True)
class PairRoutine:
    """The losses of two models, each of which depends on the other's logits.

    Attributes:
        name: name of the routine and of its graph.
        knobs: one knob for each model, in the order of `SIDES`.
        value_and_slope: loss of a model and its gradient with respect to its logits, from its
            logits, the other model's (constants), the labels, and the value of its knob; pure and
            traceable.
        pytorch: the same loss from PyTorch's own functions, as the reference of every exported
            graph.
    """

    name: str
    knobs: tuple[Knob, Knob]
    value_and_slope: Callable[
        [
            Tensor,
            Tensor,
            Tensor,
            Tensor | float,
        ],
        tuple[Tensor, Tensor],
    ]
    # Written independently of the closed form, so that an error is not in both.
    pytorch: Callable[[Tensor, Tensor, Tensor, float], Tensor]


def pair_routine(name: str | None = None) -> PairRoutine:
    """Return a routine of `trainer_export.routines` by its name; None for the only one.

    Raises:
        ConfigError: there is no such routine, or None was given and there are several.
    """
    routines: Mapping[str, PairRoutine] = discover("trainer_export.routines", "PAIR_ROUTINES")
    # With one routine there is nothing to choose; a second one makes the name necessary.
    if name is None and len(routines) == 1:
        return next(iter(routines.values()))
    if name is None or name not in routines:
        raise ConfigError(f"unknown routine {name!r} for a pair; choose from {', '.join(routines)}")
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
    trained: TrainedTensors
    knob: Tensor | float
    lr: Tensor
    recipe: Recipe


@dataclass(frozen=True)
class LearnerResult:
    """A model after a step: its earlier loss, float [], and its new parameters and states."""

    loss: Tensor
    trained: TrainedTensors


def pair_step(
    routine: PairRoutine,
    learners: tuple[Learner, Learner],
    x: Tensor,
    y: Tensor,
) -> tuple[LearnerResult, LearnerResult]:
    """Train the personal and the sent model on one batch, simultaneously."""
    runs = [_run(learner, x) for learner in learners]
    # Before any update and without gradients: each model learns from the other's previous state.
    logits = [run.logits.detach() for run in runs]
    own = _step(
        routine,
        learners[0],
        runs[0],
        y,
        logits[1],
    )
    sent = _step(
        routine,
        learners[1],
        runs[1],
        y,
        logits[0],
    )
    return own, sent


@dataclass(frozen=True)
class _Run:
    """A model's logits for a batch, and the parameters to differentiate."""

    parameters: list[Tensor]
    logits: Tensor


def _run(learner: Learner, x: Tensor) -> _Run:
    parameters = []
    for parameter in learner.trained.parameters:
        # New leaves, because inputs of a trace have no gradient.
        parameters.append(parameter.detach().requires_grad_())
    return _Run(parameters, learner.call(parameters, x))


def _step(
    routine: PairRoutine,
    learner: Learner,
    run: _Run,
    y: Tensor,
    peer: Tensor,
) -> LearnerResult:
    """Return a model after a step that uses the logits of its peer."""
    # The routine gives the slope of the loss in closed form, so the loss itself is not
    # differentiated.
    loss, slope = routine.value_and_slope(
        run.logits.detach(),
        peer,
        y,
        learner.knob,
    )
    # A parameter without influence on the loss has a zero gradient, but weight decay and momentum
    # still change it.
    gradients = torch.autograd.grad(
        run.logits,
        run.parameters,
        slope,
        allow_unused=True,
        materialize_grads=True,
    )
    before = TrainedTensors(
        [parameter.detach() for parameter in run.parameters],
        learner.trained.states,
        learner.trained.step,
    )
    return LearnerResult(loss, update(before, gradients, learner.lr, learner.recipe))


@dataclass(frozen=True)
class _PairSide:
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
    """Trace the joint step of the personal and the sent model on one batch.

    Neither is changed.

    Returns:
        Inputs ``<side>.param.*`` and ``<side>.state.*`` of both, ``x``, ``y``, ``noise.<side>.*``,
        the knobs and ``lr``; outputs ``own.loss``, ``sent.loss`` and the ``next.*``.

    Raises:
        ConfigError: the recipe has a proximal term, or a loss other than cross entropy; pairs
            support neither.
        ExportError: a model cannot be traced with a dynamic batch, or returns other logits.
    """
    if recipe.proximal or recipe.accumulate:
        raise ConfigError(
            "a pair supports neither a proximal term nor micro-batches; export it with a recipe"
            " without them"
        )
    if not isinstance(recipe.loss, MaskedCrossEntropy):
        raise ConfigError(
            f"a pair uses the loss of its routine, not {recipe.loss.name}; remove the loss from"
            " the recipe"
        )
    recipe.loss.require_outputs(signature.heads)
    halves = []
    for side, model in zip(SIDES, models, strict=True):
        halves.append(_half(side, model, signature, recipe))

    def step(*tensors: Tensor) -> list[Tensor]:
        # Consumed from the front, in the order of `_inputs`: the graph's inputs have no names here.
        inputs = iter(tensors)
        trained = []
        for half in halves:
            changing = [next(inputs) for _ in half.changing]
            trained.append(TrainedTensors.from_tensors(changing, recipe.optimizer))
        x = next(inputs)
        y = next(inputs)
        drawn = []
        for half in halves:
            drawn.append([next(inputs) for _ in half.noise])
        # In the order of `_inputs`, to which the knobs and the rate are appended.
        *knobs, lr = inputs
        own, sent = (
            Learner(half.call(signature, numbers), values, knob, lr, recipe)
            for half, values, numbers, knob in zip(halves, trained, drawn, knobs, strict=True)
        )
        # Losses first, then values: the order of `_outputs`.
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


def _inputs(
    halves: Sequence[_PairSide],
    signature: Signature,
    recipe: Recipe,
) -> list[Port]:
    """Return the changing values of both models, the batch, and the noise of both."""
    ports: list[Port] = []
    for half in halves:
        ports += half.changing
    ports += batch_ports(signature, recipe.loss)[:2]  # a pair does not use a label mask
    for half in halves:
        shapes = {}
        for path, shape in half.noise.items():
            # Both models may have layers with the same path.
            shapes[side_name(half.side, path)] = shape
        ports += noise_ports(shapes)
    return ports


def _outputs(halves: Sequence[_PairSide]) -> tuple[Port, ...]:
    """Return the losses of both, and all changed values."""
    ports = []
    for side in SIDES:
        ports.append(Port(loss_name(side), "float32", ()))
    for half in halves:
        for port in half.changing:
            ports.append(Port(next_name(port.name), port.dtype, port.shape))
    return tuple(ports)


def _half(
    side: Side,
    model: nn.Module,
    signature: Signature,
    recipe: Recipe,
) -> _PairSide:
    """Return a model as one of a pair; it must not have frozen parameters."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            raise ExportError(
                f"parameter {name} of the {side} model is frozen, but a pair trains all"
                " parameters: set requires_grad = True, or use a method without pairs, which"
                " supports frozen parameters"
            )
    noise = model_noise(model, signature)
    model = prepared(model, "train", operators=True)
    shapes = {}
    for name, value in model.named_parameters():
        shapes[name] = tuple(value.shape)
    changing_of_side = []
    for port in changing_ports(shapes, recipe):
        changing_of_side.append(
            Port(
                side_name(side, port.name),
                port.dtype,
                port.shape,
            )
        )
    changing = tuple(changing_of_side)
    return _PairSide(side, model, noise, changing)
