"""The portable format: four graphs of standard ONNX operators that every stock onnxruntime from 1.18 on runs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fleet_protocol.manifest import CheckSpec
from trainer_export import check
from trainer_export.check import SizedBatches
from trainer_export.formats.files import GraphFile
from trainer_export.lowering import write_graph
from trainer_export.memory import fit_into_memory
from trainer_export.recipe import Recipe
from trainer_export.trace import Signature, Trace, trace_eval, trace_infer, trace_statistics, trace_train

__all__ = ["check_graphs", "write_graphs", "write_train_graph"]


def write_graphs(module: nn.Module, signature: Signature, recipe: Recipe) -> tuple[GraphFile, ...]:
    """Write the train, eval, stats (with static batch norm only) and infer graphs of a model.

    Args:
        module: the sub-model; not changed.
        signature: what it takes and returns.
        recipe: loss and optimizer.

    Returns:
        The graphs.

    Raises:
        ExportError: an operator cannot be exported.
    """
    traces: list[Trace | None] = [
        trace_eval(module, signature),
        trace_statistics(module, signature),
        trace_infer(module, signature),
    ]
    return (write_train_graph(module, signature, recipe), *(_written(t) for t in traces if t is not None))


def write_train_graph(module: nn.Module, signature: Signature, recipe: Recipe) -> GraphFile:
    """Write the train graph alone; arguments and errors as for :func:`write_graphs`."""
    return _written(trace_train(module, signature, recipe))


def _written(trace: Trace) -> GraphFile:
    model = fit_into_memory(write_graph(trace, {"shoal.graph": trace.name}))
    data = model.SerializeToString(deterministic=True)
    return GraphFile(f"onnx/{trace.name}", f"{trace.name}.onnx", data, trace.inputs, trace.outputs, model)


def check_graphs(
    graphs: Sequence[GraphFile], module: nn.Module, recipe: Recipe, batches: SizedBatches
) -> tuple[CheckSpec, ...]:
    """Compare every graph with PyTorch.

    Args:
        graphs: what :func:`write_graphs` wrote.
        module: the sub-model as its author wrote it.
        recipe: what the train graph was made for.
        batches: random batches.

    Returns:
        One report per graph.

    Raises:
        ExportError: a graph deviates; the message names it and the tensor.
    """
    reports = []
    for graph in graphs:
        if graph.key == "onnx/train":
            reports.append(check.check_train(graph.data, module, recipe, batches))
        elif graph.key == "onnx/eval":
            reports.append(check.check_eval(graph.data, module, batches))
        elif graph.key == "onnx/stats":
            reports.append(check.check_statistics(graph.data, module, batches))
        else:
            reports.append(check.check_infer(graph.data, module, batches))
    return tuple(reports)
