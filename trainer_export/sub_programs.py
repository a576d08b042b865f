"""Makes programs of parts of a traced program, with the values that pass between the parts.

Values pass at a cut. A value is part of it only if it is float32 and has a row for each sample, so
that it can be stored, and rows can be left out. Any other, such as a mask or a transposed view, is
computed again behind the cut.
"""

import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from fleet_protocol.graph_parts import kept_input
from trainer_export.graph import Port
from trainer_export.lowering.values import Spec, hint, is_fixed
from trainer_export.traced_program import BATCH, Trace

SAMPLES = "x"
_aten = torch.ops.aten
_MOVES = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,  # noqa: SLF001 - the operator's name
        _aten.reshape.default,
        _aten.permute.default,
        _aten.t.default,
        _aten.transpose.int,
        _aten.unsqueeze.default,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.expand.default,
        _aten.detach.default,
        _aten.alias.default,
        _aten.clone.default,
        operator.getitem,
    }
)
"""Operators that only arrange entries; they cost next to nothing above the cut."""


@dataclass(frozen=True)
class Cut:
    """Where a program is split.

    Attributes:
        program: the whole program.
        before: nodes before the cut, with all that they depend on.
        behind: nodes behind it, for which values pass.
    """

    program: Trace
    before: Collection[fx.Node]
    behind: Collection[fx.Node]

    def values(self) -> list[fx.Node]:
        """Return the values that pass, in the program's order."""
        passing: set[fx.Node] = set()
        visited: set[fx.Node] = set()
        dependent = _nodes_of_samples(self.program)
        waiting: list[fx.Node] = []
        for node in self.behind:
            waiting.extend(node.all_input_nodes)
        while waiting:
            node = waiting.pop()
            if node in visited or node not in self.before or node not in dependent:
                continue
            visited.add(node)
            if _can_pass(node):
                passing.add(node)
            else:
                waiting.extend(node.all_input_nodes)
        # In the program's order, so that the same model has the same names in every export.
        in_order: list[fx.Node] = []
        for node in self.program.program.graph.nodes:
            if node in passing:
                in_order.append(node)
        return in_order


def _nodes_of_samples(program: Trace) -> set[fx.Node]:
    """Return the nodes that depend on the samples."""
    dependent: set[fx.Node] = set()
    ports = iter(program.inputs)
    for node in program.program.graph.nodes:
        is_samples = node.op == "placeholder" and next(ports).name == SAMPLES
        if is_samples or not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    return dependent


def _can_pass(node: fx.Node) -> bool:
    """Return whether a value is computed, is float32 and has a row for each sample."""
    spec = node.meta.get("val")
    if node.op != "call_function" or not isinstance(spec, Spec) or not spec.shape:
        return False
    batch, *sizes = spec.shape
    # Rows are stored sample by sample, so all of them need one size.
    has_rows = isinstance(batch, sympy.Symbol) and is_fixed(sizes)
    if not has_rows or spec.dtype != torch.float32:
        return False
    # A smaller view, such as one token of a text, takes less space than its source.
    return node.target not in _MOVES or _is_smaller(node, spec)


def _is_smaller(node: fx.Node, spec: Spec) -> bool:
    """Return whether a view has fewer entries than what it is a view of."""
    for source in node.all_input_nodes:
        before = source.meta.get("val")
        if not isinstance(before, Spec) or hint(before.shape) <= hint(spec.shape):
            return False
    return True


def results_of(program: Trace) -> tuple[fx.Node, ...]:
    """Return the nodes of a program's outputs, in their order."""
    results: Any = program.program.graph.output_node().args[0]
    return tuple(results)


def needed_for(nodes: Iterable[fx.Node], taken: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Return what must be computed for some nodes, with them, from inputs and `taken` values."""
    needed: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node in needed or node in taken or _is_size(node):
            continue
        needed.add(node)
        waiting.extend(node.all_input_nodes)
    return needed


def _is_size(node: fx.Node) -> bool:
    """Return whether a node is a number of the trace, for which no operator is written."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), (int, sympy.Basic))


def kept_port(node: fx.Node, number: int) -> Port:
    """Return the port of a value that passes at a cut."""
    spec: Spec = node.meta["val"]
    return Port(kept_input(number), "float32", (BATCH, *spec.shape[1:]))


def sub_program(
    program: Trace,
    name: str,
    taken: Mapping[fx.Node, Port],
    returned: Mapping[Port, fx.Node],
) -> Trace:
    """Return a part of a program.

    Args:
        program: the whole program.
        name: name of the part.
        taken: values that are inputs of the part, with their ports.
        returned: outputs of the part, with their values.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    inputs: dict[Port, Spec] = {}
    needed = needed_for(returned.values(), taken)
    ports = iter(zip(program.inputs, program.input_specs, strict=True))
    for node in program.program.graph.nodes:
        if node.op != "placeholder":
            continue
        port, spec = next(ports)
        if node in needed:
            inputs[port] = spec
            copies[node] = graph.node_copy(node, copies.__getitem__)
    for node, port in taken.items():
        copies[node] = graph.placeholder(f"taken_{len(inputs)}")
        # The lowering reads the shape of a value from here.
        copies[node].meta = dict(node.meta)
        inputs[port] = node.meta["val"]
    for node in program.program.graph.nodes:
        # Sizes are numbers in both parts, and need no place in the graph.
        if _is_size(node):
            copies[node] = node.meta["val"]
        elif node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for node in returned.values()])
    batched = [port.name for port in inputs if BATCH in port.shape]
    return replace(
        program,
        name=name,
        program=fx.GraphModule(program.program, graph),
        inputs=tuple(inputs),
        input_specs=tuple(inputs.values()),
        outputs=tuple(returned),
        batch_input=SAMPLES if SAMPLES in batched else batched[0],
        hidden=frozenset(),
    )
