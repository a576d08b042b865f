"""Artifact sets on disk: what is where, what the manifest says, and that a failure changes
nothing.
"""

import hashlib
import json
from collections import OrderedDict
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError, ExportError, PlanError, StorageError
from fleet_protocol.manifest import Manifest, parse_manifest
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.weights import encode_weights
from models import Cut, Layout, Tier, architecture, infer_layout, make_plan, slice_weights
from tests.trainer_export.helpers import TINY, ZOO, tiny
from trainer_export import artifact_set
from trainer_export.artifact_set import (
    FORMATS,
    ExportOptions,
    ExportRequest,
    export_architecture,
    installed_formats,
)
from trainer_export.check import open_session, run_session
from trainer_export.formats import ort_training
from trainer_export.progress import Progress
from trainer_export.recipe import Recipe
from trainer_export.tier_report import TierReport

TIERS = [Tier(1.0, 1), Tier(0.5, 1)]
OTHER_STEPS = ("ort-training/step",) if "ort-training" in installed_formats() else ()


@pytest.fixture(scope="module")
def published(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, tuple[TierReport, ...], list[Progress]]:
    """A small `conv` exported once for all tests that only look."""
    out = tmp_path_factory.mktemp("artifacts")
    seen: list[Progress] = []
    reports = export_architecture(
        ExportRequest(ZOO.get("conv"), TINY["conv"], TIERS, Recipe()),
        out,
        ExportOptions(progress=seen.append),
    )
    return out, reports, seen


def manifest_of(out: Path, tier: Tier, arch: str = "conv") -> Manifest:
    return parse_manifest((out / arch / tier.id / "manifest.json").read_bytes())


