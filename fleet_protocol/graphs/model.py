"""The parts of an ONNX model that a board looks at, read without the onnx package.

The fields below are all that the exporter writes. Whatever else the format has (external data,
functions, sparse tensors, training information) is a field that is not in these tables, and so
refused by `wire.read`. A graph inside a node is read for the body of a loop alone, and holds none
itself.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.graphs.wire import (
    BYTES,
    FLOAT,
    NUMBER,
    Field,
    Message,
    Raw,
    floats,
    numbers,
    read,
    text,
)

NODES_LIMIT = 200_000
_NAMES_LIMIT = 4096  # inputs and outputs of one node
_RANK_LIMIT = 16
_FLOAT32 = 1
_INT32 = 6
_INT64 = 7
_BOOL = 9
_ITEM_BYTES = {_FLOAT32: 4, _INT32: 4, _INT64: 8, _BOOL: 1}
_WHOLE: Mapping[int, np.dtype[Any]] = {_INT32: np.dtype("<i4"), _INT64: np.dtype("<i8")}
EMPTY_LIMIT = 2**24
"""Most rows of an empty constant: it costs nothing to store, but a loop over its rows would not
end.
"""

_DTYPES = {_FLOAT32: "float32", _INT64: "int64"}
_TENSOR_ATTRIBUTE = 4
_GRAPH_ATTRIBUTE = 5
_GRAPHS_ATTRIBUTE = 10
_LOOP = "Scan"

_MODEL = {
    1: Field("ir_version", NUMBER),
    2: Field("producer_name", BYTES),
    3: Field("producer_version", BYTES),
    7: Field("graph", BYTES),
    8: Field("opset_import", BYTES, many=True),
    14: Field("metadata_props", BYTES, many=True),
}
_OPSET = {1: Field("domain", BYTES), 2: Field("version", NUMBER)}
_GRAPH = {
    1: Field("node", BYTES, many=True),
    2: Field("name", BYTES),
    5: Field("initializer", BYTES, many=True),
    11: Field("input", BYTES, many=True),
    12: Field("output", BYTES, many=True),
    13: Field("value_info", BYTES, many=True),
}
_NODE = {
    1: Field("input", BYTES, many=True),
    2: Field("output", BYTES, many=True),
    3: Field("name", BYTES),
    4: Field("op_type", BYTES),
    5: Field("attribute", BYTES, many=True),
    6: Field("doc_string", BYTES),
    7: Field("domain", BYTES),
}
_ATTRIBUTE = {
    1: Field("name", BYTES),
    2: Field("f", FLOAT),
    3: Field("i", NUMBER),
    4: Field("s", BYTES),
    5: Field("t", BYTES),
    6: Field("g", BYTES),
    7: Field("floats", FLOAT, many=True, packed=True),
    8: Field("ints", NUMBER, many=True, packed=True),
    9: Field("strings", BYTES, many=True),
    20: Field("type", NUMBER),
}
_TENSOR = {
    1: Field("dims", NUMBER, many=True, packed=True),
    2: Field("data_type", NUMBER),
    4: Field("float_data", FLOAT, many=True, packed=True),
    5: Field("int32_data", NUMBER, many=True, packed=True),
    7: Field("int64_data", NUMBER, many=True, packed=True),
    8: Field("name", BYTES),
    9: Field("raw_data", BYTES),
}
_VALUE = {1: Field("name", BYTES), 2: Field("type", BYTES)}
_TYPE = {1: Field("tensor_type", BYTES)}
_TENSOR_TYPE = {1: Field("elem_type", NUMBER), 2: Field("shape", BYTES)}
_SHAPE = {1: Field("dim", BYTES, many=True)}
_DIM = {1: Field("value", NUMBER), 2: Field("param", BYTES)}


@dataclass(frozen=True)
class Node:
    """One operator of a graph."""

    domain: str  # of the operator; empty for ONNX's own
    op_type: str
    inputs: tuple[str, ...]  # value names; empty where an optional input is left out
    outputs: tuple[str, ...]  # value names, likewise
    body: "Graph | None" = None  # what a loop does in each step; None for every other operator


@dataclass(frozen=True)
class Port:
    """An input or output of a graph: numpy's name of its dtype, empty for one that no manifest has,
    and its shape.

    A string in a shape names a dynamic dimension.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Graph:
    """A model, or the body of a loop in one, as far as a board looks at it."""

    ir_version: int  # of the file format; 0 for a body
    # operator set to version; the empty name is ONNX's own. None of a body, which has those of the
    # model
    opsets: Mapping[str, int]
    nodes: tuple[Node, ...]  # in the order of the file, which is one they can run in
    constants: frozenset[str]  # names of the initializers
    largest: Mapping[str, int]  # largest magnitude in short lists of whole numbers, such as shapes
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


