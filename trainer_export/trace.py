"""Traces the train, eval, statistics and infer functions of a model into programs of torch operators.

A program is made by running the function once on fake tensors, with the batch as the only dynamic size. Forward pass,
gradient and optimizer end up in one flat list of operators; the gradient is PyTorch's own, except where a layer is
replaced by an operator with a gradient in closed form (see `operators`). What a layer draws at random in training
(`models.zoo.dropout`) is an input of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fleet_protocol.manifest import next_name, parameter_input, state_input
from trainer_export import recipe as rules
from trainer_export.graph import Port
from trainer_export.model_ports import (
    Signature,
    anchor_ports,
    batch_ports,
    call_model,
    check_logits,
    logits_port,
    mask_port,
    model_noise,
    noise_ports,
    norms,
    parameter_names,
    parameter_ports,
    prepared,
    statistic_ports,
)
from trainer_export.recipe import Recipe
from trainer_export.tracing import Trace, trace_program

__all__ = [
    "Signature",
    "Trace",
    "trace_eval",
    "trace_infer",
    "trace_loss",
    "trace_optimizer",
    "trace_statistics",
    "trace_train",
]


def trace_train(model: nn.Module, signature: Signature, recipe: Recipe) -> Trace:
    """The whole training step: loss, gradient, clipping and optimizer.

    Args:
        model: the module, unchanged by this.
        signature: what it takes and returns.
        recipe: loss and optimizer.

    Returns:
        Inputs ``param.*``, ``state.*``, ``x``, ``y``, ``mask``, ``noise.*``, ``lr``, and with a proximal term
        ``anchor.*`` and ``mu``; outputs ``loss`` and ``next.*``.

    Raises:
        ExportError: the model cannot be traced with a dynamic batch.
    """
    noise = model_noise(model, signature)
    model = prepared(model, "train", operators=True)
    names = parameter_names(model)
    count, states = len(names), len(names) if recipe.has_state else 0
    place = count + states + 3 + len(noise)  # of the learning rate

    def step(*tensors: Tensor) -> list[Tensor]:
        parameters = list(tensors[:count])
        x, y, mask, *drawn = tensors[count + states : place]
        lr, pull = tensors[place], _pull(tensors[place + 1 :])
        trained = [p.detach().requires_grad_() for p in parameters]
        logits = call_model(model, names, trained, x, dict(zip(noise, drawn, strict=True)))
        check_logits(logits, signature)
        loss, slope = rules.loss_and_logit_gradient(logits.detach(), y, mask)
        # As in PyTorch, a parameter the loss does not depend on is left alone, weight decay and momentum too; the
        # proximal term depends on all of them.
        gradients: Sequence[Tensor | None] = torch.autograd.grad(
            logits, trained, slope, allow_unused=True, materialize_grads=recipe.proximal
        )
        used = {i: g for i, g in enumerate(gradients) if g is not None}
        moved, kept = list(parameters), list(tensors[count : count + states])
        stepped = rules.sgd_step(
            [parameters[i] for i in used], [kept[i] for i in used if states], list(used.values()), lr, recipe, pull
        )
        for old, new in zip((moved, kept), stepped, strict=True):
            for i, tensor in zip(used, new, strict=False):
                old[i] = tensor
        return [loss, *moved, *kept]

    ports = parameter_ports(model)
    state_ports = tuple(Port(state_input(n), p.dtype, p.shape) for n, p in zip(names, ports, strict=True))[:states]
    inputs = (
        *ports,
        *state_ports,
        *batch_ports(signature, "x", "y"),
        mask_port(signature),
        *noise_ports(noise),
        Port("lr", "float32", ()),
        *(anchor_ports({n: tuple(p.shape) for n, p in model.named_parameters()}) if recipe.proximal else ()),
    )
    outputs = (
        Port("loss", "float32", ()),
        *(Port(next_name(p.name), p.dtype, p.shape) for p in (*ports, *state_ports)),
    )
    return trace_program("train", step, inputs, outputs)


def _pull(tensors: Sequence[Tensor]) -> rules.Pull | None:
    """The proximal term from the inputs of `anchor_ports`."""
    return rules.Pull(tensors[:-1], tensors[-1]) if tensors else None


def trace_loss(model: nn.Module, signature: Signature) -> Trace:
    """The loss of a training batch and its logits, for runtimes that differentiate the graph themselves.

    Inputs ``param.*``, ``x``, ``y``, ``mask``, ``noise.*``; outputs ``loss`` and ``logits``.
    """
    noise = model_noise(model, signature)
    model = prepared(model, "train")
    names = parameter_names(model)

    def loss(*tensors: Tensor) -> list[Tensor]:
        x, y, mask, *drawn = tensors[len(names) :]
        logits = call_model(model, names, tensors[: len(names)], x, dict(zip(noise, drawn, strict=True)))
        check_logits(logits, signature)
        return [rules.loss_and_logit_gradient(logits, y, mask)[0], logits]

    inputs = (
        *parameter_ports(model),
        *batch_ports(signature, "x", "y"),
        mask_port(signature),
        *noise_ports(noise),
    )
    return trace_program("loss", loss, inputs, (Port("loss", "float32", ()), logits_port(signature)))


def trace_optimizer(shapes: Mapping[str, tuple[int, ...]], recipe: Recipe) -> Trace:
    """Clipping and optimizer alone.

    Inputs ``param.*``, ``state.*``, ``grad.*``, ``lr``, and with a proximal term ``anchor.*`` and ``mu``; outputs
    ``next.*``.
    """
    count, states = len(shapes), len(shapes) if recipe.has_state else 0

    def update(*tensors: Tensor) -> list[Tensor]:
        place = count + states + count  # of the learning rate
        gradients, pull = tensors[count + states : place], _pull(tensors[place + 1 :])
        moved, kept = rules.sgd_step(
            tensors[:count], tensors[count : count + states], gradients, tensors[place], recipe, pull
        )
        return [*moved, *kept]

    parameters = tuple(Port(parameter_input(name), "float32", shape) for name, shape in shapes.items())
    kept = tuple(Port(state_input(name), "float32", shape) for name, shape in shapes.items())[:states]
    gradients = tuple(Port(f"grad.{name}", "float32", shape) for name, shape in shapes.items())
    outputs = tuple(Port(next_name(p.name), p.dtype, p.shape) for p in (*parameters, *kept))
    inputs = (
        *parameters,
        *kept,
        *gradients,
        Port("lr", "float32", ()),
        *(anchor_ports(shapes) if recipe.proximal else ()),
    )
    return trace_program("optimizer", update, inputs, outputs)


def trace_eval(model: nn.Module, signature: Signature) -> Trace:
    """Sum of losses and number of right answers of a batch, with given statistics."""
    model = prepared(model, "eval")

    def evaluate(logits: Tensor, y: Tensor, mask: Tensor) -> list[Tensor]:
        return [rules.loss_sum(logits, y, mask), rules.correct_count(logits, y, mask)]

    extra = (*batch_ports(signature, "y"), mask_port(signature))
    return _trace_forward(
        "eval", model, signature, extra, evaluate, (Port("loss_sum", "float32", ()), Port("correct", "int64", ()))
    )


def trace_infer(model: nn.Module, signature: Signature) -> Trace:
    """The logits of a batch, with given statistics."""
    model = prepared(model, "eval")
    return _trace_forward("infer", model, signature, (), lambda logits: [logits], (logits_port(signature),))


def trace_statistics(model: nn.Module, signature: Signature) -> Trace | None:
    """Mean and unbiased variance of every static batch norm for one batch; None if the model has none."""
    model = prepared(model, "statistics")
    names, layers = parameter_names(model), norms(model)
    if not layers:
        return None

    def measure(*tensors: Tensor) -> list[Tensor]:
        call_model(model, names, tensors[:-1], tensors[-1])
        return [t for _, norm in layers for t in (norm.last_mean, norm.last_var) if t is not None]

    inputs = (*parameter_ports(model), *batch_ports(signature, "x"))
    return trace_program("stats", measure, inputs, statistic_ports(layers))


def _trace_forward(
    name: str,
    model: nn.Module,
    signature: Signature,
    extra: tuple[Port, ...],
    finish: Callable[..., list[Tensor]],
    outputs: tuple[Port, ...],
) -> Trace:
    names, layers = parameter_names(model), norms(model)
    buffers = [f"{path}.{kind}" for path, _ in layers for kind in ("running_mean", "running_var")]
    given = [*names, *buffers]

    def run(*tensors: Tensor) -> list[Tensor]:
        logits = call_model(model, given, tensors[: len(given)], tensors[len(given)])
        check_logits(logits, signature)
        return finish(logits, *tensors[len(given) + 1 :])

    inputs = (*parameter_ports(model), *statistic_ports(layers), *batch_ports(signature, "x"), *extra)
    return trace_program(name, run, inputs, outputs)