def files_under(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


@pytest.mark.slow
def test_every_file_is_an_object_of_its_digest(published: tuple[Path, object, object]) -> None:
    """Each file is a hard link to the object named by its sha256, and each object holds what its
    name says.
    """
    out = published[0]
    for path in (out / "conv").rglob("*"):
        if path.is_file():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            assert (out / "objects" / digest[:2] / digest).samefile(path)
    for stored in (out / "objects").rglob("*"):
        if stored.is_file():
            assert hashlib.sha256(stored.read_bytes()).hexdigest() == stored.name


def test_the_manifest_describes_the_files(published: tuple[Path, object, object]) -> None:
    """Digest, size and signature of every graph are those of the file."""
    out = published[0]
    for tier in TIERS:
        manifest = manifest_of(out, tier)
        assert set(manifest.graphs) >= {
            "onnx/train",
            "onnx/eval",
            "onnx/stats",
            "onnx/infer",
            *OTHER_STEPS,
        }
        for spec in (*manifest.graphs.values(), *manifest.files.values()):
            data = (out / "conv" / tier.id / spec.path).read_bytes()
            assert (len(data), hashlib.sha256(data).hexdigest()) == (spec.size, spec.digest)
        for key in ("onnx/train", "onnx/eval", "onnx/stats", "onnx/infer", *OTHER_STEPS):
            session = open_session(
                (out / "conv" / tier.id / manifest.graphs[key].path).read_bytes()
            )
            assert [i.name for i in session.get_inputs()] == [
                i.name for i in manifest.graphs[key].inputs
            ]
            assert [o.name for o in session.get_outputs()] == [
                o.name for o in manifest.graphs[key].outputs
            ]
        for key in OTHER_STEPS:
            assert manifest.graphs[key].inputs == manifest.graphs["onnx/train"].inputs
            assert manifest.graphs[key].outputs == manifest.graphs["onnx/train"].outputs


def test_the_manifest_describes_the_model(
    published: tuple[Path, tuple[TierReport, ...], object],
) -> None:
    """Parameters, states, statistics, settings, footprint and checks are there and agree with
    layout and report.
    """
    out, reports, _ = published
    layout = Layout.from_json((out / "conv" / "layout.json").read_bytes())
    for tier, report in zip(TIERS, reports, strict=True):
        manifest = manifest_of(out, tier)
        assert {p.name: p.shape for p in manifest.parameters} == layout.shapes(tier)
        assert manifest.parameter_count == report.parameters == layout.parameter_count(tier)
        assert [s.name for s in manifest.states] == [p.name for p in manifest.parameters]
        assert [(s.name, s.channels) for s in manifest.statistics] == [
            (s.name, layout.local_shape(s.dims, tier.width)[0]) for s in layout.statistics
        ]
        assert manifest.settings["channels"] == [8, 12, 16]
        assert (
            manifest.flops_per_step_sample
            > manifest.flops_per_sample
            == report.flops_per_sample
            > 0
        )
        assert (
            manifest.peak_memory_bytes
            == report.peak_memory_bytes
            > 4 * 4 * manifest.parameter_count
        )
        assert {check.graph for check in manifest.checks} >= {
            "onnx/train",
            "onnx/stats",
            *OTHER_STEPS,
        }
        assert (
            max(check.worst_relative for check in manifest.checks) == report.worst_deviation <= 1e-4
        )
        assert manifest.recipe == Recipe().spec((manifest.classes,))
        assert {"torch", "onnx", "numpy", "python"} <= set(manifest.versions)


def test_offsets_lead_into_the_weights_blob(published: tuple[Path, object, object]) -> None:
    """The initial weights cut to a tier and encoded in manifest order have each parameter at its
    offset.
    """
    out = published[0]
    layout = Layout.from_json((out / "conv" / "layout.json").read_bytes())
    weights = tensors_in((out / "conv" / "init.safetensors").read_bytes())
    local = slice_weights(layout, make_plan(layout, TIERS[1]), weights)
    manifest = manifest_of(out, TIERS[1])
    blob = encode_weights({p.name: local[p.name] for p in manifest.parameters})
    data = blob[len(blob) - sum(spec.nbytes for spec in manifest.parameters) :]
    for spec in manifest.parameters:
        value = np.frombuffer(data, np.float32, count=spec.nbytes // 4, offset=spec.offset).reshape(
            spec.shape
        )
        np.testing.assert_array_equal(value, local[spec.name])


def test_published_graphs_train(published: tuple[Path, object, object]) -> None:
    """The train graph of a tier lowers the loss of a batch it sees again and again."""
    out = published[0]
    manifest = manifest_of(out, TIERS[0])
    session = open_session((out / "conv" / TIERS[0].id / "train.onnx").read_bytes())
    rng = np.random.default_rng(0)
    weights = tensors_in((out / "conv" / "init.safetensors").read_bytes())
    feed = {f"param.{name}": value for name, value in weights.items()}
    feed |= {
        f"state.{spec.name}": np.full(spec.shape, spec.initial, spec.dtype)
        for spec in manifest.states
    }
    feed |= {
        "x": rng.standard_normal((16, *manifest.input_shape), np.float32),
        "y": rng.integers(0, manifest.classes, 16),
        "mask": np.ones(manifest.classes, np.float32),
        "lr": np.array(0.1, np.float32),
    }
    losses = []
    for _ in range(30):
        outputs = run_session(session, feed)
        losses.append(float(outputs["loss"]))
        feed |= {
            name.removeprefix("next."): value for name, value in outputs.items() if name != "loss"
        }
    assert losses[-1] < 0.5 * losses[0]


def test_progress_counts_up_to_its_total(published: tuple[Path, object, list[Progress]]) -> None:
    """Every stage is announced, and the last call says that all are done."""
    seen = published[2]
    assert [item.done for item in seen] == list(range(len(seen)))
    assert seen[-1].done == seen[-1].total
    assert {item.tier for item in seen} == {tier.id for tier in TIERS}


def test_the_portable_format_alone(tmp_path: Path) -> None:
    """Without ort-training there is no such folder, and the manifest lists none of it."""
    export_architecture(
        ExportRequest(ZOO.get("mlp"), TINY["mlp"], [Tier(0.5, 1)], Recipe()),
        tmp_path,
        ExportOptions(formats=("onnx",)),
    )
    manifest = manifest_of(tmp_path, Tier(0.5, 1), "mlp")
    assert set(manifest.graphs) == {"onnx/train", "onnx/eval", "onnx/infer"}
    assert not (tmp_path / "mlp" / "w0.50-d1" / "ort-training").exists()
    assert not manifest.statistics


def test_a_layout_that_was_proved_is_not_proved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command has proved it to read its tiers, which takes seconds for a large model."""
    arch = ZOO.get("mlp")
    layout = infer_layout(arch, TINY["mlp"])
    proof = mock.Mock(side_effect=AssertionError("proved again"))
    monkeypatch.setattr(artifact_set, "infer_layout", proof)
    request = ExportRequest(arch, TINY["mlp"], [layout.tier(0.5)], Recipe(), layout=layout)
    (report,) = export_architecture(request, tmp_path, ExportOptions(formats=["onnx"]))
    assert report.tier == layout.tier(0.5)


def test_a_format_whose_runtime_is_not_installed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside stock onnxruntime the default is the portable format; a wish for the other says what
    to install.
    """
    monkeypatch.setattr(ort_training, "is_installed", lambda: False)
    assert installed_formats() == ("onnx",)
    arch = ZOO.get("mlp")
    with pytest.raises(
        ConfigError, match=r"needs onnxruntime-training-cpu .* or export with --formats onnx"
    ):
        export_architecture(
            ExportRequest(arch, TINY["mlp"], TIERS[:1], Recipe()),
            tmp_path,
            ExportOptions(formats=FORMATS),
        )
    with pytest.raises(ExportError, match="needs onnxruntime-training-cpu"):
        ort_training.write_artifacts(*tiny("mlp"), Recipe())
    export_architecture(ExportRequest(arch, TINY["mlp"], [Tier(0.5, 1)], Recipe()), tmp_path)
    manifest = manifest_of(tmp_path, Tier(0.5, 1), "mlp")
    assert set(manifest.graphs) == {"onnx/train", "onnx/eval", "onnx/infer"}
    assert not manifest.skipped


def test_exporting_again_gives_the_same_bytes(tmp_path: Path) -> None:
    """A set is a function of model, settings, recipe and seed."""
    for folder in ("a", "b"):
        export_architecture(
            ExportRequest(ZOO.get("mlp"), TINY["mlp"], [Tier(1.0, 1)], Recipe(), seed=3),
            tmp_path / folder,
            ExportOptions(formats=("onnx",)),
        )
    assert files_under(tmp_path / "a") == files_under(tmp_path / "b")


@architecture()
def mlp(
    cut: Cut, *, input_shape: tuple[int, ...] = (4,), classes: int = 3, broken: bool = False
) -> nn.Module:
    """A model of a user that can be broken by a setting."""

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = nn.Linear(input_shape[0], cut.width("hidden", 6))
            self.head = nn.Linear(cut.width("hidden", 6), cut.classes(classes))

        def forward(self, x: Tensor) -> Tensor:
            x = self.hidden(x)
            return self.head(x.lgamma() if broken else x.relu())

    return Body()


def test_a_failed_export_leaves_the_old_set(tmp_path: Path) -> None:
    """The old set stays, byte for byte, and nothing half-made is left beside it."""
    export_architecture(
        ExportRequest(mlp, None, [Tier(1.0, 1)], Recipe()),
        tmp_path,
        ExportOptions(formats=("onnx",)),
    )
    before = files_under(tmp_path)
    with pytest.raises(ExportError, match="lgamma"):
        export_architecture(
            ExportRequest(mlp, {"broken": True}, [Tier(1.0, 1), Tier(0.5, 1)], Recipe()),
            tmp_path,
            ExportOptions(formats=("onnx",)),
        )
    assert files_under(tmp_path) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mlp", "objects"]


def test_a_tier_in_which_nothing_is_cut_is_refused(tmp_path: Path) -> None:
    """It would be the whole model under another name; width 1 alone is an export like any other."""

    @architecture()
    def uncut(cut: Cut, *, input_shape: tuple[int, ...] = (4,), classes: int = 3) -> nn.Module:
        return nn.Linear(input_shape[0], cut.classes(classes))

    with pytest.raises(
        ConfigError,
        match=r"the parameters of w0.50-d1 .*cut\.width\(name, size\), or export only width 1",
    ):
        export_architecture(
            ExportRequest(uncut, None, [Tier(1.0, 1), Tier(0.5, 1)], Recipe()),
            tmp_path,
            ExportOptions(formats=("onnx",)),
        )
    assert not [*tmp_path.iterdir()]


def test_an_export_killed_between_two_renames_is_mended(tmp_path: Path) -> None:
    """If only the retired folder is there, the next export starts by putting it back."""
    export_architecture(
        ExportRequest(mlp, None, [Tier(1.0, 1)], Recipe()),
        tmp_path,
        ExportOptions(formats=("onnx",)),
    )
    before = files_under(tmp_path / "mlp")
    (tmp_path / "mlp").rename(tmp_path / ".mlp.old")
    with pytest.raises(ExportError):
        export_architecture(
            ExportRequest(mlp, {"broken": True}, [Tier(1.0, 1)], Recipe()),
            tmp_path,
            ExportOptions(formats=("onnx",)),
        )
    assert files_under(tmp_path / "mlp") == before


def test_wrong_requests_are_refused_before_any_work(tmp_path: Path) -> None:
    """No tier, an unknown format, a depth the model does not have."""
    arch = ZOO.get("mlp")
    with pytest.raises(ConfigError, match="no tier"):
        export_architecture(ExportRequest(arch, TINY["mlp"], [], Recipe()), tmp_path)
    with pytest.raises(ConfigError, match="unknown format 'tflite'"):
        export_architecture(
            ExportRequest(arch, TINY["mlp"], TIERS, Recipe()),
            tmp_path,
            ExportOptions(formats=("tflite",)),
        )  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="depth 7"):
        export_architecture(ExportRequest(arch, TINY["mlp"], [Tier(1.0, 7)], Recipe()), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    """A file where the folder should be is reported with its path."""
    (tmp_path / "taken").write_text("in the way")
    with pytest.raises(StorageError, match="taken"):
        export_architecture(
            ExportRequest(mlp, None, [Tier(1.0, 1)], Recipe()),
            tmp_path / "taken",
            ExportOptions(formats=("onnx",)),
        )


@pytest.mark.slow
def test_depth_tiers_have_their_own_sets(tmp_path: Path) -> None:
    """A shallower Transformer has fewer parameters, all from the stem, the lower blocks and the
    head.
    """
    tiers = [Tier(1.0, 2), Tier(0.5, 1)]
    export_architecture(
        ExportRequest(ZOO.get("text_encoder"), TINY["text_encoder"], tiers, Recipe()),
        tmp_path,
        ExportOptions(formats=("onnx",)),
    )
    shallow = manifest_of(tmp_path, tiers[1], "text_encoder")
    assert {p.block for p in shallow.parameters} == {"stem", "block1", "head"}
    assert (shallow.width, shallow.depth, shallow.input_dtype) == (0.5, 1, "int64")
    assert json.loads((tmp_path / "text_encoder" / "layout.json").read_text())["depth"] == 2


@pytest.mark.slow
def test_a_tier_is_exported_with_a_head_of_its_own(tmp_path: Path) -> None:
    """Its graphs and manifest have its labels, and its first weights lie beside them; the rest is
    the model's.
    """
    settings = TINY["text_encoder"]
    small = Tier(1.0, 1)
    whole = Tier(1.0, 2)
    arch = ZOO.get("text_encoder")
    export_architecture(
        ExportRequest(arch, settings, [whole, small], Recipe(), heads={small: 7}),
        tmp_path,
        ExportOptions(formats=("onnx",)),
    )
    folder = tmp_path / "text_encoder"
    layout = Layout.from_json((folder / "layout.json").read_bytes())
    own, other = (manifest_of(tmp_path, tier, "text_encoder") for tier in (small, whole))
    assert (own.classes, own.settings["classes"], other.classes) == (7, 7, layout.classes)
    assert {spec.name: spec.shape for spec in own.parameters} == layout.shapes(small)
    infer = own.graphs["onnx/infer"]
    assert infer.outputs[0].shape[-1] == 7
    head = tensors_in((folder / small.id / "head.safetensors").read_bytes())
    assert {name: value.shape for name, value in head.items()} == {
        item.name: layout.shapes(small)[item.name] for item in layout.own_head(small)
    }
    assert any(value.any() for value in head.values())
    assert not (folder / whole.id / "head.safetensors").exists()


def test_a_head_needs_its_tier_and_a_model_that_can_have_one(tmp_path: Path) -> None:
    """A tier that is not exported, a model whose labels reach below its head, a builder with labels
    of its own mind.
    """
    arch = ZOO.get("text_encoder")
    with pytest.raises(ConfigError, match=r"tier w1\.00-d1, which is not exported"):
        export_architecture(
            ExportRequest(
                arch, TINY["text_encoder"], [Tier(1.0, 2)], Recipe(), heads={Tier(1.0, 1): 7}
            ),
            tmp_path,
        )
    with pytest.raises(PlanError, match="depends on the labels"):
        export_architecture(
            ExportRequest(
                ZOO.get("transformer_mlm"),
                TINY["transformer_mlm"],
                TIERS[:1],
                Recipe(),
                heads={TIERS[0]: 7},
            ),
            tmp_path,
        )

    @architecture()
    def stubborn(cut: Cut, *, input_shape: tuple[int] = (4,), classes: int = 3) -> nn.Module:
        blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(cut.depth(2))))
        return nn.Sequential(
            OrderedDict(stem=nn.Linear(4, 4), blocks=blocks, head=nn.Linear(4, cut.classes(3)))
        )

    with pytest.raises(ConfigError, match="the setting `classes` must be the number of labels"):
        export_architecture(
            ExportRequest(stubborn, {}, [Tier(1.0, 1)], Recipe(), heads={Tier(1.0, 1): 7}), tmp_path
        )
    assert not list(tmp_path.glob("*/layout.json"))
