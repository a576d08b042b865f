"""A small writer of ONNX graphs, with equal nodes and constants only once, and no dead nodes."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from fleet_protocol.errors import ExportError

OPSET = 18  # what onnxruntime 1.14 and later, and every converter we know, read
IR_VERSION = 9  # older runtimes on boards refuse newer files

Attribute: TypeAlias = "int | float | str | Sequence[int] | Sequence[float] | GraphBuilder"

_TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}


@dataclass(frozen=True)
class Port:
    """An input or output of a graph, ``float32`` or ``int64``.

    A string in its shape names a dynamic dimension.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]


class GraphBuilder:
    """Collects nodes and writes one model.

    Values are named by the builder (``v0``, ``v1``, ...). Asking twice for the same operator on the
    same values gives the same value, so that a lowering may rebuild what it needs (a transposed
    view, the columns of a convolution) without counting who asked first.

    Example:
        >>> g = GraphBuilder("twice")
        >>> x = g.input(Port("x", "float32", ("batch", 3)))
        >>> g.output(Port("y", "float32", ("batch", 3)), g.node("Add", x, x))
        >>> g.model().graph.node[0].op_type
        'Add'
    """

    def __init__(self, name: str, prefix: str = "") -> None:
        """Begin a graph.

        Inside another one its values have a prefix that no other has (:meth:`inner_prefix`).
        """
        self._name = name
        self.prefix = prefix
        self._inner = 0
        self._nodes: list[onnx.NodeProto] = []
        self._known: dict[tuple[object, ...], tuple[str, ...]] = {}
        self._constants: dict[str, NDArray[np.generic]] = {}
        self._constant_names: dict[bytes, str] = {}
        self._inputs: dict[str, Port] = {}
        self._outputs: list[tuple[Port, str]] = []
        self._count = 0
        self._shapes: list[onnx.ValueInfoProto] = []

    def inner_prefix(self) -> str:
        """Return a prefix for a graph inside a node of this one, such as the body of a loop."""
        self._inner += 1
        return f"{self.prefix}g{self._inner}."

    def input(self, port: Port) -> str:
        """Declare a graph input and return its value name."""
        self._inputs[port.name] = port
        return port.name

    def output(self, port: Port, value: str) -> None:
        """Declare that the graph output ``port`` is ``value``."""
        self._outputs.append((port, value))

    def constant(self, array: NDArray[np.generic], name: str | None = None) -> str:
        """Return the name of a constant.

        Args:
            array: its content.
            name: of its own, as a parameter has; without it equal constants share one.

        Raises:
            ExportError: it has double precision.
        """
        if array.dtype == np.float64:
            raise ExportError(
                "double precision cannot be exported, as boards compute in float32; call .float()"
                " on what comes in, and leave .double() and torch.float64 out"
            )
        if name is not None:
            self._constants[name] = array
            return name
        key = hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).digest()
        if key not in self._constant_names:
            self._constant_names[key] = f"{self.prefix}c{len(self._constant_names)}"
            self._constants[self._constant_names[key]] = array
        return self._constant_names[key]

    def ints(self, *values: int) -> str:
        """Return a constant int64 vector: a shape, a list of axes, indices."""
        return self.constant(np.array(values, np.int64))

    def scalar(self, value: float, dtype: str = "float32") -> str:
        """Return a constant of rank 0."""
        return self.constant(np.array(value, dtype))

    def constant_value(self, name: str) -> NDArray[np.generic] | None:
        """Return the content of a constant, None if the value is not one."""
        return self._constants.get(name)

    def node(self, op_type: str, *inputs: str, **attributes: Attribute) -> str:
        """Append a node of the default domain with one output, or find the equal one.

        An empty name among the inputs leaves an optional one out.

        Returns:
            The name of the output.
        """
        return self.nodes(op_type, *inputs, outputs=1, attributes=attributes)[0]

    def nodes(
        self,
        op_type: str,
        *inputs: str,
        outputs: int,
        attributes: Mapping[str, Attribute],
    ) -> tuple[str, ...]:
        """Append a node of several outputs; else as :meth:`node`."""
        ordered = sorted(attributes.items())
        frozen = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in ordered)
        key = (op_type, inputs, outputs, frozen)
        if key not in self._known:
            names = tuple(f"{self.prefix}v{self._count + i}" for i in range(outputs))
            self._count += outputs
            # A name of its own: rewrites of the runtime derive theirs from it and refuse two equal
            # ones.
            title = f"{op_type}.{names[0]}"
            node = helper.make_node(op_type, list(inputs), list(names), name=title)
            for attribute, value in ordered:
                proto = value.graph() if isinstance(value, GraphBuilder) else value
                node.attribute.append(helper.make_attribute(attribute, proto))
            self._nodes.append(node)
            self._known[key] = names
        return self._known[key]

    def append(
        self,
        nodes: Sequence[onnx.NodeProto],
        constants: Mapping[str, NDArray[np.generic]],
        shapes: Sequence[onnx.ValueInfoProto],
    ) -> None:
        """Append nodes of another graph, as they are and in order.

        Args:
            nodes: whose names must not be of the form ``v<i>`` or ``c<i>``.
            constants: that they read.
            shapes: of values between them.
        """
        self._nodes.extend(nodes)
        self._constants.update(constants)
        self._shapes.extend(shapes)

    def model(
        self,
        metadata: Mapping[str, str] | None = None,
        domains: Sequence[tuple[str, int]] = (),
    ) -> onnx.ModelProto:
        """Return the model: live nodes only, outputs under their own names, no external files.

        Args:
            metadata: of the model.
            domains: operator sets, with versions, that appended nodes use beyond the default one.
        """
        opsets = [("", OPSET), *domains]
        model = helper.make_model(
            self.graph(),
            opset_imports=[helper.make_opsetid(domain, version) for domain, version in opsets],
            ir_version=IR_VERSION,
            producer_name="shoal",
        )
        if metadata:
            helper.set_model_props(model, dict(metadata))
        return model

    def graph(self) -> onnx.GraphProto:
        """Return the graph: what :meth:`model` wraps, and what a loop has inside."""
        renamed, copies = self._name_outputs()
        live = live_nodes(self._nodes, {value for _, value in self._outputs})
        nodes = [_renamed(node, renamed) for node in live] + copies
        used: set[str] = set()
        computed: set[str] = set()
        for node in nodes:
            used |= values_read(node)
            computed.update(node.output)
        computed -= {port.name for port, _ in self._outputs}
        initializers = []
        for name, array in self._constants.items():
            if name in used:
                initializers.append(numpy_helper.from_array(array, name))
        shapes = []
        for shape in self._shapes:
            if shape.name in computed:
                shapes.append(shape)
        return helper.make_graph(
            nodes,
            self._name,
            [_value_info(port) for port in self._inputs.values()],
            [_value_info(port) for port, _ in self._outputs],
            initializers,
            value_info=shapes,
        )

    def _name_outputs(self) -> tuple[dict[str, str], list[onnx.NodeProto]]:
        """Give produced values the names of the outputs.

        An input or constant passed through, a value that is two outputs, or one that a graph inside
        reads, needs a copy.
        """
        renamed: dict[str, str] = {}
        copies: list[onnx.NodeProto] = []
        # A value that is read inside a node, where this graph renames nothing.
        captured: set[str] = set()
        for node in self._nodes:
            captured |= values_read(node).difference(node.input)
        fixed = self._inputs.keys() | self._constants.keys() | captured
        for port, value in self._outputs:
            if value in renamed or value in fixed:
                source = renamed.get(value, value)
                copies.append(helper.make_node("Identity", [source], [port.name]))
            else:
                renamed[value] = port.name
        return renamed, copies