def _bad(what: str) -> RefusedError:
    return RefusedError(
        RefusalReason.UNSAFE_GRAPH,
        f"the graph is not one that the exporter writes: {what}",
    )


def _piece(message: Message, name: str) -> memoryview:
    values = message[name]
    if not values:
        raise _bad(f"{name} is missing")
    return _view(values[0])


def _view(value: Raw) -> memoryview:
    if isinstance(value, int):
        raise _bad("a number stands where a message should")
    return value


def _small(values: list[Raw], what: str) -> int:
    """A number of 32 bits; a larger one would mean something else to a reader that cuts it off."""
    value = next(numbers(values), 0)
    if not 0 <= value < 2**31:
        raise _bad(f"{what} is {value}")
    return value


def read_model(data: memoryview) -> Graph:
    """Read a model, or raise a RefusedError where it is malformed or has parts that the exporter
    does not write.
    """
    model = read(data, _MODEL, "the model")
    opsets = [read(_view(item), _OPSET, "an operator set") for item in model["opset_import"]]
    if len({text(item["domain"]) for item in opsets}) < len(opsets):
        raise _bad("two operator sets have one name")
    return replace(
        _graph(_piece(model, "graph")),
        ir_version=_small(model["ir_version"], "the IR version"),
        opsets=MappingProxyType(
            {text(item["domain"]): _small(item["version"], "a version") for item in opsets}
        ),
    )


def _graph(data: memoryview, *, loops: bool = True) -> Graph:
    graph = read(data, _GRAPH, "the graph")
    if len(graph["node"]) > NODES_LIMIT:
        raise _bad(f"it has {len(graph['node'])} nodes; {NODES_LIMIT} are the most")
    constants = [_constant(_view(item), "an initializer") for item in graph["initializer"]]
    names = frozenset(constant.name for constant in constants)
    if len(names) < len(constants):
        raise _bad("two initializers have one name")
    return Graph(
        ir_version=0,
        opsets=MappingProxyType({}),
        nodes=tuple(_node(_view(item), loops=loops) for item in graph["node"]),
        constants=names,
        largest=MappingProxyType(
            {each.name: each.largest for each in constants if each.largest is not None}
        ),
        inputs=tuple(_port(_view(item)) for item in graph["input"]),
        outputs=tuple(_port(_view(item)) for item in graph["output"]),
    )


def _node(data: memoryview, *, loops: bool) -> Node:
    node = read(data, _NODE, "a node")
    if max(len(node["input"]), len(node["output"])) > _NAMES_LIMIT:
        raise _bad(f"a node has more than {_NAMES_LIMIT} inputs or outputs")
    op_type = text(node["op_type"])
    bodies = [
        _attribute(_view(item), op_type, loop=loops and op_type == _LOOP)
        for item in node["attribute"]
    ]
    found = [body for body in bodies if body is not None]
    if len(found) != (op_type == _LOOP):
        raise _bad(f"a node {op_type} contains {len(found)} graphs")
    names = [tuple(text([item]) for item in node[key]) for key in ("input", "output")]
    return Node(text(node["domain"]), op_type, names[0], names[1], next(iter(found), None))


