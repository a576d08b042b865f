"""Rewrites of a traced program that reduce its cost without changing its results."""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from trainer_export.pointwise_norms import fuse_pointwise_norms

aten = torch.ops.aten


def simplify(program: fx.GraphModule) -> None:
    """Apply every rewrite to a program, in place.

    The order matters, because a rewrite finds its pattern only if its operators are adjacent.
    """
    _drop_no_operations(program.graph)
    # A scale between a convolution and its norm would hide the bias that the norm cancels.
    _fold_scales_into_norms(program.graph)
    _drop_cancelled_biases(program.graph)
    fuse_pointwise_norms(program.graph)
    _choose_behind_roots(program.graph)
    _pool_before_relu(program.graph)
    # Each rewrite leaves nodes behind that are no longer read.
    program.graph.eliminate_dead_code()


def _drop_no_operations(graph: fx.Graph) -> None:
    """Remove detach, alias and clone, which do not change a value."""
    for node in list(graph.nodes):
        if node.target in (aten.detach.default, aten.alias.default, aten.clone.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _output(node: fx.Node, index: int) -> fx.Node | None:
    """Return the getitem of a node of several outputs."""
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == index:
            return user
    return None


def _scale_of(node: Any) -> tuple[fx.Node, float] | None:
    """Return ``(x, k)`` if the node is ``k * x`` for a number ``k > 0``."""
    if not isinstance(node, fx.Node) or len(node.args) != 2:
        return None
    x, number = node.args
    # A scale of 0 or below would change the variance's part of the norm, or its sign.
    if not isinstance(x, fx.Node) or not isinstance(number, (int, float)) or number <= 0:
        return None
    if node.target in (aten.mul.Tensor, aten.mul.Scalar):
        return x, float(number)
    if node.target in (aten.div.Tensor, aten.div.Scalar):
        return x, 1 / number
    return None


def _argument(node: fx.Node, index: int) -> fx.Node:
    """Return a tensor argument."""
    argument = node.args[index]
    if not isinstance(argument, fx.Node):
        raise TypeError(f"argument {index} of {node} is not a tensor")
    return argument


def _norm_pair(norm: fx.Node) -> fx.Node | None:
    """Return the backward node of a static batch norm, if the gradient of its input is used."""
    backward = torch.ops.shoal.static_batch_norm_backward.default
    for user in _argument(norm, 0).users:
        if user.target is backward:
            return user
    return None


def _norms(graph: fx.Graph) -> list[fx.Node]:
    norm = torch.ops.shoal.static_batch_norm.default
    norms = []
    for node in graph.nodes:
        if node.target is norm:
            norms.append(node)
    return norms


def _fold_scales_into_norms(graph: fx.Graph) -> None:
    """Replace ``norm(k x, eps)`` by ``norm(x, eps / k^2)``, and absorb ``k`` into its gradient.

    This is HeteroFL's Scaler before a static batch norm, and saves a pass over the activations in
    each direction.
    """
    for norm in _norms(graph):
        scaled = _argument(norm, 0)
        backward = _norm_pair(norm)
        scale = _scale_of(scaled)
        # Whoever else reads the scaled value still needs it, and then nothing is saved.
        if scale is None or backward is None or set(scaled.users) != {norm, backward}:
            continue
        x, factor = scale
        grad = _output(backward, 0)
        if grad is not None:
            # The gradient of the operator is now with respect to x itself, so the multiplication
            # after it is removed.
            followers = list(grad.users)
            if len(followers) != 1 or _scale_of(followers[0]) != (grad, factor):
                continue
            followers[0].replace_all_uses_with(grad)
        number: Any = norm.args[3]
        # norm(k x, eps) divides by sqrt(k^2 var + eps), which is k sqrt(var + eps / k^2).
        eps = number / factor**2
        norm.args = (x, *norm.args[1:3], eps)
        backward.args = (backward.args[0], x, backward.args[2], eps)


def _drop_cancelled_biases(graph: fx.Graph) -> None:
    """Remove biases before a static batch norm, because the mean cancels them.

    They do not affect the output, and their gradients are zero.
    """
    for norm in _norms(graph):
        conv = _argument(norm, 0)
        backward = _norm_pair(norm)
        if conv.target is not aten.convolution.default or conv.args[2] is None:
            continue
        if backward is None or set(conv.users) != {norm, backward}:
            continue
        grad = _output(backward, 0)
        receivers = list(grad.users) if grad is not None else []
        if len(receivers) != 1 or receivers[0].target is not aten.convolution_backward.default:
            continue
        bias = conv.args[2]
        gradient = _output(receivers[0], 2)
        if gradient is not None:
            with graph.inserting_before(gradient):
                # The bias stays a parameter of the model, so a step still takes a gradient for it.
                zeros = graph.call_function(aten.zeros_like.default, (bias,))
                zeros.meta = dict(gradient.meta)
            gradient.replace_all_uses_with(zeros)
            graph.erase_node(gradient)
        mask: Any = receivers[0].args[10]
        # The last flag of the mask asks for the gradient of the bias, which nothing reads now.
        receivers[0].args = (
            *receivers[0].args[:10],
            [
                mask[0],
                mask[1],
                False,
            ],
        )
        conv.args = (*conv.args[:2], None, *conv.args[3:])


_SHAPED = {
    getattr(aten, name).default
    for name in ("view", "expand", "unsqueeze", "permute", "sqrt", "reciprocal", "exp")
}
"""Operators whose result is 0 or NaN only if their argument is."""
_SHAPED |= {aten.t.default, aten.squeeze.dim, aten.transpose.int}
_SUMS = {aten.add.Tensor, aten.add.Scalar}
_FLOORS = {aten.clamp.default, aten.clamp_min.default}
_SCALES = {
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.mul.Scalar,
    aten.div.Scalar,
}
_QUOTIENTS = {aten.div.Tensor, aten.pow.Tensor_Tensor}
_INVERSES = {
    aten.reciprocal.default,
    aten.rsqrt.default,
    aten.log.default,
    aten.pow.Tensor_Scalar,
}


def _not_zero(node: Any) -> bool:
    """Return whether a divisor is a constant, or bounded away from 0.

    It is bounded if something positive is added, or by a lower bound.
    """
    if not isinstance(node, fx.Node):
        return True
    number = node.args[1] if len(node.args) > 1 else None
    has_number = isinstance(number, (int, float))
    if node.target in _SUMS | _FLOORS:
        is_positive = isinstance(number, (int, float)) and number > 0
        return is_positive and not _is_negated(node.args[0])
    value = node.meta.get("val")
    # Such as a size or a count; if it is 0, the loss is NaN.
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return True
    scaled = node.target in _SCALES and has_number
    return (node.target in _SHAPED or scaled) and _not_zero(node.args[0])


def _is_negated(node: Any) -> bool:
    """Return whether a value is a negation, or is computed from one."""
    sources = [node, *getattr(node, "all_input_nodes", ())]
    return any(getattr(source, "target", None) is aten.neg.default for source in sources)


def _divides_by_zero(node: fx.Node) -> bool:
    """Return whether a result may be infinite or NaN because an argument is 0."""
    if node.target in _QUOTIENTS:
        return not _not_zero(node.args[1])
    if node.target is aten.pow.Tensor_Scalar:
        power = node.args[1]
        if isinstance(power, (int, float)) and power >= 0:
            return False
    return node.target in _INVERSES and not _not_zero(node.args[0])


def _choose_behind_roots(graph: fx.Graph) -> None:
    """Use a choice for a relu's gradient that may be infinite, as infinity times 0 is NaN.

    Without a division on its path, the gradient is multiplied, which is faster.
    """
    doubtful: set[fx.Node] = set()
    for node in list(graph.nodes):
        if _divides_by_zero(node) or not doubtful.isdisjoint(node.all_input_nodes):
            doubtful.add(node)
        if node.target is not aten.threshold_backward.default or node.args[0] not in doubtful:
            continue
        grad, x, bound = node.args
        with graph.inserting_before(node):
            off = graph.call_function(aten.le.Scalar, (x, bound))
            chosen = graph.call_function(aten.masked_fill.Scalar, (grad, off, 0.0))
        value = _argument(node, 1).meta["val"]
        with value.fake_mode:
            off.meta = {**node.meta, "val": value <= bound}
        chosen.meta = dict(node.meta)
        node.replace_all_uses_with(chosen)
        graph.erase_node(node)
        # The choice is as doubtful as the gradient that it chooses from.
        doubtful.remove(node)
        doubtful.add(chosen)


@dataclass(frozen=True)
class _PooledRelu:
    """A relu that only a max pooling reads, with the gradients of both, if used."""

    relu: fx.Node
    pool: fx.Node
    pooled: fx.Node
    pool_back: fx.Node | None
    relu_back: fx.Node | None


def _pool_before_relu(graph: fx.Graph) -> None:
    """Replace ``max_pool(relu(x))`` by ``relu(max_pool(x))``, and so their gradients.

    The second form works on fewer numbers. If a window's maximum is not positive, neither form
    propagates a gradient; if it is positive, both propagate it to the first maximum.
    """
    relus: list[fx.Node] = []
    for node in graph.nodes:
        if node.target is aten.relu.default:
            relus.append(node)
    for relu in relus:
        chain = _pooled_relu(relu)
        if chain is not None:
            _swap(graph, chain)


def _pooled_relu(relu: fx.Node) -> _PooledRelu | None:
    """Return the pooling after a relu; None if anything else reads the relu."""
    by_kind = {user.target: user for user in relu.users}
    pool = by_kind.get(aten.max_pool2d_with_indices.default)
    pool_back = by_kind.get(aten.max_pool2d_with_indices_backward.default)
    relu_back = by_kind.get(aten.threshold_backward.default)
    if pool is None or len(by_kind) != len(relu.users) or set(by_kind) - _POOLED:
        return None
    # Half of a gradient: the other half is read elsewhere, and a swap would change it.
    if (pool_back is None) != (relu_back is None):
        return None
    if pool_back is not None and relu_back is not None:
        alone = len(pool_back.users) == 1
        if relu_back.args[0] is not pool_back or not alone:
            return None
    pooled = _output(pool, 0)
    if pooled is None:
        return None
    return _PooledRelu(relu, pool, pooled, pool_back, relu_back)


_POOLED = {
    aten.max_pool2d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.threshold_backward.default,
}


def _swap(graph: fx.Graph, chain: _PooledRelu) -> None:
    """Pool first, and let the relu follow."""
    x = _argument(chain.relu, 0)
    pooled = chain.pooled
    chain.pool.args = (x, *chain.pool.args[1:])
    with graph.inserting_after(pooled):
        late = graph.call_function(aten.relu.default, (pooled,))
    late.meta = dict(pooled.meta)
    pooled.replace_all_uses_with(late, delete_user_cb=lambda user: user is not late)
    pool_back = chain.pool_back
    if pool_back is None or chain.relu_back is None:
        return
    grad = _argument(pool_back, 0)
    with graph.inserting_before(pool_back):
        small = graph.call_function(aten.threshold_backward.default, (grad, late, 0))
    small.meta = dict(pooled.meta)
    pool_back.args = (small, x, *pool_back.args[2:])
    chain.relu_back.replace_all_uses_with(pool_back)
    graph.erase_node(chain.relu_back)
