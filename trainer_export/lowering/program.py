"""Writes a traced program as ONNX, operator by operator, and says what to do about an operator it
does not know.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from fleet_protocol.errors import ExportError
from trainer_export.graph import GraphBuilder
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.table import LOWERINGS, Lowering
from trainer_export.lowering.values import Spec, Value, numpy_dtype
from trainer_export.traced_program import Trace

_NO_RANDOM_NUMBERS = "a NoiseLayer of models.zoo.dropout for random numbers: graphs draw none, its uniform(x) is an input of theirs"

_SUGGESTIONS: Mapping[str, str] = MappingProxyType(
    {
        "dropout": "Dropout of models.zoo.dropout (`shoal export --convert` or models.zoo.conversion puts it there);"
        " scaled_dot_product_attention takes it behind its softmax, so write that, and give it dropout_p=0",
        **dict.fromkeys(
            (
                "bernoulli",
                "exponential",
                "rrelu",
                "rand",
                "normal_",
                "uniform_",
                "empty",
            ),
            _NO_RANDOM_NUMBERS,
        ),
        ".prod.": "prod or cumprod along one dimension of fixed size",
        "grid_sampler": "torch.nn.functional.grid_sample, which is written in simpler operators",
        "nonzero": "a mask and a multiplication: sizes must not depend on values",
        "copy_.": "a new tensor: a graph does not write into parameters, buffers or their data",
        "scatter_reduce": "index_add, or amax over torch.where with a mask",
        "kthvalue": "topk",
        **dict.fromkeys(
            (".max.default", ".min.default"),
            "amax or amin along dimensions behind the batch",
        ),
        **dict.fromkeys(
            ("bucketize", "searchsorted"),
            "sums of comparisons: (x.unsqueeze(-1) > edges).sum(-1)",
        ),
        "lgamma": "Stirling's series above 0: with y = x + 5, (y - 0.5) * y.log() - y + 0.9189385 + 1 / (12 * y)"
        " - 1 / (360 * y**3) - (x * (x + 1) * (x + 2) * (x + 3) * (x + 4)).log()",
        "digamma": "its series above 0: with y = x + 5, y.log() - 1 / (2 * y) - 1 / (12 * y**2) + 1 / (120 * y**4)"
        " - sum(1 / (x + k) for k in range(5))",
        "erfinv": "Winitzki's formula, right to 0.4 %: with t = (1 - x * x).log() and s = 4.3307 + t / 2,"
        " x.sign() * ((s * s - t / 0.147).sqrt() - s).sqrt()",
        "sparse": "a dense matrix",
        "unfold": "Tensor.unfold; for a spectrum matrix products with tables of cosines and sines",
        "linalg": "additions and matrix products",
        "fft": "matrix products with tables of cosines and sines",
        "complex": "real arithmetic on two tensors",
    }
)


def write_graph(trace: Trace, metadata: Mapping[str, str] | None = None) -> Any:
    """The ONNX model of a traced program, of standard operators: an ``onnx.ModelProto``.

    Raises:
        ExportError: an operator has no lowering; the message names it, its module and what to use
            instead.
    """
    graph = GraphBuilder(trace.name)
    values: list[Value] = []
    for port, spec in zip(trace.inputs, trace.input_specs, strict=True):
        name = port.name if port.name in trace.hidden else graph.input(port)
        values.append(
            Value(name, spec.shape, spec.dtype, spec.shape, tuple(range(len(spec.shape))))
        )
    emitter = Emitter(graph, trace.batch_input)
    for port, value in zip(trace.outputs, lower(emitter, trace, values), strict=True):
        if port.name not in trace.hidden:
            graph.output(port, emitter.plain(value))
    return graph.model(metadata)


def lower(
    emitter: Emitter,
    trace: Trace,
    inputs: Sequence[Value],
    rules: Mapping[Any, Lowering] = LOWERINGS,
) -> list[Value]:
    """Write the nodes of a traced program into a graph; the values of its outputs.

    Errors as of `write_graph`.
    """
    known: dict[fx.Node, Any] = {}
    waiting = iter(inputs)
    for node in trace.program.graph.nodes:
        if node.op == "placeholder":
            known[node] = next(waiting)
        elif node.op == "get_attr":
            try:
                known[node] = _constant(emitter, getattr(trace.program, str(node.target)))
            except ExportError as error:
                raise ExportError(
                    f"{trace.where(next(iter(node.users), node))}: {error}"
                ) from error
        elif node.op == "output":
            return [_resolve(known, value) for value in node.args[0]]
        else:
            known[node] = _call(emitter, trace, node, known, rules)
    raise ExportError(f"the trace of {trace.name} has no output")


def _constant(emitter: Emitter, tensor: torch.Tensor) -> Value:
    array = tensor.detach().cpu().numpy().astype(numpy_dtype(tensor.dtype))
    return emitter.value(emitter.graph.constant(array), array.shape, tensor.dtype)


def _call(
    emitter: Emitter,
    trace: Trace,
    node: fx.Node,
    known: Mapping[fx.Node, Any],
    rules: Mapping[Any, Lowering],
) -> Any:
    meta = node.meta.get("val")
    if isinstance(meta, (sympy.Basic, int)):
        return meta
    if getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[0], fx.Node):
        return known[node.args[0]][node.args[1]]
    lowering = rules.get(node.target)
    if lowering is None:
        raise _unsupported(trace, node)
    args = [_resolve(known, arg) for arg in node.args]
    kwargs = {key: _resolve(known, arg) for key, arg in node.kwargs.items()}
    try:
        result = lowering(emitter, meta, *args, **kwargs)
    except ExportError as error:
        raise ExportError(f"{trace.where(node)}: {error}") from error
    if isinstance(result, Value) and isinstance(meta, Spec) and result.rank != len(meta.shape):
        raise ExportError(
            f"{trace.where(node)}: lowering of {node.target} lost a dimension; report this as a bug"
        )
    return result


def _resolve(known: Mapping[fx.Node, Any], arg: Any) -> Any:
    if isinstance(arg, fx.Node):
        return known[arg]
    return [_resolve(known, item) for item in arg] if isinstance(arg, (list, tuple)) else arg


def _unsupported(trace: Trace, node: fx.Node) -> ExportError:
    name = str(node.target)
    plain = (
        "express it with matrix products, convolutions, element-wise operators, sums and softmax"
    )
    advice = next((f"use {text}" for key, text in _SUGGESTIONS.items() if key in name), plain)
    if not isinstance(node.target, torch._ops.OpOverload):  # noqa: SLF001 - no public name
        name = f"{getattr(node.target, '__name__', name)} on the size of the batch"
        advice = "what a model says of a sample must not depend on how many there are; take sums or means instead"
    return ExportError(f"{trace.where(node)}: operator {name} cannot be exported; {advice}")
