"""What a sub-model costs a device: arithmetic, and memory while it trains.

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

_NUMBER_BYTES: dict[int, int] = {
    onnx.TensorProto.FLOAT: 4,
    onnx.TensorProto.INT64: 8,
    onnx.TensorProto.BOOL: 1,
    onnx.TensorProto.INT32: 4,
    onnx.TensorProto.DOUBLE: 8,
}


@dataclass(frozen=True)
class Footprint:
    """The costs of one tier."""

    parameters: int  # number of scalars
    flops_per_sample: int  # one forward pass of one sample
    flops_per_step_sample: int  # one training step per sample of the batch, the update left out
    peak_memory_bytes: int  # training at batch 32, beyond the runtime itself


class _WholeModel(nullcontext[None]):
    """Counts a model as one.

    PyTorch's way to count its modules apart forbids gradients inside a forward pass.
    """

    parents = frozenset({"Global"})


_Sizes = tuple[int, ...]


def _recurrent_flops(x: _Sizes, to_gates: _Sizes, of_state: _Sizes, *_: Any, **__: Any) -> int:
    """Return two per weight for each step of each sample."""
    return 2 * x[0] * x[1] * (math.prod(to_gates) + math.prod(of_state))


def _recurrent_backward_flops(*shapes: Any, **_: Any) -> int:
    return 2 * _recurrent_flops(*shapes)


def _attention_flops(q: _Sizes, k: _Sizes, v: _Sizes, *_: Any, **__: Any) -> int:
    """Return those of the products of queries with keys, and of their shares with values."""
    return 2 * math.prod(q[:-1]) * k[-2] * (k[-1] + v[-1])


def _attention_backward_flops(*shapes: Any, **_: Any) -> int:
    return 2 * _attention_flops(*shapes[1:])


_FUSED = "_scaled_dot_product_flash_attention_for_cpu"
# Operators of the CPU that PyTorch's counter does not know; they get shapes.
_UNKNOWN = {
    torch.ops.aten.mkldnn_rnn_layer: _recurrent_flops,
    torch.ops.aten.mkldnn_rnn_layer_backward: _recurrent_backward_flops,
    getattr(torch.ops.aten, _FUSED): _attention_flops,
    getattr(torch.ops.aten, f"{_FUSED}_backward"): _attention_backward_flops,
}


def _counter() -> FlopCounterMode:
    counter = FlopCounterMode(display=False, custom_mapping=_UNKNOWN)
    counter.mod_tracker = _WholeModel()  # type: ignore[assignment]
    return counter


def count_flops(module: nn.Module, signature: Signature) -> tuple[int, int]:
    """Return floating point operations per sample of the forward pass, and of a training step."""
    batch = 2  # a static batch norm needs more than one sample
    x = signature.samples(batch)
    set_mode(module, "train")
    with _counter() as forward:
        outputs = tree_leaves(module(x))
    parameters = []
    for value in module.parameters():
        if value.requires_grad:
            parameters.append(value)
    with _counter() as backward:
        total = sum(output.sum() for output in outputs)
        torch.autograd.grad(total, parameters, allow_unused=True)
    one_way = forward.get_total_flops()
    return one_way // batch, (one_way + backward.get_total_flops()) // batch


def peak_memory(model: onnx.ModelProto, batch: int = MEMORY_BATCH) -> int:
    """Return bytes of all live values at the worst moment of one run.

    How it is counted stands at the top of this module.
    """
    graph = sized(model, batch)
    sizes = {}
    for value in (*graph.value_info, *graph.input, *graph.output):
        sizes[value.name] = _value_bytes(value.type.tensor_type)
    for tensor in graph.initializer:
        sizes[tensor.name] = math.prod(tensor.dims) * _NUMBER_BYTES[tensor.data_type]
    return _peak(graph, sizes)


def _value_bytes(tensor: onnx.TypeProto.Tensor) -> int:
    # A size that nothing is known of counts as 1.
    dims: list[int] = []
    for dim in tensor.shape.dim:
        dims.append(max(dim.dim_value, 1))
    return math.prod(dims) * _NUMBER_BYTES.get(tensor.elem_type, 4)


def _peak(graph: onnx.GraphProto, sizes: Mapping[str, int]) -> int:
    """Return the largest sum of live values, whose nodes run in order."""
    constants = []
    for tensor in graph.initializer:
        constants.append(tensor.name)
    inputs = [value.name for value in graph.input]
    forever = {*inputs, *constants, *(value.name for value in graph.output)}
    owner, dying = _lifetimes(graph)
    live = sum(sizes.get(name, 0) for name in inputs) + sum(sizes[name] for name in constants)
    worst = live
    for position, node in enumerate(graph.node):
        for name in node.output:
            if name not in owner:  # a view has no memory of its own
                live += sizes.get(name, 0)
        worst = max(worst, live)
        for name in dying.get(position, ()):
            if name not in forever:
                live -= sizes.get(name, 0)
    return worst


def _lifetimes(graph: onnx.GraphProto) -> tuple[dict[str, str], dict[int, list[str]]]:
    """Return the value whose memory each view shares, and the values that each node reads last."""
    owner: dict[str, str] = {}
    last: dict[str, int] = {}
    for position, node in enumerate(graph.node):
        if node.op_type in VIEWS:
            owner[node.output[0]] = owner.get(node.input[0], node.input[0])
        for name in values_read(node):
            last[owner.get(name, name)] = position
    dying: dict[int, list[str]] = {}
    for name, position in last.items():
        dying.setdefault(position, []).append(name)
    return owner, dying
