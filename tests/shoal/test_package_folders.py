"""Versions as folders of transformers and peft, of a class that only looks like theirs.

The packages themselves read such folders in tests/packages.
"""

import json
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

from broker_server.store import Store
from fleet_protocol.errors import ConfigError
from models.architecture import Architecture, architecture
from models.cut import Cut
from models.tier import Tier
from models.zoo.adapters import Adapters, with_adapters
from shoal.cli.main import main
from shoal.downloads import Selection, save_version
from tests.shoal.stored import store_of
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.recipe import Recipe

WHOLE = Tier(1.0, 1)
HALF = Tier(0.5, 1)
LABELS = ["cat", "dog", "hen"]
RANK = 4
ALPHA = 8.0
Stores = Callable[[Architecture], Path]


class Config:
    """A configuration as transformers has it: fields that become JSON."""

    def __init__(self, hidden: int, classes: int) -> None:
        self.hidden = hidden
        self.classes = classes

    def to_json_string(self, use_diff: bool = True) -> str:
        return json.dumps({"hidden_size": self.hidden, "use_cache": False, "diff": use_diff})


class TinyForSequenceClassification(nn.Module):
    """Two layers, and a configuration."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.first = nn.Linear(6, config.hidden)
        self.classifier = nn.Linear(config.hidden, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(torch.tanh(self.first(x)))
        return logits


# Models of transformers are recognised by the module of their class.
TinyForSequenceClassification.__module__ = "transformers.models.tiny"


@architecture()
def tiny(cut: Cut, *, input_shape=(6,), classes=3) -> nn.Module:
    """The model itself, whose hidden layer a width cuts."""
    del input_shape
    return TinyForSequenceClassification(Config(cut.width("hidden", 8), cut.classes(classes)))


@architecture()
def adapted(cut: Cut, *, input_shape=(6,), classes=3) -> nn.Module:
    """The model with an adapter beside its first layer; a width cuts the rank."""
    del input_shape
    model = TinyForSequenceClassification(Config(8, cut.classes(classes)))
    return with_adapters(model, Adapters(RANK, ALPHA, ("first",), ("classifier.*",)), cut)


class Scaled(nn.Module):
    """A layer in the form of peft's IA3: it scales the outputs of another one."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.ia3_l = nn.ParameterDict({"default": nn.Parameter(torch.full((8,), 0.5))})

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.base_layer(x) * self.ia3_l["default"]
        return scaled


class Biased(nn.Module):
    """A layer in the form of peft's LoRA with ``lora_bias``: the second factor adds a bias."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(6, RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, 8)})
        self.scaling = {"default": ALPHA / RANK}

    def forward(self, x: Tensor) -> Tensor:
        low = self.lora_A["default"](x)
        out: Tensor = self.base_layer(x) + self.lora_B["default"](low) * self.scaling["default"]
        return out


class Triple(nn.Module):
    """A layer in the form of peft's AdaLoRA: three factors, which are parameters."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ParameterDict({"default": nn.Parameter(torch.randn(RANK, 6))})
        self.lora_E = nn.ParameterDict({"default": nn.Parameter(torch.randn(RANK, 1))})
        self.lora_B = nn.ParameterDict({"default": nn.Parameter(torch.randn(8, RANK))})
        self.scaling = {"default": ALPHA / RANK}

    def forward(self, x: Tensor) -> Tensor:
        low = x @ (self.lora_A["default"] * self.lora_E["default"]).T
        out: Tensor = self.base_layer(x) + low @ self.lora_B["default"].T * self.scaling["default"]
        return out


def whole_model(classes: int) -> TinyForSequenceClassification:
    return TinyForSequenceClassification(Config(8, classes))


@architecture()
def scaled(cut: Cut, *, input_shape=(6,), classes=3) -> nn.Module:
    """The model with a first layer whose outputs are scaled."""
    del input_shape
    model = whole_model(cut.classes(classes))
    model.first = Scaled(model.first)  # type: ignore[assignment]
    return model


