"""The format of onnxruntime-training: its official artifact set, and our whole step on its gradient graph.

The official set (training, eval and optimizer model, checkpoint) is what the training APIs of that runtime in Python,
C++, C#, Android and iOS read. Its SGD has neither momentum nor weight decay, so beside it stands ``step.onnx``: the
gradient graph that the runtime derived from our forward graph, without its accumulators, with the recipe's optimizer
appended. It takes and returns the same as the portable train graph and runs in the InferenceSession of the same
package, where the kernels of the gradient operators are registered.

The eval model computes the training loss (batch statistics, label mask) and the logits without gradients; evaluation
with given statistics is what the portable eval graph is for.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from torch import nn

from fleet_protocol.errors import ExportError
from fleet_protocol.manifest import CheckSpec, next_name, parameter_input, state_input
from trainer_export import check
from trainer_export.check import SizedBatches
from trainer_export.emitter import Emitter
from trainer_export.formats.files import GraphFile, SetFile
from trainer_export.graph import IR_VERSION, GraphBuilder, Port
from trainer_export.lowering import LOWERINGS, lower
from trainer_export.lowering_plain import LOWERINGS as PLAIN
from trainer_export.model_ports import Signature, anchor_ports, batch_ports, mask_port, model_noise, noise_ports
from trainer_export.recipe import Recipe
from trainer_export.trace import trace_loss, trace_optimizer
from trainer_export.values import Value

__all__ = ["MissingGradientError", "check_artifacts", "write_artifacts"]

_FOLDER = "ort-training"
_STEP = f"{_FOLDER}/step"
_MODELS = ("training_model", "eval_model", "optimizer_model")
_OFFICIAL_STEPS = 5
_NO_GRADIENT = re.compile(r"gradient builder has not been registered: *(\w+)")


class MissingGradientError(ExportError):
    """onnxruntime-training cannot differentiate an operator of the model; the portable format does not need it.

    Args:
        operator: the ONNX operator without a gradient.
    """

    def __init__(self, operator: str) -> None:
        super().__init__(
            f"format ort-training not available for this model: no gradient for op {operator};"
            " the portable format works"
        )
        self.operator = operator


def write_artifacts(module: nn.Module, signature: Signature, recipe: Recipe) -> tuple[SetFile, ...]:
    """Write the official artifact set and the step graph of a model.

    Args:
        module: the sub-model; its weights become those of the checkpoint.
        signature: what it takes and returns.
        recipe: what the step graph does; the official optimizer is plain SGD.

    Returns:
        The files.

    Raises:
        ExportError: an operator cannot be exported.
        MissingGradientError: the runtime has no gradient for an operator.
    """
    weights = {name: p.detach().numpy() for name, p in module.named_parameters()}
    forward = _forward_model(module, signature, weights)
    files = _official_files(forward, list(weights))
    training = onnx.load_model_from_string(files[0].data)
    batch = (*batch_ports(signature, "x", "y"), mask_port(signature), *noise_ports(model_noise(module, signature)))
    return (*files, _step_file(training, batch, {n: w.shape for n, w in weights.items()}, recipe))


def check_artifacts(
    files: Sequence[SetFile], module: nn.Module, recipe: Recipe, batches: SizedBatches
) -> tuple[CheckSpec, ...]:
    """Train with the step graph, and with the official set through its own API, and compare with PyTorch.

    Args:
        files: what :func:`write_artifacts` wrote.
        module: the sub-model whose weights are in the checkpoint.
        recipe: what the step graph was made for.
        batches: random batches.

    Returns:
        Two reports.

    Raises:
        ExportError: one of them deviates; the message names the tensor.
    """
    step = next(file for file in files if file.key == _STEP)
    official = [file for file in files if file.key != _STEP]
    return (
        check.check_train(step.data, module, recipe, batches, graph=_STEP),
        check.repeated(lambda seeded: _check_official(official, module, seeded), batches),
    )


# -- the official set --------------------------------------------------------------------------------------------------


def _forward_model(module: nn.Module, signature: Signature, weights: Mapping[str, NDArray[Any]]) -> onnx.ModelProto:
    """Loss and logits of a batch, parameters as initializers under their own names.

    LayerNormalization is written with all three outputs: the runtime has a gradient for it only then.
    """
    trace = trace_loss(module, signature)
    graph = GraphBuilder("forward")
    emitter = Emitter(graph, trace.batch_input)
    names = [
        *(graph.constant(weight, name) for name, weight in weights.items()),
        *(graph.input(port) for port in trace.inputs[len(weights) :]),
    ]
    inputs = [emitter.value(name, spec.shape, spec.dtype) for name, spec in zip(names, trace.input_specs, strict=True)]
    outputs = lower(emitter, trace, inputs, {**LOWERINGS, **PLAIN})
    for port, value in zip(trace.outputs, outputs, strict=True):
        graph.output(port, emitter.plain(value))
    return graph.model()


def _official_files(forward: onnx.ModelProto, trained: list[str]) -> list[SetFile]:
    try:
        from onnxruntime.training import artifacts  # noqa: PLC0415 - only in onnxruntime-training
    except ImportError as error:
        raise ExportError(
            "the format ort-training needs onnxruntime-training; install shoal[export], or export --formats onnx only"
        ) from error
    with tempfile.TemporaryDirectory() as name, _silent_stderr():
        folder = Path(name)
        try:
            artifacts.generate_artifacts(
                forward, requires_grad=trained, optimizer=artifacts.OptimType.SGD, artifact_directory=folder
            )
        except Exception as error:
            unknown = _NO_GRADIENT.search(str(error))
            if unknown:
                raise MissingGradientError(unknown[1]) from error
            raise ExportError(
                f"onnxruntime-training cannot derive the gradient graph: {_reason(error)}; export --formats onnx only"
            ) from error
        files: list[SetFile] = [_model_file(folder, name) for name in _MODELS]
        files.append(SetFile(f"{_FOLDER}/checkpoint", f"{_FOLDER}/checkpoint", (folder / "checkpoint").read_bytes()))
    return files


def _reason(error: Exception) -> str:
    """What the runtime says, without the signature of the C++ function it says it in."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rsplit(" was false. ", 1)[-1]


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """The runtime prints every rewrite it tries, past every logger setting; what fails still raises."""
    kept = os.dup(2)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _model_file(folder: Path, name: str) -> GraphFile:
    model = onnx.load(str(folder / f"{name}.onnx"))
    # The installed onnx stamps its own newest version on the optimizer model, and the runtime reads up to 10.
    model.ir_version = IR_VERSION
    data = model.SerializeToString(deterministic=True)
    inputs, outputs = (tuple(_port(v) for v in vs) for vs in (model.graph.input, model.graph.output))
    return GraphFile(f"{_FOLDER}/{name}", f"{_FOLDER}/{name}.onnx", data, inputs, outputs, model)