def _attribute(data: memoryview, op_type: str, *, loop: bool) -> Graph | None:
    """Check an attribute; the body of a loop is returned."""
    attribute = read(data, _ATTRIBUTE, "an attribute")
    kind = _small(attribute["type"], "the type of an attribute")
    is_body = kind == _GRAPH_ATTRIBUTE and loop
    if (
        (kind == _GRAPH_ATTRIBUTE and not loop)
        or kind == _GRAPHS_ATTRIBUTE
        or bool(attribute["g"]) != is_body
    ):
        raise _bad(f"a node {op_type} contains a graph")
    for _ in numbers(attribute["ints"]):
        pass
    for _ in floats(attribute["floats"]):
        pass
    if attribute["t"]:
        _constant(_view(attribute["t"][0]), "an attribute")
    return _graph(_view(attribute["g"][0]), loops=False) if is_body else None


@dataclass(frozen=True)
class _Constant:
    name: str
    largest: int | None  # for a short list of whole numbers; None for other tensors


def _constant(data: memoryview, what: str) -> _Constant:
    """Check that a tensor holds exactly the elements that its shape says, here and not in another
    file.
    """
    tensor = read(data, _TENSOR, f"the tensor of {what}")
    name = text(tensor["name"])
    dims = tuple(numbers(tensor["dims"]))
    dtype = _small(tensor["data_type"], "an element type")
    if (
        dtype not in _ITEM_BYTES
        or len(dims) > _RANK_LIMIT
        or any(not 0 <= size < 2**40 for size in dims)
    ):
        raise _bad(f"{what} {name!r} has element type {dtype} and shape {dims}")
    if 0 in dims and math.prod(max(1, size) for size in dims) > EMPTY_LIMIT:
        raise _bad(f"{what} {name!r} has shape {dims} but no element")
    held = sum(len(_view(item)) for item in tensor["raw_data"]) // _ITEM_BYTES[dtype]
    held += sum(1 for _ in floats(tensor["float_data"]))
    held += sum(1 for key in ("int32_data", "int64_data") for _ in numbers(tensor[key]))
    if held != math.prod(dims):
        raise _bad(f"{what} {name!r} of shape {dims} holds {held} elements")
    return _Constant(name, _largest(tensor, dtype) if 0 < held <= _RANK_LIMIT else None)


def _largest(tensor: Message, dtype: int) -> int | None:
    """Return the largest magnitude of a tensor's whole numbers; None for other types."""
    if dtype not in _WHOLE:
        return None
    listed = [number for key in ("int32_data", "int64_data") for number in numbers(tensor[key])]
    for piece in tensor["raw_data"]:
        raw = bytes(_view(piece))
        if len(raw) % _ITEM_BYTES[dtype]:
            raise _bad("the content of a tensor is truncated")
        listed += np.frombuffer(raw, _WHOLE[dtype]).tolist()
    return max(map(abs, listed))


def _port(data: memoryview) -> Port:
    value = read(data, _VALUE, "an input or output")
    tensor = read(
        _piece(read(_piece(value, "type"), _TYPE, "a type"), "tensor_type"),
        _TENSOR_TYPE,
        "a tensor type",
    )
    dims = read(_piece(tensor, "shape"), _SHAPE, "a shape")["dim"] if tensor["shape"] else []
    sizes = tuple(_size(_view(item)) for item in dims)
    return Port(
        text(value["name"]),
        _DTYPES.get(_small(tensor["elem_type"], "an element type"), ""),
        sizes,
    )


def _size(data: memoryview) -> int | str:
    dim = read(data, _DIM, "a dimension")
    return text(dim["param"]) if dim["param"] else next(numbers(dim["value"]), 0)
