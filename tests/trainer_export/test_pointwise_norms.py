"""A convolution of single places and its batch norm become one operator where that pays."""

from collections import Counter

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor

from trainer_export.graph import Port
from trainer_export.lowering.program import write_graph
from trainer_export.operators import static_batch_norm
from trainer_export.traced_program import Trace, trace_program

INPUTS = 6
EPS = 1e-5


def step(
    x: Tensor, depth: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, slope: Tensor
) -> list[Tensor]:
    """A depthwise convolution, one of single places and a norm, with all gradients."""
    variables = [value.detach().requires_grad_() for value in (x, depth, weight, scale, shift)]
    x, depth, weight, scale, shift = variables
    between = torch.conv2d(x, depth, padding=1, groups=INPUTS)
    y = static_batch_norm(torch.conv2d(between, weight), scale, shift, EPS)
    return [y.detach(), *torch.autograd.grad(y, variables, slope)]


def traced(outputs: int) -> tuple[Trace, list[Tensor]]:
    """The program, and inputs whose means are far above their deviations."""
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "x": (5, INPUTS, 4, 3),
        "depth": (INPUTS, 1, 3, 3),
        "weight": (outputs, INPUTS, 1, 1),
        "scale": (outputs,),
        "shift": (outputs,),
        "slope": (5, outputs, 4, 3),
    }
    tensors = [torch.randn(shape, generator=generator) for shape in shapes.values()]
    tensors[0] = tensors[0] + 20
    ports = tuple(
        Port(name, "float32", ("batch", *shape[1:]) if shape[0] == 5 else shape)
        for name, shape in shapes.items()
    )
    results = (
        Port("y", "float32", ports[-1].shape),
        *(Port(f"next.{port.name}", "float32", port.shape) for port in ports[:-1]),
    )
    return trace_program("step", step, ports, results), tensors


@pytest.mark.parametrize("outputs", [36, 1])
def test_the_gradients_are_those_of_pytorch(outputs: int) -> None:
    """Of wide results by one operator, of narrow ones by two."""
    trace, tensors = traced(outputs)
    model = write_graph(trace)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    names = [port.name for port in trace.inputs]
    feed = dict(zip(names, [tensor.numpy() for tensor in tensors], strict=True))
    results = session.run(None, feed)
    expected = step(*[tensor.double() for tensor in tensors])
    for port, result, value in zip(trace.outputs, results, expected, strict=True):
        size = float(value.abs().max())
        np.testing.assert_allclose(
            result / size, value.numpy() / size, rtol=0, atol=2e-5, err_msg=port.name
        )
    targets = Counter(str(node.target) for node in trace.program.graph.nodes)
    assert targets["shoal.pointwise_norm.default"] == (outputs == 36)
    assert targets["shoal.static_batch_norm.default"] == (outputs == 1)


def test_the_operators_compute_in_pytorch_what_they_stand_for() -> None:
    """Other formats than the portable one run them as they are."""
    trace, tensors = traced(36)
    doubles = [tensor.double() for tensor in tensors]
    for result, value in zip(trace.program(*doubles), step(*doubles), strict=True):
        torch.testing.assert_close(result, value)


def top_step(
    x: Tensor, depth: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, slope: Tensor
) -> list[Tensor]:
    """The same layers, of which only the upper two are trained."""
    variables = [value.detach().requires_grad_() for value in (weight, scale, shift)]
    between = torch.conv2d(x, depth, padding=1, groups=INPUTS)
    y = static_batch_norm(torch.conv2d(between, variables[0]), variables[1], variables[2], EPS)
    return [y.detach(), *torch.autograd.grad(y, variables, slope)]


def test_nothing_below_needs_a_gradient_if_it_is_frozen() -> None:
    """The operator of a tier whose lowest trained layer is such a pair."""
    whole, tensors = traced(36)
    names = ("weight", "scale", "shift")
    results = [whole.outputs[0]]
    for port in whole.inputs:
        if port.name in names:
            results.append(Port(f"next.{port.name}", "float32", port.shape))
    trace = trace_program("step", top_step, whole.inputs, tuple(results))
    session = onnxruntime.InferenceSession(write_graph(trace).SerializeToString())
    feed = {}
    for port, tensor in zip(whole.inputs, tensors, strict=True):
        feed[port.name] = tensor.numpy()
    expected = top_step(*[tensor.double() for tensor in tensors])
    targets = {str(node.target) for node in trace.program.graph.nodes}
    assert "shoal.pointwise_norm_backward.default" in targets
    for result, value in zip(session.run(None, feed), expected, strict=True):
        size = float(value.abs().max())
        np.testing.assert_allclose(result / size, value.numpy() / size, rtol=0, atol=2e-5)
