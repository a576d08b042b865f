"""Whether a step may write a new parameter or state over the old one: a device then needs one buffer for both.

That is safe where everything that reads the old one comes before what writes the new one by the flow of data, so
that no order of execution can turn them round.
"""

from collections.abc import Mapping, Sequence

import onnx

from fleet_protocol.manifest import next_name
from trainer_export.graph import values_read
from trainer_export.sized_graph import VIEWS

_ENTRYWISE = frozenset({"Add", "Mul", "Sub"})  # read an entry before they write it


def in_place(model: onnx.ModelProto, prefix: str) -> bool:
    """Whether every ``param.`` or ``state.`` input of a step graph may share memory with its next (``next.<name>``).

    Also true where there are none.
    """
    graph = model.graph
    reads = [values_read(node) for node in graph.node]
    readers: dict[str, list[int]] = {}
    for index, names in enumerate(reads):
        for name in names:
            readers.setdefault(name, []).append(index)
    producers = {output: index for index, node in enumerate(graph.node) for output in node.output}
    ancestors = _ancestors(reads, producers)
    for old in (value.name for value in graph.input if value.name.startswith(prefix)):
        if next_name(old) not in producers:
            continue  # frozen
        writer, same = producers[next_name(old)], [old]
        for name in same:  # which grows by what may share its memory
            for index in readers.get(name, ()):
                node = graph.node[index]
                if node.op_type in VIEWS:
                    same.extend(node.output)
                if not (ancestors[writer] >> index & 1 or (index == writer and node.op_type in _ENTRYWISE)):
                    return False
    return True


def _ancestors(reads: Sequence[set[str]], producers: Mapping[str, int]) -> list[int]:
    """For each node, the nodes that must run before it, each a bit of a number."""
    found: list[int] = []
    for names in reads:
        before = 0
        for index in {producers[name] for name in names if name in producers}:
            before |= found[index] | 1 << index
        found.append(before)
    return found
