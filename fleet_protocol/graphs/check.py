"""Checks a graph against its manifest and against what the exporter writes, before it is run.

A board runs only graphs that pass, and a server evaluates only such graphs.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from typing_extensions import Buffer

from fleet_protocol.digests import name_among
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.foreign_files import read_regular
from fleet_protocol.graphs.exposure import exposed_outputs, is_sample_input
from fleet_protocol.graphs.model import Graph, Node, Port, read_model
from fleet_protocol.graphs.operators import ENLARGING, OPERATORS, OPSETS
from fleet_protocol.manifest import GraphSpec, TensorSpec

GRAPH_LIMIT_BYTES = 512 * 1024 * 1024
IR_VERSIONS = range(8, 11)

SIZE_LIMIT = 2**24
"""The largest dimension that a constant may produce.

It bounds a loop over the rows of a tensor, and the memory of a tensor.
"""


def check_graph(
    data: Buffer,
    specs: Iterable[GraphSpec],
    *,
    leaves_board: bool = True,
) -> None:
    """Check that the manifest specifies a graph, and that it may run on this board's data.

    Args:
        data: the file.
        specs: graphs of the manifest.
        leaves_board: whether its outputs leave the board; then they must not expose single samples.

    Raises:
        RefusedError: the graph is not in the manifest, its inputs or outputs differ from the
            manifest's, it has operators or fields that the exporter does not write, or it returns
            its batch.
    """
    _on_view(data, lambda view: _check(view, specs, leaves_board))


def read_checked_graph(path: Path) -> bytes:
    """Read a graph that has only operators and fields that the exporter writes.

    The caller opens the returned bytes, because the path may name another file by then.

    Raises:
        RefusedError: it has other operators or fields.
        BlobError: the file cannot be read, or has more than `GRAPH_LIMIT_BYTES`.
    """
    # The size is limited before the file is in memory.
    data = read_regular(path, GRAPH_LIMIT_BYTES)
    _on_view(data, check_structure)
    return data


def check_structure(data: memoryview) -> Graph:
    """Return a graph if it has only operators and fields that the exporter writes.

    Raises:
        RefusedError: it has others, or is malformed.
    """
    if len(data) > GRAPH_LIMIT_BYTES:
        raise _unsafe(f"a graph of {len(data)} bytes; at most {GRAPH_LIMIT_BYTES} are allowed")
    graph = read_model(data)
    if graph.ir_version not in IR_VERSIONS:
        raise _unsafe(
            f"a graph of IR version {graph.ir_version}; versions {IR_VERSIONS[0]} to "
            f"{IR_VERSIONS[-1]} are supported"
        )
    # onnxruntime-training also lists operator sets that no node uses, so unknown sets are not
    # refused here. `_check_nodes` refuses a node whose set is unknown.
    for domain, versions in OPSETS.items():
        if graph.opsets.get(domain, versions[0]) not in versions:
            raise _unsafe(f"a graph of operator set {domain or 'onnx'} {graph.opsets[domain]}")
    _check_nodes(graph)
    return graph


def _unsafe(what: str) -> RefusedError:
    return RefusedError(RefusalReason.UNSAFE_GRAPH, f"{what}; it is not run")


def _on_view(data: Buffer, check: Callable[[memoryview], object]) -> None:
    """Check bytes, and release all views of them before raising a refusal.

    Otherwise the frames of the traceback would keep views, and the caller could not close the
    mapping.
    """
    refusal: RefusedError | None = None
    with memoryview(data) as view:
        try:
            check(view)
        except RefusedError as error:
            refusal = RefusedError(error.reason, str(error))
    if refusal is not None:
        raise refusal


@dataclass(frozen=True)
class _GraphFile:
    """A file that has the digest of its specification, which decides what is found in it.

    Attributes:
        spec: specification of the file.
        leaves_board: see `_check`.
        data: its bytes. Two files of one specification are equal.
    """

    spec: GraphSpec
    leaves_board: bool
    data: memoryview = field(compare=False, repr=False)


def _check(
    data: memoryview,
    specs: Iterable[GraphSpec],
    leaves_board: bool,
) -> None:
    by_digest = {spec.digest: spec for spec in specs}
    digest = name_among(data, by_digest)
    if digest is None:
        raise _unsafe(f"a graph of {len(data)} bytes is not in the manifest")
    _check_file(_GraphFile(by_digest[digest], leaves_board, data))


# A board opens the same few graphs in every round. A refusal is an exception, which is not cached:
# a file that was refused is checked again, so that each refusal has its reason. The views that the
# cache keeps are released by their owner, so no mapping stays open for them.
@functools.lru_cache(maxsize=64)
def _check_file(file: _GraphFile) -> None:
    """Check the structure of a graph, and its ports against its specification."""
    spec = file.spec
    graph = check_structure(file.data)
    _compare_ports(f"inputs of graph {spec.path}", graph.inputs, spec.inputs)
    _compare_ports(f"outputs of graph {spec.path}", graph.outputs, spec.outputs)
    if file.leaves_board:
        _check_outputs(graph, spec.path)


def _compare_ports(
    what: str,
    ports: Sequence[Port],
    specs: Sequence[TensorSpec],
) -> None:
    """Check that inputs or outputs are those of the manifest, in their order."""
    actual = [(port.name, port.dtype, port.shape) for port in ports]
    specified = [(spec.name, spec.dtype, spec.shape) for spec in specs]
    if actual == specified:
        return
    text = f"the {what} differ from the manifest's"
    for port, spec in zip(actual, specified, strict=False):
        if port != spec:
            text = f"{text}: {port[0]!r}"
            break
    raise _unsafe(text)


def _check_outputs(graph: Graph, path: str) -> None:
    """Check that no output has a row for each sample, or carries entries of the batch."""
    for port in graph.outputs:
        if any(isinstance(size, str) or size < 0 for size in port.shape):
            raise _unsafe(f"output {port.name!r} of graph {path} grows with the batch")
    batch = [port.name for port in graph.inputs if is_sample_input(port.name)]
    exposed = exposed_outputs(graph, batch)
    if exposed:
        raise _unsafe(
            f"output {exposed[0]!r} of graph {path} contains the batch itself, as the gradient of"
            " an embedding does if no linear layer lies between it and the output of the model"
        )


def _check_nodes(
    graph: Graph,
    outer_names: AbstractSet[str] = frozenset({""}),
    outer_sizes: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Check that every node has a known operator and reads only values that exist before it.

    Args:
        graph: a model, or the body of a loop.
        outer_names: values that the graph around a body has made; a body may read them. The empty
            name stands for an optional input that is left out.
        outer_sizes: largest numbers of the constants of that graph.
    """
    sizes = {**outer_sizes, **graph.largest}
    names = {*outer_names, *graph.constants, *(port.name for port in graph.inputs)}
    if len(names) != len(outer_names) + len(graph.constants) + len(graph.inputs):
        raise _unsafe("two inputs or constants of a graph have the same name")
    for node in graph.nodes:
        _check_operator(node)
        _check_inputs(node, names)
        _check_sizes(node, sizes)
        if node.body is not None:
            _check_body(node, node.body, names, sizes)
        outputs = [name for name in node.outputs if name]
        if len(set(outputs)) < len(outputs) or not names.isdisjoint(outputs):
            raise _unsafe(f"a node {node.op_type} makes a value that exists already")
        # Only now: a node must not read its own outputs.
        names.update(outputs)
    for port in graph.outputs:
        if port.name not in names:
            raise _unsafe(f"nothing makes the output {port.name!r}")


