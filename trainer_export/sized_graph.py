"""An ONNX graph with the sizes of its values for a batch, to be rewritten node by node."""

import math
from collections.abc import Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from trainer_export.graph import live_nodes

_BATCH = 32
VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Identity", "Flatten"})
"""Operators that give memory another name."""

Shape = tuple[int, ...]


def sized(model: onnx.ModelProto, batch: int) -> onnx.GraphProto:
    """A copy of a graph with the shapes of its values for a batch."""
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    for value in (*fixed.graph.input, *fixed.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = batch
    return onnx.shape_inference.infer_shapes(fixed, data_prop=True).graph


class SizedGraph:
    """A model with the shapes of its values for a batch of 32; :meth:`replace` changes it."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.proto = model.graph
        self._count = 0
        inferred = sized(model, _BATCH)
        values = (*inferred.value_info, *inferred.input, *inferred.output)
        tensors = [(v.name, v.type.tensor_type) for v in values]
        self.shapes: dict[str, Shape] = {
            name: tuple(d.dim_value for d in t.shape.dim) for name, t in tensors
        }
        items = {
            name: helper.tensor_dtype_to_np_dtype(t.elem_type).itemsize
            for name, t in tensors
            if t.elem_type
        }
        self.sizes = {
            name: math.prod(shape) * items.get(name, 4) for name, shape in self.shapes.items()
        }
        self.constants = {t.name: t for t in self.proto.initializer}
        self.producers = {name: node for node in self.proto.node for name in node.output}
        self._taken = {
            *self.producers,
            *self.constants,
            *(value.name for value in self.proto.input),
        }

    def name(self) -> str:
        """A name that no value has."""
        self._count += 1
        while f"memory.{self._count}" in self._taken:  # a graph that was rewritten before
            self._count += 1
        return f"memory.{self._count}"

    def ints(self, *values: int) -> str:
        """A constant of integers."""
        return self.constant(np.array(values, np.int64))

    def constant(self, array: NDArray[np.int64]) -> str:
        """A constant of its own: values that share one would be merged again by the runtime."""
        tensor = numpy_helper.from_array(array, self.name())
        self.proto.initializer.append(tensor)
        self.constants[tensor.name] = tensor
        return str(tensor.name)

    def replace(self, nodes: Sequence[onnx.NodeProto]) -> None:
        """Set the nodes, without those whose results nobody uses, and forget unused constants."""
        needed = {value.name for value in self.proto.output}
        kept = live_nodes(nodes, needed)
        constants = [t for t in self.proto.initializer if t.name in needed]
        del self.proto.node[:], self.proto.initializer[:]
        self.proto.node.extend(kept)
        self.proto.initializer.extend(constants)


def attribute(node: onnx.NodeProto, name: str) -> int:
    """An integer attribute of a node; 0 if it has none of this name."""
    return next((int(a.i) for a in node.attribute if a.name == name), 0)
