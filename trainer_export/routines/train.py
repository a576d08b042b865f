"""Traces the training step, as a whole and in two parts.

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
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fleet_protocol.errors import ExportError
from fleet_protocol.manifest import (
    next_name,
)
from models.zoo.builds import shapes_of
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
    shapes = shapes_of(model)
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
    inputs = (*parameter_ports(shapes_of(model)), *batch, *noise_ports(noise), *knobs)
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
