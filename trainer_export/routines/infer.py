"""Inference: the model's output for a batch, with given statistics of the static batch norms."""

from torch import nn

from fleet_protocol.manifest import CheckSpec
from trainer_export.batches import SizedBatches
from trainer_export.check import Session
from trainer_export.forward import check_forward
from trainer_export.model_inputs import heads_of
from trainer_export.recipe import Recipe
from trainer_export.traced_program import Trace


def infer_part(evaluation: Trace) -> Trace:
    """Return the graph of a batch's output, a part of the model's `evaluate.trace_eval`.

    Its inputs are those of `trace_forward`.
    """
    heads: list[str] = []
    for port in evaluation.outputs:
        # ``logits``, or ``logits.NAME`` of a model with several outputs.
        if port.name.partition(".")[0] == "logits":
            heads.append(port.name)
    return evaluation.part("infer", heads, ["y", "mask"])


def check_infer(
    model: bytes | Session,
    module: nn.Module,
    recipe: Recipe,
    batches: SizedBatches,
    *,
    graph: str = "onnx/infer",
) -> CheckSpec:
    """Compare the output with PyTorch's.

    Raises:
        ExportError: if it deviates.
    """
    del recipe
    return check_forward(model, module, batches, graph, lambda output, _: heads_of(output))
