"""Recurrent layers as one loop per layer and direction (`trainer_export.recurrence`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fleet_protocol.errors import ExportError
from trainer_export.recurrence import CELLS, recurrence

_SETTINGS = 6  # arguments after the weights, in a call without packed sequences


@dataclass(frozen=True)
class _Stack:
    """All layers of a recurrent network, in one or both directions."""

    kind: str  # as in `CELLS`
    layers: int
    directions: int
    weights: Sequence[Tensor]  # of all layers and directions, one after another
    start: Sequence[Tensor]  # the first states, [layers * directions, batch, size] each

    def run(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the outputs of the last layer, [time, batch, size], and the last states."""
        last: list[list[Tensor]] = []
        count = len(self.weights) // (self.layers * self.directions)
        for layer in range(self.layers):
            outputs: list[Tensor] = []
            for direction in range(self.directions):
                place = layer * self.directions + direction
                weights = self.weights[place * count : (place + 1) * count]
                start = [state[place] for state in self.start]
                is_backwards = direction == 1
                states = _one_direction(self.kind, x, weights, start, is_backwards=is_backwards)
                # In the backward direction, the last step is at the first time.
                last_step = 0 if is_backwards else -1
                last.append([state[last_step] for state in states])
                outputs.append(states[0])
            x = torch.cat(outputs, 2) if self.directions > 1 else outputs[0]
        return x, [torch.stack(state) for state in zip(*last, strict=True)]


def _one_direction(
    kind: str,
    x: Tensor,
    weights: Sequence[Tensor],
    start: list[Tensor],
    *,
    is_backwards: bool,
) -> list[Tensor]:
    """Run one layer in one direction; return its states after every step in time order.

    A projected state is a product, ``h = P u``, so it adds ``(W P) u`` to the gates. This is the
    same loop over ``u``, which starts at 0; the first step adds the contribution of the first
    ``h``.
    """
    # The matrices are followed by their two biases, if any, and the projection, if any.
    to_input, to_state, *biases = weights
    projection = biases.pop() if len(biases) % 2 else None
    x = x.flip(0) if is_backwards else x
    gates = linear(x, to_input, biases[0] if biases else None)
    bias = biases[1] if biases else to_state.new_zeros(to_state.shape[0])
    if projection is not None:
        gates = torch.cat([gates[:1] + linear(start[0], to_state), gates[1:]])
        to_state = to_state @ projection
        start = [torch.zeros_like(start[1]), start[1]]
    states: list[Tensor] = recurrence(kind, gates, to_state, bias, start)
    if projection is not None:
        states = [linear(states[0], projection), states[1]]
    return [state.flip(0) for state in states] if is_backwards else states


def _layers(kind: str) -> Callable[..., Any]:
    """Return PyTorch's function of a kind of layers, written as loops."""

    def run(
        x: Tensor,
        start: Any,
        weights: Any,
        *settings: Any,
    ) -> Any:
        if len(settings) != _SETTINGS or isinstance(settings[0], (list, tuple)):
            raise ExportError(
                f"{kind} over packed sequences cannot be exported; pad the sequences, and mask"
                " the padding"
            )
        _, layers, dropout, training, both_directions, batch_first = settings
        if x.dim() != 3:
            return NotImplemented
        if dropout and training:
            raise ExportError(
                f"{kind} with dropout between its layers cannot be exported; `shoal export"
                " --convert` splits it into single layers with Dropout of models.zoo.dropout"
                " between them, or use dropout=0"
            )
        states = list(start) if isinstance(start, (list, tuple)) else [start]
        stack = _Stack(kind, layers, 2 if both_directions else 1, weights, states)
        outputs, ends = stack.run(x.transpose(0, 1) if batch_first else x)
        return (outputs.transpose(0, 1) if batch_first else outputs), *ends

    return run


FUNCTIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {getattr(torch, kind): _layers(kind) for kind in CELLS}
)
