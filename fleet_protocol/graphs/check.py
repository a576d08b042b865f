"""Holds a graph against what the exporter writes, before anything runs it."""

import functools
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from typing_extensions import Buffer

from fleet_protocol.digests import name_among
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.graphs.flow import bare_outputs, is_batch
from fleet_protocol.graphs.model import Graph, Node, Port, read_model
from fleet_protocol.graphs.operators import IR_VERSIONS, OPERATORS, OPSETS
from fleet_protocol.manifest import GraphSpec, TensorSpec

GRAPH_LIMIT_BYTES = 512 * 1024 * 1024


def _unsafe(what: str) -> RefusedError:
    return RefusedError(RefusalReason.UNSAFE_GRAPH, f"{what}; it is not run")


@functools.lru_cache(maxsize=64)
def _passed(spec: GraphSpec, leaves: bool) -> list[bool]:
    """Empty until a file with the digest of `spec` has passed; a board opens the same few graphs in every round."""
    del spec, leaves
    return []


def check_graph(data: Buffer, specs: Iterable[GraphSpec], *, leaves: bool = True) -> None:
    """See that a graph is one that the manifest specifies, and may be run on this board's data.

    What it returns must tell nothing of single samples, unless it never `leaves` the board.

    Raises:
        RefusedError: the manifest does not have it, its inputs or outputs are others than the manifest says, or it
            has operators or parts that the exporter does not write, or it gives its batch back.
    """
    with memoryview(data) as view:
        _check(view, specs, leaves)


def _check(data: memoryview, specs: Iterable[GraphSpec], leaves: bool) -> None:
    known = {item.digest: item for item in specs}
    spec = known.get(name_among(data, known) or "")
    if spec is None:
        raise _unsafe(f"a graph of {len(data)} bytes is not in the manifest")
    passed = _passed(spec, leaves)
    if passed:
        return
    graph = check_structure(data)
    for what, ports, stated in (("inputs", graph.inputs, spec.inputs), ("outputs", graph.outputs, spec.outputs)):
        _compare(f"{what} of graph {spec.path}", ports, stated)
    if leaves:
        _check_outputs(graph, spec.path)
    passed.append(True)


def _check_outputs(graph: Graph, path: str) -> None:
    grown = [port.name for port in graph.outputs if any(isinstance(size, str) or size < 0 for size in port.shape)]
    if grown:
        raise _unsafe(f"output {grown[0]!r} of graph {path} grows with the batch")
    bare = bare_outputs(graph, (port.name for port in graph.inputs if is_batch(port.name)))
    if bare:
        raise _unsafe(f"output {bare[0]!r} of graph {path} carries the batch itself")


def check_structure(data: memoryview) -> Graph:
    """See that a graph has only operators and parts that the exporter writes, else a RefusedError, and return it."""
    if len(data) > GRAPH_LIMIT_BYTES:
        raise _unsafe(f"a graph of {len(data)} bytes; {GRAPH_LIMIT_BYTES} are the most")
    graph = read_model(data)
    if graph.ir_version not in IR_VERSIONS:
        raise _unsafe(f"a graph of IR version {graph.ir_version}; {IR_VERSIONS[0]} to {IR_VERSIONS[-1]} are read")
    # onnxruntime-training lists sets that no node is of; whether a node's is known is looked at with the node.
    for domain, versions in OPSETS.items():
        if graph.opsets.get(domain, versions[0]) not in versions:
            raise _unsafe(f"a graph of operator set {domain or 'onnx'} {graph.opsets[domain]}")
    _check_nodes(graph)
    return graph


def _check_nodes(graph: Graph, around: AbstractSet[str] = frozenset({""})) -> None:
    known = {*around, *graph.constants, *(port.name for port in graph.inputs)}
    if len(known) != len(around) + len(graph.constants) + len(graph.inputs):
        raise _unsafe("two inputs or constants of a graph have one name")
    for node in graph.nodes:
        if node.op_type not in OPERATORS.get(node.domain, ()):
            raise _unsafe(f"the exporter writes no operator {node.domain and node.domain + '.'}{node.op_type}")
        strange = next((name for name in node.inputs if name not in known), None)
        if strange is not None:
            raise _unsafe(f"a node {node.op_type} takes {strange!r}, which nothing before it makes")
        if node.body is not None:
            _check_body(node, node.body, known)
        made = [name for name in node.outputs if name]
        if len(set(made)) < len(made) or not known.isdisjoint(made):
            raise _unsafe(f"a node {node.op_type} makes a value that is there already")
        known.update(made)
    absent = next((port.name for port in graph.outputs if port.name not in known), None)
    if absent is not None:
        raise _unsafe(f"nothing makes the output {absent!r}")


def _check_body(node: Node, body: Graph, known: AbstractSet[str]) -> None:
    """What a loop does in each step; it may read what the graph around it has made."""
    if (len(body.inputs), len(body.outputs)) != (len(node.inputs), len(node.outputs)):
        raise _unsafe(f"the body of a node {node.op_type} has other inputs or outputs than the node")
    _check_nodes(body, known)


def _compare(what: str, ports: Sequence[Port], stated: Sequence[TensorSpec]) -> None:
    found = [(port.name, port.dtype, port.shape) for port in ports]
    wanted = [(spec.name, spec.dtype, spec.shape) for spec in stated]
    if found != wanted:
        strange = next((f for f, w in zip(found, wanted, strict=False) if f != w), None)
        raise _unsafe(f"the {what} are not as the manifest says" + (f": {strange[0]!r}" if strange else ""))
