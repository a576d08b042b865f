"""The format of onnxruntime-training: its official artifact set, and a step on its gradients.

The runtime's training APIs in Python, C++, C#, Android and iOS read the official set (training,
eval and optimizer model, checkpoint). Its SGD has neither momentum nor weight decay, so the format
adds ``step.onnx``: the gradient graph that the runtime derives from the forward graph, without its
accumulators and with the recipe's optimizer appended. This graph has the inputs and outputs of the
portable train graph. It runs in the InferenceSession of the same package, which registers the
kernels of the gradient operators.

The eval model computes the training loss (batch statistics, label mask) and the logits without
gradients; use the portable eval graph to evaluate with given statistics.
"""

import importlib.util
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import nn

from fleet_protocol.errors import ExportError
from fleet_protocol.manifest import CheckSpec
from trainer_export import check
from trainer_export.batches import SizedBatches
from trainer_export.formats.files import (
    GraphFile,
    SetFile,
    UnavailableError,
    silent_stderr,
)
from trainer_export.formats.model_bytes import model_bytes
from trainer_export.formats.ort_rules import RULES
from trainer_export.formats.ort_step import FOLDER, STEP, step_file
from trainer_export.graph import IR_VERSION, GraphBuilder, Port
from trainer_export.loss import Answer
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.program import lower
from trainer_export.model_inputs import (
    Signature,
    batch_ports,
    knob_ports,
    model_noise,
    noise_ports,
)
from trainer_export.optimizers.sgd import Sgd
from trainer_export.recipe import Recipe
from trainer_export.reference import LEARNING_RATE, Reference, in_float64
from trainer_export.repeated_check import repeated
from trainer_export.routines.train import trace_loss
from trainer_export.train_check import check_train

NOT_INSTALLED = (
    "the format ort-training needs onnxruntime-training-cpu (Python <= 3.12) instead of"
    " onnxruntime: run pip install 'shoal[export-training]' in a new environment, or export with"
    " --formats onnx"
)
"""The error if the runtime of this format is not installed."""

# The files of the official set, by the names that the runtime gives them.
_MODELS = ("training_model", "eval_model", "optimizer_model")
# Steps that the official set is compared for.
_OFFICIAL_STEPS = 5
_NO_GRADIENT = re.compile(r"gradient builder has not been registered: *(\w+)")


class MissingGradientError(UnavailableError):
    """onnxruntime-training cannot differentiate an operator of the model.

    The portable format does not need it.
    """

    def __init__(self, operator: str) -> None:
        super().__init__("ort-training", f"no gradient for op {operator}")
        self.operator = operator


def is_installed() -> bool:
    """Return whether the runtime of this format is installed.

    Stock onnxruntime has the same import name, but no training.
    """
    return importlib.util.find_spec("onnxruntime.training") is not None


def write_artifacts(
    module: nn.Module,
    signature: Signature,
    recipe: Recipe,
) -> tuple[SetFile, ...]:
    """Write the official artifact set and the step graph of a model.

    The checkpoint gets the weights of the module; the official optimizer is plain SGD.

    Raises:
        ExportError: an operator cannot be exported, or onnxruntime-training is not installed.
        UnavailableError: the runtime has no gradient for an operator.
    """
    if recipe.loss.has_constants:
        # The runtime would differentiate those parts, too, and train something else.
        reason = f"the loss {recipe.loss.name} treats a part of the outputs as constant"
        raise UnavailableError("ort-training", reason)
    files = _official_files(_forward_model(module, signature, recipe), module)
    training = onnx.load_model_from_string(files[0].data)
    noise = noise_ports(model_noise(module, signature))
    batch = (*batch_ports(signature, recipe.loss), *noise, *knob_ports(recipe.loss))
    return (*files, step_file(training, batch, module, signature.base, recipe))


