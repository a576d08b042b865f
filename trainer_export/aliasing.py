"""Whether a step may write a new optimizer state over the old one: a device then needs one buffer for both.

That is safe where everything that reads the old state comes before what writes the new one by the flow of data, so
that no order of execution can turn them round.
"""

from __future__ import annotations

import onnx

from fleet_protocol.manifest import next_name
from trainer_export.graph import values_read

__all__ = ["states_in_place"]

_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Identity", "Flatten"})  # may share their input's memory
_ENTRYWISE = frozenset({"Add", "Mul", "Sub"})  # read an entry before they write it


def states_in_place(model: onnx.ModelProto) -> bool:
    """Whether every state of a step graph may share memory with its next value.

    Args:
        model: a step graph; its states are the inputs ``state.<name>``, their next values ``next.state.<name>``.

    Returns:
        True also where there are no states.
    """
    graph = model.graph
    producers = {output: index for index, node in enumerate(graph.node) for output in node.output}
    ancestors = _ancestors(graph, producers)
    states = [value.name for value in graph.input if value.name.startswith("state.")]
    for state in states:
        writer = producers[next_name(state)]
        same = {state}
        for index, node in enumerate(graph.node):
            if not same.intersection(values_read(node)):
                continue
            if node.op_type in _VIEWS:
                same.update(node.output)
            before = index in ancestors[writer] or (index == writer and node.op_type in _ENTRYWISE)
            if not before:
                return False
    return True


def _ancestors(graph: onnx.GraphProto, producers: dict[str, int]) -> list[frozenset[int]]:
    """For each node, the nodes that must run before it."""
    found: list[frozenset[int]] = []
    for node in graph.node:
        direct = {producers[name] for name in values_read(node) if name in producers}
        found.append(frozenset(direct.union(*(found[index] for index in direct))))
    return found
