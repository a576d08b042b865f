"""Recurrent layers as one loop per layer and direction (`trainer_export.recurrence`)."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fleet_protocol.errors import ExportError
from trainer_export.recurrence import CELLS, recurrence


def _one_way(
    kind: str,
    x: Tensor,
    weights: Sequence[Tensor],
    start: list[Tensor],
    backwards: bool,
) -> list[Tensor]:
    """One layer in one direction: its states after every step, in the order of time.

    A projected state is a product, ``h = P u``, so what it adds to the gates is ``(W P) u``: the
    same loop over ``u``, which begins at 0, and the first step is given what the first ``h`` adds.
    """
    to_input, to_state, *biases = weights
    projection = biases.pop() if len(biases) % 2 else None
    x = x.flip(0) if backwards else x
    z = linear(x, to_input, biases[0] if biases else None)
    bias = biases[1] if biases else to_state.new_zeros(to_state.shape[0])
    if projection is not None:
        z = torch.cat([z[:1] + linear(start[0], to_state), z[1:]])
        to_state = to_state @ projection
        start = [torch.zeros_like(start[1]), start[1]]
    states: list[Tensor] = recurrence(kind, z, to_state, bias, start)
    states = states if projection is None else [linear(states[0], projection), states[1]]
    return [state.flip(0) for state in states] if backwards else states


def _layers(kind: str) -> Callable[..., Any]:
    def run(x: Tensor, given: Any, weights: Any, *rest: Any) -> Any:
        if len(rest) != 6 or isinstance(rest[0], (list, tuple)):
            raise ExportError(
                f"{kind} over packed sequences cannot be exported; pad them, and mask what is padding"
            )
        biased, layers, dropout, training, both_ways, batch_first = rest
        if x.dim() != 3:
            return NotImplemented
        if dropout and training:
            raise ExportError(
                f"{kind} with dropout between its layers cannot be exported; `shoal export --convert` makes"
                " layers of their own with Dropout of models.zoo.dropout between them, or use dropout=0"
            )
        first = list(given) if isinstance(given, (list, tuple)) else [given]
        projected = first[0].shape[-1] * CELLS[kind].gates != weights[0].shape[0]
        x = x.transpose(0, 1) if batch_first else x
        count = (4 if biased else 2) + projected
        ways = 1 + both_ways
        last: list[list[Tensor]] = []
        for layer in range(layers):
            made = []
            for way in range(ways):
                place = layer * ways + way
                own = weights[place * count : (place + 1) * count]
                states = _one_way(kind, x, own, [state[place] for state in first], bool(way))
                last.append([state[0 if way else -1] for state in states])
                made.append(states[0])
            x = torch.cat(made, 2) if both_ways else made[0]
        ends = [torch.stack(state) for state in zip(*last, strict=True)]
        return (x.transpose(0, 1) if batch_first else x), *ends

    return run


FUNCTIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {getattr(torch, kind): _layers(kind) for kind in CELLS}
)
