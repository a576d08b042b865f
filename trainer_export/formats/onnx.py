"""The portable format: graphs of standard ONNX operators, which onnxruntime 1.18 and later run."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from torch import nn

from fleet_protocol.errors import ConfigError
from fleet_protocol.graph_parts import exit_keys
from fleet_protocol.manifest import CheckSpec
from trainer_export.batches import SizedBatches
from trainer_export.column_pieces import in_pieces
from trainer_export.exit_stages import stages_of
from trainer_export.formats.chained import Chained
from trainer_export.formats.files import GraphFile
from trainer_export.formats.model_bytes import model_bytes
from trainer_export.late_gradients import delay_gradients
from trainer_export.lowering.program import write_graph
from trainer_export.model_inputs import Signature
from trainer_export.pointwise_norms import has_convolutions
from trainer_export.recipe import Recipe
from trainer_export.recomputing import compute_again
from trainer_export.routines.evaluate import check_eval, trace_eval
from trainer_export.routines.infer import check_infer, infer_part
from trainer_export.routines.statistics import check_statistics, trace_statistics
from trainer_export.routines.train import trace_train
from trainer_export.sized_graph import SizedGraph
from trainer_export.step_parts import parts_of
from trainer_export.traced_program import Trace
from trainer_export.train_check import check_train

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
        graph: the graph.
        tensors: weights and statistics by its inputs ``param.*`` and ``stat.*``.
        metadata: metadata to add.

    Returns:
        A model with one input, ``x``, and one output, ``logits``.

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
        # The inputs besides the samples that are left have no value in this store.
        if value.name != "x":
            raise ConfigError(
                f"the store has no {value.name} for this tier: it keeps statistics only of the"
                " evaluated tier; export that one (evaluation.tier), or use --format"
                " safetensors"
            )
    for name, tensor in tensors.items():
        if name in names:
            model.graph.initializer.append(numpy_helper.from_array(tensor, name))
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    # Properties with the same name get the new value.
    properties = {}
    for entry in model.metadata_props:
        properties[entry.key] = entry.value
    helper.set_model_props(model, properties | dict(metadata))
    return model_bytes(model)


def fit_into_memory(model: onnx.ModelProto) -> onnx.ModelProto:
    """Rewrite a graph with one dynamic dimension so that it needs less memory.

    If nothing can be saved, the result is a copy with the same nodes.

    There are two rewrites, both exact up to the order of additions. They split the columns of
    convolutions into pieces that fit the cache, and recompute values that wait for a late consumer.
    The order of nodes is part of the result: run it with the runtime's priority-based execution
    order, because the default order delays weight gradients to the end.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = SizedGraph(result)
    nodes: list[onnx.NodeProto] = []
    for node in result.graph.node:
        # Pieces first: recomputing decides by the sizes that are left.
        nodes += in_pieces(graph, node) or [node]
    graph.replace(nodes)
    compute_again(graph)
    return result


def write_graphs(
    module: nn.Module,
    signature: Signature,
    recipe: Recipe,
) -> tuple[GraphFile, ...]:
    """Write the train, eval, stats (with static batch norm only) and infer graphs of a model.

    If layers below what is trained are worth it, the train graph follows once more in two parts.

    Raises:
        ExportError: an operator cannot be exported.
    """
    whole, *parts = write_step_graphs(module, signature, recipe)
    return (whole, *write_forward_graphs(module, signature, recipe), *parts)


def write_step_graphs(
    module: nn.Module, signature: Signature, recipe: Recipe
) -> tuple[GraphFile, ...]:
    """Write the train graph, and its two parts if there are any.

    Arguments and errors as for :func:`write_graphs`.
    """
    step = trace_train(module, signature, recipe)
    traces = [step]
    parts = parts_of(step, signature.base)
    if parts is not None:
        traces += [parts.below, parts.above]
    return tuple(_write_step(trace, signature) for trace in traces)


def _write_step(step: Trace, signature: Signature) -> GraphFile:
    """Write a training step or a part of it."""
    # A step that trains everything keeps the order of its additions, and so its bits.
    has_frozen = bool(signature.base)
    if has_frozen:
        delay_gradients(step.program.graph)
    # Only convolutions gain from another order.
    is_free = has_frozen and has_convolutions(step.program.graph)
    return write_trace(step, free_order=is_free)


def write_train_graph(
    module: nn.Module,
    signature: Signature,
    recipe: Recipe,
) -> GraphFile:
    """Write only the train graph; arguments and errors as for :func:`write_graphs`."""
    return _write_step(trace_train(module, signature, recipe), signature)


def write_forward_graphs(
    module: nn.Module,
    signature: Signature,
    recipe: Recipe,
) -> tuple[GraphFile, ...]:
    """Write the eval, stats (with static batch norm only) and infer graphs.

    A model with exits has its infer graph once more in stages, which end at the exits.

    Arguments as for :func:`write_graphs`.
    """
    evaluation = trace_eval(module, signature, recipe)
    statistics = trace_statistics(module, signature, recipe)
    # Infer is eval without its loss, so both share one trace.
    # The order of a manifest: train, eval, stats, infer.
    inference = infer_part(evaluation)
    traces = [evaluation, inference]
    if len(signature.heads) > 1 and recipe.loss.answering(signature.outputs(1)):
        traces += stages_of(inference)
    if statistics is not None:
        traces.insert(1, statistics)
    return tuple(write_trace(trace) for trace in traces)


def write_trace(trace: Trace, *, free_order: bool = False) -> GraphFile:
    """Return a traced program as a file of the portable format.

    Args:
        trace: the program.
        free_order: whether additions may have any order.
    """
    # The name lies in the graph too, so that a file can be recognised without its manifest.
    metadata = {"shoal.graph": trace.name}
    model = fit_into_memory(write_graph(trace, metadata, free_order=free_order))
    data = model_bytes(model)
    visible_inputs = []
    for port in trace.inputs:
        # A part of a program leaves out the inputs and outputs that only its other outputs need.
        if port.name not in trace.hidden:
            visible_inputs.append(port)
    inputs = tuple(visible_inputs)
    visible_outputs = []
    for port in trace.outputs:
        if port.name not in trace.hidden:
            visible_outputs.append(port)
    outputs = tuple(visible_outputs)
    return GraphFile(
        f"onnx/{trace.name}",
        f"{trace.name}.onnx",
        data,
        inputs,
        outputs,
        model,
    )


def check_graphs(
    graphs: Sequence[GraphFile],
    module: nn.Module,
    recipe: Recipe,
    batches: SizedBatches,
) -> tuple[CheckSpec, ...]:
    """Compare every graph with PyTorch, except the two parts of a step.

    Raises:
        ExportError: one deviates; the message names it and the tensor.
    """
    checks: list[CheckSpec] = []
    for graph in graphs:
        if graph.key in _CHECKS:
            checks.append(_CHECKS[graph.key](graph.data, module, recipe, batches))
    by_key = {graph.key: graph for graph in graphs}
    stages = [by_key[key].data for key in exit_keys(by_key)]
    if stages:
        checks.append(check_infer(Chained(stages), module, recipe, batches, graph="onnx/exit1"))
    return tuple(checks)
