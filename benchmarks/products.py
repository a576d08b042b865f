"""Counts the matrix products of a graph, which a step cannot do without."""

import math
from pathlib import Path

import onnx

from trainer_export.sized_graph import attribute, sized

_Shapes = dict[str, tuple[int, ...]]


def product_flops(path: Path, batch: int) -> int:
    """Return the multiplications and additions of a graph's matrix products and convolutions.

    Args:
        path: file of the graph.
        batch: samples of a batch.
    """
    model = onnx.load(path)
    inferred = sized(model, batch)
    shapes: _Shapes = {}
    for value in (*inferred.value_info, *inferred.input, *inferred.output):
        dims = value.type.tensor_type.shape.dim
        shapes[value.name] = tuple(dim.dim_value for dim in dims)
    for tensor in model.graph.initializer:
        shapes[tensor.name] = tuple(tensor.dims)
    return sum(_node_flops(node, shapes) for node in model.graph.node)


def _node_flops(node: onnx.NodeProto, shapes: _Shapes) -> int:
    if node.op_type not in ("Gemm", "MatMul", "Conv"):
        return 0
    left, right = node.input[:2]
    results = math.prod(shapes[node.output[0]])
    if node.op_type == "Conv":
        return 2 * results * math.prod(shapes[right][1:])
    transposed = node.op_type == "Gemm" and attribute(node, "transA")
    terms = shapes[left][-2 if transposed else -1]
    return 2 * results * terms
