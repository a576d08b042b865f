"""Finds the inputs of a training step whose next values may be written into their memory."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from fleet_protocol.manifest import next_name
from trainer_export.formats.files import SetFile
from trainer_export.graph import values_read
from trainer_export.sized_graph import VIEWS

PARAMETERS = "param."
"""Prefix of the inputs that are parameters."""

STATES = "state."
"""Prefix of the inputs that are states of the optimizer."""

_STEP_GRAPHS = ("onnx/train", "ort-training/step")
_ENTRYWISE = frozenset({"Add", "Mul", "Sub"})


def overwritten(files: Iterable[SetFile]) -> tuple[str, ...]:
    """Return the prefixes of the inputs that devices overwrite, for the files of an artifact set.

    A set has one manifest for both runtimes, so each of its step graphs must allow it.
    """
    steps = []
    for file in files:
        if file.key in _STEP_GRAPHS:
            steps.append(onnx.load_model_from_string(file.data))
    return prefixes_in_place(steps)


def prefixes_in_place(steps: Sequence[onnx.ModelProto]) -> tuple[str, ...]:
    """Return the prefixes for which every step allows it; see :func:`in_place`."""
    allowed = []
    for prefix in (PARAMETERS, STATES):
        if all(in_place(step, prefix) for step in steps):
            allowed.append(prefix)
    return tuple(allowed)


def in_place(model: onnx.ModelProto, prefix: str) -> bool:
    """Return whether inputs of a step graph may share memory with their next values.

    These are the inputs with a prefix, ``param.`` or ``state.``; the next value is ``next.<name>``.
    True if there are none. Sharing is safe if, by the data flow, every reader of the old value
    precedes the writer of the new one in any order of execution.
    """
    flow = _Flow.read(model.graph)
    names = []
    for value in model.graph.input:
        if value.name.startswith(prefix):
            names.append(value.name)
    return all(flow.may_overwrite(name) for name in names)


@dataclass(frozen=True)
class _Flow:
    """The flow of data through a graph, its nodes by number.

    Attributes:
        readers: readers of each value.
        producers: the node that produces each value.
        ancestors: for each node, the nodes that must run before it, as bits of a number.
    """

    nodes: Sequence[onnx.NodeProto]
    readers: Mapping[str, Sequence[int]]
    producers: Mapping[str, int]
    ancestors: Sequence[int]

    @classmethod
    def read(cls, graph: onnx.GraphProto) -> "_Flow":
        """Return the flow of a graph."""
        readers: dict[str, list[int]] = {}
        producers: dict[str, int] = {}
        ancestors: list[int] = []
        for index, node in enumerate(graph.node):
            before = 0
            for name in values_read(node):
                readers.setdefault(name, []).append(index)
                producer = producers.get(name)
                # Inputs of the graph and constants have no producer.
                if producer is not None:
                    # ONNX lists nodes after those whose results they read.
                    # Bits of one number: sets would hold half of the square of all nodes.
                    before |= ancestors[producer] | 1 << producer
            ancestors.append(before)
            producers.update(dict.fromkeys(node.output, index))
        return cls(graph.node, readers, producers, ancestors)

    def may_overwrite(self, old: str) -> bool:
        """Return whether the next value of an input may be written into its memory."""
        writer = self.producers.get(next_name(old))
        if writer is None:
            return True  # frozen: there is no next value
        same_memory = [old]
        for name in same_memory:  # grows by the views of its values
            for index in self.readers.get(name, ()):
                node = self.nodes[index]
                if node.op_type in VIEWS:
                    same_memory.extend(node.output)
                # An element-wise writer reads each entry before it writes it.
                writes_entries = index == writer and node.op_type in _ENTRYWISE
                if not writes_entries and not self.ancestors[writer] >> index & 1:
                    return False
        return True
