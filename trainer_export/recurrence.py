"""Recurrent cells as one operator over all steps, with a gradient that is one operator, too.

Each is a loop in the graph.

A cell is the function of one step; the gradient of a step is traced from it. The contribution of
the states to the gates, ``a = h W^T + b``, is the same for all cells, so the gradient of ``W`` is
one product over all steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

States = Sequence[Tensor]


@dataclass(frozen=True)
class Cell:
    """A kind of recurrent layer.

    Attributes:
        gates: size of its pre-activations as a multiple of a state's size.
        states: number of states; the first is the output.
        step: maps the contributions of input and states to the gates, both [batch, gates * size],
            and the states [batch, size] to the new states.
    """

    gates: int
    states: int
    step: Callable[[Tensor, Tensor, States], list[Tensor]]


def _lstm(z: Tensor, a: Tensor, states: States) -> list[Tensor]:
    # c' = sigmoid(f) * c + sigmoid(i) * tanh(g), h' = sigmoid(o) * tanh(c').
    i, f, g, o = (z + a).chunk(4, 1)
    memory = torch.sigmoid(f) * states[1] + torch.sigmoid(i) * torch.tanh(g)
    return [torch.sigmoid(o) * torch.tanh(memory), memory]


def _gru(z: Tensor, a: Tensor, states: States) -> list[Tensor]:
    # n = tanh(z_n + sigmoid(r) * a_n), h' = n + sigmoid(u) * (h - n): the reset gate applies to the
    # contribution of the states, as in PyTorch.
    z_reset, z_update, z_new = z.chunk(3, 1)
    a_reset, a_update, a_new = a.chunk(3, 1)
    new = torch.tanh(z_new + torch.sigmoid(z_reset + a_reset) * a_new)
    return [new + torch.sigmoid(z_update + a_update) * (states[0] - new)]


CELLS: Mapping[str, Cell] = MappingProxyType(
    {
        "lstm": Cell(4, 2, _lstm),
        "gru": Cell(3, 1, _gru),
        "rnn_tanh": Cell(1, 1, lambda z, a, _: [torch.tanh(z + a)]),
        "rnn_relu": Cell(1, 1, lambda z, a, _: [torch.relu(z + a)]),
    }
)


def forth(
    cell: Cell,
    z: Tensor,
    weight: Tensor,
    bias: Tensor,
    states: States,
) -> list[Tensor]:
    """Return the new states after one step.

    Args:
        cell: the cell.
        z: contribution of the input to the gates, float32 [batch, gates].
        weight: weights of the first state, float32 [gates, size].
        bias: float32 [gates].
        states: float32 [batch, size] each.
    """
    return cell.step(
        z,
        torch.addmm(bias, states[0], weight.t()),
        states,
    )


def back(  # noqa: PLR0913  (the inputs of a step, and its slopes)
    cell: Cell,
    slopes: States,
    z: Tensor,
    weight: Tensor,
    bias: Tensor,
    states: States,
) -> list[Tensor]:
    """Return the gradient of :func:`forth`.

    It is with respect to the states, ``z`` and the contribution of the states to the gates.
    """
    with torch.enable_grad():
        gates = torch.addmm(bias, states[0], weight.t())
        leaves = []
        for tensor in (z, gates, *states):
            leaves.append(tensor.detach().requires_grad_())
        new = cell.step(
            leaves[0],
            leaves[1],
            leaves[2:],
        )
        slope_of: list[Tensor | None] = list(
            torch.autograd.grad(new, leaves, list(slopes), allow_unused=True)
        )
    gradients = []
    for slope, leaf in zip(slope_of, leaves, strict=True):
        gradients.append(torch.zeros_like(leaf) if slope is None else slope)
    to_z, to_gates, *before = gradients
    # The first state also affects the cell through the gates.
    through_gates = to_gates @ weight
    before[0] = through_gates if slope_of[2] is None else before[0] + through_gates
    return [*before, to_z, to_gates]


@torch.library.custom_op("shoal::recurrence", mutates_args=())
def recurrence(
    kind: str,
    z: Tensor,
    weight: Tensor,
    bias: Tensor,
    start: Sequence[Tensor],
) -> list[Tensor]:
    """Run all steps of a cell.

    Args:
        kind: a key of `CELLS`.
        z: contribution of the inputs to the gates, float32 [steps, batch, gates].
        weight: weights of the first state, float32 [gates, size].
        bias: float32 [gates].
        start: the states before the first step, float32 [batch, size].

    Returns:
        Each state after every step, float32 [steps, batch, size].
    """
    states = list(start)
    kept = []
    for row in z:
        states = forth(CELLS[kind], row, weight, bias, states)
        kept.append(states)
    states = []
    for state in zip(*kept, strict=True):
        states.append(torch.stack(state))
    return states


@torch.library.custom_op("shoal::recurrence_backward", mutates_args=())
def recurrence_backward(  # noqa: PLR0913  (an operator takes tensors, not values of ours)
    kind: str,
    slopes: Sequence[Tensor | None],
    z: Tensor,
    weight: Tensor,
    bias: Tensor,
    before: Sequence[Tensor],
) -> list[Tensor]:
    """Return the gradient of :func:`recurrence`.

    Args:
        kind: a key of `CELLS`.
        slopes: gradients of each state after every step; None for a state without other uses.
        z: as in :func:`recurrence`, like `weight` and `bias`.
        weight: weight of the first state.
        bias: bias of the gates.
        before: each state before every step, float32 [steps, batch, size].

    Returns:
        The gradients of the first states, ``z``, and the contribution of the states to the gates.

    Raises:
        NotImplementedError: the function is called; in graphs it is a loop over :func:`back`.
    """
    del slopes, z, weight, bias, before
    raise NotImplementedError(
        f"the gradient of {kind} exists only in exported graphs and cannot run in PyTorch"
    )


@recurrence.register_fake
def _fake(
    kind: str,
    z: Tensor,
    weight: Tensor,
    bias: Tensor,
    start: Sequence[Tensor],
) -> list[Tensor]:
    del kind, weight, bias
    states = []
    for state in start:
        states.append(z.new_empty([z.shape[0], *state.shape]))
    return states


@recurrence_backward.register_fake
def _fake_backward(  # noqa: PLR0913  (as the operator's)
    kind: str,
    slopes: Sequence[Tensor | None],
    z: Tensor,
    weight: Tensor,
    bias: Tensor,
    before: Sequence[Tensor],
) -> list[Tensor]:
    del kind, slopes, weight, bias
    return [
        *(state.new_empty(state.shape[1:]) for state in before),
        torch.empty_like(z),
        torch.empty_like(z),
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.kind, z, weight, bias, start = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(z, weight, bias, *start, *output)


def _gradient(ctx: Any, slopes: Sequence[Tensor | None]) -> tuple[Any, ...]:
    z, weight, bias, *states = ctx.saved_tensors
    count = CELLS[ctx.kind].states
    pairs = zip(states[:count], states[count:], strict=True)
    before = []
    for first, after in pairs:
        before.append(torch.cat([first.unsqueeze(0), after[:-1]]))
    *start, to_z, to_gates = recurrence_backward(
        ctx.kind,
        list(slopes),
        z,
        weight,
        bias,
        before,
    )
    gates = to_gates.flatten(0, 1)
    return None, to_z, gates.t() @ before[0].flatten(0, 1), gates.sum(0), start


recurrence.register_autograd(_gradient, setup_context=_save)
