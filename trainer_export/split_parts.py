"""Replaces a Split of which some parts are not read by a slice for each of the others.

The runtime keeps a result that nothing reads until the run ends. Recomputed values leave such
results behind, which would need more memory than the recomputing saves.
"""

from collections.abc import Iterator, Sequence

import onnx
from onnx import helper, numpy_helper

from trainer_export.graph import values_read
from trainer_export.sized_graph import SizedGraph, attribute


def without_unread_parts(
    graph: SizedGraph, nodes: Sequence[onnx.NodeProto]
) -> Iterator[onnx.NodeProto]:
    """Yield nodes that compute the same values, but no parts of a Split that nothing reads.

    Args:
        graph: has the constants, and gets new ones.
        nodes: the nodes in order.
    """
    read = {value.name for value in graph.proto.output}
    for node in nodes:
        read |= values_read(node)
    for node in nodes:
        sizes = _sizes_of_parts(graph, node)
        if sizes is None or read.issuperset(node.output):
            yield node
        else:
            yield from _slices(graph, node, sizes, read)


def _sizes_of_parts(graph: SizedGraph, node: onnx.NodeProto) -> Sequence[int] | None:
    """Return the sizes of the parts of a Split; None for other nodes, and if they may vary."""
    if node.op_type != "Split" or len(node.input) < 2:
        return None
    sizes = graph.constants.get(node.input[1])
    return None if sizes is None else numpy_helper.to_array(sizes).tolist()


def _slices(
    graph: SizedGraph, node: onnx.NodeProto, sizes: Sequence[int], read: set[str]
) -> Iterator[onnx.NodeProto]:
    """Yield a slice for each part of a Split that is read."""
    start = 0
    for name, size in zip(node.output, sizes, strict=True):
        end = start + size
        if name in read:
            first = graph.ints(start)
            behind = graph.ints(end)
            axis = graph.ints(attribute(node, "axis"))
            inputs = [node.input[0], first, behind, axis]
            yield helper.make_node("Slice", inputs, [name])
        start = end