def _check_operator(node: Node) -> None:
    if node.op_type not in OPERATORS.get(node.domain, ()):
        domain = f"{node.domain}." if node.domain else ""
        raise _unsafe(f"the exporter writes no operator {domain}{node.op_type}")


def _check_inputs(node: Node, names: AbstractSet[str]) -> None:
    for name in node.inputs:
        if name not in names:
            raise _unsafe(f"a node {node.op_type} takes {name!r}, which nothing before it makes")


def _check_sizes(node: Node, sizes: Mapping[str, int]) -> None:
    """Check that no constant makes a value so large that a loop over its rows would not end."""
    for place in ENLARGING.get(node.op_type, ()):
        size = sizes.get(node.inputs[place], 0) if place < len(node.inputs) else 0
        if size > SIZE_LIMIT:
            raise _unsafe(f"a node {node.op_type} makes {size:,} rows; the limit is {SIZE_LIMIT:,}")


def _check_body(
    node: Node,
    body: Graph,
    names: AbstractSet[str],
    sizes: Mapping[str, int],
) -> None:
    """Check a loop's body, which may read values that the graph around it has made."""
    if (len(body.inputs), len(body.outputs)) != (len(node.inputs), len(node.outputs)):
        raise _unsafe(
            f"the body of a node {node.op_type} has other inputs or outputs than the node"
        )
    _check_nodes(body, names, sizes)
