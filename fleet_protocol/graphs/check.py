"""Holds a graph against what the exporter writes, before anything runs it.

That is all that a board runs, and all that a server evaluates. An operator *keeps* what it is given
unless it is a contraction or a reduction, whose numbers are sums over many products or entries. A
*selector* decides by some of its inputs which entries of the others are taken.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from typing_extensions import Buffer

from fleet_protocol.digests import name_among
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.foreign_files import read_regular
from fleet_protocol.graphs.model import Graph, Node, Port, read_model
from fleet_protocol.manifest import GraphSpec, TensorSpec

GRAPH_LIMIT_BYTES = 512 * 1024 * 1024
OPSETS: Mapping[str, range] = MappingProxyType({"": range(13, 23), "com.microsoft": range(1, 2)})
"""Operator sets by name, with the versions that are read.

What onnxruntime-training has of its own is the second.
"""

IR_VERSIONS = range(8, 11)

# What onnxruntime-training writes into a gradient graph: operators of its own, and two of no set at
# all.
_GRADIENTS = """
AveragePoolGrad GatherElementsGrad GatherGrad LeakyReluGrad LogSoftmaxGrad_13 MaxPoolGrad ReluGrad Scale SigmoidGrad
SoftmaxGrad_13 TanhGrad
"""
_MIXING_GRADIENTS = "ConvGrad FusedMatMul LayerNormalizationGrad"
_CONTRACTIONS = "Conv ConvTranspose Gemm MatMul"
_REDUCTIONS = "ArgMax ArgMin ReduceL2 ReduceMax ReduceMean ReduceMin ReduceSum"
_POINTWISE = """
Abs Acos Acosh Add And Asin Asinh Atan Atanh Cast Ceil Cos Cosh Div Equal Erf Exp Floor Greater GreaterOrEqual
HardSigmoid LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax Max Min Mod Mul Neg Not Or Pow Reciprocal Relu
Round Sigmoid Sign Sin Sinh Softmax Sqrt Sub Sum Tan Tanh Where
"""
_MOVING = """
AveragePool Concat CumSum Expand Flatten Gather GatherElements Identity MaxPool Pad Range Reshape Scan ScatterElements
Shape Size Slice Split Squeeze Tile TopK Transpose Unsqueeze
"""

OPERATORS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "": frozenset(
            f"{_CONTRACTIONS} {_REDUCTIONS} {_POINTWISE} {_MOVING} MaxPoolGrad AveragePoolGrad".split()
        ),
        "com.microsoft": frozenset(f"{_GRADIENTS} {_MIXING_GRADIENTS}".split()),
    }
)
"""Operators by the set they are of."""

CONTRACTIONS = frozenset(f"{_CONTRACTIONS} {_MIXING_GRADIENTS}".split())
REDUCTIONS = frozenset(_REDUCTIONS.split())

SIZES = frozenset({"Shape", "Size"})
"""Operators that tell how large a value is and nothing of its entries."""

SELECTORS: Mapping[str, int] = MappingProxyType(
    {
        "Gather": 1,
        "GatherElements": 1,
        "GatherGrad": 1,
        "ScatterElements": 1,
        "Where": 0,
    }
)
"""Operators to the input that only says which entries of the others are taken."""

MASKS = frozenset(["Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"])
"""Operators whose entries are true or false."""

MASKING = frozenset(
    [
        "And",
        "Cast",
        "Expand",
        "Identity",
        "Not",
        "Or",
        "Reshape",
        "Slice",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
    ]
)
"""Operators that make masks of masks."""


SIZE_LIMIT = 2**24
"""The largest dimension that a constant may produce: a loop over its rows ends, and a tensor's
memory is limited.
"""

_SIZED: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"Expand": (1,), "Range": (0, 1, 2), "Tile": (1,)}
)
"""Operators that make a value larger, with the inputs that say how large."""


def is_sample_input(name: str) -> bool:
    """Whether a graph's input belongs to the samples: ``x`` and ``y``.

    The label mask is what the device has, too.
    """
    return name in {"x", "y", "mask"}


@dataclass(frozen=True)
class _Kind:
    """What is known of a value."""

    bare: bool  # entries of it may be entries of the batch, or one to one functions of them
    model: bool  # it depends on parameters
    met: bool = False  # batch and parameters have met in it, in a contraction
    mask: bool = False  # its entries are true or false


_NEITHER = _Kind(bare=False, model=False)


def exposed_outputs(graph: Graph, batch: Iterable[str]) -> tuple[str, ...]:
    """Names of outputs that the batch reaches without a reduction, or a contraction that parameters
    have a part in.

    The nodes are in an order in which they can run; `batch` names the inputs that carry samples or
    labels. Nothing that the exporter writes has such an output.
    """
    samples = frozenset(batch)
    kinds = {
        port.name: _Kind(
            bare=port.name in samples,
            model="param." in port.name or "state." in port.name,
        )
        for port in graph.inputs
    }
    _follow(graph, kinds)
    return tuple(port.name for port in graph.outputs if kinds.get(port.name, _NEITHER).bare)


def _follow(graph: Graph, kinds: dict[str, _Kind]) -> None:
    """Add the kinds of all values of a graph to those of what it is given."""
    for node in graph.nodes:
        given = [kinds.get(name, _NEITHER) for name in node.inputs]
        if node.body is None:
            kinds.update(dict.fromkeys(node.outputs, _kind(node, given)))
        else:
            kinds.update(zip(node.outputs, _looped(node.body, given, kinds), strict=True))


def _looped(body: Graph, given: list[_Kind], around: Mapping[str, _Kind]) -> list[_Kind]:
    """The kinds of what a loop gives: a step reads what the one before it gave, so once more until
    nothing is new.
    """
    while True:
        kinds = {
            **around,
            **{port.name: kind for port, kind in zip(body.inputs, given, strict=True)},
        }
        _follow(body, kinds)
        made = [kinds.get(port.name, _NEITHER) for port in body.outputs]
        told = [*made, *[_NEITHER] * len(given)]
        carried = [
            _Kind(
                old.bare or new.bare,
                old.model,
                old.met and new.met,
                old.mask and new.mask,
            )
            for old, new in zip(given, told, strict=False)
        ]
        if carried == given:
            return made
        given = carried


def _kind(node: Node, given: list[_Kind]) -> _Kind:
    if node.op_type in SIZES:
        return _NEITHER
    model = any(kind.model for kind in given)
    met = any(kind.met for kind in given)
    if node.op_type in REDUCTIONS or (node.op_type in CONTRACTIONS and model):
        return _Kind(
            bare=False,
            model=model,
            met=model and any(kind.bare or kind.met for kind in given),
        )
    if node.op_type == "Mul" and any(kind.met and not kind.bare for kind in given):
        # Padding is left out by a factor of 0: that says which entries are taken, as a selector
        # does.
        return _Kind(
            bare=any(kind.bare and not kind.mask for kind in given),
            model=model,
            met=met,
        )
    mask = node.op_type in MASKS or (
        node.op_type in MASKING and all(kind.mask for kind in given if kind.bare)
    )
    selector = SELECTORS.get(node.op_type)
    others = [kind for i, kind in enumerate(given) if i != selector]
    bare = any(kind.bare for kind in others)
    if selector is not None and not any(kind.model for kind in others):
        bare = bare or (selector < len(given) and given[selector].bare)
    return _Kind(bare=bare, model=model, met=met, mask=mask and bare)


def _unsafe(what: str) -> RefusedError:
    return RefusedError(RefusalReason.UNSAFE_GRAPH, f"{what}; it is not run")


@functools.lru_cache(maxsize=64)
def _passed(spec: GraphSpec, leaves: bool) -> list[bool]:
    """Empty until a file with the digest of `spec` has passed.

    A board opens the same few graphs in every round.
    """
    del spec, leaves
    return []


def check_graph(data: Buffer, specs: Iterable[GraphSpec], *, leaves: bool = True) -> None:
    """See that a graph is one that the manifest specifies, and may be run on this board's data.

    What it returns must tell nothing of single samples, unless it never `leaves` the board.

    Raises:
        RefusedError: the manifest does not have it, its inputs or outputs are others than the
            manifest says, or it has operators or parts that the exporter does not write, or it
            gives its batch back.
    """
    _on_view(data, lambda view: _check(view, specs, leaves))


def read_checked_graph(path: Path) -> bytes:
    """Read a graph that has only operators and parts that the exporter writes, like
    `check_structure`.

    The caller opens these bytes, because the path may name another file by then.

    Raises:
        RefusedError: it has other operators or parts.
        BlobError: the file cannot be read, or has more than `GRAPH_LIMIT_BYTES`.
    """
    data = read_regular(path, GRAPH_LIMIT_BYTES)
    _on_view(data, check_structure)
    return data


def _on_view(data: Buffer, look: Callable[[memoryview], object]) -> None:
    """Check bytes, and release all of them before raising a refusal, so that the caller can close
    the mapping.

    Otherwise the frames of the traceback would keep the pieces.
    """
    refusal: RefusedError | None = None
    with memoryview(data) as view:
        try:
            look(view)
        except RefusedError as error:
            refusal = RefusedError(error.reason, str(error))
    if refusal is not None:
        raise refusal


def _check(data: memoryview, specs: Iterable[GraphSpec], leaves: bool) -> None:
    known = {item.digest: item for item in specs}
    spec = known.get(name_among(data, known) or "")
    if spec is None:
        raise _unsafe(f"a graph of {len(data)} bytes is not in the manifest")
    passed = _passed(spec, leaves)
    if passed:
        return
    graph = check_structure(data)
    for what, ports, stated in (
        ("inputs", graph.inputs, spec.inputs),
        ("outputs", graph.outputs, spec.outputs),
    ):
        _compare(f"{what} of graph {spec.path}", ports, stated)
    if leaves:
        _check_outputs(graph, spec.path)
    passed.append(True)


def _check_outputs(graph: Graph, path: str) -> None:
    grown = [
        port.name
        for port in graph.outputs
        if any(isinstance(size, str) or size < 0 for size in port.shape)
    ]
    if grown:
        raise _unsafe(f"output {grown[0]!r} of graph {path} grows with the batch")
    bare = exposed_outputs(
        graph, (port.name for port in graph.inputs if is_sample_input(port.name))
    )
    if bare:
        raise _unsafe(f"output {bare[0]!r} of graph {path} carries the batch itself")


def check_structure(data: memoryview) -> Graph:
    """See that a graph has only operators and parts that the exporter writes, else a RefusedError,
    and return it.
    """
    if len(data) > GRAPH_LIMIT_BYTES:
        raise _unsafe(f"a graph of {len(data)} bytes; {GRAPH_LIMIT_BYTES} are the most")
    graph = read_model(data)
    if graph.ir_version not in IR_VERSIONS:
        raise _unsafe(
            f"a graph of IR version {graph.ir_version}; {IR_VERSIONS[0]} to {IR_VERSIONS[-1]} are read"
        )
    # onnxruntime-training lists sets that no node is of; whether a node's is known is looked at
    # with the node.
    for domain, versions in OPSETS.items():
        if graph.opsets.get(domain, versions[0]) not in versions:
            raise _unsafe(f"a graph of operator set {domain or 'onnx'} {graph.opsets[domain]}")
    _check_nodes(graph)
    return graph


def _check_sizes(node: Node, largest: Mapping[str, int]) -> None:
    """Check that no constant makes a value so large that a loop over its rows would not end."""
    for place in _SIZED.get(node.op_type, ()):
        size = largest.get(node.inputs[place], 0) if place < len(node.inputs) else 0
        if size > SIZE_LIMIT:
            raise _unsafe(f"a node {node.op_type} makes {size:,} rows; the limit is {SIZE_LIMIT:,}")


def _check_nodes(
    graph: Graph,
    around: AbstractSet[str] = frozenset({""}),
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> None:
    largest = {**sizes, **graph.largest}
    known = {*around, *graph.constants, *(port.name for port in graph.inputs)}
    if len(known) != len(around) + len(graph.constants) + len(graph.inputs):
        raise _unsafe("two inputs or constants of a graph have one name")
    for node in graph.nodes:
        if node.op_type not in OPERATORS.get(node.domain, ()):
            raise _unsafe(
                f"the exporter writes no operator {node.domain and node.domain + '.'}{node.op_type}"
            )
        strange = next((name for name in node.inputs if name not in known), None)
        if strange is not None:
            raise _unsafe(f"a node {node.op_type} takes {strange!r}, which nothing before it makes")
        _check_sizes(node, largest)
        if node.body is not None:
            _check_body(node, node.body, known, largest)
        made = [name for name in node.outputs if name]
        if len(set(made)) < len(made) or not known.isdisjoint(made):
            raise _unsafe(f"a node {node.op_type} makes a value that is there already")
        known.update(made)
    absent = next((port.name for port in graph.outputs if port.name not in known), None)
    if absent is not None:
        raise _unsafe(f"nothing makes the output {absent!r}")


def _check_body(
    node: Node, body: Graph, known: AbstractSet[str], largest: Mapping[str, int]
) -> None:
    """What a loop does in each step; it may read what the graph around it has made."""
    if (len(body.inputs), len(body.outputs)) != (len(node.inputs), len(node.outputs)):
        raise _unsafe(
            f"the body of a node {node.op_type} has other inputs or outputs than the node"
        )
    _check_nodes(body, known, largest)


def _compare(what: str, ports: Sequence[Port], stated: Sequence[TensorSpec]) -> None:
    found = [(port.name, port.dtype, port.shape) for port in ports]
    wanted = [(spec.name, spec.dtype, spec.shape) for spec in stated]
    if found != wanted:
        strange = next((f for f, w in zip(found, wanted, strict=False) if f != w), None)
        raise _unsafe(
            f"the {what} are not as the manifest says" + (f": {strange[0]!r}" if strange else "")
        )
