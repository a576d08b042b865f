"""An ONNX graph with the sizes of its values for a batch, for rewrites node by node."""

import math
from collections.abc import Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from trainer_export.graph import live_nodes

_BATCH = 32
VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Identity", "Flatten"})
"""Operators whose output shares their input's memory."""

Shape = tuple[int, ...]


def sized(model: onnx.ModelProto, batch: int) -> onnx.GraphProto:
    """Return a copy of a graph with the shapes of its values for a batch."""
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    for value in (*fixed.graph.input, *fixed.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            # Only the batch is a named dimension.
            if dim.dim_param:
                dim.dim_value = batch
    # Shapes that the graph computes from shapes are followed, too.
    return onnx.shape_inference.infer_shapes(fixed, data_prop=True).graph


class SizedGraph:
    """A model with the shapes of its values for a batch of 32; :meth:`replace` changes it."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.proto = model.graph
        self._count = 0
        inferred = sized(model, _BATCH)
        self.shapes: dict[str, Shape] = {}
        self.sizes: dict[str, int] = {}
        for value in (*inferred.value_info, *inferred.input, *inferred.output):
            tensor = value.type.tensor_type
            shape = tuple(dim.dim_value for dim in tensor.shape.dim)
            self.shapes[value.name] = shape
            self.sizes[value.name] = math.prod(shape) * _number_bytes(tensor.elem_type)
        self.constants = {tensor.name: tensor for tensor in self.proto.initializer}
        self.producers: dict[str, onnx.NodeProto] = {}
        for node in self.proto.node:
            self.producers.update(dict.fromkeys(node.output, node))
        inputs = (value.name for value in self.proto.input)
        self._taken = {*self.producers, *self.constants, *inputs}

    def name(self) -> str:
        """Return an unused name."""
        self._count += 1
        while f"memory.{self._count}" in self._taken:  # a graph that was rewritten before
            self._count += 1
        return f"memory.{self._count}"

    def ints(self, *values: int) -> str:
        """Return a constant of integers."""
        return self.constant(np.array(values, np.int64))

    def constant(self, array: NDArray[np.int64]) -> str:
        """Return a constant for a single node.

        The runtime would merge values that share a constant.
        """
        tensor = numpy_helper.from_array(array, self.name())
        self.proto.initializer.append(tensor)
        self.constants[tensor.name] = tensor
        return str(tensor.name)

    def replace(self, nodes: Sequence[onnx.NodeProto]) -> None:
        """Set the nodes, without those whose results nothing reads, and drop unused constants."""
        needed = {value.name for value in self.proto.output}
        kept = live_nodes(nodes, needed)
        constants = []
        # `live_nodes` has added to `needed` what the kept nodes read.
        for tensor in self.proto.initializer:
            if tensor.name in needed:
                constants.append(tensor)
        del self.proto.node[:], self.proto.initializer[:]
        self.proto.node.extend(kept)
        self.proto.initializer.extend(constants)


def attribute(node: onnx.NodeProto, name: str) -> int:
    """Return an integer attribute of a node; 0 if it has no such attribute."""
    for entry in node.attribute:
        if entry.name == name:
            return int(entry.i)
    return 0


def _number_bytes(element_type: int) -> int:
    """Return the bytes of a number; 4 if its type is unknown."""
    if not element_type:
        return 4
    return int(helper.tensor_dtype_to_np_dtype(element_type).itemsize)
