"""What a sub-model costs a device: arithmetic, bytes of the graphs, and memory while it trains.

Arithmetic is counted by PyTorch's own counter (multiplications and additions of matrix products and
convolutions, two per multiply-add; element-wise work is left out, as in the tables of the papers).
Memory is counted on the exported graph: the sizes of all values are inferred, the nodes are walked
in the order the runtime runs them, each value lives from its producer to its last consumer, and the
peak of the sum is taken. Two sets of parameters and states (a step reads one and writes the other)
are part of it; the runtime itself, its arena's slack and the data set are not.
"""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from models.zoo.layers import set_mode
from trainer_export.graph import values_read
from trainer_export.model_inputs import Signature
from trainer_export.sized_graph import VIEWS, sized

MEMORY_BATCH = 32
"""Samples per batch the memory estimate is for."""

_ITEM_BYTES = {1: 4, 7: 8, 9: 1, 6: 4, 11: 8}


@dataclass(frozen=True)
class Footprint:
    """The costs of one tier."""

    parameters: int  # number of scalars
    flops_per_sample: int  # one forward pass of one sample
    flops_per_step_sample: int  # one training step per sample of the batch, the update left out
    peak_memory_bytes: int  # training at batch 32, beyond the runtime itself


class _WholeModel(nullcontext[None]):
    """Counts for no module of its own: PyTorch's way to tell them apart forbids gradients inside a
    forward pass.
    """

    parents = frozenset({"Global"})


def _recurrent_flops(
    x: tuple[int, ...], one: tuple[int, ...], other: tuple[int, ...], *_: Any, **__: Any
) -> int:
    return 2 * x[0] * x[1] * (math.prod(one) + math.prod(other))


def _attention_flops(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *_: Any, **__: Any
) -> int:
    return 2 * math.prod(q[:-1]) * k[-2] * (k[-1] + v[-1])


# Operators of the CPU that PyTorch's counter does not know; all are given shapes.
_UNKNOWN = {
    getattr(torch.ops.aten, name): count
    for name, count in (
        ("mkldnn_rnn_layer", _recurrent_flops),
        (
            "mkldnn_rnn_layer_backward",
            lambda *shapes, **_: 2 * _recurrent_flops(*shapes),
        ),
        ("_scaled_dot_product_flash_attention_for_cpu", _attention_flops),
        (
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            lambda *shapes, **_: 2 * _attention_flops(*shapes[1:]),
        ),
    )
}


def _counter() -> FlopCounterMode:
    counter = FlopCounterMode(display=False, custom_mapping=_UNKNOWN)
    counter.mod_tracker = _WholeModel()  # type: ignore[assignment]
    return counter


def count_flops(module: nn.Module, signature: Signature) -> tuple[int, int]:
    """Floating point operations per sample of the forward pass, and of forward and backward
    together.
    """
    batch = 2  # a static batch norm needs more than one sample
    x = signature.samples(batch)
    set_mode(module, "train")
    with _counter() as forward:
        logits = tree_leaves(module(x))
    with _counter() as backward:
        torch.autograd.grad(
            sum(head.sum() for head in logits),
            [p for p in module.parameters() if p.requires_grad],
            allow_unused=True,
        )
    one_way = forward.get_total_flops()
    return one_way // batch, (one_way + backward.get_total_flops()) // batch


def peak_memory(model: onnx.ModelProto, batch: int = MEMORY_BATCH) -> int:
    """Bytes of all live values at the worst moment of one run.

    How it is counted stands at the top of this module.
    """
    inferred = sized(model, batch)
    sizes = {
        v.name: _size(v.type.tensor_type)
        for v in (*inferred.value_info, *inferred.input, *inferred.output)
    }
    sizes |= {t.name: math.prod(t.dims) * _ITEM_BYTES[t.data_type] for t in inferred.initializer}
    return _peak(inferred, sizes)


def _size(tensor: onnx.TypeProto.Tensor) -> int:
    dims: list[int] = [max(d.dim_value, 1) for d in tensor.shape.dim]
    return math.prod(dims) * _ITEM_BYTES.get(tensor.elem_type, 4)


def _peak(graph: onnx.GraphProto, sizes: Mapping[str, int]) -> int:
    owner: dict[str, str] = {}
    last: dict[str, int] = {}
    for i, node in enumerate(graph.node):
        if node.op_type in VIEWS:
            owner[node.output[0]] = owner.get(node.input[0], node.input[0])
        for name in values_read(node):
            last[owner.get(name, name)] = i
    forever = {v.name for v in (*graph.input, *graph.output)} | {t.name for t in graph.initializer}
    live = sum(sizes.get(v.name, 0) for v in graph.input) + sum(
        sizes[t.name] for t in graph.initializer
    )
    worst = live
    dying = dict[int, list[str]]()
    for name, i in last.items():
        dying.setdefault(i, []).append(name)
    for i, node in enumerate(graph.node):
        live += sum(sizes.get(name, 0) for name in node.output if name not in owner)
        worst = max(worst, live)
        live -= sum(sizes.get(name, 0) for name in dying.get(i, ()) if name not in forever)
    return worst
