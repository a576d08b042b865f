"""The cost of a sub-model on a device: arithmetic, and memory during training.

PyTorch's own counter counts the arithmetic: multiplications and additions of matrix products and
convolutions, two per multiply-add. Element-wise work is not counted, as in the papers' tables.
Memory is computed from the exported graph: the sizes of all values are inferred, the nodes are
visited in the runtime's order, each value lives from its producer to its last consumer, and the
result is the peak of the sum. It includes two sets of parameters and states (a step reads one and
writes the other) unless the step may overwrite them, but not the runtime itself, the unused part of
its arena, or the data set.
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

from fleet_protocol.manifest import next_name
from models.zoo.layers import set_mode
from trainer_export.graph import values_read
from trainer_export.model_inputs import Signature
from trainer_export.sized_graph import VIEWS, sized

MEMORY_BATCH = 32
"""Batch size of the memory estimate."""

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
    flops_per_step_sample: int  # one training step per sample, without the optimizer's update
    peak_memory_bytes: int  # training at batch size 32, without the runtime itself
    recomputed_share: float | None = None  # of the step's work; None without a bound of memory


class _WholeModel(nullcontext[None]):
    """Counts a model as a whole.

    PyTorch's count by module does not allow gradients inside a forward pass.
    """

    parents = frozenset({"Global"})


_Sizes = tuple[int, ...]


def _recurrent_flops(
    x: _Sizes,
    to_gates: _Sizes,
    of_state: _Sizes,
    *_: Any,
    **__: Any,
) -> int:
    """Return the operations of a recurrent layer: two per weight, step and sample."""
    return 2 * x[0] * x[1] * (math.prod(to_gates) + math.prod(of_state))


def _recurrent_backward_flops(*shapes: Any, **_: Any) -> int:
    return 2 * _recurrent_flops(*shapes)


def _attention_flops(
    q: _Sizes,
    k: _Sizes,
    v: _Sizes,
    *_: Any,
    **__: Any,
) -> int:
    """Return the operations of attention: queries times keys, and weights times values."""
    return 2 * math.prod(q[:-1]) * k[-2] * (k[-1] + v[-1])


def _attention_backward_flops(*shapes: Any, **_: Any) -> int:
    return 2 * _attention_flops(*shapes[1:])


def _convolution_backward_flops(
    grad: _Sizes, x: _Sizes, weight: _Sizes, *settings: Any, **_: Any
) -> int:
    """Return the operations of a convolution's gradients, of each group by itself.

    PyTorch's counter counts the gradient of a grouped kernel as that of a dense one.
    """
    _bias, _stride, _padding, _dilation, transposed, _output_padding, _groups, wanted = settings[:8]
    places = math.prod((x if transposed else grad)[2:])
    one_way = 2 * x[0] * places * math.prod(weight)
    # The gradient of the bias is a sum.
    return one_way * sum(map(bool, wanted[:2]))


_FUSED = "_scaled_dot_product_flash_attention_for_cpu"
# CPU operators that PyTorch's counter lacks or counts wrongly; the functions receive shapes.
_UNKNOWN = {
    torch.ops.aten.convolution_backward: _convolution_backward_flops,
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
    """Return floating point operations per sample of the forward pass and of a training step."""
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


def peak_memory(
    model: onnx.ModelProto,
    batch: int = MEMORY_BATCH,
    in_place: tuple[str, ...] = (),
) -> int:
    """Return the peak number of bytes of all live values during a run.

    The docstring of this module describes the calculation.

    Args:
        model: the graph.
        batch: samples of a run.
        in_place: prefixes of the inputs whose next values are written into their memory
            (`trainer_export.in_place`).
    """
    graph = sized(model, batch)
    sizes = {}
    for value in (*graph.value_info, *graph.input, *graph.output):
        sizes[value.name] = _value_bytes(value.type.tensor_type)
    for tensor in graph.initializer:
        sizes[tensor.name] = math.prod(tensor.dims) * _NUMBER_BYTES[tensor.data_type]
    for name in _overwritten(graph, in_place):
        sizes[next_name(name)] = 0
    return _peak(graph, sizes)


def _overwritten(graph: onnx.GraphProto, prefixes: tuple[str, ...]) -> list[str]:
    """Return the inputs with one of some prefixes."""
    names = []
    for value in graph.input:
        if value.name.startswith(prefixes):
            names.append(value.name)
    return names


def _value_bytes(tensor: onnx.TypeProto.Tensor) -> int:
    # An unknown size counts as 1.
    dims: list[int] = []
    for dim in tensor.shape.dim:
        dims.append(max(dim.dim_value, 1))
    return math.prod(dims) * _NUMBER_BYTES.get(tensor.elem_type, 4)


def _peak(graph: onnx.GraphProto, sizes: Mapping[str, int]) -> int:
    """Return the largest sum of live values when the nodes run in order."""
    constants = []
    for tensor in graph.initializer:
        constants.append(tensor.name)
    inputs = [value.name for value in graph.input]
    forever = {
        *inputs,
        *constants,
        *(value.name for value in graph.output),
    }
    owner, dying = _lifetimes(graph)
    live = sum(sizes.get(name, 0) for name in inputs) + sum(sizes[name] for name in constants)
    worst = live
    for position, node in enumerate(graph.node):
        for name in node.output:
            if name not in owner:  # a view does not allocate memory
                live += sizes.get(name, 0)
        worst = max(worst, live)
        for name in dying.get(position, ()):
            if name not in forever:
                live -= sizes.get(name, 0)
    return worst


def _lifetimes(graph: onnx.GraphProto) -> tuple[dict[str, str], dict[int, list[str]]]:
    """Return the base value of each view, and the values that each node reads last."""
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
