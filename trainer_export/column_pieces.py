"""Splits matrix products with gathered columns into products over a few output positions.

Then at most ``PIECE_BYTES`` of columns exist at once. Each product gathers its own columns: forward
pass and weight gradient no longer share them, because sharing would keep them in memory from one to
the other. This also holds for small ones: in the cache, they save as much time in the product as
gathering them again takes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from trainer_export.sized_graph import SizedGraph, attribute

PIECE_BYTES = 4 * 1024 * 1024
"""Bytes of columns that may exist at once for a batch of 32; or four times the kernel's, if more.

Every product packs the kernel again, so few rows with a large kernel take a third longer.
"""


@dataclass(frozen=True)
class _Columns:
    """A gathered column matrix ``[batch * positions, taps * channels]``.

    Or ``[batch * positions, channels * taps]``.

    Attributes:
        rows: ``[batch, places, channels]`` from which it is gathered.
        table: the source place of each position and tap.
        width: number of columns.
        nbytes: size for a batch of 32.
        has_channels_first: whether channels come before taps.
    """

    rows: str
    table: NDArray[np.int64]
    width: int
    nbytes: int
    has_channels_first: bool

    def pieces(self, outputs: int) -> list[NDArray[np.int64]]:
        """Return the table in pieces, each with at most the allowed number of columns.

        Args:
            outputs: output channels of the kernel.
        """
        kernel_bytes = 4 * self.width * outputs
        # Four times the kernel: with fewer rows, packing the kernel again dominates (see
        # PIECE_BYTES).
        count = math.ceil(self.nbytes / max(PIECE_BYTES, 4 * kernel_bytes))
        # At most a piece for each position, and pieces of nearly equal length.
        return np.array_split(self.table, max(1, min(len(self.table), count)))


def _columns(graph: SizedGraph, name: str) -> _Columns | None:
    """Return the columns behind an operand.

    They consist of a Gather by a constant along the places and a Reshape to a matrix, perhaps with
    a Transpose that puts channels first; None for anything else.
    """
    source = _before(graph, name, "Reshape")
    split = None
    if source is not None and source.op_type == "Transpose":
        split = source.input[0]
        source = _before(graph, split, "Reshape")
    if source is None or source.op_type != "Gather" or attribute(source, "axis") != 1:
        return None
    rows = source.input[0]
    table = graph.constants.get(source.input[1])
    shape = graph.shapes.get(name, ())
    channels = (graph.shapes.get(rows) or (0,))[-1]
    # Columns are whole rows of channels, or these are not columns of a convolution.
    if table is None or len(shape) != 2 or not channels or shape[1] % channels:
        return None
    if len(graph.shapes[rows]) != 3:  # maps of a batch by places and channels
        return None
    taps = shape[1] // channels
    if split is not None and graph.shapes[split][1:] != (taps, channels):
        return None
    places = numpy_helper.to_array(table).reshape(-1, taps)
    return _Columns(rows, places, shape[1], graph.sizes[name], split is not None)


def _before(
    graph: SizedGraph,
    name: str,
    operator: str,
) -> onnx.NodeProto | None:
    """Return the node before the operator that makes a value; None if another one makes it."""
    node = graph.producers.get(name)
    if node is None or node.op_type != operator:
        return None
    return graph.producers.get(node.input[0])


def in_pieces(graph: SizedGraph, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    """Rewrite a matrix product with gathered columns as products with pieces of them.

    Returns:
        None for any other node.
    """
    if node.op_type != "Gemm":
        return None
    if node.input[0] == node.input[1]:
        return _squared(graph, node)
    # A transposed second operand would need pieces along the other axis.
    if attribute(node, "transB") and _columns(graph, node.input[1]) is not None:
        return None
    transposed = attribute(node, "transA")
    columns = _columns(graph, node.input[1 if transposed else 0])
    if columns is None:
        return None
    # With transA, the columns are summed over: a weight gradient.
    split = _gradient_pieces if transposed else _product_pieces
    return list(split(graph, node, columns))


def _squared(graph: SizedGraph, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    """Rewrite the product of columns with themselves so that it gathers its own columns."""
    columns = _columns(graph, node.input[0])
    if columns is None:
        return None
    nodes, matrix = _gathered(graph, columns, columns.table)
    return [*nodes, _like(node, [matrix, matrix], node.output[0])]


def _gathered(
    graph: SizedGraph,
    columns: _Columns,
    piece: NDArray[np.int64],
) -> tuple[list[onnx.NodeProto], str]:
    """Return the nodes that gather a piece of the columns, and its name."""
    wide = graph.name()
    matrix = graph.name()
    table = graph.constant(piece.reshape(-1))
    nodes = [helper.make_node("Gather", [columns.rows, table], [wide], axis=1)]
    if columns.has_channels_first:
        taps = piece.shape[1]
        split = graph.name()
        sizes = graph.ints(-1, taps, columns.width // taps)
        nodes.append(helper.make_node("Reshape", [wide, sizes], [split]))
        wide = graph.name()
        nodes.append(helper.make_node("Transpose", [split], [wide], perm=[0, 2, 1]))
    sizes = graph.ints(-1, columns.width)
    nodes.append(helper.make_node("Reshape", [wide, sizes], [matrix]))
    return nodes, matrix


def _like(
    node: onnx.NodeProto,
    inputs: Sequence[str],
    output: str,
) -> onnx.NodeProto:
    """Return a product with the attributes of another one."""
    copy = helper.make_node(node.op_type, inputs, [output])
    copy.attribute.extend(node.attribute)
    return copy


def _product_pieces(
    graph: SizedGraph,
    node: onnx.NodeProto,
    columns: _Columns,
) -> Iterator[onnx.NodeProto]:
    """Yield products over a few positions each, joined along the positions."""
    width = graph.shapes[node.output[0]][1]
    pieces = columns.pieces(width)
    maps: list[str] = []
    for piece in pieces:
        nodes, matrix = _gathered(graph, columns, piece)
        yield from nodes
        product = node.output[0] if len(pieces) == 1 else graph.name()
        yield _like(node, [matrix, *node.input[1:]], product)
        if len(pieces) > 1:
            maps.append(graph.name())
            sizes = graph.ints(-1, len(piece), width)
            yield helper.make_node("Reshape", [product, sizes], [maps[-1]])
    if maps:
        joined = graph.name()
        yield helper.make_node("Concat", maps, [joined], axis=1)
        yield helper.make_node(
            "Reshape",
            [joined, graph.ints(-1, width)],
            [node.output[0]],
        )


def _gradient_pieces(
    graph: SizedGraph,
    node: onnx.NodeProto,
    columns: _Columns,
) -> Iterator[onnx.NodeProto]:
    """Yield the product over all positions as a sum over pieces of them.

    Gemm adds to its third operand, so the sum needs no extra nodes.
    """
    width = graph.shapes[node.input[0]][1]
    pieces = columns.pieces(width)
    if len(pieces) == 1:
        nodes, matrix = _gathered(graph, columns, pieces[0])
        yield from nodes
        yield _like(
            node,
            [node.input[0], matrix, *node.input[2:]],
            node.output[0],
        )
        return
    rows = graph.name()
    slopes = [graph.name() for _ in pieces]
    sizes = graph.ints(-1, len(columns.table), width)
    yield helper.make_node("Reshape", [node.input[0], sizes], [rows])
    yield helper.make_node(
        "Split",
        [rows, graph.ints(*map(len, pieces))],
        slopes,
        axis=1,
    )
    total = list(node.input[2:])
    for index, (piece, slope) in enumerate(zip(pieces, slopes, strict=True)):
        nodes, matrix = _gathered(graph, columns, piece)
        yield from nodes
        flat = graph.name()
        yield helper.make_node(
            "Reshape",
            [slope, graph.ints(-1, width)],
            [flat],
        )
        product = node.output[0] if index == len(pieces) - 1 else graph.name()
        yield _like(node, [flat, matrix, *total], product)
        total = [product]
