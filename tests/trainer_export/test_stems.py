"""The first layers of image nets: strided convolutions, patches, and tokens that are places."""

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trainer_export.graph import Port
from trainer_export.lowering.program import write_graph
from trainer_export.traced_program import trace_program

BATCH = 3
Layers = Callable[[Tensor, Tensor, Tensor], Tensor]


def checked(layers: Layers, x_shape: tuple[int, ...], *weights: tuple[int, ...]) -> Counter[str]:
    """Compare layers with their gradients with PyTorch, and return how often each operator is."""

    def run(x: Tensor, first: Tensor, second: Tensor, slope: Tensor) -> list[Tensor]:
        variables = [value.detach().requires_grad_() for value in (first, second)]
        result = layers(x, *variables)
        return [result.detach(), *torch.autograd.grad(result, variables, slope)]

    generator = torch.Generator().manual_seed(1)
    shapes = ((BATCH, *x_shape), *weights)
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors.append(torch.randn(layers(*tensors).shape, generator=generator))
    expected = run(*[tensor.double() for tensor in tensors])
    inputs = (
        Port("x", "float32", ("batch", *x_shape)),
        Port("first", "float32", weights[0]),
        Port("second", "float32", weights[1]),
        Port("slope", "float32", ("batch", *tensors[3].shape[1:])),
    )
    outputs = (
        Port("result", "float32", ("batch", *tensors[3].shape[1:])),
        Port("grad_first", "float32", weights[0]),
        Port("grad_second", "float32", weights[1]),
    )
    model = write_graph(trace_program("layers", run, inputs, outputs))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    feed = {port.name: tensor.numpy() for port, tensor in zip(inputs, tensors, strict=True)}
    results = session.run([port.name for port in outputs], feed)
    for port, result, value in zip(outputs, results, expected, strict=True):
        scale = max(1.0, float(value.abs().max()))
        np.testing.assert_allclose(
            result / scale, value.numpy() / scale, rtol=0, atol=1e-5, err_msg=port.name
        )
    return Counter(node.op_type for node in model.graph.node)


STEMS = [
    ((1, 49), (5,), 2, 2, 1),
    ((3, 32, 31), (3, 3), 2, 1, 1),
    ((2, 17, 19), (4, 5), 3, 2, 1),
    ((1, 20, 20), (3, 4), 2, 3, 2),
    ((1, 7, 8, 9), (3, 3, 3), 2, 1, 1),
]


@pytest.mark.parametrize(("x_shape", "kernel", "stride", "padding", "dilation"), STEMS, ids=str)
def test_a_strided_stem_before_depthwise_layers_is_not_looked_up(
    x_shape: tuple[int, ...], kernel: tuple[int, ...], stride: int, padding: int, dilation: int
) -> None:
    """The runtime computes it, and slices are the columns of its weight gradient."""
    rank = len(kernel)
    convolution = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]

    def layers(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        stem = convolution(x, first, None, stride, padding, dilation)
        result: Tensor = convolution(stem, second, None, 1, 0, 1, 4)
        return result

    count = checked(layers, x_shape, (4, x_shape[0], *kernel), (4, 1, *(1,) * rank))
    assert count["Conv"] >= 1
    assert count["Slice"] >= math.prod(kernel)


@pytest.mark.parametrize("x_shape", [(3, 12), (3, 12, 8), (2, 4, 8, 8)], ids=str)
def test_patches_are_moved_and_not_looked_up(x_shape: tuple[int, ...]) -> None:
    """Windows side by side are a transpose of the map."""
    rank = len(x_shape) - 1
    convolution = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]

    def layers(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        result: Tensor = convolution(x, first, second, 4)
        return result

    count = checked(layers, x_shape, (5, x_shape[0], *(4,) * rank), (5,))
    assert count["Gather"] == 0


def test_tokens_lie_as_the_map_whose_places_they_are() -> None:
    """A product with tokens of a map needs no transpose: the channels lie last already."""

    def layers(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        patches = functional.conv2d(x, first, None, 2)
        tokens = patches.flatten(2).transpose(1, 2)
        return tokens @ second

    count = checked(layers, (3, 8, 6), (5, 3, 2, 2), (5, 7))
    # Of the image, its windows, both kernels' layouts and the gradient's, but not of the tokens.
    assert count["Transpose"] <= 4
