"""Graphs that read parameters and change nothing: a run with statistics, and what follows it."""

from collections.abc import Callable
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
from trainer_export.batches import SizedBatches
from trainer_export.check import Session, Worst, open_session, run_session
from trainer_export.graph import Port
from trainer_export.model_inputs import (
    Signature,
    call_model,
    check_output,
    norms,
    parameter_names,
    parameter_ports,
    prepared,
    sample_port,
    statistic_ports,
)
from trainer_export.traced_program import Trace, trace_program


def trace_forward(
    model: nn.Module,
    signature: Signature,
    finish: Callable[..., list[Tensor]],
    extra: tuple[Port, ...],
    outputs: tuple[Port, ...],
) -> Trace:
    """Trace a run of the model in evaluation mode, and what a pure function makes of its output.

    The model is not changed. Inputs are ``param.*``, ``stat.*``, ``x`` and the extra ones.

    Args:
        model: what is run.
        signature: of the model.
        finish: takes the output of the model, then the extra inputs.
        extra: inputs of `finish`.
        outputs: of `finish`.
    """
    model = prepared(model, "eval")
    names = parameter_names(model)
    layers = norms(model)
    for path, _ in layers:
        names += [f"{path}.running_mean", f"{path}.running_var"]
    count = len(names)

    def run(*tensors: Tensor) -> list[Tensor]:
        output = call_model(model, names, tensors[:count], tensors[count])
        check_output(output, signature)
        return finish(output, *tensors[count + 1 :])

    shapes = {}
    for name, value in model.named_parameters():
        shapes[name] = tuple(value.shape)
    inputs = (
        *parameter_ports(shapes),
        *statistic_ports(layers),
        sample_port(signature),
        *extra,
    )
    return trace_program("eval", run, inputs, outputs, signature.known)


def check_forward(
    model: bytes | Session,
    module: nn.Module,
    batches: SizedBatches,
    graph: str,
    expected: Callable[[Tensor, Tensor], dict[str, Tensor]],
) -> CheckSpec:
    """Compare a forward graph with the module as it was written, which is not changed.

    Args:
        model: the graph.
        module: what it must agree with.
        batches: what both are run on.
        graph: its name in the report.
        expected: from the module's output and the targets what the graph must return.

    Raises:
        ExportError: it deviates.
    """
    session = open_session(model)
    worst = Worst()
    reference = prepared(module, "eval")
    feed = {}
    for name, parameter in reference.named_parameters():
        feed[parameter_input(name)] = parameter.detach().numpy()
    feed |= _random_statistics(reference, batches.seed)
    for x, y in batches.take(len(batches.sizes)):
        worst.sizes.append(len(y))
        batch = {"x": x.numpy(), "y": y.numpy(), "mask": batches.mask().numpy()}
        outputs = run_session(session, {**feed, **batch})
        with torch.no_grad():
            for name, value in expected(reference(x), y).items():
                worst.compare(outputs, {name: value.numpy()})
    return worst.report(graph, len(batches.sizes))


def _random_statistics(module: nn.Module, seed: int) -> dict[str, NDArray[Any]]:
    """Set statistics that no norm has by accident, and return them as inputs of a graph."""
    generator = torch.Generator().manual_seed(seed)
    feed: dict[str, NDArray[Any]] = {}
    for path, norm in norms(module):
        norm.running_mean = torch.randn(norm.running_mean.shape, generator=generator) * 0.1
        norm.running_var = torch.rand(norm.running_var.shape, generator=generator) + 0.5
        feed[statistic_mean(path)] = norm.running_mean.numpy()
        feed[statistic_variance(path)] = norm.running_var.numpy()
    return feed
