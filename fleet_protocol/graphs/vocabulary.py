"""Finds the vocabulary size of a graph: the rows of the tables that its samples select from."""

from pathlib import Path

from fleet_protocol.graphs.model import Graph, Node, read_model

_SAMPLES = "x"
# Operators whose output has the same numbers as their first input, or some of them.
_KEEPING = frozenset(
    {
        "Cast",
        "Expand",
        "Flatten",
        "Gather",
        "Identity",
        "Reshape",
        "Slice",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    }
)


def read_vocabulary(path: Path) -> int | None:
    """Return the vocabulary of a graph's file; errors as in `read_model` and for the file."""
    return vocabulary_of(read_model(memoryview(path.read_bytes())))


def vocabulary_of(graph: Graph) -> int | None:
    """Return how many rows the smallest table has in which tokens are looked up.

    Returns:
        The number of tokens; None if no input of the graph indexes such a table.
    """
    rows = {port.name: port.shape[0] for port in graph.inputs if port.shape}
    # Values that are tokens of the samples.
    tokens = {_SAMPLES}
    small_ones: set[str] = set()
    sizes: list[int] = []
    for node in graph.nodes:
        if node.op_type == "Gather" and node.inputs[1] in tokens:
            size = rows.get(node.inputs[0])
            if isinstance(size, int):
                sizes.append(size)
        elif node.op_type in _KEEPING and node.inputs[0] in tokens:
            tokens.update(node.outputs)
        elif node.op_type == "Less" and node.inputs[0] in tokens:
            small_ones.update(node.outputs)
        elif _replaces_small(node, small_ones) and node.inputs[2] in tokens:
            tokens.update(node.outputs)
    return min(sizes, default=None)


def _replaces_small(node: Node, small_ones: set[str]) -> bool:
    """Return whether a node replaces only values below a bound, such as negative ones."""
    return node.op_type == "Where" and node.inputs[0] in small_ones
