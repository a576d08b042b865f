"""The format of onnxruntime-training: its official artifact set, and our whole step on its gradient
graph.

The official set (training, eval and optimizer model, checkpoint) is what the training APIs of that
runtime in Python, C++, C#, Android and iOS read. Its SGD has neither momentum nor weight decay, so
beside it stands ``step.onnx``: the gradient graph that the runtime derived from our forward graph,
without its accumulators, with the recipe's optimizer appended. It takes and returns the same as the
portable train graph and runs in the InferenceSession of the same package, where the kernels of the
gradient operators are registered.

The eval model computes the training loss (batch statistics, label mask) and the logits without
gradients; evaluation with given statistics is what the portable eval graph is for.
"""

import copy
import importlib.util
import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from torch import nn

from fleet_protocol.errors import ExportError
from fleet_protocol.manifest import CheckSpec, next_name, parameter_input
from trainer_export import check
from trainer_export.batches import SizedBatches
from trainer_export.formats.files import (
    GraphFile,
    SetFile,
    UnavailableError,
    silent_stderr,
)
from trainer_export.graph import IR_VERSION, GraphBuilder, Port
from trainer_export.loss import Answer
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.program import lower
from trainer_export.lowering.rules.activation import only_exact
from trainer_export.lowering.rules.elementwise import multiply
from trainer_export.lowering.table import LOWERINGS
from trainer_export.lowering.values import Spec, Value
from trainer_export.lowering.windows import Convolution, Window, mean_window, spread
from trainer_export.model_inputs import (
    Signature,
    batch_ports,
    model_noise,
    noise_ports,
    parameter_ports,
)
from trainer_export.optimizers.sgd import Sgd
from trainer_export.recipe import Recipe
from trainer_export.reference import LEARNING_RATE, Reference, in_float64
from trainer_export.routines.train import check_train, trace_loss, trace_optimizer
from trainer_export.update import changing_ports, extra_ports

NOT_INSTALLED = (
    "the format ort-training needs onnxruntime-training-cpu (Python <= 3.12) in the place of onnxruntime; in a new"
    " environment: pip install 'shoal[export-training]', or export --formats onnx only"
)
"""What is wrong, and what to do, where the runtime that this format is made with is not there."""

_FOLDER = "ort-training"
_STEP = f"{_FOLDER}/step"
_MODELS = ("training_model", "eval_model", "optimizer_model")
_OFFICIAL_STEPS = 5
_NO_GRADIENT = re.compile(r"gradient builder has not been registered: *(\w+)")
aten = torch.ops.aten


def _convolution(
    e: Emitter, out: Spec, x: Value, weight: Value, bias: Value | None, *settings: Any
) -> Value:
    convolution = Convolution(*settings)
    if convolution.transposed:
        raise ExportError(
            "a transposed convolution cannot be exported; use Upsample followed by a convolution"
        )
    rank = x.rank - 2
    inputs = [e.plain(value) for value in (x, weight, bias) if value is not None]
    name = e.graph.node(
        "Conv",
        *inputs,
        kernel_shape=list(weight.shape[2:]),
        strides=spread(convolution.stride, rank),
        pads=spread(convolution.padding, rank) * 2,
        dilations=spread(convolution.dilation, rank),
        group=convolution.groups,
    )
    return e.value(name, out.shape)


def _max_pool(e: Emitter, out: Sequence[Spec], x: Value, *settings: Any) -> tuple[Value, None]:
    window = Window(*settings)
    name = e.graph.node(
        "MaxPool", e.plain(x), **window.attributes, dilations=spread(window.dilation, 2)
    )
    return e.value(name, out[0].shape), None


def _average_pool(e: Emitter, out: Spec, x: Value, *settings: Any) -> Value:
    window, with_pads = mean_window(*settings)
    name = e.graph.node(
        "AveragePool", e.plain(x), **window.attributes, count_include_pad=int(with_pads)
    )
    return e.value(name, out.shape)


def _gelu(e: Emitter, _out: Spec, x: Value, *, approximate: str = "none") -> Value:
    only_exact(approximate)
    twice = e.pointwise(
        "Add", e.pointwise("Erf", multiply(e, x, math.sqrt(0.5))), e.scalar(1, x.dtype)
    )
    return e.pointwise("Mul", x, multiply(e, twice, 0.5))


PLAIN: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        aten.convolution.default: _convolution,
        aten.gelu.default: _gelu,
        aten.max_pool2d_with_indices.default: _max_pool,
        aten.avg_pool2d.default: _average_pool,
    }
)


class MissingGradientError(UnavailableError):
    """onnxruntime-training cannot differentiate an operator of the model.

    The portable format does not need it.
    """

    def __init__(self, operator: str) -> None:
        super().__init__("ort-training", f"no gradient for op {operator}")
        self.operator = operator


