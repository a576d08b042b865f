"""The portable format: graphs of standard ONNX operators, which onnxruntime 1.18 and later run."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from torch import nn

from fleet_protocol.errors import ConfigError
from fleet_protocol.manifest import CheckSpec
from trainer_export.batches import SizedBatches
from trainer_export.column_pieces import in_pieces
from trainer_export.formats.files import GraphFile
from trainer_export.formats.model_bytes import model_bytes
from trainer_export.lowering.program import write_graph
from trainer_export.model_inputs import Signature
from trainer_export.recipe import Recipe
from trainer_export.recomputing import compute_again
from trainer_export.routines.evaluate import check_eval, trace_eval
from trainer_export.routines.infer import check_infer, infer_part
from trainer_export.routines.statistics import check_statistics, trace_statistics
from trainer_export.routines.train import check_train, trace_train
from trainer_export.sized_graph import SizedGraph
from trainer_export.traced_program import Trace

_CHECKS: Mapping[str, Callable[[bytes, nn.Module, Recipe, SizedBatches], CheckSpec]] = (
    MappingProxyType(
        {
            "onnx/train": check_train,
            "onnx/eval": check_eval,
            "onnx/stats": check_statistics,
            "onnx/infer": check_infer,
        }
    )
)


def runnable(
    graph: bytes,
    tensors: Mapping[str, NDArray[Any]],
    metadata: Mapping[str, str],
) -> bytes:
    """Put weights and metadata into a serialized infer graph.

    Args:
        graph: what the weights go into.
        tensors: weights by its inputs ``param.*`` and ``stat.*``.
        metadata: added to what it has.

    Returns:
        A model of one input, ``x``, and one output, ``logits``.

    Raises:
        ConfigError: a tensor is missing.
    """
    model = onnx.load_model_from_string(graph)
    names = {value.name for value in model.graph.input}
    inputs = []
    for value in model.graph.input:
        if value.name not in tensors:
            inputs.append(value)
    for value in inputs:
        if value.name != "x":
            raise ConfigError(
                f"the store has no {value.name} that fits this tier: statistics are kept of the"
                " tier that is judged; export that one (evaluation.tier), or take --format"
                " safetensors"
            )
    for name, tensor in tensors.items():
        if name in names:
            model.graph.initializer.append(numpy_helper.from_array(tensor, name))
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    properties = {}
    for entry in model.metadata_props:
        properties[entry.key] = entry.value
    helper.set_model_props(model, properties | dict(metadata))
    return model_bytes(model)


def fit_into_memory(model: onnx.ModelProto) -> onnx.ModelProto:
    """Rewrite a graph with one dynamic dimension so that it takes less memory.

    Where nothing can be gained, this is a copy with the same nodes.

    Both rewrites are exact up to the order of additions: columns of convolutions in pieces, which
    fit the cache, and values that wait for a late consumer computed again. The order of nodes is
    part of the result: run it with the runtime's priority-based execution order, as the default one
    delays weight gradients to the end.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = SizedGraph(result)
    nodes: list[onnx.NodeProto] = []
    for node in result.graph.node:
        nodes += in_pieces(graph, node) or [node]
    graph.replace(nodes)
    compute_again(graph)
    return result


def write_graphs(module: nn.Module, signature: Signature, recipe: Recipe) -> tuple[GraphFile, ...]:
    """Write the train, eval, stats (with static batch norm only) and infer graphs of a model.

    Raises:
        ExportError: an operator cannot be exported.
    """
    return (
        write_train_graph(module, signature, recipe),
        *write_forward_graphs(module, signature, recipe),
    )


def write_train_graph(module: nn.Module, signature: Signature, recipe: Recipe) -> GraphFile:
    """Write the train graph alone; arguments and errors as for :func:`write_graphs`."""
    return write_trace(trace_train(module, signature, recipe))


def write_forward_graphs(
    module: nn.Module,
    signature: Signature,
    recipe: Recipe,
) -> tuple[GraphFile, ...]:
    """Write the eval, stats (with static batch norm only) and infer graphs.

    Arguments as for :func:`write_graphs`.
    """
    evaluation = trace_eval(module, signature, recipe)
    statistics = trace_statistics(module, signature, recipe)
    traces = [evaluation, infer_part(evaluation)]
    if statistics is not None:
        traces.insert(1, statistics)
    return tuple(write_trace(trace) for trace in traces)


def write_trace(trace: Trace) -> GraphFile:
    """Return a traced program as a file of the portable format."""
    model = fit_into_memory(write_graph(trace, {"shoal.graph": trace.name}))
    data = model_bytes(model)
    visible_inputs = []
    for port in trace.inputs:
        if port.name not in trace.hidden:
            visible_inputs.append(port)
    inputs = tuple(visible_inputs)
    visible_outputs = []
    for port in trace.outputs:
        if port.name not in trace.hidden:
            visible_outputs.append(port)
    outputs = tuple(visible_outputs)
    return GraphFile(f"onnx/{trace.name}", f"{trace.name}.onnx", data, inputs, outputs, model)


def check_graphs(
    graphs: Sequence[GraphFile],
    module: nn.Module,
    recipe: Recipe,
    batches: SizedBatches,
) -> tuple[CheckSpec, ...]:
    """Compare every graph with PyTorch.

    Raises:
        ExportError: one deviates; the message names it and the tensor.
    """
    return tuple(_CHECKS[graph.key](graph.data, module, recipe, batches) for graph in graphs)
