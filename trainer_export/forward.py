"""Graphs that only read parameters: a forward pass with given statistics, and functions of it."""

from collections.abc import Callable
from dataclasses import dataclass
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
from trainer_export.check import Session, run_session
from trainer_export.double_graph import deviation_on, repeated_on
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
from trainer_export.reference import computed_in_float64, numpy_arrays
from trainer_export.repeated_check import Run
from trainer_export.traced_program import Trace, trace_program


def trace_forward(
    model: nn.Module,
    signature: Signature,
    finish: Callable[..., list[Tensor]],
    extra: tuple[Port, ...],
    outputs: tuple[Port, ...],
) -> Trace:
    """Trace a forward pass in evaluation mode, and a pure function of its output.

    The model is not changed. Inputs are ``param.*``, ``stat.*``, ``x`` and the extra ones.

    Args:
        model: the model to run.
        signature: signature of the model.
        finish: pure function of the output of the model and the extra inputs.
        extra: inputs of `finish`.
        outputs: outputs of `finish`.
    """
    # A copy in evaluation mode, in which dropout is off and norms use given statistics.
    model = prepared(model, "eval")
    names = parameter_names(model)
    layers = norms(model)
    for path, _ in layers:
        names += [f"{path}.running_mean", f"{path}.running_var"]
    # Parameters and statistics come first among the inputs, in this order.
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
    """Compare a forward graph with the original module, which is not changed.

    Args:
        model: the graph.
        module: the reference.
        batches: the batches for both.
        graph: its name in the report.
        expected: computes the expected outputs from the module's output and the targets.

    Raises:
        ExportError: the graph deviates.
    """

    def on(session: Session) -> Run:
        return _ForwardCheck(session, module, graph, expected).run

    return repeated_on(model, on, batches)


@dataclass(frozen=True)
class _ForwardCheck:
    """A forward graph and its PyTorch reference."""

    session: Session
    module: nn.Module
    graph: str
    expected: Callable[[Tensor, Tensor], dict[str, Tensor]]

    def run(self, batches: SizedBatches, exact: bool) -> CheckSpec:
        """Check some batches; with `exact`, also compare with PyTorch in float64."""
        worst = deviation_on(self.session)
        reference = prepared(self.module, "eval")
        feed: dict[str, NDArray[Any]] = {}
        for name, parameter in reference.named_parameters():
            feed[parameter_input(name)] = parameter.detach().numpy()
        feed |= _random_statistics(reference, batches.seed)
        for x, y in batches.draw(len(batches.sizes)):
            worst.sizes.append(len(y))
            batch = {"x": x.numpy(), "y": y.numpy(), "mask": batches.mask().numpy()}
            outputs = run_session(self.session, {**feed, **batch})
            values = numpy_arrays(self._compute(reference, x, y))
            truth = computed_in_float64(reference, self._compute, x, y) if exact else None
            for name, value in values.items():
                worst.compare(outputs, {name: value}, truth and {name: truth[name]})
        return worst.report(self.graph, len(batches.sizes))

    def _compute(self, model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            return self.expected(model(x), y)


def _random_statistics(module: nn.Module, seed: int) -> dict[str, NDArray[Any]]:
    """Set random statistics, and return them as inputs of a graph."""
    generator = torch.Generator().manual_seed(seed)
    feed: dict[str, NDArray[Any]] = {}
    for path, norm in norms(module):
        # Not zeros and ones, which would hide a statistic that the graph does not use.
        norm.running_mean = torch.randn(norm.running_mean.shape, generator=generator) * 0.1
        # At least 0.5, because a norm divides by the root of a variance.
        norm.running_var = torch.rand(norm.running_var.shape, generator=generator) + 0.5
        feed[statistic_mean(path)] = norm.running_mean.numpy()
        feed[statistic_variance(path)] = norm.running_var.numpy()
    return feed