def check_artifacts(
    files: Sequence[SetFile],
    module: nn.Module,
    recipe: Recipe,
    batches: SizedBatches,
) -> tuple[CheckSpec, ...]:
    """Compare training by the step graph, and by the official set and its API, with PyTorch.

    Raises:
        ExportError: one of them deviates; the message names the tensor.
    """
    steps = []
    official = []
    for file in files:
        if file.key == STEP:
            steps.append(file)
        else:
            official.append(file)
    # There is one step; all other files are the official set.
    (step,) = steps

    def check_official(seeded: SizedBatches, exact: bool) -> CheckSpec:
        return _check_official(official, module, recipe, seeded, exact)

    return (
        check_train(step.data, module, recipe, batches, graph=STEP),
        repeated(check_official, batches),
    )


def _forward_model(
    module: nn.Module,
    signature: Signature,
    recipe: Recipe,
) -> onnx.ModelProto:
    """Return loss and logits of a batch; parameters are initializers with their own names.

    LayerNormalization is written with all three outputs, because otherwise the runtime has no
    gradient for it.
    """
    trace = trace_loss(module, signature, recipe)
    graph = GraphBuilder("forward")
    emitter = Emitter(graph, trace.batch_input)
    # The trace takes the parameters first, in the order of the module.
    names = []
    for name, parameter in module.named_parameters():
        names.append(graph.constant(parameter.detach().numpy(), name))
    for port in trace.inputs[len(names) :]:
        names.append(graph.input(port))
    inputs = []
    for name, spec in zip(names, trace.input_specs, strict=True):
        inputs.append(emitter.value(name, spec.shape, spec.dtype))
    outputs = lower(emitter, trace, inputs, RULES)
    for port, value in zip(trace.outputs, outputs, strict=True):
        graph.output(port, emitter.in_logical_order(value))
    return graph.model()


def _official_files(forward: onnx.ModelProto, module: nn.Module) -> list[SetFile]:
    if not is_installed():
        raise ExportError(NOT_INSTALLED)
    from onnxruntime.training import artifacts  # noqa: PLC0415 - only in onnxruntime-training

    # A frozen parameter has no gradient in the training model, and stays in the checkpoint.
    trained: list[str] = []
    frozen: list[str] = []
    for name, parameter in module.named_parameters():
        (trained if parameter.requires_grad else frozen).append(name)
    with tempfile.TemporaryDirectory() as name, silent_stderr():
        folder = Path(name)
        try:
            artifacts.generate_artifacts(
                forward,
                requires_grad=trained,
                frozen_params=frozen,
                optimizer=artifacts.OptimType.SGD,
                artifact_directory=folder,
            )
        # The runtime raises different errors for different causes, all with a message in English.
        except Exception as error:
            unknown = _NO_GRADIENT.search(str(error))
            if unknown:
                raise MissingGradientError(unknown[1]) from error
            raise ExportError(
                f"onnxruntime-training cannot derive the gradient graph: {_reason(error)};"
                " export with --formats onnx"
            ) from error
        files: list[SetFile] = [_model_file(folder, name) for name in _MODELS]
        checkpoint = (folder / "checkpoint").read_bytes()
        files.append(
            SetFile(
                f"{FOLDER}/checkpoint",
                f"{FOLDER}/checkpoint",
                checkpoint,
            )
        )
    return files


