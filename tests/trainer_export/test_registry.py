"""Every architecture of the zoo, in several tiers, recipes and formats, against PyTorch; small
settings.
"""

import pytest
from torch import Tensor, nn

from fleet_protocol.manifest import parse_manifest
from models import architecture
from models.cut import Cut
from models.tier import Tier
from tests.trainer_export.helpers import (
    LOSS_OF,
    TINY,
    ZOO,
    all_reports,
    batches_for,
    deviation,
    recipe_for,
    tiny,
    train_report,
)
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.check import calm_torch
from trainer_export.formats import ort_training
from trainer_export.formats.ort_training import MissingGradientError
from trainer_export.lowering.program import write_graph
from trainer_export.model_inputs import Signature
from trainer_export.optimizers.sgd import Sgd
from trainer_export.pair_check import check_pair
from trainer_export.pair_step import trace_pair
from trainer_export.recipe import Recipe
from trainer_export.routines.mutual import MUTUAL

LIMIT = 1e-5
SGD = Recipe()
PROXIMAL = Recipe(Sgd(momentum=0.5), proximal=True)
TIERS = [(1.0, None), (0.5, 1)]


def depth_of(name: str, depth: int | None) -> int | None:
    """The depth, for a model that has one."""
    return depth if "blocks" in TINY[name] else None


def ort_deviation(module: nn.Module, signature: Signature, recipe: Recipe) -> float:
    files = ort_training.write_artifacts(
        module, signature, recipe
    )  # every model of the zoo has its gradients
    with calm_torch():
        return deviation(
            ort_training.check_artifacts(files, module, recipe, batches_for(module, signature))
        )


FROZEN = {"minilm_adapters"}
# One of each kind of layer and noise; a pair of any other is the same step of the same layers.
PAIRS = {"conv", "har_cnn", "preresnet18", "smollm", "transformer_mlm"}


def test_every_architecture_has_small_settings():
    """So that none is left out below."""
    assert set(TINY) == set(ZOO.names)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO.names)
def test_every_graph_agrees_with_pytorch(name):
    """All graphs of a tier, training in a smaller one, also proximal, and the mutual step: 1e-5
    after six steps.
    """
    (width, depth), smaller = TIERS
    reports = all_reports(*tiny(name, width, depth_of(name, depth)), recipe_for(name, SGD))
    assert reports["onnx/train"].steps >= 5
    assert deviation(reports.values()) <= LIMIT
    module, signature = tiny(name, smaller[0], depth_of(name, smaller[1]))
    for recipe in (SGD, PROXIMAL):
        report = train_report(module, signature, recipe_for(name, recipe))
        assert deviation([report]) <= LIMIT
    if name not in PAIRS:
        return
    meme, _ = tiny(name)
    graph = write_graph(trace_pair(MUTUAL, (module, meme), signature, SGD)).SerializeToString()
    with calm_torch():
        assert (
            deviation(
                [check_pair(graph, MUTUAL, (module, meme), SGD, batches_for(module, signature))]
            )
            <= LIMIT
        )


@pytest.mark.slow
@pytest.mark.ort_training
@pytest.mark.parametrize("name", [name for name in ZOO.names if name not in {*FROZEN, *LOSS_OF}])
def test_every_step_of_onnxruntime_training_agrees_with_pytorch(name):
    """The other format, in the same tiers and recipes."""
    for width, depth in TIERS:
        module, signature = tiny(name, width, depth_of(name, depth))
        assert ort_deviation(module, signature, SGD) <= LIMIT
    assert ort_deviation(module, signature, PROXIMAL) <= LIMIT


class Largest(nn.Module):
    """Divides by the largest value, for which onnxruntime-training has no gradient."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(6, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).exp()
        return self.head(x / x.amax(1, keepdim=True))


@architecture()
def largest(
    cut: Cut, *, input_shape: tuple[int] = (6,), classes: int = 3, hidden: int = 8
) -> Largest:
    """Build the module."""
    return Largest(cut.width("hidden", hidden), cut.classes(classes))


@pytest.mark.ort_training
def test_a_model_without_a_gradient_in_the_runtime_keeps_the_portable_format(tmp_path):
    """The format is skipped, report and manifest say which operator it lacks, and all else is
    checked and there.
    """
    (report,) = export_architecture(ExportRequest(largest, None, [Tier(1.0, 1)], SGD), tmp_path)
    reason = (
        "the format ort-training does not support this model: no gradient for op ReduceMax; the "
        "portable format does"
    )
    assert report.skipped == {"ort-training": reason}
    folder = tmp_path / "largest" / "w1.00-d1"
    manifest = parse_manifest((folder / "manifest.json").read_bytes())
    assert manifest.skipped == report.skipped
    assert set(manifest.graphs) == {"onnx/train", "onnx/eval", "onnx/infer"}
    assert not (folder / "ort-training").exists()
    with pytest.raises(MissingGradientError, match="no gradient for op ReduceMax"):
        ort_training.write_artifacts(Largest(8, 3), Signature((6,), "float32", 3), SGD)


@pytest.mark.ort_training
def test_a_model_with_all_gradients_skips_nothing(tmp_path):
    """The record is empty then."""
    (report,) = export_architecture(
        ExportRequest(ZOO.get("mlp"), TINY["mlp"], [Tier(0.5, 1)], SGD), tmp_path
    )
    assert report.skipped == {}


def test_the_recipe_is_in_the_manifest(tmp_path):
    """What a strategy asks before it offers a proximal task."""
    export_architecture(
        ExportRequest(ZOO.get("mlp"), TINY["mlp"], [Tier(1.0, 1)], PROXIMAL),
        tmp_path,
        ExportOptions(formats=("onnx",)),
    )
    manifest = parse_manifest((tmp_path / "mlp" / "w1.00-d1" / "manifest.json").read_bytes())
    assert manifest.recipe.proximal
    anchors = [
        spec for spec in manifest.graphs["onnx/train"].inputs if spec.name.startswith("anchor.")
    ]
    assert [spec.shape for spec in anchors] == [spec.shape for spec in manifest.parameters]
