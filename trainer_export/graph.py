"""A small writer of ONNX graphs without duplicate nodes and constants, and without dead nodes."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from fleet_protocol.errors import ExportError

OPSET = 18  # supported by onnxruntime 1.14 and later and by common converters
IR_VERSION = 9  # older runtimes on boards refuse files of newer versions

Attribute: TypeAlias = "int | float | str | Sequence[int] | Sequence[float] | GraphBuilder"

# The types of ports that boards and the runtime's sessions pass.
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

    Values are named by the builder (``v0``, ``v1``, ...). The same operator on the same values
    always gives the same value. So a lowering may request what it needs (a transposed view, the
    columns of a convolution) without knowing whether it already exists.

    Example:
        >>> g = GraphBuilder("twice")
        >>> x = g.input(Port("x", "float32", ("batch", 3)))
        >>> g.output(Port("y", "float32", ("batch", 3)), g.node("Add", x, x))
        >>> g.model().graph.node[0].op_type
        'Add'
    """

    def __init__(self, name: str, prefix: str = "") -> None:
        """Begin a graph.

        The values of an inner graph have a unique prefix (:meth:`inner_prefix`).
        """
        self._name = name
        self.prefix = prefix
        self._inner = 0
        self._nodes: list[onnx.NodeProto] = []
        # Every node by operator, inputs and attributes, so that an equal one is not written twice.
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

    def constant(
        self,
        array: NDArray[np.generic],
        name: str | None = None,
    ) -> str:
        """Return the name of a constant.

        Args:
            array: its content.
            name: a name, such as a parameter's; without it, equal constants share one.

        Raises:
            ExportError: the array has double precision.
        """
        if array.dtype == np.float64:
            raise ExportError(
                "double precision cannot be exported, because boards compute in float32; call"
                " .float() on the inputs, and remove .double() and torch.float64"
            )
        if name is not None:
            self._constants[name] = array
            return name
        # By type and shape, too: equal bytes may be different arrays.
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
        """Return the content of a constant; None if the value is not a constant."""
        return self._constants.get(name)

    def node(
        self,
        op_type: str,
        *inputs: str,
        **attributes: Attribute,
    ) -> str:
        """Append a node of the default domain with one output, or find an equal node.

        An empty name among the inputs omits an optional input.

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
        """Append a node with several outputs; otherwise like :meth:`node`."""
        # In the order of names, so that the call's order does not change the file.
        ordered = sorted(attributes.items())
        # Lists cannot be keys; a GraphBuilder is a key by identity, so bodies of loops are never
        # shared.
        frozen: list[tuple[str, Any]] = []
        for name, value in ordered:
            frozen.append((name, tuple(value) if isinstance(value, list) else value))
        key = (op_type, inputs, outputs, tuple(frozen))
        if key not in self._known:
            names = tuple(f"{self.prefix}v{self._count + i}" for i in range(outputs))
            self._count += outputs
            # A unique name, because rewrites of the runtime derive names from it and refuse
            # duplicates.
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
        """Append nodes of another graph, unchanged and in order.

        Args:
            nodes: the nodes; their names must not have the form ``v<i>`` or ``c<i>``.
            constants: constants that they read.
            shapes: shapes of values between them.
        """
        self._nodes.extend(nodes)
        self._constants.update(constants)
        self._shapes.extend(shapes)

    def model(
        self,
        metadata: Mapping[str, str] | None = None,
        domains: Sequence[tuple[str, int]] = (),
    ) -> onnx.ModelProto:
        """Return the model: only live nodes, outputs with their own names, no external files.

        Args:
            metadata: metadata of the model.
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
        """Return the graph, which :meth:`model` wraps and a loop contains."""
        renamed, copies = self._name_outputs()
        # Nodes that no output depends on, such as an unused gradient, are dropped.
        live = live_nodes(self._nodes, {value for _, value in self._outputs})
        nodes = [_renamed(node, renamed) for node in live] + copies
        used: set[str] = set()
        computed: set[str] = set()
        for node in nodes:
            used |= values_read(node)
        needed = used | {port.name for port, _ in self._outputs}
        for node in nodes:
            _drop_unread(node, needed)
            computed.update(node.output)
        # Shapes of outputs are in their own declarations.
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
        """Rename produced values to the names of the outputs.

        A copy is needed for an input or constant that is an output, for a value of two outputs, and
        for a value that an inner graph reads.
        """
        renamed: dict[str, str] = {}
        copies: list[onnx.NodeProto] = []
        # A value that an inner graph reads, in which nothing is renamed.
        captured: set[str] = set()
        for node in self._nodes:
            # The inner graphs of a node read the values that are not among its inputs.
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
        nodes: the nodes in the order in which they run.
        wanted: names of the values; the names of all values that the nodes read are added.
    """
    live: list[onnx.NodeProto] = []
    # From the end, because a node is live if a live node after it reads a value.
    for node in reversed(nodes):
        if any(name in wanted for name in node.output):
            live.append(node)
            wanted.update(values_read(node))
    return live[::-1]


def values_read(node: onnx.NodeProto) -> set[str]:
    """Return the values that a node reads, including those of its inner graphs."""
    names = set(node.input)
    for attribute in node.attribute:
        # Bodies of loops and branches see the values of the graphs around them.
        if attribute.type == onnx.AttributeProto.GRAPH:
            names |= _read_from_around(attribute.g)
    return names


def _read_from_around(graph: onnx.GraphProto) -> set[str]:
    """Return the outer values that a graph reads."""
    read: set[str] = set()
    own = {value.name for value in graph.input}
    own.update(tensor.name for tensor in graph.initializer)
    for node in graph.node:
        read |= values_read(node)
        own.update(node.output)
    return read - own


def _drop_unread(node: onnx.NodeProto, needed: Collection[str]) -> None:
    """Remove the indices of a max pooling if nothing reads them.

    With them, the runtime takes 20 times as long.
    """
    has_indices = node.op_type == "MaxPool" and len(node.output) > 1
    if has_indices and node.output[1] not in needed:
        del node.output[1]


def _renamed(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    values = (*node.input, *node.output)
    if names.keys().isdisjoint(values):
        return node
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.input[:] = [names.get(name, name) for name in node.input]
    copy.output[:] = [names.get(name, name) for name in node.output]
    return copy


def _value_info(port: Port) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(port.name, _TYPES[port.dtype], list(port.shape))
