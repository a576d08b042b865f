"""Evaluation: sums of the loss and its metrics over a batch.

Static batch norms use statistics that are inputs.
"""

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fleet_protocol.manifest import CheckSpec
from trainer_export.batches import SizedBatches
from trainer_export.check import Session
from trainer_export.forward import check_forward, trace_forward
from trainer_export.graph import Port
from trainer_export.loss import Answer
from trainer_export.metric import count_shapes, counts
from trainer_export.model_inputs import Signature, batch_ports, output_ports
from trainer_export.recipe import Recipe
from trainer_export.traced_program import Trace


def trace_eval(
    model: nn.Module,
    signature: Signature,
    recipe: Recipe,
) -> Trace:
    """Trace the sums of a batch, in the order of the loss's metrics.

    The program also returns the model's output, for `infer.infer_part`.

    Returns:
        The inputs are those of `trace_forward`, ``y`` and ``mask``.
    """

    def evaluate(output: Tensor, *answer_tensors: Tensor) -> list[Tensor]:
        answer = Answer(*answer_tensors)
        sums = recipe.loss.sums(output, answer)
        further = counts(recipe.metrics, recipe.loss, output, answer)
        return [*sums, *further.values(), *tree_leaves(output)]

    outputs: list[Port] = []
    for metric in recipe.loss.metrics:
        outputs.append(Port(metric.name, metric.dtype, ()))
    for name, shape in count_shapes(recipe.metrics, recipe.loss, signature).items():
        outputs.append(Port(name, "float32", shape))
    answer_ports = batch_ports(signature, recipe.loss)[1:]  # `trace_forward` has ``x`` itself
    all_outputs = (*outputs, *output_ports(signature))
    traced = trace_forward(model, signature, evaluate, answer_ports, all_outputs)
    return traced.part("eval", [port.name for port in outputs])


def check_eval(
    model: bytes | Session,
    module: nn.Module,
    recipe: Recipe,
    batches: SizedBatches,
    *,
    graph: str = "onnx/eval",
) -> CheckSpec:
    """Compare the sums with those of the original module in PyTorch, which is not changed.

    Raises:
        ExportError: a sum deviates.
    """
    names = [metric.name for metric in recipe.loss.metrics]

    def expected(output: Tensor, y: Tensor) -> dict[str, Tensor]:
        answer = Answer(y, batches.mask())
        sums = dict(
            zip(
                names,
                recipe.loss.pytorch_sums(output, answer),
                strict=True,
            )
        )
        return sums | counts(recipe.metrics, recipe.loss, output, answer, by_pytorch=True)

    return check_forward(model, module, batches, graph, expected)
