"""Activations of straight pieces have PyTorch's values and gradients, at their bends, too."""

from collections.abc import Callable
from functools import partial

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trainer_export.graph import Port
from trainer_export.lowering.program import write_graph
from trainer_export.traced_program import trace_program

PORTS = (Port("x", "float32", ("batch", 2)), Port("slope", "float32", ("batch", 2)))
RESULTS = (Port("y", "float32", ("batch", 2)), Port("grad", "float32", ("batch", 2)))


@pytest.mark.parametrize(
    "function",
    [
        functional.relu6,
        functional.hardtanh,
        partial(functional.hardtanh, min_val=-1e5, max_val=2.0),
        functional.hardsigmoid,
        functional.hardswish,
    ],
    ids=["relu6", "hardtanh", "a wide hardtanh", "hardsigmoid", "hardswish"],
)
def test_values_and_gradients_are_those_of_pytorch(function: Callable[[Tensor], Tensor]) -> None:
    """Beside a bend by one number that a float32 holds, and without a choice between two."""

    def run(x: Tensor, slope: Tensor) -> list[Tensor]:
        variable = x.detach().requires_grad_()
        y = function(variable)
        return [y.detach(), *torch.autograd.grad(y, variable, slope)]

    model = write_graph(trace_program("activation", run, PORTS, RESULTS))
    bends = np.array([-1e5, -3, -1, -1e-6, 1e-6, 1, 2, 3, 6], np.float32)
    beside = [np.nextafter(bends, np.float32(side)) for side in (-np.inf, np.inf)]
    places = np.concatenate([*beside, np.linspace(-8, 8, 101, dtype=np.float32)])
    x = np.stack([places, places[::-1]], 1)
    slope = np.linspace(-1, 1, x.size, dtype=np.float32).reshape(x.shape)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    y, grad = session.run(None, {"x": x, "slope": slope})
    expected, expected_grad = run(torch.from_numpy(x), torch.from_numpy(slope))
    np.testing.assert_allclose(y, expected.numpy(), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(grad, expected_grad.numpy(), rtol=1e-5, atol=1e-6)
    assert "Where" not in {node.op_type for node in model.graph.node}
