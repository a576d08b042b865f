"""Steps with frozen parameters may add in any order.

Their convolutions and gradients are computed in the cheapest way.
"""

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trainer_export.formats.onnx import fit_into_memory
from trainer_export.graph import GraphBuilder, Port
from trainer_export.late_gradients import delay_gradients
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.geometry import Geometry
from trainer_export.lowering.program import write_graph
from trainer_export.lowering.values import Spec
from trainer_export.lowering.winograd import (
    SIZES,
    Tiling,
    winograd,
    winograd_kernel_gradient,
)
from trainer_export.sized_graph import SizedGraph
from trainer_export.traced_program import trace_program

BATCH = 3
KERNEL = "param.kernel"


def run(model: onnx.ModelProto, feed: dict[str, Any]) -> Any:
    """The only output of a graph."""
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, feed)[0]


def numbers(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Numbers around 0, float32."""
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def written(
    x: tuple[int, ...], kernel: tuple[int, ...], stride: int, *, free_order: bool
) -> onnx.ModelProto:
    """The graph of a convolution."""

    def function(x: Tensor, weight: Tensor) -> list[Tensor]:
        return [functional.conv2d(x, weight, stride=stride, padding=kernel[-1] // 2)]

    inputs = (Port("x", "float32", ("batch", *x)), Port(KERNEL, "float32", kernel))
    trace = trace_program("train", function, inputs, (Port("y", "float32", ("batch",)),))
    return write_graph(trace, free_order=free_order)


def operators(model: onnx.ModelProto) -> set[str]:
    """The operators of a graph."""
    return {node.op_type for node in model.graph.node}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("map_size", [(8, 12), (5, 7), (3, 3)])
@pytest.mark.parametrize("padding", [(0, 0), (1, 1), (2, 1)])
def test_winograd_is_a_convolution(
    size: int, map_size: tuple[int, int], padding: tuple[int, int]
) -> None:
    """Also for tiles that reach beyond the results, and for a map smaller than a tile."""
    x = numbers(BATCH, 5, *map_size)
    kernel = numbers(6, 5, 3, 3)
    expected = functional.conv2d(
        torch.from_numpy(x).double(), torch.from_numpy(kernel).double(), padding=padding
    ).numpy()
    geometry = Geometry(map_size, expected.shape[2:], (3, 3), (1, 1), padding, (1, 1))
    found = by_winograd(x, kernel, expected.shape, Tiling(geometry, size))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def by_winograd(
    x: np.ndarray[Any, Any],
    kernel: np.ndarray[Any, Any],
    shape: tuple[int, ...],
    tiling: Tiling,
    *,
    turned: bool = False,
) -> Any:
    """The result of `winograd` in the runtime."""
    graph = GraphBuilder("train")
    emit = Emitter(graph, "x")
    x_value = emit.value(graph.input(Port("x", "float32", ("batch", *x.shape[1:]))), x.shape)
    weight = emit.value(graph.input(Port(KERNEL, "float32", kernel.shape)), kernel.shape)
    out = Spec(shape, torch.float32)
    result = winograd(emit, out, x_value, weight, tiling, turned=turned)
    graph.output(Port("y", "float32", ("batch", *shape[1:])), emit.in_logical_order(result))
    return run(graph.model(), {"x": x, KERNEL: kernel})


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("padding", [(0, 0), (1, 1), (2, 1)])
def test_winograd_with_a_turned_kernel_is_the_gradient_of_the_input(
    size: int, padding: tuple[int, int]
) -> None:
    """The gradient is a convolution, from the outputs of the kernel to its inputs."""
    shape = (BATCH, 5, 5, 7)
    kernel = numbers(6, 5, 3, 3)
    results = (5 + 2 * padding[0] - 2, 7 + 2 * padding[1] - 2)
    slope = numbers(BATCH, 6, *results)
    weight = torch.from_numpy(kernel).double()
    expected = torch.nn.grad.conv2d_input(
        shape, weight, torch.from_numpy(slope).double(), padding=padding
    ).numpy()
    geometry = Geometry((5, 7), results, (3, 3), (1, 1), padding, (1, 1))
    found = by_winograd(slope, kernel, shape, Tiling(geometry.turned, size), turned=True)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("padding", [(0, 0), (1, 1), (2, 1)])
def test_winograd_has_the_gradient_of_the_kernel(size: int, padding: tuple[int, int]) -> None:
    """Also for tiles that reach beyond the results, whose slopes are zeros."""
    x = numbers(BATCH, 5, 5, 7)
    slope = numbers(BATCH, 6, 5 + 2 * padding[0] - 2, 7 + 2 * padding[1] - 2)
    kernel = (6, 5, 3, 3)
    expected = torch.nn.grad.conv2d_weight(
        torch.from_numpy(x).double(), kernel, torch.from_numpy(slope).double(), padding=padding
    ).numpy()
    graph = GraphBuilder("train")
    emit = Emitter(graph, "x")
    maps = []
    for name, value in (("x", x), ("slope", slope)):
        port = Port(name, "float32", ("batch", *value.shape[1:]))
        maps.append(emit.value(graph.input(port), value.shape))
    geometry = Geometry((5, 7), slope.shape[2:], (3, 3), (1, 1), padding, (1, 1))
    result = winograd_kernel_gradient(emit, maps[1], maps[0], Tiling(geometry, size))
    graph.output(Port("y", "float32", kernel), emit.in_logical_order(result))
    found = run(graph.model(), {"x": x, "slope": slope})
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_the_gradient_of_a_kernel_looks_up_its_own_tiles() -> None:
    """Transformed windows of the forward pass would wait in memory until the gradient."""
    model, _, _ = gradients((64, 12, 12), (64, 64, 3, 3), 1, free_order=True)
    shapes = SizedGraph(model).shapes
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    assert [36, 64, 64] in [list(shapes[node.output[0]]) for node in products]
    look_ups = [node for node in model.graph.node if node.op_type == "Gather"]
    # Windows twice, tiles of slopes, and windows of slopes for the gradient of the map.
    assert len(look_ups) == 4


def gradients(
    x: tuple[int, ...], kernel: tuple[int, ...], stride: int, *, free_order: bool
) -> tuple[onnx.ModelProto, Any, dict[str, Any]]:
    """The graph of both gradients of a convolution, the expected values joined, and the inputs."""

    def function(x: Tensor, weight: Tensor, slope: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        weight = weight.detach().requires_grad_()
        y = functional.conv2d(x, weight, stride=stride, padding=1)
        to_x, to_weight = torch.autograd.grad(y, (x, weight), slope)
        return [torch.cat([to_x.flatten(), to_weight.flatten(), y.flatten()])]

    side = -(-x[1] // stride)
    slope = (kernel[0], side, side)
    inputs = (
        Port("x", "float32", ("batch", *x)),
        Port(KERNEL, "float32", kernel),
        Port("slope", "float32", ("batch", *slope)),
    )
    trace = trace_program("train", function, inputs, (Port("y", "float32", ("batch",)),))
    model = write_graph(trace, free_order=free_order)
    feed = {
        "x": numbers(BATCH, *x),
        KERNEL: numbers(*kernel),
        "slope": numbers(BATCH, *slope),
    }
    (expected,) = function(*(torch.from_numpy(value).double() for value in feed.values()))
    return model, expected.detach().numpy(), feed


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    ("x", "kernel"),
    [
        ((24, 3, 3), (320, 24, 3, 3)),
        ((64, 12, 12), (64, 64, 3, 3)),
    ],
)
def test_gradients_in_any_order_are_those_of_autograd(
    x: tuple[int, ...], kernel: tuple[int, ...], stride: int
) -> None:
    """Of few places and many channels, and of maps that are worth tiles."""
    model, expected, feed = gradients(x, kernel, stride, free_order=True)
    for graph in (model, fit_into_memory(model)):
        np.testing.assert_allclose(run(graph, feed), expected, atol=2e-5 * expected.std())


def test_no_kernel_of_few_places_is_transposed() -> None:
    """The columns of a batch have fewer numbers than the kernel, so they are transposed."""
    x, kernel = (24, 3, 3), (320, 24, 3, 3)

    def transposed(*, free_order: bool) -> set[int]:
        model, _, _ = gradients(x, kernel, 1, free_order=free_order)
        shapes = SizedGraph(model).shapes
        nodes = [node for node in model.graph.node if node.op_type == "Transpose"]
        return {int(np.prod(shapes[node.output[0]])) for node in nodes}

    numbers_of_kernel = int(np.prod(kernel))
    assert numbers_of_kernel in transposed(free_order=False)
    assert numbers_of_kernel not in transposed(free_order=True)


def test_columns_do_not_stay_in_memory_until_the_gradient() -> None:
    """Forward pass and gradient look them up again, whichever of taps and channels comes first."""
    model, _, _ = gradients((24, 3, 3), (320, 24, 3, 3), 1, free_order=True)
    fitted = fit_into_memory(model)

    def look_ups(graph: onnx.ModelProto) -> int:
        return sum(node.op_type == "Gather" for node in graph.graph.node)

    assert look_ups(fitted) == look_ups(model) + 1


def test_a_number_times_kernels_of_one_tap_works_in_long_runs() -> None:
    """The runtime multiplies along the last axes, which here have one number each."""

    def function(weight: Tensor, rate: Tensor) -> list[Tensor]:
        return [weight * rate]

    kernel = (8, 4, 1, 1)
    inputs = (Port(KERNEL, "float32", kernel), Port("rate", "float32", ()))
    trace = trace_program("train", function, inputs, (Port("y", "float32", kernel),))
    model = write_graph(trace, free_order=True)
    (product,) = [node for node in model.graph.node if node.op_type == "Mul"]
    assert SizedGraph(model).shapes[product.output[0]] == (8, 4)


@pytest.mark.parametrize(
    ("x", "kernel", "stride", "operator"),
    [
        ((64, 24, 24), (64, 64, 3, 3), 1, "MatMul"),
        ((3, 48, 48), (32, 3, 7, 7), 2, "Conv"),
        ((64, 12, 12), (128, 64, 1, 1), 2, "Gemm"),
        ((512, 3, 3), (512, 512, 3, 3), 1, "Gemm"),
    ],
)
def test_the_cheapest_way_is_chosen(
    x: tuple[int, ...], kernel: tuple[int, ...], stride: int, operator: str
) -> None:
    """Tiles of maps with channels, the runtime for images, columns for few or large products."""
    model = written(x, kernel, stride, free_order=True)
    ways = operators(model) & {"MatMul", "Conv"}
    assert ways == {operator} & {"MatMul", "Conv"}
    assert operator in operators(model)
    feed = {"x": numbers(BATCH, *x), KERNEL: numbers(*kernel)}
    expected = functional.conv2d(
        torch.from_numpy(feed["x"]).double(),
        torch.from_numpy(feed[KERNEL]).double(),
        stride=stride,
        padding=kernel[-1] // 2,
    ).numpy()
    np.testing.assert_allclose(run(model, feed), expected, atol=2e-5 * expected.std())


def test_other_graphs_keep_their_columns() -> None:
    """The order of additions in tiers that train everything stays what it was."""
    assert "Gemm" in operators(written((64, 24, 24), (64, 64, 3, 3), 1, free_order=False))


def test_a_pooling_without_gradient_returns_no_indices() -> None:
    """With them, the runtime takes 20 times as long."""

    def function(x: Tensor) -> list[Tensor]:
        return [functional.max_pool2d(x, 3, 2, 1)]

    inputs = (Port("x", "float32", ("batch", 4, 9, 9)),)
    trace = trace_program("eval", function, inputs, (Port("y", "float32", ("batch",)),))
    (pooling,) = [node for node in write_graph(trace).graph.node if node.op_type == "MaxPool"]
    assert len(pooling.output) == 1


@pytest.mark.parametrize("stride", [1, 2])
def test_a_late_gradient_has_the_norm_of_the_gradient(stride: int) -> None:
    """The norm needs no gradient, which follows where the optimizer reads it."""
    kernel = (256, 256, 3, 3)

    def function(x: Tensor, weight: Tensor, slope: Tensor) -> list[Tensor]:
        weight = weight.detach().requires_grad_()
        y = functional.conv2d(x, weight, stride=stride, padding=1)
        (gradient,) = torch.autograd.grad(y, weight, slope.expand(y.shape))
        scale = 1 / torch.linalg.vector_norm(gradient)
        return [gradient * scale]

    places = 2 // stride
    inputs = (
        Port("x", "float32", ("batch", 256, 2, 2)),
        Port(KERNEL, "float32", kernel),
        Port("slope", "float32", ("batch", 256, places, places)),
    )
    trace = trace_program("train", function, inputs, (Port("y", "float32", kernel),))
    delay_gradients(trace.program.graph)
    targets = [node.target for node in trace.program.graph.nodes]
    norm = targets.index(torch.ops.shoal.kernel_gradient_norm.default)
    assert norm < targets.index(torch.ops.aten.convolution_backward.default)
    assert torch.ops.aten.linalg_vector_norm.default not in targets
    # The factor multiplies the few places rather than the gradient.
    products = trace.program.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    assert kernel not in [tuple(product.meta["val"].shape) for product in products]
    feed = {
        "x": numbers(BATCH, 256, 2, 2),
        KERNEL: numbers(*kernel),
        "slope": numbers(BATCH, 256, places, places),
    }
    (expected,) = function(*(torch.from_numpy(value).double() for value in feed.values()))
    np.testing.assert_allclose(
        run(fit_into_memory(write_graph(trace)), feed), expected.numpy(), rtol=1e-4, atol=1e-7
    )


def test_a_gradient_of_many_places_is_not_late() -> None:
    """Its norm would cost more than the gradient."""

    def function(x: Tensor, weight: Tensor) -> list[Tensor]:
        weight = weight.detach().requires_grad_()
        y = functional.conv2d(x, weight, padding=1)
        (gradient,) = torch.autograd.grad(y, weight, torch.ones_like(y))
        return [gradient * torch.linalg.vector_norm(gradient)]

    inputs = (Port("x", "float32", ("batch", 8, 8, 8)), Port(KERNEL, "float32", (8, 8, 3, 3)))
    trace = trace_program("train", function, inputs, (Port("y", "float32", (8, 8, 3, 3)),))
    delay_gradients(trace.program.graph)
    targets = {node.target for node in trace.program.graph.nodes}
    assert torch.ops.aten.linalg_vector_norm.default in targets