@architecture()
def biased(cut: Cut, *, input_shape=(6,), classes=3) -> nn.Module:
    """The model with a first layer whose adapter has a bias."""
    del input_shape
    model = whole_model(cut.classes(classes))
    model.first = Biased(model.first)  # type: ignore[assignment]
    return model


@architecture()
def triple(cut: Cut, *, input_shape=(6,), classes=3) -> nn.Module:
    """The model with a first layer whose adapter has three factors."""
    del input_shape
    model = whole_model(cut.classes(classes))
    model.first = Triple(model.first)  # type: ignore[assignment]
    return model


@architecture()
def beheaded(cut: Cut, *, input_shape=(6,), classes=3) -> nn.Module:
    """The model without its last layer, which a builder has replaced by a larger first one."""
    del input_shape
    model = whole_model(cut.classes(classes))
    model.first = nn.Linear(6, cut.classes(classes))
    model.classifier = nn.Identity()  # type: ignore[assignment]
    return model


@architecture()
def unbiased(cut: Cut, *, input_shape=(6,), classes=3) -> nn.Module:
    """The model with a last layer without bias."""
    del input_shape
    model = whole_model(cut.classes(classes))
    model.classifier = nn.Linear(8, cut.classes(classes), bias=False)
    return model


@architecture()
def plain(cut: Cut, *, input_shape=(6,), classes=3) -> nn.Module:
    """No model of a package."""
    del input_shape
    hidden = cut.width("hidden", 8)
    return nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, cut.classes(classes)))


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Stores:
    """The store of an architecture, which is exported when it is first asked for."""
    folder = tmp_path_factory.mktemp("folders")

    def store(arch: Architecture) -> Path:
        place = folder / arch.name
        if not place.exists():
            request = ExportRequest(arch, {}, (WHOLE, HALF), Recipe())
            export_architecture(request, folder / "artifacts", ExportOptions(formats=("onnx",)))
            store_of(folder / "artifacts", arch.name, place, contract={"labels": LABELS})
        return place

    return store


def export_weights(store: Path, out: Path, *options: str) -> None:
    """Run the command in this process."""
    words = ["shoal", "export-weights", "--store", str(store), "--out", str(out), *options]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as caught:
            main()
    assert caught.value.code in (0, None)


def test_a_folder_has_the_configuration_of_its_tier(
    stores: Stores, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sizes are the tier's, the labels the fleet's; files of a tokenizer stay."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tokenizer.json").touch()
    store = stores(tiny)
    export_weights(store, tmp_path / "out", "--tier", "w0.50-d1", "--format", "transformers")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["hidden_size"] == 4
    assert config["architectures"] == ["TinyForSequenceClassification"]
    assert config["id2label"] == {"0": "cat", "1": "dog", "2": "hen"}
    assert config["label2id"]["hen"] == 2
    assert "use_cache" not in config
    assert (tmp_path / "out" / "tokenizer.json").exists()
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    whole = load_file(store.parent / "artifacts" / "tiny" / "init.safetensors")
    np.testing.assert_array_equal(tensors["first.weight"], whole["first.weight"][:4])
    with safe_open(tmp_path / "out" / "model.safetensors", "numpy") as opened:
        assert opened.metadata()["format"] == "pt"
        assert opened.metadata()["version"] == "0"
    out = capsys.readouterr().out
    assert "from transformers import TinyForSequenceClassification" in out
    assert f"TinyForSequenceClassification.from_pretrained({str(tmp_path / 'out')!r})" in out
    assert "# labels of the outputs, in order: cat, dog, hen" in out


