"""The training step, whole and in its two parts, and its comparison with PyTorch.

Forward pass, gradient and optimizer are one flat list of operators; the gradient is PyTorch's own,
except where a layer is replaced by an operator with a gradient in closed form (see `operators`).
What a layer draws at random in training (`models.zoo.dropout`) is an input of the graph.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fleet_protocol.errors import ExportError
from fleet_protocol.manifest import (
    CheckSpec,
    next_name,
    noise_input,
    parameter_input,
    state_input,
)
from trainer_export.batches import SizedBatches
from trainer_export.check import Session, Worst, open_session, repeated, run_session
from trainer_export.graph import Port
from trainer_export.loss import Answer
from trainer_export.model_inputs import (
    Signature,
    batch_ports,
    call_model,
    check_output,
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


def trace_train(model: nn.Module, signature: Signature, recipe: Recipe) -> Trace:
    """The whole training step: loss, gradient, clipping and optimizer; the module is not changed.

    Returns:
        Inputs ``param.*``, ``state.*``, ``x``, ``y``, ``mask`` if the loss takes one, ``noise.*``,
        ``lr``, with a proximal term ``anchor.*`` and ``mu``, and to take a batch in pieces
        ``share`` and ``last``; outputs ``loss`` and ``next.*``. What the signature names as its
        base goes in alone; any other frozen parameter (``requires_grad`` False) and its states come
        out as they went in.

    Raises:
        ExportError: the model cannot be traced with a dynamic batch, or all of it is frozen.
    """
    noise = model_noise(model, signature)
    model = prepared(model, "train", operators=True)
    shapes = _shapes(model)
    base = parameter_ports({name: shapes.pop(name) for name in signature.base})
    names = [*shapes, *signature.base]
    free = [place for place, name in enumerate(shapes) if model.get_parameter(name).requires_grad]
    if not free:
        raise ExportError(
            "every parameter is frozen (requires_grad False), so there is nothing to train; free some"
        )
    changing = changing_ports(shapes, recipe)
    batch = batch_ports(signature, recipe.loss)

    def step(*tensors: Tensor) -> list[Tensor]:
        changed = tensors[: len(changing)]
        held = tensors[len(changing) : len(changing) + len(base)]
        rest = tensors[len(changing) + len(base) :]
        x = rest[0]
        answer = Answer(*rest[1 : len(batch)])
        drawn = rest[len(batch) : len(batch) + len(noise)]
        lr, *extras = rest[len(batch) + len(noise) :]
        leaves = [
            p.detach().requires_grad_(place in free)
            for place, p in enumerate(changed[: len(shapes)])
        ]
        before = _chance()
        output = call_model(model, names, [*leaves, *held], x, dict(zip(noise, drawn, strict=True)))
        if _chance() != before:
            raise ExportError(
                "the model draws random numbers of Python or NumPy in training, and the graph would keep those of one"
                " step; let a NoiseLayer of models.zoo.dropout draw them: its uniform(x) becomes an input of the graph"
            )
        check_output(output, signature)
        loss, slope = recipe.loss.value_and_slope(tree_map(Tensor.detach, output), answer)
        # A head that the loss does not look at has no slope, nor has one of frozen parameters
        # alone.
        heads = [
            (o, s)
            for o, s in zip(tree_leaves(output), tree_leaves(slope), strict=True)
            if s is not None
        ]
        outputs, slopes = zip(*((o, s) for o, s in heads if o.requires_grad), strict=True)
        # As in PyTorch, a parameter the loss does not depend on is left alone, weight decay and
        # momentum too; the proximal term depends on all of them that are not frozen.
        gradients: Sequence[Tensor | None] = torch.autograd.grad(
            outputs,
            [leaves[i] for i in free],
            slopes,
            allow_unused=True,
            materialize_grads=recipe.proximal,
        )
        used = {i: g for i, g in zip(free, gradients, strict=True) if g is not None}
        return [loss, *stepped(changed, used, lr, extras, recipe)]

    inputs = (
        *changing,
        *base,
        *batch,
        *noise_ports(noise),
        Port("lr", "float32", ()),
        *extra_ports(shapes, recipe),
    )
    return trace_program(
        "train",
        step,
        inputs,
        (Port("loss", "float32", ()), *_next_ports(changing)),
        signature.known,
    )


def _chance() -> tuple[Any, ...]:
    """Where the generators stand that PyTorch's seed does not set."""
    _, keys, *places = np.random.get_state(legacy=True)  # noqa: NPY002 - what a model may draw from
    return random.getstate(), np.asarray(keys).tobytes(), *places


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def _next_ports(changing: Sequence[Port]) -> tuple[Port, ...]:
    return tuple(Port(next_name(p.name), p.dtype, p.shape) for p in changing)


