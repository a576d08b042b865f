"""Grouped and depthwise convolutions are exported as what they are, and compute what PyTorch does."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from trainer_export.graph import Port
from trainer_export.lowering import depthwise, groups
from trainer_export.lowering.geometry import Geometry
from trainer_export.lowering.program import write_graph
from trainer_export.lowering.tiles import Tiles, forward_tiles
from trainer_export.traced_program import trace_program

BATCH = 3
CONVOLUTIONS: dict[bool, dict[int, Any]] = {
    False: {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d},
    True: {
        1: functional.conv_transpose1d,
        2: functional.conv_transpose2d,
        3: functional.conv_transpose3d,
    },
}


@dataclass(frozen=True)
class Layer:
    """A convolution of several groups."""

    groups: int
    inputs: int  # of a group
    outputs: int  # of a group
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    transposed: bool = False
    bias: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "stride": self.stride,
            "padding": self.padding,
            "dilation": self.dilation,
            "groups": self.groups,
        }
        if self.transposed and self.stride > 1:
            settings["output_padding"] = 1
        return settings

    def function(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        convolution = CONVOLUTIONS[self.transposed][len(self.size)]
        result: Tensor = convolution(x, weight, bias if self.bias else None, **self.settings)
        return result

    @property
    def weight_shape(self) -> tuple[int, ...]:
        wide = self.groups * (self.inputs if self.transposed else self.outputs)
        return (wide, self.outputs if self.transposed else self.inputs, *self.kernel)

    def fits(self) -> bool:
        """Whether a kernel is no larger than its padded map."""
        if self.transposed:
            meta = torch.empty(1, self.groups * self.inputs, *self.size, device="meta")
            weight = torch.empty(self.weight_shape, device="meta")
            bias = torch.empty(self.groups * self.outputs, device="meta")
            try:
                return self.function(meta, weight, bias).numel() > 0
            except RuntimeError:
                return False
        for size, taps in zip(self.size, self.kernel, strict=True):
            if size + 2 * self.padding < self.dilation * (taps - 1) + 1:
                return False
        return True


def checked(layer: Layer) -> set[str]:
    """Compare a convolution with its gradients with PyTorch, and return the graph's operators."""
    shape = (BATCH, layer.groups * layer.inputs, *layer.size)
    weight_shape = layer.weight_shape
    bias_shape = (layer.groups * layer.outputs,)

    def run(x: Tensor, weight: Tensor, bias: Tensor, slope: Tensor) -> list[Tensor]:
        variables = [value.detach().requires_grad_() for value in (x, weight, bias)]
        result = layer.function(*variables)
        wanted = variables if layer.bias else variables[:2]
        return [result.detach(), *torch.autograd.grad(result, wanted, slope)]

    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(size, generator=generator) for size in (shape, weight_shape, bias_shape)]
    tensors.append(torch.randn(layer.function(*tensors).shape, generator=generator))
    expected = run(*[tensor.double() for tensor in tensors])
    inputs = (
        Port("x", "float32", ("batch", *shape[1:])),
        Port("weight", "float32", weight_shape),
        Port("bias", "float32", bias_shape),
        Port("slope", "float32", ("batch", *tensors[3].shape[1:])),
    )
    names = ["result", "grad_x", "grad_weight", "grad_bias"][: len(expected)]
    outputs = tuple(
        Port(name, "float32", ("batch", *value.shape[1:]) if number < 2 else tuple(value.shape))
        for number, (name, value) in enumerate(zip(names, expected, strict=True))
    )
    model = write_graph(trace_program("layer", run, inputs, outputs))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    feed = {port.name: tensor.numpy() for port, tensor in zip(inputs, tensors, strict=True)}
    results = session.run(names, feed)
    for name, result, value in zip(names, results, expected, strict=True):
        scale = max(1.0, float(value.abs().max()))
        np.testing.assert_allclose(
            result / scale, value.numpy() / scale, rtol=0, atol=1e-5, err_msg=f"{name} of {layer}"
        )
    return {node.op_type for node in model.graph.node}


