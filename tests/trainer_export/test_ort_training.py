"""The artifacts for onnxruntime-training."""

import onnx
import pytest
import torch
from torch import Tensor, nn

from fleet_protocol.errors import ExportError
from tests.trainer_export.helpers import batches_for, grouped_convolutions, tiny
from trainer_export.check import calm_torch
from trainer_export.formats import ort_training
from trainer_export.model_inputs import Signature
from trainer_export.recipe import Recipe

pytestmark = pytest.mark.ort_training


@pytest.mark.parametrize(("name", "width"), [("lenet5", 1.0), ("conv", 0.5), ("text_encoder", 0.5)])
def test_step_and_official_set_train_as_pytorch_does(name: str, width: float) -> None:
    """The full-recipe step graph and the official training model with its own SGD both follow
    PyTorch.
    """
    module, signature = tiny(name, width)
    files = ort_training.write_artifacts(module, signature, Recipe())
    with calm_torch():
        reports = ort_training.check_artifacts(
            files, module, Recipe(), batches_for(module, signature)
        )
    assert {report.graph for report in reports} == {
        "ort-training/step",
        "ort-training/training_model",
    }
    assert max(report.worst_absolute for report in reports) <= 1e-5


def test_grouped_convolutions_train_as_pytorch_does() -> None:
    """Of several channels, of one channel each, and with steps between their taps."""
    model = grouped_convolutions()
    signature = Signature((2, 8, 8), "float32", 3).with_places_of(model)
    files = ort_training.write_artifacts(model, signature, Recipe())
    with calm_torch():
        reports = ort_training.check_artifacts(
            files, model, Recipe(), batches_for(model, signature)
        )
    assert max(report.worst_absolute for report in reports) <= 1e-5


@pytest.mark.parametrize("base", [True, False])
def test_frozen_parameters_train_nothing(base: bool) -> None:
    """In the base they go in and never come out; else, as where a width cuts them, they come out as
    they went in.
    """
    module = nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
    )
    frozen = ("0.weight", "1.weight", "1.bias", "3.weight")
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    signature = Signature((6,), "float32", 3, base=frozen if base else ())
    recipe = Recipe(proximal=True)
    files = ort_training.write_artifacts(module, signature, recipe)
    step = onnx.load_model_from_string(
        next(file.data for file in files if file.key == "ort-training/step")
    )
    came_out = {
        name
        for name in frozen
        if f"next.param.{name}" in {value.name for value in step.graph.output}
    }
    assert came_out == (set() if base else set(frozen))
    assert {f"param.{name}" for name in frozen} <= {value.name for value in step.graph.input}
    with calm_torch():
        reports = ort_training.check_artifacts(
            files, module, recipe, batches_for(module, signature)
        )
    assert max(report.worst_absolute for report in reports) <= 1e-5


def test_models_are_of_a_version_the_runtime_reads() -> None:
    """IR 9 for all of them, the generated optimizer model included."""
    files = ort_training.write_artifacts(*tiny("mlp"), Recipe())
    versions = {
        file.key: onnx.load_model_from_string(file.data).ir_version
        for file in files
        if file.is_graph
    }
    assert set(versions.values()) == {9}
    assert set(versions) == {
        f"ort-training/{name}"
        for name in ("training_model", "eval_model", "optimizer_model", "step")
    }
    assert [file.key for file in files if not file.is_graph] == ["ort-training/checkpoint"]


def test_layer_norm_keeps_a_gradient() -> None:
    """The forward graph names all three outputs of LayerNormalization, without which there is no
    gradient for it.
    """
    files = {
        file.key: file for file in ort_training.write_artifacts(*tiny("text_encoder"), Recipe())
    }
    step = onnx.load_model_from_string(files["ort-training/step"].data)
    kinds = [node.op_type for node in step.graph.node]
    assert kinds.count("LayerNormalization") == kinds.count("LayerNormalizationGrad") == 5
    assert "InPlaceAccumulatorV2" not in kinds


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """The runtime's chatter stays out of the user's terminal, while writing and while checking."""
    module, signature = tiny("mlp")
    files = ort_training.write_artifacts(module, signature, Recipe())
    with calm_torch():
        ort_training.check_artifacts(files, module, Recipe(), batches_for(module, signature))
    assert capfd.readouterr() == ("", "")


def test_hard_activations_keep_a_gradient() -> None:
    """The portable graph has an operator for each that this runtime does not differentiate."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Hardsigmoid(), nn.Hardswish(), nn.Linear(4, 3))
    signature = Signature((4,), "float32", 3)
    files = ort_training.write_artifacts(module, signature, Recipe())
    ort_training.check_artifacts(files, module, Recipe(), batches_for(module, signature))


def test_an_operator_without_a_gradient_is_named() -> None:
    """The message names the operator and says which format still works; the portable graph of the
    model trains.
    """
    module = nn.Sequential(nn.Linear(4, 4), nn.Hardsigmoid(), Rounded(), nn.Linear(4, 3))
    with pytest.raises(ExportError, match=r"no gradient for op Round; the portable format does"):
        ort_training.write_artifacts(module, Signature((4,), "float32", 3), Recipe())


class Rounded(nn.Module):
    """An operator that onnxruntime-training cannot differentiate."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.round(x)
