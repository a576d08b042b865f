"""Runs a graph in float64, where rounding is too small to matter.

The runtime computes in float32 only. So a graph whose float32 run deviates is run once more by
onnx's reference evaluator, with all its numbers in float64: what deviates there is a fault.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import GraphProto, TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch.nn import functional

from fleet_protocol.manifest import CheckSpec
from trainer_export.batches import SizedBatches
from trainer_export.check import Session, WorstDeviation, open_session
from trainer_export.repeated_check import Run, repeated

Array = NDArray[Any]

_TYPED = {"to", "dtype"}  # attributes that are a data type


class DoubleSession:
    """A graph whose numbers are all in float64, with the interface of a session.

    Args:
        model: the graph, with its weights in the file or as inputs.
    """

    def __init__(self, model: bytes) -> None:
        self._model = onnx.load_from_string(model)
        _double_graph(self._model.graph)
        self._evaluator = ReferenceEvaluator(self._model, new_ops=[*_FAST])

    def get_inputs(self) -> Sequence[Any]:
        """Return the inputs with their names."""
        initial = {tensor.name for tensor in self._model.graph.initializer}
        return [port for port in self._model.graph.input if port.name not in initial]

    def get_outputs(self) -> Sequence[Any]:
        """Return the outputs with their names."""
        return [*self._model.graph.output]

    def run(self, names: Sequence[str], feed: Mapping[str, Array]) -> Sequence[Array]:
        """Return the outputs with these names.

        Args:
            names: names of outputs.
            feed: inputs; floating-point numbers are converted to float64.
        """
        doubled: dict[str, Array] = {}
        for name, value in feed.items():
            doubled[name] = _doubled(value)
        outputs: Sequence[Array] = self._evaluator.run([*names], doubled)
        return outputs


def deviation_on(session: Session) -> WorstDeviation:
    """Return the deviations of a graph in a session before any is known."""
    if isinstance(session, DoubleSession):
        return WorstDeviation(runtime=f"onnx {onnx.__version__}, float64", in_float64=True)
    return WorstDeviation()


def repeated_on(
    model: bytes | Session, run_on: Callable[[Session], Run], batches: SizedBatches
) -> CheckSpec:
    """Compare a graph with PyTorch on several batches, and in float64 if none agrees.

    Args:
        model: the graph; a session of a graph in parts is not run in float64.
        run_on: returns the comparison by a session.
        batches: batches of the first run.

    Raises:
        ExportError: every run deviates, as it does for a bug.
    """

    def in_float64() -> Run:
        assert isinstance(model, bytes)
        return run_on(DoubleSession(model))

    can_double = isinstance(model, bytes)
    return repeated(run_on(open_session(model)), batches, in_float64 if can_double else None)


def _doubled(value: Array) -> Array:
    return value.astype(np.float64) if value.dtype == np.float32 else value


def _double_graph(graph: GraphProto) -> None:
    """Change all float32 of a graph, and of the graphs in its nodes, to float64."""
    for tensor in graph.initializer:
        _double_tensor(tensor)
    for port in (*graph.input, *graph.output, *graph.value_info):
        tensor_type = port.type.tensor_type
        if tensor_type.elem_type == TensorProto.FLOAT:
            tensor_type.elem_type = TensorProto.DOUBLE
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                _double_tensor(attribute.t)
            if attribute.HasField("g"):
                _double_graph(attribute.g)
            if attribute.name in _TYPED and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.DOUBLE


def _double_tensor(tensor: TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        value = _doubled(numpy_helper.to_array(tensor))
        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))


# The evaluator's own convolutions and maxima are loops in Python. The graph's attributes are
# complete (`trainer_export.lowering`), so that automatic padding does not occur.


def _padded(x: Array, pads: Sequence[int], filler: float) -> torch.Tensor:
    """Pad the spatial axes; ONNX gives all begins first, PyTorch the last axis first."""
    spatial = len(pads) // 2
    amounts: list[int] = []
    for axis in reversed(range(spatial)):
        amounts += [pads[axis], pads[axis + spatial]]
    return functional.pad(torch.from_numpy(x), amounts, value=filler)


class _Conv(OpRun):
    """A convolution by PyTorch."""

    op_domain = ""

    def _run(self, x: Array, w: Array, b: Array | None = None, **attributes: Any) -> tuple[Array]:
        spatial = x.ndim - 2
        convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[spatial - 1]
        padded = _padded(x, attributes["pads"] or [0] * 2 * spatial, 0.0)
        result = convolve(
            padded,
            torch.from_numpy(w),
            None if b is None else torch.from_numpy(b),
            stride=attributes["strides"] or 1,
            dilation=attributes["dilations"] or 1,
            groups=attributes["group"] or 1,
        )
        return (result.numpy(),)


class _ConvTranspose(OpRun):
    """A transposed convolution by PyTorch, with equal padding at both ends."""

    op_domain = ""

    def _run(self, x: Array, w: Array, b: Array | None = None, **attributes: Any) -> tuple[Array]:
        spatial = x.ndim - 2
        transpose = (
            functional.conv_transpose1d,
            functional.conv_transpose2d,
            functional.conv_transpose3d,
        )[spatial - 1]
        pads = attributes["pads"] or [0] * 2 * spatial
        result = transpose(
            torch.from_numpy(x),
            torch.from_numpy(w),
            None if b is None else torch.from_numpy(b),
            stride=attributes["strides"] or 1,
            padding=pads[:spatial],
            output_padding=attributes["output_padding"] or 0,
            groups=attributes["group"] or 1,
            dilation=attributes["dilations"] or 1,
        )
        return (result.numpy(),)


class _MaxPool(OpRun):
    """A maximum over windows by PyTorch, with places in the whole map."""

    op_domain = ""

    def _run(self, x: Array, **attributes: Any) -> tuple[Array, Array]:
        spatial = x.ndim - 2
        pads = attributes["pads"] or [0] * 2 * spatial
        pool = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[spatial - 1]
        padded = _padded(x, pads, -np.inf)
        # The places of all entries are padded alike, and taken at the maxima.
        places = np.arange(x.size, dtype=np.float64).reshape(x.shape)
        padded_places = _padded(places, pads, -1.0).flatten(2)
        pooled, indices = pool(
            padded,
            attributes["kernel_shape"],
            stride=attributes["strides"] or 1,
            dilation=attributes["dilations"] or 1,
            return_indices=True,
        )
        taken = padded_places.gather(2, indices.flatten(2)).reshape(indices.shape)
        return pooled.numpy(), taken.numpy().astype(np.int64)


class _Erf(OpRun):
    """The error function, which the evaluator rounds to float32."""

    op_domain = ""

    def _run(self, x: Array) -> tuple[Array]:
        return (torch.erf(torch.from_numpy(x)).numpy(),)


def _named(kind: type[OpRun], name: str) -> type[OpRun]:
    """Return a class with the name of the operator by which the evaluator finds it."""
    return type(name, (kind,), {"op_domain": ""})


_FAST = (
    _named(_Conv, "Conv"),
    _named(_ConvTranspose, "ConvTranspose"),
    _named(_MaxPool, "MaxPool"),
    _named(_Erf, "Erf"),
)