def is_installed() -> bool:
    """Whether the runtime of this format is installed: stock onnxruntime is the same import package
    without it.
    """
    return importlib.util.find_spec("onnxruntime.training") is not None


def write_artifacts(module: nn.Module, signature: Signature, recipe: Recipe) -> tuple[SetFile, ...]:
    """Write the official artifact set and the step graph of a model.

    The weights of the module become those of the checkpoint; the official optimizer is plain SGD.

    Raises:
        ExportError: an operator cannot be exported, or onnxruntime-training is not installed.
        UnavailableError: the runtime has no gradient for an operator.
    """
    files = _official_files(_forward_model(module, signature, recipe), module)
    training = onnx.load_model_from_string(files[0].data)
    batch = (
        *batch_ports(signature, recipe.loss),
        *noise_ports(model_noise(module, signature)),
    )
    return (*files, _step_file(training, batch, module, signature.base, recipe))


def check_artifacts(
    files: Sequence[SetFile], module: nn.Module, recipe: Recipe, batches: SizedBatches
) -> tuple[CheckSpec, ...]:
    """Train with the step graph, and with the official set through its own API, and compare with
    PyTorch.

    Raises:
        ExportError: one of them deviates; the message names the tensor.
    """
    step = next(file for file in files if file.key == _STEP)
    official = [file for file in files if file.key != _STEP]
    return (
        check_train(step.data, module, recipe, batches, graph=_STEP),
        check.repeated(lambda *run: _check_official(official, module, recipe, *run), batches),
    )


# -- the official set
# --------------------------------------------------------------------------------------------------


def _forward_model(module: nn.Module, signature: Signature, recipe: Recipe) -> onnx.ModelProto:
    """Loss and logits of a batch, parameters as initializers under their own names.

    LayerNormalization is written with all three outputs: the runtime has a gradient for it only
    then.
    """
    trace = trace_loss(module, signature, recipe)
    weights: Mapping[str, NDArray[Any]] = {
        name: p.detach().numpy() for name, p in module.named_parameters()
    }
    graph = GraphBuilder("forward")
    emitter = Emitter(graph, trace.batch_input)
    names = [
        *(graph.constant(weight, name) for name, weight in weights.items()),
        *(graph.input(port) for port in trace.inputs[len(weights) :]),
    ]
    inputs = [
        emitter.value(name, spec.shape, spec.dtype)
        for name, spec in zip(names, trace.input_specs, strict=True)
    ]
    for port, value in zip(
        trace.outputs,
        lower(emitter, trace, inputs, {**LOWERINGS, **PLAIN}),
        strict=True,
    ):
        graph.output(port, emitter.plain(value))
    return graph.model()


def _official_files(forward: onnx.ModelProto, module: nn.Module) -> list[SetFile]:
    if not is_installed():
        raise ExportError(NOT_INSTALLED)
    from onnxruntime.training import artifacts  # noqa: PLC0415 - only in onnxruntime-training

    kinds: dict[bool, list[str]] = {True: [], False: []}
    for key, parameter in module.named_parameters():
        kinds[parameter.requires_grad].append(key)
    with tempfile.TemporaryDirectory() as name, silent_stderr():
        folder = Path(name)
        try:
            artifacts.generate_artifacts(
                forward,
                requires_grad=kinds[True],
                frozen_params=kinds[False],
                optimizer=artifacts.OptimType.SGD,
                artifact_directory=folder,
            )
        except Exception as error:
            unknown = _NO_GRADIENT.search(str(error))
            if unknown:
                raise MissingGradientError(unknown[1]) from error
            raise ExportError(
                f"onnxruntime-training cannot derive the gradient graph: {_reason(error)}; export --formats onnx only"
            ) from error
        files: list[SetFile] = [_model_file(folder, name) for name in _MODELS]
        files.append(
            SetFile(
                f"{_FOLDER}/checkpoint",
                f"{_FOLDER}/checkpoint",
                (folder / "checkpoint").read_bytes(),
            )
        )
    return files


