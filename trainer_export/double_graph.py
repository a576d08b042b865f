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
        return [*self._model.graph.input]

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
        return [*self._evaluator.run([*names], doubled)]


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


# The evaluator's own convolutions and maxima are loops in Python. The exporter writes all
# attributes of these operators, and equal padding at both ends of a convolution's axes.


class _Conv(OpRun):
    """A convolution by PyTorch."""

    is_transposed = False

    def _run(
        self,
        x: Array,
        weight: Array,
        bias: Array | None = None,
        *,
        output_padding: Sequence[int] | None = None,
        **attributes: Any,
    ) -> tuple[Array]:
        axes = x.ndim - 2
        result = torch.convolution(
            torch.from_numpy(x),
            torch.from_numpy(weight),
            None if bias is None else torch.from_numpy(bias),
            attributes["strides"],
            attributes["pads"][:axes],
            attributes["dilations"],
            self.is_transposed,
            output_padding or [0] * axes,
            attributes["group"],
        )
        return (result.numpy(),)


class _ConvTranspose(_Conv):
    """A transposed convolution by PyTorch."""

    is_transposed = True


class _MaxPool(OpRun):
    """Maxima over windows of maps by PyTorch, and their places among the entries of all maps."""

    def _run(self, x: Array, **attributes: Any) -> tuple[Array, Array]:
        top, left, bottom, right = attributes["pads"]
        margins = (left, right, top, bottom)
        padded = functional.pad(torch.from_numpy(x), margins, value=-torch.inf)
        pooled, indices = functional.max_pool2d(
            padded,
            attributes["kernel_shape"],
            attributes["strides"],
            dilation=attributes["dilations"],
            return_indices=True,
        )
        # The indices are those of padded maps; the places are padded alike, and looked up.
        places = torch.arange(float(x.size), dtype=torch.float64).reshape(x.shape)
        padded_places = functional.pad(places, margins).flatten(2)
        found = padded_places.gather(2, indices.flatten(2))
        return pooled.numpy(), found.reshape(indices.shape).long().numpy()


class _Erf(OpRun):
    """The error function, which the evaluator rounds to float32."""

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
