"""Evaluation: sums of the loss and its metrics over a batch, with given statistics of the static
batch norms.
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


def trace_eval(model: nn.Module, signature: Signature, recipe: Recipe) -> Trace:
    """The sums of a batch, in the order of the loss's metrics.

    Inputs as of `trace_forward`, ``y`` and ``mask``.

    The program also gives the model's output, for `infer.infer_part`.
    """

    def evaluate(output: Tensor, *answer: Tensor) -> list[Tensor]:
        given = Answer(*answer)
        sums = [
            *recipe.loss.sums(output, given),
            *counts(recipe.metrics, recipe.loss, output, given).values(),
        ]
        return [*sums, *tree_leaves(output)]

    outputs = (
        *(Port(metric.name, metric.dtype, ()) for metric in recipe.loss.metrics),
        *(
            Port(name, "float32", shape)
            for name, shape in count_shapes(recipe.metrics, recipe.loss, signature).items()
        ),
    )
    extra = batch_ports(signature, recipe.loss)[1:]
    traced = trace_forward(model, signature, evaluate, extra, (*outputs, *output_ports(signature)))
    return traced.part("eval", [port.name for port in outputs])


def check_eval(
    model: bytes | Session,
    module: nn.Module,
    recipe: Recipe,
    batches: SizedBatches,
    *,
    graph: str = "onnx/eval",
) -> CheckSpec:
    """Compare the sums with PyTorch's of the module as written, not changed.

    An ExportError where one deviates.
    """
    names = [metric.name for metric in recipe.loss.metrics]

    def expected(output: Tensor, y: Tensor) -> dict[str, Tensor]:
        given = Answer(y, batches.mask())
        sums = dict(zip(names, recipe.loss.pytorch_sums(output, given), strict=True))
        return sums | counts(recipe.metrics, recipe.loss, output, given, by_pytorch=True)

    return check_forward(model, module, batches, graph, expected)