def test_adapters_are_merged_or_written_for_peft(stores: Stores, tmp_path: Path) -> None:
    """Both compute the same; the half tier has half of the rank and the scale of the whole."""
    store = stores(adapted)
    # The factors of an adapter start at zero, which would hide a wrong scale.
    trained = train_factors(store)
    export_weights(trained, tmp_path / "merged", "--format", "transformers", "--tier", "w0.50-d1")
    export_weights(trained, tmp_path / "peft", "--format", "peft", "--tier", "w0.50-d1")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    base = load_file(tmp_path / "peft" / "base" / "model.safetensors")
    adapter = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert merged.keys() == base.keys()
    prefix = "base_model.model."
    down = adapter[f"{prefix}first.lora_A.weight"]
    up = adapter[f"{prefix}first.lora_B.weight"]
    assert down.shape == (RANK // 2, 6)
    assert (config["r"], config["lora_alpha"]) == (RANK // 2, ALPHA / 2)
    change = config["lora_alpha"] / config["r"] * (up @ down)
    assert np.abs(change).max() > 0.01
    np.testing.assert_allclose(merged["first.weight"], base["first.weight"] + change, atol=1e-6)
    assert config["modules_to_save"] == ["classifier"]
    for name in ("classifier.weight", "classifier.bias"):
        np.testing.assert_array_equal(adapter[prefix + name], merged[name])
    assert config["base_model_name_or_path"] == str(tmp_path / "peft" / "base")
    assert (tmp_path / "peft" / "base" / "config.json").exists()


@pytest.mark.parametrize(
    ("arch", "reason"),
    [
        (scaled, "has no place for first.ia3_l.default"),
        (biased, "has no place for first.lora_B.default.bias"),
        (triple, "the adapter of first is not one product of two factors"),
        (unbiased, "the model lacks classifier.bias of TinyForSequenceClassification"),
        (beheaded, "first.weight has 18 numbers, and TinyForSequenceClassification has 48 there"),
    ],
)
def test_a_folder_that_would_lose_something_is_not_written(
    tmp_path: Path, arch: Architecture, reason: str
) -> None:
    """Transformers reads a folder without what its class has no place for, or draws the rest."""
    request = ExportRequest(arch, {}, (WHOLE,), Recipe())
    export_architecture(request, tmp_path / "artifacts", ExportOptions(formats=("onnx",)))
    store = store_of(
        tmp_path / "artifacts", arch.name, tmp_path / "store", contract={"labels": LABELS}
    )
    with closing(Store(store, read_only=True)) as opened:
        selection = Selection(None, 0, None, "transformers")
        with pytest.raises(ConfigError, match=f"{reason}.*use --format torch"):
            save_version(opened, selection, tmp_path / "out", artifacts=tmp_path / "artifacts")
    assert not (tmp_path / "out").exists()


def train_factors(store: Path) -> Path:
    """Return a store whose version has other factors than the initial ones."""
    artifacts = store.parent / "artifacts"
    path = artifacts / "adapted" / "init.safetensors"
    tensors = load_file(path)
    draw = np.random.default_rng(5).standard_normal
    changed = {name: draw(value.shape).astype(np.float32) for name, value in tensors.items()}
    before = path.read_bytes()
    path.unlink()
    save_file(changed, path)
    trained = store_of(artifacts, "adapted", store.parent / "trained")
    path.write_bytes(before)
    return trained


@pytest.mark.parametrize(
    ("arch", "file_format", "reason"),
    [
        (plain, "transformers", "plain is not a model of transformers"),
        (tiny, "peft", "tiny has no low-rank adapters; use --format transformers"),
    ],
)
def test_what_a_package_does_not_read_is_refused(
    stores: Stores, tmp_path: Path, arch: Architecture, file_format: str, reason: str
) -> None:
    """Nothing is written."""
    store = stores(arch)
    with closing(Store(store, read_only=True)) as opened:
        selection = Selection(None, 0, None, file_format)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=reason):
            save_version(opened, selection, tmp_path / "out", artifacts=store.parent / "artifacts")
    assert not (tmp_path / "out").exists()