def trace_loss(model: nn.Module, signature: Signature, recipe: Recipe) -> Trace:
    """The loss of a training batch and the model's output, for runtimes that differentiate the
    graph themselves.

    Inputs ``param.*``, ``x``, ``y``, ``mask`` if the loss takes one, ``noise.*``; outputs ``loss``
    and ``logits``.
    """
    noise = model_noise(model, signature)
    model = prepared(model, "train")
    names = parameter_names(model)
    batch = batch_ports(signature, recipe.loss)

    def loss(*tensors: Tensor) -> list[Tensor]:
        x, *rest = tensors[len(names) :]
        answer = Answer(*rest[: len(batch) - 1])
        drawn = rest[len(batch) - 1 :]
        output = call_model(
            model, names, tensors[: len(names)], x, dict(zip(noise, drawn, strict=True))
        )
        check_output(output, signature)
        return [recipe.loss.value(output, answer), *tree_leaves(output)]

    inputs = (*parameter_ports(_shapes(model)), *batch, *noise_ports(noise))
    return trace_program(
        "loss",
        loss,
        inputs,
        (Port("loss", "float32", ()), *output_ports(signature)),
        signature.known,
    )


def trace_optimizer(
    shapes: Mapping[str, tuple[int, ...]], recipe: Recipe, free: Sequence[str]
) -> Trace:
    """Clipping and optimizer alone.

    Inputs ``param.*``, ``state.*``, ``grad.*`` of the parameters that are `free`, ``lr``, and the
    extras of `trace_train`; outputs ``next.*``.
    """
    changing = changing_ports(shapes, recipe)
    places = [place for place, name in enumerate(shapes) if name in free]

    def step(*tensors: Tensor) -> list[Tensor]:
        place = len(changing) + len(places)  # of the learning rate
        gradients = dict(zip(places, tensors[len(changing) : place], strict=True))
        return stepped(
            tensors[: len(changing)],
            gradients,
            tensors[place],
            tensors[place + 1 :],
            recipe,
        )

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
    """Train with PyTorch, let the graph take each step from where PyTorch stands, and compare all
    that comes out.

    The module is as its author wrote it, and not changed. Returns the figures of the first run
    within the limit; an ExportError names the tensor that deviates in all.
    """
    session = open_session(model)
    shapes = model_noise(module, batches.signature)
    base = batches.signature.base

    def run(seeded: SizedBatches, exact: bool) -> CheckSpec:
        worst = Worst()
        reference = Reference(module, recipe, base=base, underway=True)
        held = {parameter_input(name): module.get_parameter(name).detach().numpy() for name in base}
        for number, (x, y) in enumerate(seeded.take(seeded.steps)):
            worst.sizes.append(len(y))
            answer = Answer(y, seeded.mask())
            noise = seeded.noise(shapes, len(y), number)
            parameters, states = reference.snapshot()
            specs = recipe.state_specs({name: value.shape for name, value in parameters.items()})
            sums = [spec for spec in specs if spec.name not in states]
            feed: dict[str, NDArray[Any]] = {parameter_input(n): v for n, v in parameters.items()}
            feed |= held | {state_input(n): v for n, v in states.items()}
            feed |= {"x": x.numpy(), "y": y.numpy(), "mask": seeded.mask().numpy()}
            numbers = {"lr": LEARNING_RATE, "mu": MU, "share": 1.0, "last": 1.0}
            feed |= {name: np.array(value, np.float32) for name, value in numbers.items()}
            feed |= {state_input(spec.name): np.zeros(spec.shape, np.float32) for spec in sums}
            feed |= reference.anchors() | {
                noise_input(path): drawn.numpy() for path, drawn in noise.items()
            }
            outputs = run_session(session, feed)
            del feed, parameters, states  # the first states are arrays of their own
            twin = in_float64(reference, x, answer, noise) if exact else None
            worst.compare(outputs, {"loss": reference.step(x, answer, noise)})
            true = twin.snapshot() if twin else (None, None)
            for kind, expected, double in zip(
                (parameter_input, state_input), reference.snapshot(), true, strict=True
            ):
                found = {name: outputs.pop(next_name(kind(name))) for name in expected}
                worst.compare(found, expected, double, kind(""))
        return worst.report(graph, seeded.steps)

    return repeated(run, batches)
