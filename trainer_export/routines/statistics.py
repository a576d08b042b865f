"""Statistics: mean and variance of every static batch norm for a batch (specification 1.6)."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fleet_protocol.manifest import (
    CheckSpec,
    parameter_input,
    statistic_mean,
    statistic_variance,
)
from models.zoo.builds import shapes_of
from trainer_export import model_inputs
from trainer_export.batches import SizedBatches
from trainer_export.check import Session, run_session
from trainer_export.double_graph import deviation_on, repeated_on
from trainer_export.recipe import Recipe
from trainer_export.reference import computed_in_float64, numpy_arrays
from trainer_export.repeated_check import Run
from trainer_export.traced_program import Trace, trace_program


def trace_statistics(
    model: nn.Module, signature: model_inputs.Signature, recipe: Recipe
) -> Trace | None:
    """Trace mean and unbiased variance of every static batch norm for one batch.

    None if the model has no static batch norm.
    """
    del recipe
    model = model_inputs.prepared(model, "statistics")
    names = model_inputs.parameter_names(model)
    layers = model_inputs.norms(model)
    if not layers:
        return None

    # Only what the norms saw is returned; the logits are dropped from the graph.
    def measure(*tensors: Tensor) -> list[Tensor]:
        model_inputs.call_model(
            model,
            names,
            tensors[:-1],
            tensors[-1],
        )
        statistics: list[Tensor] = []
        for _, norm in layers:
            # Mean before variance of each norm, the order of `statistic_ports`.
            for value in (norm.last_mean, norm.last_var):
                if value is not None:
                    statistics.append(value)
        return statistics

    shapes = shapes_of(model)
    inputs = (
        *model_inputs.parameter_ports(shapes),
        model_inputs.sample_port(signature),
    )
    return trace_program(
        "stats", measure, inputs, model_inputs.statistic_ports(layers), signature.known
    )


def check_statistics(
    model: bytes,
    module: nn.Module,
    recipe: Recipe,
    batches: SizedBatches,
    *,
    graph: str = "onnx/stats",
) -> CheckSpec:
    """Compare the statistics of every static batch norm.

    Raises:
        ExportError: if one deviates.
    """
    del recipe
    reference = model_inputs.prepared(module, "statistics")
    parameters: dict[str, NDArray[Any]] = {}
    for name, parameter in reference.named_parameters():
        parameters[parameter_input(name)] = parameter.detach().numpy()

    def on(session: Session) -> Run:
        def run(seeded: SizedBatches, exact: bool) -> CheckSpec:
            worst = deviation_on(session)
            for x, _ in seeded.draw(len(seeded.sizes)):
                worst.sizes.append(len(x))
                outputs = run_session(session, {**parameters, "x": x.numpy()})
                expected = numpy_arrays(_measured(reference, x))
                truth = computed_in_float64(reference, _measured, x) if exact else None
                # Each by itself: `compare` judges small tensors by the largest of a call.
                for name, value in expected.items():
                    worst.compare(outputs, {name: value}, truth and {name: truth[name]})
            return worst.report(graph, len(seeded.sizes))

        return run

    return repeated_on(model, on, batches)


def _measured(reference: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the statistics that the batch norms of a module see in a batch."""
    with torch.no_grad():
        reference(x)
    statistics: dict[str, Tensor] = {}
    for path, norm in model_inputs.norms(reference):
        assert norm.last_mean is not None
        assert norm.last_var is not None
        statistics[statistic_mean(path)] = norm.last_mean
        statistics[statistic_variance(path)] = norm.last_var
    return statistics
