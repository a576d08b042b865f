"""Splits a traced training step where training ends: the frozen layers below, and the step above.

The layers below the lowest trained one depend only on the samples and on frozen parameters, so a
board can compute them separately, as inference, and keep their results for the next epoch. The
values that the step takes from below are those of a cut (`trainer_export.sub_programs`).
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import fx

from fleet_protocol.manifest import parameter_input
from trainer_export.graph import Port
from trainer_export.sub_programs import SAMPLES, Cut, kept_port, needed_for, results_of, sub_program
from trainer_export.traced_program import Trace

_aten = torch.ops.aten
_HEAVY = frozenset(
    {
        _aten.convolution.default,
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        torch.ops.shoal.recurrence.default,
    }
)
"""Operators that are worth their own graph."""


@dataclass(frozen=True)
class StepParts:
    """A training step in two graphs, which run one after the other.

    Attributes:
        below: takes ``x`` and frozen parameters, and returns the values of the cut.
        above: takes these values instead, and returns what the whole step returns.
    """

    below: Trace
    above: Trace


def parts_of(step: Trace, frozen: Iterable[str]) -> StepParts | None:
    """Split a traced training step.

    Args:
        step: trace of the whole step.
        frozen: names of the parameters that the step never returns.

    Returns: None if there is no matrix product or convolution below the trained layers.
    """
    names = {SAMPLES, *map(parameter_input, frozen)}
    below_nodes = _nodes_below(step, names)
    above_nodes: list[fx.Node] = []
    for node in step.program.graph.nodes:
        if node not in below_nodes:
            above_nodes.append(node)
    cut = Cut(step, below_nodes, above_nodes)
    # Ports of both parts: what the part below returns is what the part above takes.
    kept: dict[fx.Node, Port] = {}
    returned: dict[Port, fx.Node] = {}
    for number, node in enumerate(cut.values()):
        port = kept_port(node, number)
        kept[node] = port
        returned[port] = node
    # Reading kept rows costs time too; without a product it would save nothing.
    if not any(node.target in _HEAVY for node in needed_for(kept)):
        return None
    outputs = dict(zip(step.outputs, results_of(step), strict=True))
    below = sub_program(step, "below", {}, returned)
    return StepParts(below, sub_program(step, "above", kept, outputs))


def _nodes_below(step: Trace, names: Collection[str]) -> set[fx.Node]:
    """Return the nodes that depend only on some inputs and on constants."""
    below: set[fx.Node] = set()
    ports = iter(step.inputs)
    for node in step.program.graph.nodes:
        if node.op == "placeholder":
            # Placeholders come in the order of the inputs, and have no other name here.
            is_below = next(ports).name in names
        else:
            # A node without inputs is a constant, and so below as well.
            is_below = node.op != "output" and below.issuperset(node.all_input_nodes)
        if is_below:
            below.add(node)
    return below