def _reason(error: Exception) -> str:
    """What the runtime says, without the signature of the C++ function it says it in."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rsplit(" was false. ", 1)[
        -1
    ]


def _model_file(folder: Path, name: str) -> GraphFile:
    model = onnx.load(str(folder / f"{name}.onnx"))
    # The installed onnx stamps its own newest version on the optimizer model, and the runtime reads
    # up to 10.
    model.ir_version = IR_VERSION
    data = model.SerializeToString(deterministic=True)
    inputs, outputs = (
        tuple(_port(v) for v in vs) for vs in (model.graph.input, model.graph.output)
    )
    return GraphFile(f"{_FOLDER}/{name}", f"{_FOLDER}/{name}.onnx", data, inputs, outputs, model)


def _port(value: onnx.ValueInfoProto) -> Port:
    tensor = (
        value.type.tensor_type
        if value.type.HasField("tensor_type")
        else value.type.sequence_type.elem_type.tensor_type
    )
    shape = tuple(d.dim_param or d.dim_value for d in tensor.shape.dim)
    return Port(
        value.name,
        "int64" if tensor.elem_type == onnx.TensorProto.INT64 else "float32",
        shape,
    )


def _check_official(
    files: Sequence[SetFile],
    module: nn.Module,
    recipe: Recipe,
    batches: SizedBatches,
    exact: bool,
) -> CheckSpec:
    """The official set through its Python API: gradients of the training model, its own SGD."""
    from onnxruntime.training import api  # noqa: PLC0415 - only in onnxruntime-training

    worst = check.Worst()
    shapes = model_noise(module, batches.signature)
    plain = Recipe(Sgd(momentum=0.0, weight_decay=0.0), recipe.loss, clip_norm=None)
    reference = Reference(module, plain, base=batches.signature.base)
    with tempfile.TemporaryDirectory() as name, silent_stderr():
        paths = {file.key.split("/")[1]: Path(name) / Path(file.path).name for file in files}
        for file in files:
            paths[file.key.split("/")[1]].write_bytes(file.data)
        state = api.CheckpointState.load_checkpoint(str(paths["checkpoint"]))
        model = api.Module(str(paths["training_model"]), state, str(paths["eval_model"]))
        optimizer = api.Optimizer(str(paths["optimizer_model"]), model)
        optimizer.set_learning_rate(LEARNING_RATE)
        model.train()
        twin = reference if exact else None
        for number, (x, y) in enumerate(batches.take(_OFFICIAL_STEPS)):
            worst.sizes.append(len(y))
            answer = Answer(y, batches.mask())
            noise = batches.noise(shapes, len(y), number)
            given = (
                x,
                y,
                *([batches.mask()] if recipe.loss.masked else []),
                *noise.values(),
            )
            loss, *_ = model(*(tensor.numpy() for tensor in given))
            optimizer.step()
            model.lazy_reset_grad()
            twin = twin and in_float64(twin, x, answer, noise)
            worst.compare({"loss": np.asarray(loss)}, {"loss": reference.step(x, answer, noise)})
        expected, _ = reference.snapshot()
        found = {name: state.parameters[name].data for name in expected}
        worst.compare(found, expected, twin.snapshot()[0] if twin else None)
        del optimizer, model, state  # they hold the files open
    return worst.report(f"{_FOLDER}/training_model", _OFFICIAL_STEPS)


# -- the step graph
# ----------------------------------------------------------------------------------------------------


def _step_file(
    training: onnx.ModelProto,
    batch: Sequence[Port],
    module: nn.Module,
    base: Sequence[str],
    recipe: Recipe,
) -> GraphFile:
    """The whole step; frozen tensors of the base go in alone, any other comes out as it went in."""
    graph = GraphBuilder("step")
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    held = parameter_ports({name: shapes.pop(name) for name in base})
    free = {
        name: shape for name, shape in shapes.items() if module.get_parameter(name).requires_grad
    }
    changing = changing_ports(shapes, recipe)
    extras = extra_ports(shapes, recipe)
    inputs = [*changing, *held, *batch, Port("lr", "float32", ()), *extras]
    for port in inputs:
        graph.input(port)
    _append_gradients(graph, training, [*shapes, *base], [port.name for port in batch])
    emitter = Emitter(graph, "x")
    outputs = [
        Port("loss", "float32", ()),
        *(Port(next_name(p.name), p.dtype, p.shape) for p in changing),
    ]
    trace = trace_optimizer(shapes, recipe, list(free))
    known = [_value(emitter, p.name, p.shape) for p in changing]
    known += [_value(emitter, _inner(f"{name}_grad"), shape) for name, shape in free.items()]
    known += [
        _value(emitter, "lr", ()),
        *(_value(emitter, p.name, p.shape) for p in extras),
    ]
    moved = lower(emitter, trace, known)
    for port, name in zip(
        outputs, [_inner("loss"), *(emitter.plain(v) for v in moved)], strict=True
    ):
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
    graph: GraphBuilder,
    training: onnx.ModelProto,
    trained: Sequence[str],
    batch: Sequence[str],
) -> None:
    """Take over the gradient graph.

    Its accumulators lose their consumers and are dropped with all dead nodes.

    Its shapes come along: the kernel of MaxPoolGrad reads that of its output and crashes without.
    """
    names = (
        {name: parameter_input(name) for name in trained}
        | {name: name for name in batch}
        | {"": ""}
    )
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
