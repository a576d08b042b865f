"""Tries a model with its recipe before its export, whose errors come late and name no line."""

from collections.abc import Container
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from fleet_protocol.errors import ExportError
from trainer_export.batches import SizedBatches
from trainer_export.loss import Answer
from trainer_export.model_inputs import check_output, heads_of, prepared
from trainer_export.recipe import Recipe


def try_own_functions(
    module: nn.Module,
    recipe: Recipe,
    batches: SizedBatches,
) -> None:
    """Call the user's loss and metrics once on every size of a batch."""
    recipe.loss.require_outputs(batches.signature.heads)
    # Shoal's own losses and metrics have tests, and need no try.
    if not recipe.has_own:
        return
    with torch.no_grad():
        for x, y in batches.draw(len(batches.sizes)):
            output = prepared(module, "statistics")(x)
            # The trial also differentiates the loss, which `no_grad` would prevent.
            with torch.enable_grad():
                recipe.try_out(output, Answer(y, batches.mask()))


def refuse_idle(
    module: nn.Module,
    recipe: Recipe,
    batches: SizedBatches,
    class_rows: Container[str],
) -> None:
    """Refuse a model with a head that would never be trained.

    Args:
        module: the sub-model.
        recipe: its loss must depend on every head.
        batches: the batches to try.
        class_rows: names of parameters that have rows for labels.

    Raises:
        ExportError: the loss does not depend on a head, or on one of these parameters.
    """
    model = prepared(module, "train")
    x, y = next(batches.draw(1))
    # Dropout draws here, and a set must not depend on whether this check ran.
    with torch.random.fork_rng(devices=[]):
        output = model(x)
    check_output(output, batches.signature)
    loss = recipe.loss.pytorch(output, Answer(y, batches.mask()))
    edges = _edges_below(loss)
    parameters = dict(model.named_parameters())
    rows = {}
    for name, parameter in parameters.items():
        if name in class_rows:
            rows[name] = parameter
    for name, value in {**heads_of(output), **rows}.items():
        if value.requires_grad and get_gradient_edge(value)[:2] not in edges:
            raise ExportError(
                f"the loss {recipe.loss.name} does not depend on {name}, which would never be"
                " trained; use that head in the loss, or remove it from the model"
            )


def _edges_below(loss: torch.Tensor) -> set[Any]:
    """Return every edge of the graph of gradients that a backward pass from a loss follows."""
    edges = set[Any]()
    if not loss.requires_grad:
        return edges
    waiting: list[Any] = [get_gradient_edge(loss)[:2]]
    while waiting:
        edge = waiting.pop()
        # None marks a value without a gradient.
        if edge[0] is not None and edge not in edges:
            edges.add(edge)
            waiting += edge[0].next_functions
    return edges
