"""Reads those parts of an ONNX model that a board checks, without the onnx package.

A graph inside a node is read only as the body of a loop, and contains no further graphs.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.graphs import fields
from fleet_protocol.graphs.wire import Message, Raw, floats, numbers, read, text

NODES_LIMIT = 200_000
EMPTY_LIMIT = 2**24
"""Greatest number of rows of an empty constant.

It costs nothing to store, but a loop over its rows would not end.
"""

_NAMES_LIMIT = 4096  # inputs and outputs of one node
_RANK_LIMIT = 16
_SIZE_LIMIT = 2**40
_ELEMENT_BYTES = {fields.FLOAT32: 4, fields.INT32: 4, fields.INT64: 8, fields.BOOL: 1}
_INTEGERS: Mapping[int, np.dtype[Any]] = {
    fields.INT32: np.dtype("<i4"),
    fields.INT64: np.dtype("<i8"),
}
_DTYPES = {fields.FLOAT32: "float32", fields.INT64: "int64"}
_LOOP = "Scan"


@dataclass(frozen=True)
class Node:
    """One operator of a graph."""

    domain: str  # of the operator; empty for ONNX's own
    op_type: str
    inputs: tuple[str, ...]  # value names; empty where an optional input is left out
    outputs: tuple[str, ...]  # value names, likewise
    body: "Graph | None" = None  # one step of a loop; None for every other operator


@dataclass(frozen=True)
class Port:
    """An input or output of a graph."""

    name: str
    dtype: str  # numpy's name; empty for a type that no manifest has
    shape: tuple[int | str, ...]  # a string names a dynamic dimension


@dataclass(frozen=True)
class Graph:
    """A model, or the body of a loop in one, as far as a board checks it."""

    ir_version: int  # of the file format; 0 for a body
    # Version of each operator set by its name, empty for ONNX's own; a body has none, because those
    # of the model apply.
    opsets: Mapping[str, int]
    nodes: tuple[Node, ...]  # in the order of the file, which is one in which they can run
    constants: frozenset[str]  # names of the initializers
    largest: Mapping[str, int]  # largest magnitude in short lists of integers, such as shapes
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


@dataclass(frozen=True)
class _Constant:
    name: str
    largest: int | None  # magnitude in a short list of integers; None for other tensors


def read_model(data: memoryview) -> Graph:
    """Read a model.

    Raises:
        RefusedError: it is malformed, or has fields that the exporter does not write.
    """
    model = read(data, fields.MODEL, "the model")
    graph = _read_graph(_single_message(model, "graph"), loops=True)
    return replace(
        graph,
        ir_version=_read_small(model["ir_version"], "the IR version"),
        opsets=MappingProxyType(_read_opsets(model)),
    )


def _malformed(what: str) -> RefusedError:
    return RefusedError(
        RefusalReason.UNSAFE_GRAPH,
        f"the graph is not one that the exporter writes: {what}",
    )


def _message(value: Raw) -> memoryview:
    if isinstance(value, int):
        raise _malformed("a number is where a message should be")
    return value


def _messages(values: list[Raw]) -> Iterator[memoryview]:
    for value in values:
        yield _message(value)


def _single_message(message: Message, name: str) -> memoryview:
    values = message[name]
    if not values:
        raise _malformed(f"{name} is missing")
    return _message(values[0])


def _read_small(values: list[Raw], what: str) -> int:
    """Return a number of at most 31 bits.

    A reader that truncates a larger number would mistake it for another one.
    """
    value = next(numbers(values), 0)
    if not 0 <= value < 2**31:
        raise _malformed(f"{what} is {value}")
    return value


def _read_opsets(model: Message) -> dict[str, int]:
    versions: dict[str, int] = {}
    for data in _messages(model["opset_import"]):
        opset = read(data, fields.OPSET, "an operator set")
        domain = text(opset["domain"])
        if domain in versions:
            raise _malformed("two operator sets have the same name")
        versions[domain] = _read_small(opset["version"], "a version")
    return versions


def _read_graph(data: memoryview, *, loops: bool) -> Graph:
    """Read a graph; `loops` says whether it may contain loops."""
    graph = read(data, fields.GRAPH, "the graph")
    text(graph["name"])
    for value in _messages(graph["value_info"]):
        text(read(value, fields.VALUE, "a value")["name"])
    node_count = len(graph["node"])
    if node_count > NODES_LIMIT:
        raise _malformed(f"it has {node_count} nodes; at most {NODES_LIMIT} are allowed")
    names = set()
    largest = {}
    for initializer in _messages(graph["initializer"]):
        constant = _read_constant(initializer, "an initializer")
        if constant.name in names:
            raise _malformed("two initializers have the same name")
        names.add(constant.name)
        if constant.largest is not None:
            largest[constant.name] = constant.largest
    return Graph(
        ir_version=0,
        opsets=MappingProxyType({}),
        nodes=tuple(_read_node(node, loops=loops) for node in _messages(graph["node"])),
        constants=frozenset(names),
        largest=MappingProxyType(largest),
        inputs=tuple(map(_read_port, _messages(graph["input"]))),
        outputs=tuple(map(_read_port, _messages(graph["output"]))),
    )


def _read_node(data: memoryview, *, loops: bool) -> Node:
    node = read(data, fields.NODE, "a node")
    text(node["name"])
    if max(len(node["input"]), len(node["output"])) > _NAMES_LIMIT:
        raise _malformed(f"a node has more than {_NAMES_LIMIT} inputs or outputs")
    op_type = text(node["op_type"])
    is_loop = op_type == _LOOP
    bodies = []
    for attribute in _messages(node["attribute"]):
        body = _read_attribute(attribute, op_type, has_body=loops and is_loop)
        if body is not None:
            bodies.append(body)
    if len(bodies) != int(is_loop):
        raise _malformed(f"a node {op_type} contains {len(bodies)} graphs")
    return Node(
        domain=text(node["domain"]),
        op_type=op_type,
        inputs=_read_names(node["input"]),
        outputs=_read_names(node["output"]),
        body=bodies[0] if bodies else None,
    )


def _read_names(values: list[Raw]) -> tuple[str, ...]:
    return tuple(text([value]) for value in values)


def _read_attribute(
    data: memoryview,
    op_type: str,
    *,
    has_body: bool,
) -> Graph | None:
    """Check an attribute of a node, and return the graph if it is the body of a loop."""
    attribute = read(data, fields.ATTRIBUTE, "an attribute")
    for name in (*attribute["name"], *attribute["s"], *attribute["strings"]):
        text([name])
    kind = _read_small(attribute["type"], "the type of an attribute")
    is_graph = kind == fields.GRAPH_ATTRIBUTE
    is_misplaced = is_graph and not has_body
    is_mislabelled = bool(attribute["g"]) != (is_graph and has_body)
    if is_misplaced or is_mislabelled or kind == fields.GRAPHS_ATTRIBUTE:
        raise _malformed(f"a node {op_type} contains a graph")
    # Lists are decoded lazily, so a truncated one is only noticed by reading it to its end.
    for _ in numbers(attribute["ints"]):
        pass
    for _ in floats(attribute["floats"]):
        pass
    if attribute["t"]:
        _read_constant(_message(attribute["t"][0]), "an attribute")
    return _read_graph(_message(attribute["g"][0]), loops=False) if is_graph else None


def _read_constant(data: memoryview, what: str) -> _Constant:
    """Check that a tensor holds exactly the elements that its shape announces."""
    tensor = read(data, fields.TENSOR, f"the tensor of {what}")
    name = text(tensor["name"])
    shape = tuple(numbers(tensor["dims"]))
    dtype = _read_small(tensor["data_type"], "an element type")
    is_bounded = len(shape) <= _RANK_LIMIT and all(0 <= size < _SIZE_LIMIT for size in shape)
    if dtype not in _ELEMENT_BYTES or not is_bounded:
        raise _malformed(f"{what} {name!r} has element type {dtype} and shape {shape}")
    if 0 in shape and math.prod(max(1, size) for size in shape) > EMPTY_LIMIT:
        raise _malformed(f"{what} {name!r} has shape {shape} but no element")
    held = _count_elements(tensor, dtype)
    if held != math.prod(shape):
        raise _malformed(f"{what} {name!r} of shape {shape} contains {held} elements")
    is_short = 0 < held <= _RANK_LIMIT
    return _Constant(name, _largest_magnitude(tensor, dtype) if is_short else None)


def _integers(tensor: Message) -> Iterator[int]:
    """Yield the numbers of both lists of integers, of which a tensor fills one at most."""
    yield from numbers(tensor["int32_data"])
    yield from numbers(tensor["int64_data"])


def _count_elements(tensor: Message, dtype: int) -> int:
    raw_bytes = sum(map(len, _messages(tensor["raw_data"])))
    count = raw_bytes // _ELEMENT_BYTES[dtype]
    for _ in floats(tensor["float_data"]):
        count += 1
    for _ in _integers(tensor):
        count += 1
    return count


def _largest_magnitude(tensor: Message, dtype: int) -> int | None:
    """Return the largest magnitude of a tensor's integers; None for other types."""
    if dtype not in _INTEGERS:
        return None
    integers = list(_integers(tensor))
    for view in _messages(tensor["raw_data"]):
        raw = bytes(view)
        if len(raw) % _ELEMENT_BYTES[dtype]:
            raise _malformed("the content of a tensor is truncated")
        integers += np.frombuffer(raw, _INTEGERS[dtype]).tolist()
    return max(map(abs, integers))


def _read_port(data: memoryview) -> Port:
    value = read(data, fields.VALUE, "an input or output")
    value_type = read(_single_message(value, "type"), fields.TYPE, "a type")
    tensor = read(_single_message(value_type, "tensor_type"), fields.TENSOR_TYPE, "a tensor type")
    shape: tuple[int | str, ...] = ()
    if tensor["shape"]:
        dimensions = read(_single_message(tensor, "shape"), fields.SHAPE, "a shape")
        shape = tuple(map(_read_dimension, _messages(dimensions["dim"])))
    dtype = _read_small(tensor["elem_type"], "an element type")
    return Port(text(value["name"]), _DTYPES.get(dtype, ""), shape)


def _read_dimension(data: memoryview) -> int | str:
    dimension = read(data, fields.DIMENSION, "a dimension")
    if dimension["param"]:
        return text(dimension["param"])
    return next(numbers(dimension["value"]), 0)