def _reason(error: Exception) -> str:
    """Return the runtime's message without the signature of the C++ function."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rsplit(" was false. ", 1)[-1]


def _model_file(folder: Path, name: str) -> GraphFile:
    model = onnx.load(str(folder / f"{name}.onnx"))
    # The installed onnx writes its newest IR version into the optimizer model, but the runtime
    # reads at most 10.
    model.ir_version = IR_VERSION
    data = model_bytes(model)
    inputs = tuple(_port(value) for value in model.graph.input)
    outputs = tuple(_port(value) for value in model.graph.output)
    return GraphFile(
        f"{FOLDER}/{name}",
        f"{FOLDER}/{name}.onnx",
        data,
        inputs,
        outputs,
        model,
    )


def _port(value: onnx.ValueInfoProto) -> Port:
    """Return the port of a tensor, or of the sequence of tensors that an optimizer model takes."""
    if value.type.HasField("tensor_type"):
        tensor = value.type.tensor_type
    else:
        tensor = value.type.sequence_type.elem_type.tensor_type
    # The official files have these two types only.
    dtype = "int64" if tensor.elem_type == onnx.TensorProto.INT64 else "float32"
    shape = tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
    return Port(value.name, dtype, shape)


class _OfficialTraining:
    """The official set, trained through its Python API: its training model and its own SGD."""

    def __init__(self, files: Sequence[SetFile], folder: Path) -> None:
        from onnxruntime.training import api  # noqa: PLC0415 - only in onnxruntime-training

        paths = {}
        for file in files:
            path = folder / Path(file.path).name
            path.write_bytes(file.data)
            # A key is the format's folder, a slash and the name.
            paths[file.key.split("/")[1]] = str(path)
        self._state = api.CheckpointState.load_checkpoint(paths["checkpoint"])
        self._model = api.Module(paths["training_model"], self._state, paths["eval_model"])
        self._optimizer = api.Optimizer(paths["optimizer_model"], self._model)
        self._optimizer.set_learning_rate(LEARNING_RATE)
        self._model.train()

    def step(self, tensors: Sequence[torch.Tensor]) -> NDArray[Any]:
        """Train on a batch, and return the loss."""
        loss, *_ = self._model(*(tensor.numpy() for tensor in tensors))
        self._optimizer.step()
        # Gradients accumulate until they are reset, here before the next step.
        self._model.lazy_reset_grad()
        return np.asarray(loss)

    def parameter(self, name: str) -> NDArray[Any]:
        """Return a parameter after the steps so far."""
        values: NDArray[Any] = self._state.parameters[name].data
        return values


def _check_official(
    files: Sequence[SetFile],
    module: nn.Module,
    recipe: Recipe,
    batches: SizedBatches,
    exact: bool,
) -> CheckSpec:
    """Compare training by the official set with PyTorch's plain SGD, its only optimizer."""
    worst = check.WorstDeviation()
    shapes = model_noise(module, batches.signature)
    # Without clipping: the official optimizer has none.
    plain = Recipe(Sgd(momentum=0.0, weight_decay=0.0), recipe.loss, clip_norm=None)
    reference = Reference(module, plain, base=batches.signature.base)
    with tempfile.TemporaryDirectory() as folder, silent_stderr():
        training = _OfficialTraining(files, Path(folder))
        twin = reference if exact else None
        for number, (x, y) in enumerate(batches.draw(_OFFICIAL_STEPS)):
            worst.sizes.append(len(y))
            answer = Answer(y, batches.mask())
            noise = batches.noise(shapes, len(y), number)
            # The loss takes a mask only if it is masked.
            masks = [batches.mask()] if recipe.loss.masked else []
            knobs = [torch.tensor(knob.initial) for knob in recipe.loss.knobs]
            loss = training.step(
                [
                    x,
                    y,
                    *masks,
                    *noise.values(),
                    *knobs,
                ]
            )
            # PyTorch in float64 takes the same step, to tell rounding from a wrong graph; None
            # without it.
            twin = twin and in_float64(twin, x, answer, noise)
            worst.compare(
                {"loss": loss},
                {
                    "loss": reference.step(
                        x,
                        answer,
                        noise,
                    )
                },
            )
        expected, _ = reference.snapshot()
        trained = {}
        for name in expected:
            trained[name] = training.parameter(name)
        # The parameters are compared once, after all steps.
        worst.compare(trained, expected, twin.snapshot()[0] if twin else None)
        del training  # closes the files of the folder
    return worst.report(f"{FOLDER}/training_model", _OFFICIAL_STEPS)