TABLE = [
    Layer(4, 1, 1, (6, 6), (3, 3), padding=1),
    Layer(4, 1, 1, (7, 6), (5, 5), stride=2, padding=2, bias=True),
    Layer(3, 1, 2, (9, 9), (3, 3), stride=2, padding=1),
    Layer(3, 1, 1, (12, 11), (3, 2), padding=2, dilation=2),
    Layer(2, 1, 1, (40, 40), (7, 7), padding=3),
    Layer(2, 1, 1, (2, 2), (5, 5), padding=2),
    Layer(2, 1, 1, (25, 5), (3, 3), padding=1),
    Layer(5, 1, 1, (33,), (3,), padding=1),
    Layer(5, 1, 3, (70,), (4,), stride=3, bias=True),
    Layer(2, 1, 1, (4, 5, 6), (3, 3, 3), padding=1),
    Layer(2, 3, 2, (6, 5), (3, 3), padding=1, bias=True),
    Layer(2, 4, 3, (6, 5), (1, 1)),
    Layer(2, 16, 16, (5, 5), (3, 3), stride=2, padding=1),
    Layer(3, 2, 4, (17,), (3,), stride=2, dilation=2),
    Layer(3, 1, 1, (5, 4), (3, 3), stride=2, padding=1, transposed=True, bias=True),
    Layer(3, 2, 1, (5, 4), (2, 2), stride=2, transposed=True),
    Layer(2, 2, 3, (6,), (3,), transposed=True),
]


@pytest.mark.parametrize("layer", TABLE, ids=str)
def test_a_grouped_convolution_and_its_gradients_are_those_of_pytorch(layer: Layer) -> None:
    """In one, two and three dimensions, whatever the cost model chooses."""
    checked(layer)


GEOMETRIES = [
    Geometry((25, 5), (25, 5), (3, 3), (1, 1), (1, 1), (1, 1)),
    Geometry((13, 7), (6, 7), (4, 3), (2, 1), (1, 1), (1, 1)),
    Geometry((12, 40), (12, 40), (5, 5), (1, 1), (4, 4), (2, 2)),
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_every_tiling_copies_the_places_that_its_results_read(geometry: Geometry) -> None:
    """Row by row or in runs of several rows; with either, a product is the convolution."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(geometry.inputs, generator=generator, dtype=torch.float64)
    kernel = torch.randn(geometry.kernel, generator=generator, dtype=torch.float64)
    ways = (geometry.stride, geometry.padding, geometry.dilation)
    expected = functional.conv2d(x[None, None], kernel[None, None], None, *ways)
    in_runs = set()
    for tiles in forward_tiles(geometry):
        if tiles.is_whole:
            continue
        rows, columns = tiles.axes
        in_runs.add(rows.has_runs)
        padded = np.pad(x.numpy(), tiles.padding)
        assert list(padded.shape) == tiles.padded
        windows = padded.reshape(-1, tiles.run)[tiles.table()].reshape(
            rows.count, columns.count, rows.window, columns.window
        )
        results = np.einsum(
            "tucd,ij,icr,jds->trus", windows, kernel.numpy(), rows.relation, columns.relation
        ).reshape(rows.count * rows.tile, -1)
        height, width = geometry.outputs
        np.testing.assert_allclose(results[:height, :width], expected[0, 0], atol=1e-12)
    assert in_runs == {False, True}


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    rank = draw(st.integers(1, 2))
    largest = 70 if rank == 1 else 19
    size = tuple(draw(st.integers(1, largest)) for _ in range(rank))
    layer = Layer(
        groups=draw(st.integers(2, 4)),
        inputs=draw(st.sampled_from([1, 1, 2])),
        outputs=draw(st.integers(1, 2)),
        size=size,
        kernel=tuple(draw(st.integers(1, 5)) for _ in range(rank)),
        stride=draw(st.integers(1, 3)),
        padding=draw(st.integers(0, 3)),
        dilation=draw(st.integers(1, 2)),
        transposed=draw(st.booleans()),
        bias=draw(st.booleans()),
    )
    assume(layer.fits())
    return layer


@settings(max_examples=8, deadline=None)
@given(layer=layers(), number=st.integers(0, 1000), by_runtime=st.booleans())
def test_every_way_to_write_a_grouped_convolution_is_right(
    layer: Layer, number: int, by_runtime: bool
) -> None:
    """Whatever way a cost model would choose: any tiles, look-ups or the runtime's operators."""

    def some(
        ways: Iterable[Tiles], channels: int, *, products: int = 1, turns: bool = False
    ) -> Tiles:
        del channels, products, turns
        listed = list(ways)
        return listed[number % len(listed)]

    def cost(*_: object, transposed: bool) -> float:
        del transposed
        return 0.0 if by_runtime else math.inf

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(depthwise, "_cheapest", some)
        patch.setattr(depthwise, "runtime_ns", cost)
        patch.setattr(groups, "runtime_ns", cost)
        checked(layer)