def _port(value: onnx.ValueInfoProto) -> Port:
    tensor = (
        value.type.tensor_type if value.type.HasField("tensor_type") else value.type.sequence_type.elem_type.tensor_type
    )
    shape = tuple(d.dim_param or d.dim_value for d in tensor.shape.dim)
    return Port(value.name, "int64" if tensor.elem_type == onnx.TensorProto.INT64 else "float32", shape)


def _check_official(files: Sequence[SetFile], module: nn.Module, batches: SizedBatches) -> CheckSpec:
    """The official set through its Python API: gradients of the training model, its own SGD."""
    from onnxruntime.training import api  # noqa: PLC0415 - only in onnxruntime-training

    worst, shapes = check.Worst(), model_noise(module, batches.signature)
    reference = check.Reference(module, Recipe(momentum=0.0, weight_decay=0.0, clip_norm=None))
    with tempfile.TemporaryDirectory() as name, _silent_stderr():
        paths = {file.key.split("/")[1]: Path(name) / Path(file.path).name for file in files}
        for file in files:
            paths[file.key.split("/")[1]].write_bytes(file.data)
        state = api.CheckpointState.load_checkpoint(str(paths["checkpoint"]))
        model = api.Module(str(paths["training_model"]), state, str(paths["eval_model"]))
        optimizer = api.Optimizer(str(paths["optimizer_model"]), model)
        optimizer.set_learning_rate(check.LEARNING_RATE)
        model.train()
        for number, (x, y) in enumerate(batches.take(_OFFICIAL_STEPS)):
            worst.sizes.append(len(y))
            mask, noise = batches.mask(), batches.noise(shapes, len(y), number)
            loss, _ = model(x.numpy(), y.numpy(), mask.numpy(), *(drawn.numpy() for drawn in noise.values()))
            optimizer.step()
            model.lazy_reset_grad()
            worst.compare({"loss": np.asarray(loss)}, {"loss": reference.step(x, y, mask, noise)})
        expected, _ = reference.snapshot()
        worst.compare({name: state.parameters[name].data for name in expected}, expected)
        del optimizer, model, state  # they hold the files open
    return worst.report(f"{_FOLDER}/training_model", _OFFICIAL_STEPS)


