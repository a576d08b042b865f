"""Traces the training step, as a whole and in two parts, and compares it with PyTorch.

Forward pass, gradient and optimizer are one flat list of operators; the gradient is PyTorch's own,
except where a layer is replaced by an operator with a gradient in closed form (see `operators`).
Random numbers of layers in training (`models.zoo.dropout`) are inputs of the graph.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fleet_protocol.errors import ExportError
from fleet_protocol.manifest import (
    CheckSpec,
    knob_input,
    next_name,
    noise_input,
    parameter_input,
    state_input,
)
from trainer_export.batches import SizedBatches
from trainer_export.check import Session, WorstDeviation, open_session, repeated, run_session
from trainer_export.graph import Port
from trainer_export.loss import Answer
from trainer_export.model_inputs import (
    Signature,
    answer_of,
    batch_ports,
    call_model,
    check_output,
    knob_ports,
    model_noise,
    noise_ports,
    output_ports,
    parameter_names,
    parameter_ports,
    prepared,
)
from trainer_export.recipe import Recipe
from trainer_export.reference import LEARNING_RATE, MU, Reference, in_float64
from trainer_export.traced_program import Trace, trace_program
from trainer_export.update import changing_ports, extra_ports, stepped

Shape = tuple[int, ...]


def trace_train(model: nn.Module, signature: Signature, recipe: Recipe) -> Trace:
    """Trace the whole training step: loss, gradient, clipping and optimizer.

    The module is not changed.

    Returns:
        Inputs ``param.*``, ``state.*``, ``x``, ``y``, ``mask`` if the loss takes one, ``noise.*``,
        ``knob.*``, ``lr``, with a proximal term ``anchor.*`` and ``mu``, and with micro-batches
        ``share`` and ``last``; outputs ``loss`` and ``next.*``. The base of the signature is only
        an input; any other frozen parameter (``requires_grad`` False) and its states are returned
        unchanged.

    Raises:
        ExportError: if the model cannot be traced with a dynamic batch, or all of it is frozen.
    """
    noise = model_noise(model, signature)
    model = prepared(model, "train", operators=True)
    shapes = _shapes(model)
    base_shapes: dict[str, Shape] = {}
    for name in signature.base:
        base_shapes[name] = shapes.pop(name)
    if not any(model.get_parameter(name).requires_grad for name in shapes):
        raise ExportError(
            "every parameter is frozen (requires_grad False), so there is nothing to train; set"
            " requires_grad = True for some"
        )
    step = _TrainingStep(model, signature, recipe, shapes, tuple(noise))
    changing = changing_ports(shapes, recipe)
    inputs = (
        *changing,
        *parameter_ports(base_shapes),
        *batch_ports(signature, recipe.loss),
        *noise_ports(noise),
        *knob_ports(recipe.loss),
        Port("lr", "float32", ()),
        *extra_ports(shapes, recipe),
    )
    outputs = (Port("loss", "float32", ()), *_next_ports(changing))
    return trace_program("train", step.run, inputs, outputs, signature.known)


@dataclass(frozen=True)
class _StepInputs:
    """The inputs of the graph of a training step."""

    changing: Sequence[Tensor]  # parameters, then states of the optimizer
    base: Sequence[Tensor]
    x: Tensor
    answer: Answer
    noise: Mapping[str, Tensor]
    lr: Tensor
    extras: Sequence[Tensor]


@dataclass(frozen=True)
class _TrainingStep:
    """A training step as a pure function of its inputs."""

    model: nn.Module  # prepared for training
    signature: Signature
    recipe: Recipe
    shapes: Mapping[str, Shape]  # shapes of all parameters outside the base
    noise: tuple[str, ...]  # paths of the layers that need noise

    @property
    def free(self) -> list[int]:
        """The places of the parameters that are not frozen."""
        places: list[int] = []
        for place, name in enumerate(self.shapes):
            if self.model.get_parameter(name).requires_grad:
                places.append(place)
        return places

    def run(self, *tensors: Tensor) -> list[Tensor]:
        """Return the loss, and the new values of everything that a step changes."""
        inputs = self._split(tensors)
        free = self.free
        variables: list[Tensor] = []
        free_variables: list[Tensor] = []
        for place, value in enumerate(inputs.changing[: len(self.shapes)]):
            variable = value.detach().requires_grad_(place in free)
            variables.append(variable)
            if place in free:
                free_variables.append(variable)
        output = self._forward(inputs, variables)
        detached = tree_map(Tensor.detach, output)
        loss, slope = self.recipe.loss.value_and_slope(detached, inputs.answer)
        gradients = self._gradients(free_variables, output, slope)
        # As in PyTorch, a parameter without influence on the loss is not changed, not even by
        # weight decay and momentum; the proximal term depends on all parameters that are not
        # frozen.
        used: dict[int, Tensor] = {}
        for place, gradient in zip(free, gradients, strict=True):
            if gradient is not None:
                used[place] = gradient
        changed = stepped(inputs.changing, used, inputs.lr, inputs.extras, self.recipe)
        return [loss, *changed]

    def _split(self, tensors: Sequence[Tensor]) -> _StepInputs:
        """Name the inputs of the graph, which are in the order of its ports."""
        counts = (
            len(changing_ports(self.shapes, self.recipe)),
            len(self.signature.base),
            len(batch_ports(self.signature, self.recipe.loss)),
            len(self.noise),
            len(self.recipe.loss.knobs),
        )
        groups: list[Sequence[Tensor]] = []
        start = 0
        for count in counts:
            groups.append(tensors[start : start + count])
            start += count
        changing, base, batch, noise, knobs = groups
        lr, *extras = tensors[start:]
        return _StepInputs(
            changing=changing,
            base=base,
            x=batch[0],
            answer=answer_of(self.recipe.loss, batch[1:], knobs),
            noise=dict(zip(self.noise, noise, strict=True)),
            lr=lr,
            extras=extras,
        )

    def _forward(self, inputs: _StepInputs, variables: Sequence[Tensor]) -> Any:
        """Run the model, which must not draw random numbers besides its noise."""
        before = _random_states()
        names = [*self.shapes, *self.signature.base]
        output = call_model(self.model, names, [*variables, *inputs.base], inputs.x, inputs.noise)
        if _random_states() != before:
            raise ExportError(
                "the model draws random numbers with Python or NumPy in training, and the graph"
                " would contain the numbers of one step; draw them with a NoiseLayer of"
                " models.zoo.dropout: its uniform(x) becomes an input of the graph"
            )
        check_output(output, self.signature)
        return output

    def _gradients(
        self, variables: Sequence[Tensor], output: Any, slope: Any
    ) -> Sequence[Tensor | None]:
        """Propagate the gradient of the loss with respect to the outputs through the model."""
        # A head without influence on the loss has no gradient, nor does one with only frozen
        # parameters.
        heads: list[tuple[Tensor, Tensor]] = []
        for head, head_slope in zip(tree_leaves(output), tree_leaves(slope), strict=True):
            if head_slope is not None and head.requires_grad:
                heads.append((head, head_slope))
        outputs, slopes = zip(*heads, strict=True)
        return torch.autograd.grad(
            outputs,
            variables,
            slopes,
            allow_unused=True,
            materialize_grads=self.recipe.proximal,
        )


def _random_states() -> tuple[Any, ...]:
    """Return the states of the generators that PyTorch's seed does not set."""
    _, keys, *places = np.random.get_state(legacy=True)  # noqa: NPY002 - what a model may draw from
    return random.getstate(), np.asarray(keys).tobytes(), *places


