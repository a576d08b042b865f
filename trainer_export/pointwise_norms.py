"""A 1x1 convolution and the static batch norm after it, as one operator.

With ``X`` as a matrix [inputs, places] less its means, ``C = W X`` is centred as well, and its sum
of squares is the diagonal of ``W (X X^T) W^T``. So the norm of a wide ``C`` needs no pass over it:
the product ``X X^T`` is small if there are few inputs, the kernel absorbs the scale, and ``C``
itself is never written. The gradient needs ``C`` only in sums, which are products of the same
matrices. That saves ten passes over the widest maps of an inverted residual.

The rewrite applies to programs with depthwise convolutions, where such pairs occur, and to pairs
with so many more outputs than inputs that it saves time.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from trainer_export.operators import static_batch_norm, static_batch_norm_backward

aten = torch.ops.aten

# Nanoseconds, of products and passes over maps, measured on two cores of an x86-64 server on
# 2026-11-28; only their ratios matter.
_FLOP_NS = 0.014
_PASSES_NS = 4.0  # cost of the norm of a number and of its gradient
_CENTRED_NS = 1.0  # cost per number of the input instead


def _convolved(x: Tensor, weight: Tensor) -> Tensor:
    """Return a 1x1 convolution."""
    return torch.einsum("oi,ni...->no...", weight.flatten(1), x)


@torch.library.custom_op("shoal::pointwise_norm", mutates_args=())
def pointwise_norm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float,
) -> Tensor:
    """Return the static batch norm of a 1x1 convolution.

    Float32 [batch, inputs, ...] and [batch, outputs, ...]; the kernel is [outputs, inputs, 1, ...],
    scale and shift are [outputs].
    """
    normalised: Tensor = static_batch_norm(_convolved(x, weight), scale, shift, eps)
    return normalised


@torch.library.custom_op("shoal::pointwise_norm_backward", mutates_args=())
def pointwise_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of :func:`pointwise_norm`: of ``x``, ``weight``, ``scale``, ``shift``."""
    convolved = _convolved(x, weight)
    slope, to_scale, to_shift = static_batch_norm_backward(grad, convolved, scale, eps)
    to_x = _convolved(slope, weight.transpose(0, 1))
    to_weight = torch.einsum("no...,ni...->oi", slope.flatten(2), x.flatten(2))
    return to_x, to_weight.view(weight.shape), to_scale, to_shift


def _fake_forward(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(
        [
            x.shape[0],
            weight.shape[0],
            *x.shape[2:],
        ]
    )


def _fake_backward(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del grad, eps
    return (
        torch.empty_like(x),
        torch.empty_like(weight),
        torch.empty_like(scale),
        torch.empty_like(scale),
    )


pointwise_norm.register_fake(_fake_forward)
pointwise_norm_backward.register_fake(_fake_backward)


def has_convolutions(graph: fx.Graph) -> bool:
    """Return whether a traced program has a convolution."""
    return any(node.target is aten.convolution.default for node in graph.nodes)


def has_groups(graph: fx.Graph) -> bool:
    """Return whether a traced program has a convolution of several groups."""
    for node in graph.nodes:
        if node.target is aten.convolution.default and node.args[8] != 1:
            return True
    return False


def fuse_pointwise_norms(graph: fx.Graph) -> None:
    """Replace each pair for which it saves time by one operator, and their gradients by another."""
    if not has_groups(graph):
        return
    for node in list(graph.nodes):
        if node.target is not torch.ops.shoal.static_batch_norm.default:
            continue
        pair = _pair(node)
        if pair is not None and pair.pays:
            pair.fuse(graph)


@dataclass(frozen=True)
class _Pair:
    """A convolution and its norm, with their gradients."""

    convolution: fx.Node
    norm: fx.Node
    norm_back: fx.Node
    norm_grad: fx.Node  # of the norm's input
    convolution_back: fx.Node

    @property
    def pays(self) -> bool:
        """Return whether the operator is cheaper than the norm."""
        weight: Any = self.convolution.args[1]
        outputs, inputs = weight.meta["val"].shape[:2]
        passes = _PASSES_NS * outputs
        products = 4 * inputs * inputs * _FLOP_NS
        return bool(products + _CENTRED_NS * inputs < passes)

    def fuse(self, graph: fx.Graph) -> None:
        """Replace the four nodes by the operator and its gradient."""
        x, weight = self.convolution.args[:2]
        _, scale, shift, eps = self.norm.args
        with graph.inserting_before(self.norm):
            fused = graph.call_function(
                torch.ops.shoal.pointwise_norm.default, (x, weight, scale, shift, eps)
            )
        fused.meta = dict(self.norm.meta)
        self.norm.replace_all_uses_with(fused)
        grad = self.norm_back.args[0]
        with graph.inserting_before(self.norm_back):
            back = graph.call_function(
                torch.ops.shoal.pointwise_norm_backward.default, (grad, x, weight, scale, eps)
            )
        back.meta = dict(self.norm_back.meta)
        values: list[Any] = [
            None,
            None,
            *self.norm_back.meta["val"][1:],
        ]
        values[:2] = self.convolution_back.meta["val"][:2]
        back.meta["val"] = tuple(values)
        for source, places in (
            (self.convolution_back, (0, 1, None)),
            (self.norm_back, (None, 2, 3)),
        ):
            _redirect(graph, source, back, places)
        for node in (self.convolution_back, self.norm_grad, self.norm_back, self.norm):
            graph.erase_node(node)
        graph.erase_node(self.convolution)


def _redirect(
    graph: fx.Graph, source: fx.Node, target: fx.Node, places: Sequence[int | None]
) -> None:
    """Redirect the readers of a node's results to another node, by index."""
    for user in list(source.users):
        index: Any = user.args[1]
        place = places[index]
        if place is None:
            if not user.users:
                graph.erase_node(user)
            continue
        with graph.inserting_after(target):
            result = graph.call_function(operator.getitem, (target, place))
        result.meta = dict(user.meta)
        user.replace_all_uses_with(result)
        graph.erase_node(user)


def _pair(norm: fx.Node) -> _Pair | None:
    """Return the pair that a norm completes, if nothing else reads the convolution."""
    convolution = norm.args[0]
    if not isinstance(convolution, fx.Node) or not _is_pointwise(convolution):
        return None
    backward = torch.ops.shoal.static_batch_norm_backward.default
    backs = [user for user in convolution.users if user.target is backward]
    if len(backs) != 1 or set(convolution.users) != {norm, backs[0]}:
        return None
    grads: list[fx.Node] = []
    for user in backs[0].users:
        if user.args[1] == 0:
            grads.append(user)
    if len(grads) != 1 or len(grads[0].users) != 1:
        return None
    (convolution_back,) = grads[0].users
    if convolution_back.target is not aten.convolution_backward.default:
        return None
    if convolution_back.args[0] is not grads[0]:
        return None
    if convolution_back.args[1:3] != convolution.args[:2]:
        return None
    return _Pair(convolution, norm, backs[0], grads[0], convolution_back)


def _is_pointwise(node: fx.Node) -> bool:
    """Return whether a node is a 1x1 convolution without a bias."""
    if node.target is not aten.convolution.default:
        return False
    _, weight, bias, stride, padding, _, transposed, _, groups = node.args
    kernel = weight.meta["val"].shape[2:]  # type: ignore[union-attr]
    is_single = all(size == 1 for size in (*kernel, *stride))  # type: ignore[misc]
    is_plain = bias is None and not any(padding)  # type: ignore[arg-type]
    return bool(is_single and is_plain and not transposed and groups == 1)
