"""Computes large gradients of kernels only when the optimizer reads them, after their norms.

A clipped step needs the norm of all gradients before it changes the first weight, so all gradients
are in memory at once. The norm of a kernel's gradient ``G = dY^T X``, with one row per place of the
batch, does not need ``G``: ``|G|^2 = sum(dY dY^T * X X^T)`` (Goodfellow: "Efficient Per-Example
Gradient Computations", 2015). If there are few places, these products are smaller than ``G``. Then
only ``dY`` and ``X`` wait for the optimizer.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from trainer_export.lowering.values import hint

_aten = torch.ops.aten
_BACKWARD = _aten.convolution_backward.default
_KERNEL = 1  # place of the kernel's gradient among the results
_MASK = 10  # place of the argument that says which gradients are wanted
_TRANSPOSED = 7
_GROUPS = 9


@torch.library.custom_op("shoal::kernel_gradient_norm", mutates_args=())
def kernel_gradient_norm(  # noqa: PLR0913  (the settings of aten.convolution)
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Return the norm, float32 [], of the gradient of a convolution's kernel.

    Arguments are those of ``aten.convolution_backward``; only the sizes of the kernel are used.
    """
    settings = (list(stride), list(padding), list(dilation), False, [0] * len(stride), 1)
    gradient = _BACKWARD(grad, x, weight, None, *settings, [False, True, False])[_KERNEL]
    norm: Tensor = torch.linalg.vector_norm(gradient)
    return norm


@kernel_gradient_norm.register_fake
def _fake_norm(grad: Tensor, *_: Any) -> Tensor:
    return grad.new_empty([])


def delay_gradients(graph: fx.Graph) -> None:
    """Delay the gradients of a training step for which that saves memory, in place."""
    for node in list(graph.nodes):
        if node.target is _BACKWARD:
            _delay(graph, node)
    graph.eliminate_dead_code()


def _delay(graph: fx.Graph, backward: fx.Node) -> None:
    gradient = _kernel_gradient(backward)
    if gradient is None or not _pays(backward):
        return
    readers = {user.target: user for user in gradient.users}
    norm = readers.get(_aten.linalg_vector_norm.default)
    scaled = readers.get(_aten.mul.Tensor)
    # Another reader, such as a proximal term, needs the gradient early.
    if len(gradient.users) != 2 or norm is None or scaled is None or len(norm.args) != 1:
        return
    scale = _number_times(scaled, gradient)
    if scale is None:
        return
    grad: Any = backward.args[0]
    x, weight, _bias, stride, padding, dilation = backward.args[1:7]
    with graph.inserting_before(backward):
        direct = graph.call_function(
            torch.ops.shoal.kernel_gradient_norm.default,
            (grad, x, weight, stride, padding, dilation),
        )
    direct.meta = dict(norm.meta)
    norm.replace_all_uses_with(direct)
    # The factor is multiplied to the few places rather than to the gradient.
    with graph.inserting_before(scaled):
        slopes = graph.call_function(_aten.mul.Tensor, (grad, scale))
        late = graph.call_function(
            _BACKWARD, (slopes, *_with_mask(backward, [False, True, False])[1:])
        )
        late_gradient = graph.call_function(operator.getitem, (late, _KERNEL))
    slopes.meta = dict(grad.meta)
    late.meta = dict(backward.meta)
    late_gradient.meta = dict(gradient.meta)
    scaled.replace_all_uses_with(late_gradient)
    to_x, _to_weight, to_bias = _mask(backward)
    backward.args = _with_mask(backward, [to_x, False, to_bias])


def _number_times(product: fx.Node, gradient: fx.Node) -> fx.Node | None:
    """Return the number that multiplies a gradient; None if the other factor has several."""
    factor: Any = product.args[1]
    if product.args[0] is not gradient or not isinstance(factor, fx.Node):
        return None
    return factor if factor.meta["val"].shape == () else None


def _mask(backward: fx.Node) -> list[bool]:
    mask: Any = backward.args[_MASK]
    return list(mask)


def _with_mask(backward: fx.Node, mask: list[bool]) -> tuple[Any, ...]:
    return (*backward.args[:_MASK], mask)


def _kernel_gradient(backward: fx.Node) -> fx.Node | None:
    if backward.args[_TRANSPOSED] or backward.args[_GROUPS] != 1:
        return None
    for user in backward.users:
        if user.target is operator.getitem and user.args[1] == _KERNEL:
            return user
    return None


def _pays(backward: fx.Node) -> bool:
    """Return whether the two products of places cost less than the gradient itself."""
    grad: Any = backward.args[0]
    spec = backward.meta["val"][_KERNEL]
    outputs, *rest = spec.shape
    row = hint(rest)
    slopes = grad.meta["val"]
    places = hint((slopes.shape[0], *slopes.shape[2:]))
    return bool(places * (outputs + row) < outputs * row)
