"""Convolution and pooling as slices and matrix products, against PyTorch's own."""

import pytest
import torch
from torch import nn

from fleet_protocol.errors import ExportError
from trainer_export.lowering.matrix_products import (
    convolution,
    convolution_backward,
    max_pool,
    max_pool_backward,
)

CONVOLUTIONS = [
    nn.Conv2d(4, 6, 3),
    nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=1),
    nn.Conv2d(4, 6, 3, stride=3, padding=(0, 2), dilation=2, bias=False),
    nn.Conv2d(4, 6, 3, padding=1, groups=2),
    nn.Conv2d(4, 4, 1, stride=2, groups=4),
    nn.Conv1d(4, 6, 5, stride=2, padding=2),
]


@pytest.mark.parametrize("layer", CONVOLUTIONS, ids=str)
def test_convolutions_and_their_gradients(layer):
    x = torch.randn(3, 4, *[11, 9][: layer.weight.dim() - 2], requires_grad=True)
    y = layer(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    sizes = (
        list(layer.stride),
        list(layer.padding),
        list(layer.dilation),
        False,
        [0] * (x.dim() - 2),
        layer.groups,
    )
    torch.testing.assert_close(
        convolution(x, layer.weight, layer.bias, *sizes), y, rtol=0, atol=1e-5
    )
    biased = layer.bias is not None
    found = convolution_backward(
        grad, x, layer.weight, [6] if biased else None, *sizes, [True, True, biased]
    )
    for slope, value in zip(found, (x, layer.weight, layer.bias), strict=True):
        if value is not None:
            torch.testing.assert_close(slope, value.grad, rtol=0, atol=1e-4)
    assert convolution_backward(grad, x, layer.weight, None, *sizes, [False] * 3) == (
        None,
        None,
        None,
    )


@pytest.mark.parametrize(
    "options", [(2,), (2, 2), (3, 2, 1), (3, 1, 1), ((2, 3), (3, 1), 0, (1, 2))], ids=str
)
def test_the_first_largest_of_a_window_has_its_gradient(options):
    """Of equal ones, too, of which a ReLU before the pooling leaves many."""
    x = torch.randn(3, 4, 11, 9).relu().requires_grad_()
    y = nn.functional.max_pool2d(x, *options)
    grad = torch.randn_like(y)
    y.backward(grad)
    sizes = [[size] if isinstance(size, int) else list(size) for size in options]
    largest, again = max_pool(x, *sizes)
    torch.testing.assert_close(largest, y, rtol=0, atol=0)
    sizes += [[], [0, 0], [1, 1]][len(sizes) - 1 :]
    found = max_pool_backward(grad, x, *sizes, False, again)
    torch.testing.assert_close(found, x.grad, rtol=0, atol=1e-6)


def test_what_is_not_lowered_is_refused():
    x = torch.randn(2, 4, 5, 5)
    w = torch.randn(4, 3, 2, 2)
    with pytest.raises(ExportError, match="transposed"):
        convolution(x, w, None, [1, 1], [0, 0], [1, 1], True, [0, 0], 1)
    with pytest.raises(ExportError, match="ceil_mode"):
        max_pool(x, [2], [2], [0], [1], True)
