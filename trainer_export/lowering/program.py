"""Writes a traced program as ONNX, operator by operator."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from fleet_protocol.errors import ExportError
from trainer_export.graph import GraphBuilder
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.suggestions import ON_BATCH_SIZES, suggestion
from trainer_export.lowering.table import LOWERINGS, Lowering
from trainer_export.lowering.values import Spec, Value, numpy_dtype
from trainer_export.pointwise_norms import has_convolutions, has_groups
from trainer_export.traced_program import Trace


def write_graph(
    trace: Trace,
    metadata: Mapping[str, str] | None = None,
    *,
    free_order: bool = False,
) -> Any:
    """Return the ONNX model of a traced program, of standard operators: an ``onnx.ModelProto``.

    Args:
        trace: the program.
        metadata: names and values to write into the model.
        free_order: whether additions may have any order, which makes convolutions cheaper.

    Raises:
        ExportError: an operator has no lowering; the message names it, its module and a
            replacement.
    """
    graph = GraphBuilder(trace.name)
    values: list[Value] = []
    for port, spec in zip(trace.inputs, trace.input_specs, strict=True):
        # A hidden input is only for the trace: written nodes must not read it.
        name = port.name if port.name in trace.hidden else graph.input(port)
        order = tuple(range(len(spec.shape)))
        values.append(Value(name, spec.shape, spec.dtype, spec.shape, order))
    emitter = Emitter(
        graph,
        trace.batch_input,
        keeps_planes=has_groups(trace.program.graph),
        keeps_maps=has_convolutions(trace.program.graph),
        free_order=free_order,
    )
    for port, value in zip(trace.outputs, lower(emitter, trace, values), strict=True):
        if port.name not in trace.hidden:
            graph.output(port, emitter.in_logical_order(value))
    return graph.model(metadata)


def lower(
    emitter: Emitter,
    trace: Trace,
    inputs: Sequence[Value],
    rules: Mapping[Any, Lowering] = LOWERINGS,
) -> list[Value]:
    """Write the nodes of a traced program into a graph, and return the values of its outputs.

    It raises the errors of `write_graph`.
    """
    lowered = _Lowered(emitter, trace, rules, {})
    waiting = iter(inputs)
    for node in trace.program.graph.nodes:
        if node.op == "placeholder":
            lowered.values[node] = next(waiting)
        elif node.op == "get_attr":
            lowered.values[node] = lowered.constant(node)
        elif node.op == "output":
            results = []
            for value in node.args[0]:
                results.append(lowered.resolve(value))
            return results
        else:
            lowered.values[node] = lowered.call(node)
    raise ExportError(f"the trace of {trace.name} has no output")


@dataclass(frozen=True)
class _Lowered:
    """A traced program whose nodes are being written.

    Attributes:
        values: the result of each written node: a value, several values, or an expression of the
            batch size.
    """

    emitter: Emitter
    trace: Trace
    rules: Mapping[Any, Lowering]
    values: dict[fx.Node, Any]

    def constant(self, node: fx.Node) -> Value:
        """Write a tensor that the program has as an attribute."""
        tensor: torch.Tensor = getattr(self.trace.program, str(node.target))
        try:
            array = tensor.detach().cpu().numpy().astype(numpy_dtype(tensor.dtype))
            name = self.emitter.constant(array)
        except ExportError as error:
            # An attribute has no source line, but the first operator that reads it has one.
            reader = next(iter(node.users), node)
            raise ExportError(f"{self.trace.where(reader)}: {error}") from error
        return self.emitter.value(name, array.shape, tensor.dtype)

    def call(self, node: fx.Node) -> Any:
        """Write an operator by its rule."""
        meta = node.meta.get("val")
        if isinstance(meta, (sympy.Basic, int)):  # arithmetic on sizes, evaluated by the trace
            return meta
        if getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[0], fx.Node):
            return self.values[node.args[0]][node.args[1]]
        rule = self.rules.get(node.target)
        if rule is None:
            raise _unsupported(self.trace, node)
        args = [self.resolve(arg) for arg in node.args]
        kwargs = {}
        for key, arg in node.kwargs.items():
            kwargs[key] = self.resolve(arg)
        try:
            result = rule(self.emitter, meta, *args, **kwargs)
        except ExportError as error:
            raise ExportError(f"{self.trace.where(node)}: {error}") from error
        if isinstance(result, Value) and isinstance(meta, Spec) and result.rank != len(meta.shape):
            raise ExportError(
                f"{self.trace.where(node)}: lowering of {node.target} lost a dimension; report this"
                " as a bug"
            )
        return result

    def resolve(self, arg: Any) -> Any:
        """Return an argument of a node with values for nodes, in lists, too."""
        if isinstance(arg, fx.Node):
            return self.values[arg]
        if isinstance(arg, (list, tuple)):
            return [self.resolve(element) for element in arg]
        return arg


def _unsupported(trace: Trace, node: fx.Node) -> ExportError:
    """Return the error for an operator without a rule, with what to use instead."""
    name = str(node.target)
    advice = suggestion(name)
    if not isinstance(node.target, torch._ops.OpOverload):  # noqa: SLF001 - no public name
        name = f"{getattr(node.target, '__name__', name)} on the batch size"
        advice = ON_BATCH_SIZES
    return ExportError(f"{trace.where(node)}: operator {name} cannot be exported; {advice}")