# -- the step graph ----------------------------------------------------------------------------------------------------


def _step_file(
    training: onnx.ModelProto, batch: Sequence[Port], shapes: Mapping[str, tuple[int, ...]], recipe: Recipe
) -> GraphFile:
    graph = GraphBuilder("step")
    parameters = [Port(parameter_input(name), "float32", shape) for name, shape in shapes.items()]
    states = [Port(state_input(name), "float32", shape) for name, shape in shapes.items() if recipe.has_state]
    anchors = anchor_ports(shapes) if recipe.proximal else ()
    inputs = [*parameters, *states, *batch, Port("lr", "float32", ()), *anchors]
    for port in inputs:
        graph.input(port)
    _append_gradients(graph, training, list(shapes), [port.name for port in batch])
    emitter = Emitter(graph, "x")
    outputs = [
        Port("loss", "float32", ()),
        *(Port(next_name(p.name), p.dtype, p.shape) for p in (*parameters, *states)),
    ]
    trace = trace_optimizer(shapes, recipe)
    known = [_value(emitter, p.name, p.shape) for p in (*parameters, *states)]
    known += [_value(emitter, _inner(f"{name}_grad"), shape) for name, shape in shapes.items()]
    known += [_value(emitter, "lr", ()), *(_value(emitter, p.name, p.shape) for p in anchors)]
    moved = lower(emitter, trace, known)
    for port, name in zip(outputs, [_inner("loss"), *(emitter.plain(v) for v in moved)], strict=True):
        graph.output(port, name)
    domains = [(item.domain, item.version) for item in training.opset_import if item.domain]
    model = graph.model({"shoal.graph": "step"}, domains)
    data = model.SerializeToString(deterministic=True)
    return GraphFile(_STEP, f"{_STEP}.onnx", data, tuple(inputs), tuple(outputs), model)


def _value(emitter: Emitter, name: str, shape: tuple[Any, ...]) -> Value:
    return emitter.value(name, shape, torch.float32)


def _inner(name: str) -> str:
    """A value of the gradient graph, kept apart from those of the builder."""
    return f"gradient/{name}"


def _append_gradients(
    graph: GraphBuilder, training: onnx.ModelProto, trained: Sequence[str], batch: Sequence[str]
) -> None:
    """Take over the gradient graph; its accumulators lose their consumers and are dropped with all dead nodes.

    Its shapes come along: the kernel of MaxPoolGrad reads that of its output and crashes without.
    """
    names = {name: parameter_input(name) for name in trained} | {name: name for name in batch} | {"": ""}
    nodes = []
    for node in training.graph.node:
        moved = copy.deepcopy(node)
        moved.name = _inner(node.name)
        moved.input[:] = [names.get(name, _inner(name)) for name in node.input]
        moved.output[:] = [_inner(name) if name else "" for name in node.output]
        nodes.append(moved)
    constants = {_inner(t.name): numpy_helper.to_array(t) for t in training.graph.initializer}
    shapes = []
    for info in training.graph.value_info:
        moved_info = copy.deepcopy(info)
        moved_info.name = _inner(info.name)
        shapes.append(moved_info)
    graph.append(nodes, constants, shapes)
