"""Fits a graph into less memory: columns of convolutions in pieces, and cheap values computed again instead of kept.

Two rewrites, both exact up to the order of additions. For the four-block ``conv`` at full width and batch 32 they take
the live intermediates of a training step from 77 to 29 MB, and the step is no slower: pieces fit the cache.

1. A matrix product whose operand is a gathered column matrix is done for some output positions at a time, so that no
   more than ``PIECE_BYTES`` of columns exist at once. Each product gathers its own columns: forward pass and weight
   gradient no longer share them, which would keep them from one to the other.
2. While it lowers the peak, a value that waits for a late consumer is dropped and computed again just before that
   consumer, from values that are alive there anyway (for example both halves of a max-pool from the normalised map).

The order of the nodes in the file is part of the result: run it with the runtime's priority-based execution order,
which follows it; the default order delays weight gradients to the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

__all__ = ["PIECE_BYTES", "fit_into_memory"]

PIECE_BYTES = 4 * 1024 * 1024
"""Columns that may exist at once, for a batch of 32."""

_BATCH = 32
_SMALL_BYTES = 64 * 1024  # values below this may live as long as they like
_WORK_FACTOR = 8  # bytes computed again per byte saved, at most
_THIN_COLUMNS = 16  # a product over so few columns costs little more than writing its result
_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Identity", "Flatten"})  # these give memory another name
_COMMUTATIVE = frozenset({"Add", "Max", "Min", "Mul"})
_CHEAP = _VIEWS | _COMMUTATIVE | {"HardSigmoid", "Pad", "Relu", "Slice", "Split", "Sub", "Transpose"}

Shape = tuple[int, ...]


def fit_into_memory(model: onnx.ModelProto) -> onnx.ModelProto:
    """Rewrite a graph.

    Args:
        model: any graph with one dynamic dimension; not changed.

    Returns:
        The same inputs and outputs; where nothing can be gained, the same nodes.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = _Graph(result)
    nodes = [new for node in result.graph.node for new in (_in_pieces(graph, node) or [node])]
    graph.replace(nodes)
    _compute_again(graph)
    return result


