"""The portable format: four graphs of standard ONNX operators that every stock onnxruntime from
1.18 on runs.
"""

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
    graph: bytes, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]
) -> bytes:
    """Put weights into a serialized infer graph, by its inputs ``param.*`` and ``stat.*``, and
    metadata.

    Returns:
        A model of one input, ``x``, and one output, ``logits``.

    Raises:
        ConfigError: a tensor is missing.
    """
    model = onnx.load_model_from_string(graph)
    inputs = [value for value in model.graph.input if value.name not in tensors]
    missing = [value.name for value in inputs if value.name != "x"]
    if missing:
        raise ConfigError(
            f"the store has no {missing[0]} that fits this tier: statistics are kept of the tier that is judged;"
            " export that one (evaluation.tier), or take --format safetensors"
        )
    used = {value.name for value in model.graph.input}
    model.graph.initializer.extend(
        numpy_helper.from_array(tensors[name], name) for name in tensors if name in used
    )
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    helper.set_model_props(
        model, {item.key: item.value for item in model.metadata_props} | dict(metadata)
    )
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def fit_into_memory(model: onnx.ModelProto) -> onnx.ModelProto:
    """A graph with one dynamic dimension, rewritten.

    Where nothing can be gained, a copy with the same nodes.

    Both rewrites are exact up to the order of additions: columns of convolutions in pieces, which
    fit the cache, and values that wait for a late consumer computed again. The order of nodes is
    part of the result: run it with the runtime's priority-based execution order, as the default one
    delays weight gradients to the end.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = SizedGraph(result)
    graph.replace([new for node in result.graph.node for new in (in_pieces(graph, node) or [node])])
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
    return written(trace_train(module, signature, recipe))


def write_forward_graphs(
    module: nn.Module, signature: Signature, recipe: Recipe
) -> tuple[GraphFile, ...]:
    """Write the eval, stats (with static batch norm only) and infer graphs.

    Arguments as for :func:`write_graphs`.
    """
    evaluation = trace_eval(module, signature, recipe)
    traces = (
        evaluation,
        trace_statistics(module, signature, recipe),
        infer_part(evaluation),
    )
    return tuple(written(trace) for trace in traces if trace is not None)


def written(trace: Trace) -> GraphFile:
    """A traced program as a file of the portable format."""
    model = fit_into_memory(write_graph(trace, {"shoal.graph": trace.name}))
    data = model.SerializeToString(deterministic=True)
    inputs, outputs = (
        tuple(p for p in ports if p.name not in trace.hidden)
        for ports in (trace.inputs, trace.outputs)
    )
    return GraphFile(f"onnx/{trace.name}", f"{trace.name}.onnx", data, inputs, outputs, model)


def check_graphs(
    graphs: Sequence[GraphFile],
    module: nn.Module,
    recipe: Recipe,
    batches: SizedBatches,
) -> tuple[CheckSpec, ...]:
    """Compare every graph with PyTorch; an ExportError names one that deviates, and the tensor."""
    return tuple(_CHECKS[graph.key](graph.data, module, recipe, batches) for graph in graphs)