def live_nodes(nodes: Sequence[onnx.NodeProto], wanted: set[str]) -> list[onnx.NodeProto]:
    """Return the nodes that some values depend on, in order.

    Args:
        nodes: in the order in which they run.
        wanted: names of the values; those of all values that the nodes read are added.
    """
    live: list[onnx.NodeProto] = []
    for node in reversed(nodes):
        if any(name in wanted for name in node.output):
            live.append(node)
            wanted.update(values_read(node))
    return live[::-1]


def values_read(node: onnx.NodeProto) -> set[str]:
    """Return the values that a node reads, those that a graph inside it reads among them."""
    names = set(node.input)
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            names |= _read_from_around(attribute.g)
    return names


def _read_from_around(graph: onnx.GraphProto) -> set[str]:
    """Return the values that a graph reads and does not have itself."""
    read: set[str] = set()
    own = {value.name for value in graph.input}
    own.update(tensor.name for tensor in graph.initializer)
    for node in graph.node:
        read |= values_read(node)
        own.update(node.output)
    return read - own


def _renamed(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    if not any(name in names for name in (*node.input, *node.output)):
        return node
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.input[:] = [names.get(name, name) for name in node.input]
    copy.output[:] = [names.get(name, name) for name in node.output]
    return copy


def _value_info(port: Port) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(port.name, _TYPES[port.dtype], list(port.shape))