class _Graph:
    """A model with the shapes of its values for a batch of 32.

    Args:
        model: changed by :meth:`replace`.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.proto = model.graph
        self._count = 0
        fixed = onnx.ModelProto()
        fixed.CopyFrom(model)
        for value in (*fixed.graph.input, *fixed.graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_value = _BATCH
        inferred = onnx.shape_inference.infer_shapes(fixed, data_prop=True).graph
        values = (*inferred.value_info, *inferred.input, *inferred.output)
        tensors = [(v.name, v.type.tensor_type) for v in values]
        self.shapes: dict[str, Shape] = {name: tuple(d.dim_value for d in t.shape.dim) for name, t in tensors}
        items = {name: helper.tensor_dtype_to_np_dtype(t.elem_type).itemsize for name, t in tensors if t.elem_type}
        self.sizes = {name: math.prod(shape) * items.get(name, 4) for name, shape in self.shapes.items()}
        self.constants = {t.name: t for t in self.proto.initializer}
        self.producers = {name: node for node in self.proto.node for name in node.output}
        self._taken = {*self.producers, *self.constants, *(value.name for value in self.proto.input)}

    def name(self) -> str:
        """A name that no value has."""
        self._count += 1
        while f"memory.{self._count}" in self._taken:  # a graph that was rewritten before
            self._count += 1
        return f"memory.{self._count}"

    def ints(self, *values: int) -> str:
        """A constant of integers."""
        return self.constant(np.array(values, np.int64))

    def constant(self, array: NDArray[np.int64]) -> str:
        """A constant of its own: values that share one would be merged again by the runtime."""
        tensor = numpy_helper.from_array(array, self.name())
        self.proto.initializer.append(tensor)
        self.constants[tensor.name] = tensor
        return str(tensor.name)

    def replace(self, nodes: Sequence[onnx.NodeProto]) -> None:
        """Set the nodes, without those whose results nobody uses, and forget unused constants."""
        needed = {value.name for value in self.proto.output}
        kept: list[onnx.NodeProto] = []
        for node in reversed(nodes):
            if any(name in needed for name in node.output):
                kept.append(node)
                needed.update(node.input)
        constants = [t for t in self.proto.initializer if t.name in needed]
        del self.proto.node[:], self.proto.initializer[:]
        self.proto.node.extend(reversed(kept))
        self.proto.initializer.extend(constants)


# Pieces of columns.


@dataclass(frozen=True)
class _Columns:
    """A gathered column matrix ``[batch * positions, taps * channels]``.

    Attributes:
        rows: what is gathered from, ``[batch, places, channels]``.
        table: place of each position and tap, ``[positions, taps]``.
        width: ``taps * channels``.
        nbytes: for a batch of 32.
    """

    rows: str
    table: NDArray[np.int64]
    width: int
    nbytes: int

    def pieces(self) -> list[NDArray[np.int64]]:
        """The table, cut so that no piece gives more columns than allowed."""
        count = min(len(self.table), math.ceil(self.nbytes / PIECE_BYTES))
        return np.array_split(self.table, max(1, count))


def _attribute(node: onnx.NodeProto, name: str) -> int:
    return next((int(a.i) for a in node.attribute if a.name == name), 0)


def _columns(graph: _Graph, name: str) -> _Columns | None:
    """The columns behind an operand, if it is Gather by a constant along the places, then Reshape to a matrix."""
    reshape = graph.producers.get(name)
    gather = graph.producers.get(reshape.input[0]) if reshape is not None and reshape.op_type == "Reshape" else None
    if reshape is None or gather is None or gather.op_type != "Gather" or _attribute(gather, "axis") != 1:
        return None
    table, shape = graph.constants.get(gather.input[1]), graph.shapes.get(name, ())
    channels = (graph.shapes.get(gather.input[0]) or (0,))[-1]
    if table is None or len(shape) != 2 or not channels or shape[1] % channels:
        return None
    places = numpy_helper.to_array(table).reshape(-1, shape[1] // channels)
    return _Columns(gather.input[0], places, shape[1], graph.sizes[name])


def _in_pieces(graph: _Graph, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    """A matrix product with gathered columns as products with pieces of them, or None for any other node."""
    if node.op_type != "Gemm" or (_attribute(node, "transB") and _columns(graph, node.input[1]) is not None):
        return None
    transposed = _attribute(node, "transA")
    columns = _columns(graph, node.input[1 if transposed else 0])
    if columns is None:
        return None
    return list((_gradient_pieces if transposed else _product_pieces)(graph, node, columns))


def _gathered(graph: _Graph, columns: _Columns, piece: NDArray[np.int64]) -> tuple[list[onnx.NodeProto], str]:
    wide, matrix = graph.name(), graph.name()
    gather = helper.make_node("Gather", [columns.rows, graph.constant(piece.reshape(-1))], [wide], axis=1)
    return [gather, helper.make_node("Reshape", [wide, graph.ints(-1, columns.width)], [matrix])], matrix


def _like(node: onnx.NodeProto, inputs: Sequence[str], output: str) -> onnx.NodeProto:
    copy = helper.make_node(node.op_type, inputs, [output])
    copy.attribute.extend(node.attribute)
    return copy


def _product_pieces(graph: _Graph, node: onnx.NodeProto, columns: _Columns) -> Iterator[onnx.NodeProto]:
    """Rows of the product for some positions at a time, put together again along the positions."""
    pieces, parts = columns.pieces(), []
    width = graph.shapes[node.output[0]][1]
    for piece in pieces:
        nodes, matrix = _gathered(graph, columns, piece)
        yield from nodes
        product = node.output[0] if len(pieces) == 1 else graph.name()
        yield _like(node, [matrix, *node.input[1:]], product)
        if len(pieces) > 1:
            parts.append(graph.name())
            yield helper.make_node("Reshape", [product, graph.ints(-1, len(piece), width)], [parts[-1]])
    if parts:
        joined = graph.name()
        yield helper.make_node("Concat", parts, [joined], axis=1)
        yield helper.make_node("Reshape", [joined, graph.ints(-1, width)], [node.output[0]])


def _gradient_pieces(graph: _Graph, node: onnx.NodeProto, columns: _Columns) -> Iterator[onnx.NodeProto]:
    """The product over all positions as a sum over pieces of them; Gemm adds to its third operand."""
    pieces = columns.pieces()
    width = graph.shapes[node.input[0]][1]
    if len(pieces) == 1:
        nodes, matrix = _gathered(graph, columns, pieces[0])
        yield from nodes
        yield _like(node, [node.input[0], matrix, *node.input[2:]], node.output[0])
        return
    rows, parts = graph.name(), [graph.name() for _ in pieces]
    yield helper.make_node("Reshape", [node.input[0], graph.ints(-1, len(columns.table), width)], [rows])
    yield helper.make_node("Split", [rows, graph.ints(*map(len, pieces))], parts, axis=1)
    total = list(node.input[2:])
    for index, (piece, part) in enumerate(zip(pieces, parts, strict=True)):
        nodes, matrix = _gathered(graph, columns, piece)
        yield from nodes
        flat = graph.name()
        yield helper.make_node("Reshape", [part, graph.ints(-1, width)], [flat])
        product = node.output[0] if index == len(pieces) - 1 else graph.name()
        yield _like(node, [flat, matrix, *total], product)
        total = [product]


# Values computed again.


class _TooDear(Exception):
    """A value cannot be had again for little."""


@dataclass(frozen=True)
class _Peak:
    """The worst moment of a run.

    Attributes:
        nbytes: of live values, inputs, outputs and constants left out.
        index: of the node that runs then.
        alive: values (not views) that lie in memory meanwhile.
    """

    nbytes: int
    index: int
    alive: frozenset[str]


class _Schedule:
    """An order of nodes, and how long each value lives in it.

    Args:
        nodes: in order.
        sizes: bytes of each value.
        fixed: inputs, constants and outputs, which live outside.
    """

    def __init__(self, nodes: Sequence[onnx.NodeProto], sizes: Mapping[str, int], fixed: frozenset[str]) -> None:
        self.nodes, self.sizes, self.fixed = list(nodes), dict(sizes), fixed
        self.owner: dict[str, str] = {}
        self.uses: dict[str, list[int]] = {}
        self.producer: dict[str, onnx.NodeProto] = {}
        for index, node in enumerate(self.nodes):
            if node.op_type in _VIEWS:
                self.owner[node.output[0]] = self.root(node.input[0])
            self.producer.update(dict.fromkeys(node.output, node))
            for name in {self.root(name) for name in node.input}:
                self.uses.setdefault(name, []).append(index)
        self.outside = fixed | {self.root(name) for name in fixed}

    def root(self, name: str) -> str:
        """The value whose memory a name means."""
        return self.owner.get(name, name)

    def peak(self) -> _Peak:
        """The worst moment."""
        live, worst = 0, _Peak(0, 0, frozenset())
        alive: set[str] = set()
        for index, node in enumerate(self.nodes):
            new = [n for n in node.output if n and n not in self.owner and n not in self.outside]
            alive.update(new)
            live += sum(self.sizes.get(name, 0) for name in new)
            if live > worst.nbytes:
                worst = _Peak(live, index, frozenset(alive))
            ended = {self.root(n) for n in node.input} | set(new)
            for name in [n for n in ended if n in alive and self.uses.get(n, [index])[-1] <= index]:
                alive.discard(name)
                live -= self.sizes.get(name, 0)
        return worst


def _compute_again(graph: _Graph) -> None:
    """Drop and recompute values, one after the other, as long as the peak goes down."""
    fixed = frozenset(
        {v.name for v in (*graph.proto.input, *graph.proto.output)} | {t.name for t in graph.proto.initializer}
    )
    sizes = _Graph(_model_of(graph.proto)).sizes
    schedule = _Schedule(graph.proto.node, sizes, fixed)
    peak = schedule.peak()
    while (better := _improved(graph, schedule, peak)) is not None:
        schedule = better
        peak = schedule.peak()
    graph.replace(schedule.nodes)


def _model_of(proto: onnx.GraphProto) -> onnx.ModelProto:
    return helper.make_model(proto, opset_imports=[helper.make_opsetid("", 18)])


def _improved(graph: _Graph, schedule: _Schedule, peak: _Peak) -> _Schedule | None:
    """The schedule with one value recomputed so that its peak is lower, the largest such value first."""
    waiting = [name for name in peak.alive if schedule.sizes.get(name, 0) >= _SMALL_BYTES]
    for name in sorted(waiting, key=lambda n: (-schedule.sizes[n], n)):
        uses = schedule.uses.get(name, [])
        late = next((index for index in uses if index > peak.index), None)
        if late is None or peak.index in uses:
            continue
        try:
            candidate = _recomputed(graph, schedule, name, late)
        except _TooDear:
            continue
        if candidate.peak().nbytes < peak.nbytes:
            return candidate
    return None


def _recomputed(graph: _Graph, schedule: _Schedule, target: str, late: int) -> _Schedule:
    """The schedule in which ``target`` is computed again before the node ``late``.

    Raises:
        _TooDear: that takes an operator that is not cheap, or too much work.
    """
    renamed: dict[str, str] = {}
    clones: list[onnx.NodeProto] = []
    sizes = dict(schedule.sizes)
    targets = set(schedule.producer[target].output)

    def again(name: str) -> str:
        if name in renamed:
            return renamed[name]
        root, node = schedule.root(name), schedule.producer.get(name)
        if node is None or (root not in targets and _stays(schedule, root, late)):
            return name
        thin = _is_thin(graph, node)
        if node.op_type not in _CHEAP and not thin:
            raise _TooDear
        inputs = [again(i) for i in node.input]
        if node.op_type in _COMMUTATIVE and inputs == list(node.input):
            inputs.reverse()  # another expression for the same value, which the runtime does not merge with the first
        for output in node.output:
            renamed[output] = graph.name()
            sizes[renamed[output]] = schedule.sizes.get(output, 0)
        clone = onnx.NodeProto()
        clone.CopyFrom(node)
        del clone.input[:], clone.output[:]
        clone.input.extend(inputs)
        clone.output.extend(renamed[output] for output in node.output)
        clone.name = f"{node.op_type}.{clone.output[0]}"
        if thin:
            _set_unlike(clone)
        clones.append(clone)
        return renamed[name]

    tail = []
    for node in schedule.nodes[late:]:
        inputs = [again(name) if schedule.root(name) in targets else name for name in node.input]
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        del copy.input[:]
        copy.input.extend(inputs)
        tail.append(copy)
    work = sum(sizes[name] for clone in clones if clone.op_type not in _VIEWS for name in clone.output)
    if work > _WORK_FACTOR * schedule.sizes[target]:
        raise _TooDear
    return _Schedule([*schedule.nodes[:late], *clones, *tail], sizes, schedule.fixed)


def _is_thin(graph: _Graph, node: onnx.NodeProto) -> bool:
    """Whether a node is a product over so few columns that it costs little more than writing its result."""
    shape = graph.shapes.get(node.input[0], ()) if node.op_type == "Gemm" and len(node.input) == 2 else ()
    return len(shape) == 2 and shape[0 if _attribute(node, "transA") else 1] <= _THIN_COLUMNS


def _set_unlike(node: onnx.NodeProto) -> None:
    """Make a product another expression, which the runtime does not merge with the first: beta scales nothing here."""
    kept = [attribute for attribute in node.attribute if attribute.name != "beta"]
    del node.attribute[:]
    number = float(node.output[0].rpartition(".")[2])
    node.attribute.extend([*kept, helper.make_attribute("beta", number)])


def _stays(schedule: _Schedule, root: str, late: int) -> bool:
    """Whether a value is there at a node anyway, or is so small that it may as well be."""
    if root in schedule.outside or schedule.sizes.get(root, 0) < _SMALL_BYTES:
        return True
    return schedule.uses.get(root, [-1])[-1] >= late
