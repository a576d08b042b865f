"""Convolutions whose kernels a step does not train are computed in the cheapest way."""

from collections.abc import Collection
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trainer_export.formats.onnx import fit_into_memory
from trainer_export.frozen_convolutions import mark_frozen
from trainer_export.graph import GraphBuilder, Port
from trainer_export.late_gradients import delay_gradients
from trainer_export.lowering.columns import Geometry
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.program import write_graph
from trainer_export.lowering.values import Spec
from trainer_export.lowering.winograd import SIZES, Tiling, winograd
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
    x: tuple[int, ...], kernel: tuple[int, ...], stride: int, frozen: Collection[str]
) -> onnx.ModelProto:
    """The graph of a convolution."""

    def function(x: Tensor, weight: Tensor) -> list[Tensor]:
        return [functional.conv2d(x, weight, stride=stride, padding=kernel[-1] // 2)]

    inputs = (Port("x", "float32", ("batch", *x)), Port(KERNEL, "float32", kernel))
    trace = trace_program("train", function, inputs, (Port("y", "float32", ("batch",)),))
    mark_frozen(trace.program.graph, trace.inputs, frozen)
    return write_graph(trace)


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
    graph = GraphBuilder("train")
    emit = Emitter(graph, "x")
    x_value = emit.value(graph.input(Port("x", "float32", ("batch", *x.shape[1:]))), x.shape)
    weight = emit.value(graph.input(Port(KERNEL, "float32", kernel.shape)), kernel.shape)
    out = Spec(expected.shape, torch.float32)
    result = winograd(emit, out, x_value, weight, Tiling(geometry, size))
    port = Port("y", "float32", ("batch", *expected.shape[1:]))
    graph.output(port, emit.in_logical_order(result))
    np.testing.assert_allclose(
        run(graph.model(), {"x": x, KERNEL: kernel}), expected, rtol=1e-4, atol=1e-4
    )


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
    model = written(x, kernel, stride, ["kernel"])
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


def test_a_trained_kernel_keeps_its_columns() -> None:
    """The order of additions in tiers that train everything stays what it was."""
    assert "Gemm" in operators(written((64, 24, 24), (64, 64, 3, 3), 1, []))


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
