"""Recurrent cells as one operator over all steps, whose gradient is one operator too.

A graph holds each as a loop.

A cell is what one step does to its states; the gradient of a step is traced from that. What the
weights of the states add to the gates, ``a = h W^T + b``, is the same for all cells, so the
gradient of ``W`` is one product over all steps.
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
    """A kind of recurrent layer."""

    gates: int  # how many times the size of a state its pre-activations are
    states: int  # number of states; the first is the output
    # from what the input adds to the gates [batch, gates * size], what the states add to them, and
    # the states [batch, size], to the new states
    step: Callable[[Tensor, Tensor, States], list[Tensor]]


def _lstm(z: Tensor, a: Tensor, states: States) -> list[Tensor]:
    taken, kept, new, shown = (z + a).chunk(4, 1)
    memory = torch.sigmoid(kept) * states[1] + torch.sigmoid(taken) * torch.tanh(new)
    return [torch.sigmoid(shown) * torch.tanh(memory), memory]


def _gru(z: Tensor, a: Tensor, states: States) -> list[Tensor]:
    (z_reset, z_kept, z_new), (a_reset, a_kept, a_new) = z.chunk(3, 1), a.chunk(3, 1)
    new = torch.tanh(z_new + torch.sigmoid(z_reset + a_reset) * a_new)
    return [new + torch.sigmoid(z_kept + a_kept) * (states[0] - new)]


CELLS: Mapping[str, Cell] = MappingProxyType(
    {
        "lstm": Cell(4, 2, _lstm),
        "gru": Cell(3, 1, _gru),
        "rnn_tanh": Cell(1, 1, lambda z, a, _: [torch.tanh(z + a)]),
        "rnn_relu": Cell(1, 1, lambda z, a, _: [torch.relu(z + a)]),
    }
)


def forth(cell: Cell, z: Tensor, weight: Tensor, bias: Tensor, states: States) -> list[Tensor]:
    """One step: the new states.

    Args:
        cell: what it does.
        z: what the input adds to the gates, float32 [batch, gates].
        weight: of the first state, float32 [gates, size].
        bias: float32 [gates].
        states: float32 [batch, size] each.
    """
    return cell.step(z, torch.addmm(bias, states[0], weight.t()), states)


def back(
    cell: Cell, slopes: States, z: Tensor, weight: Tensor, bias: Tensor, states: States
) -> list[Tensor]:
    """The gradient of :func:`forth`: with respect to the states, ``z`` and what the states add to
    the gates.
    """
    with torch.enable_grad():
        leaves = [z, torch.addmm(bias, states[0], weight.t()), *states]
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        new = cell.step(leaves[0], leaves[1], leaves[2:])
        found = torch.autograd.grad(new, leaves, list(slopes), allow_unused=True)
    slope_of: list[Tensor | None] = list(found)
    to_z, to_gates, *before = [
        torch.zeros_like(leaf) if slope is None else slope
        for slope, leaf in zip(slope_of, leaves, strict=True)
    ]
    before[0] = to_gates @ weight if slope_of[2] is None else before[0] + to_gates @ weight
    return [*before, to_z, to_gates]


@torch.library.custom_op("shoal::recurrence", mutates_args=())
def recurrence(
    kind: str, z: Tensor, weight: Tensor, bias: Tensor, start: Sequence[Tensor]
) -> list[Tensor]:
    """All steps of a cell.

    Args:
        kind: of `CELLS`.
        z: what the inputs add to the gates, float32 [steps, batch, gates].
        weight: of the first state, float32 [gates, size].
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
    return [torch.stack(state) for state in zip(*kept, strict=True)]


@torch.library.custom_op("shoal::recurrence_backward", mutates_args=())
def recurrence_backward(
    kind: str,
    slopes: Sequence[Tensor | None],
    z: Tensor,
    weight: Tensor,
    bias: Tensor,
    before: Sequence[Tensor],
) -> list[Tensor]:
    """The gradient of :func:`recurrence`.

    The slopes are those of each state after every step, None for one that nothing else depends on;
    `before` has each state before every step, float32 [steps, batch, size].

    Returns:
        With respect to the first states, ``z``, and what the states add to the gates.

    Raises:
        NotImplementedError: it is run; a graph has it as a loop over :func:`back`.
    """
    del slopes, z, weight, bias, before
    raise NotImplementedError(
        f"the gradient of {kind} is written into graphs, and nothing runs it here"
    )


@recurrence.register_fake
def _fake(
    kind: str, z: Tensor, weight: Tensor, bias: Tensor, start: Sequence[Tensor]
) -> list[Tensor]:
    del kind, weight, bias
    return [z.new_empty([z.shape[0], *state.shape]) for state in start]


@recurrence_backward.register_fake
def _fake_backward(
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
    before = [torch.cat([first.unsqueeze(0), after[:-1]]) for first, after in pairs]
    *start, to_z, to_gates = recurrence_backward(ctx.kind, list(slopes), z, weight, bias, before)
    gates = to_gates.flatten(0, 1)
    return None, to_z, gates.t() @ before[0].flatten(0, 1), gates.sum(0), start


recurrence.register_autograd(_gradient, setup_context=_save)