def _shapes(model: nn.Module) -> dict[str, Shape]:
    return {name: tuple(value.shape) for name, value in model.named_parameters()}


def _next_ports(changing: Sequence[Port]) -> tuple[Port, ...]:
    ports: list[Port] = []
    for port in changing:
        ports.append(Port(next_name(port.name), port.dtype, port.shape))
    return tuple(ports)


def trace_loss(model: nn.Module, signature: Signature, recipe: Recipe) -> Trace:
    """Trace the loss of a training batch and the model's output.

    It is for runtimes that differentiate the graph themselves.

    Returns:
        Inputs ``param.*``, ``x``, ``y``, ``mask`` if the loss takes one, ``noise.*``, ``knob.*``;
        outputs
        ``loss`` and ``logits``.
    """
    noise = model_noise(model, signature)
    model = prepared(model, "train")
    names = parameter_names(model)
    batch = batch_ports(signature, recipe.loss)

    def loss(*tensors: Tensor) -> list[Tensor]:
        parameters = tensors[: len(names)]
        x, *following = tensors[len(names) :]
        targets = following[: len(batch) - 1]
        drawn_end = len(targets) + len(noise)
        drawn = dict(zip(noise, following[len(targets) : drawn_end], strict=True))
        answer = answer_of(recipe.loss, targets, following[drawn_end:])
        output = call_model(model, names, parameters, x, drawn)
        check_output(output, signature)
        return [recipe.loss.value(output, answer), *tree_leaves(output)]

    knobs = knob_ports(recipe.loss)
    inputs = (*parameter_ports(_shapes(model)), *batch, *noise_ports(noise), *knobs)
    outputs = (Port("loss", "float32", ()), *output_ports(signature))
    return trace_program("loss", loss, inputs, outputs, signature.known)


def trace_optimizer(shapes: Mapping[str, Shape], recipe: Recipe, free: Sequence[str]) -> Trace:
    """Trace only clipping and optimizer.

    Args:
        shapes: shapes of all parameters outside the base.
        recipe: the recipe.
        free: names of the parameters that are not frozen.

    Returns:
        Inputs ``param.*``, ``state.*``, ``grad.*`` of the parameters that are `free`, ``lr``, and
        the extras of `trace_train`; outputs ``next.*``.
    """
    changing = changing_ports(shapes, recipe)
    places: list[int] = []
    for place, name in enumerate(shapes):
        if name in free:
            places.append(place)

    def step(*tensors: Tensor) -> list[Tensor]:
        end = len(changing) + len(places)
        gradients = dict(zip(places, tensors[len(changing) : end], strict=True))
        lr, *extras = tensors[end:]
        return stepped(tensors[: len(changing)], gradients, lr, extras, recipe)

    inputs = (
        *changing,
        *(Port(f"grad.{name}", "float32", shapes[name]) for name in free),
        Port("lr", "float32", ()),
        *extra_ports(shapes, recipe),
    )
    return trace_program("optimizer", step, inputs, _next_ports(changing))


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
    check = _TrainCheck(
        open_session(model),
        graph,
        module,
        recipe,
        batches.signature.base,
        model_noise(module, batches.signature),
    )
    return repeated(check.run, batches)


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
        worst = WorstDeviation()
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
