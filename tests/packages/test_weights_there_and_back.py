"""Weights of transformers go into an export by `--start`, and back by `shoal export-weights`."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from fleet_protocol.weights import encode_weights
from shoal.cli.main import main
from tests.packages.gallery import GALLERY, Packaged
from tests.shoal.stored import store_of

_TOLERANCE = 1e-6
_GRAPH_TOLERANCE = 1e-5  # a graph sums in another order
_TITLES = ("BERT", "RoBERTa", "ELECTRA", "DistilBERT", "GPT-2", "ViT")
_TEXTS = (3, 16)

# Packages warn of what this environment lacks.
pytestmark = [
    pytest.mark.packages,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(1800),
]

ADAPTED = '''"""A BERT with adapters of transformers' own layers."""

from shoal import Adapters, Cut, architecture, package_model, with_adapters

MODEL = package_model("transformers:{folder}", {{"input_shape": (16,)}})


@architecture(input_dtype="int64")
def bert(cut: Cut, *, input_shape=(16,), classes=2):
    chosen = Adapters(
        rank=4, alpha=8, targets=("*.query", "*.value"), trained=("classifier.*",)
    )
    return with_adapters(MODEL.build({{"num_labels": cut.classes(classes)}}), chosen, cut)
'''


@dataclass(frozen=True)
class Start:
    """A folder of transformers with random weights, and what its model computes."""

    folder: Path
    model: Any
    samples: torch.Tensor


def typed(*words: object) -> None:
    """Run a command of Shoal in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["shoal", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            main()
    assert caught.value.code in (0, None)


def start_of(packaged: Packaged, folder: Path) -> Start:
    """Write a folder as a user downloads one."""
    transformers = pytest.importorskip("transformers")
    assert packaged.config is not None
    config_name, class_name, fields = packaged.config
    torch.manual_seed(3)
    config = getattr(transformers, config_name)(**fields)
    config.id2label = label_names(packaged)
    config.label2id = {name: index for index, name in config.id2label.items()}
    model = getattr(transformers, class_name)(config).eval()
    spread_out(model)
    model.save_pretrained(folder)
    if "ViT" in class_name:
        samples = torch.randn(3, 3, config.image_size, config.image_size)
    else:
        samples = torch.randint(3, config.vocab_size, _TEXTS)
    return Start(folder, model, samples)


def label_names(packaged: Packaged) -> dict[int, str]:
    """Name each label of the gallery's model; without `num_labels` a model of transformers has two."""
    return {index: f"label {index}" for index in range(packaged.arguments.get("num_labels", 2))}


def spread_out(model: nn.Module) -> None:
    """Move vectors away from zeros and ones, which would hide a tensor that is left out."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def logits_of(model: Any, samples: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        returned = model.eval()(samples)
    logits: torch.Tensor = returned.logits
    return logits


def own_class(name: str) -> Any:
    return getattr(pytest.importorskip("transformers"), name)


@pytest.mark.parametrize("title", _TITLES)
def test_a_folder_comes_back(
    title: str, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole model has its weights and outputs, the half one those of its graph."""
    (packaged,) = (entry for entry in GALLERY if entry.title == title)
    start = start_of(packaged, tmp_path / "start")
    monkeypatch.chdir(tmp_path)
    options = ["--model", "transformers:start", "--start", "start", "--widths", "1,0.5"]
    typed("export", *options, *set_options(packaged), "--formats", "onnx", "--jobs", 1)
    (arch,) = (path.name for path in (tmp_path / "artifacts").iterdir() if path.name != "objects")
    store = store_of(tmp_path / "artifacts", arch, tmp_path / "store")

    capsys.readouterr()
    typed("export-weights", "--store", store, "--format", "transformers", "--out", "whole")
    whole = loaded(capsys.readouterr().out)
    assert type(whole) is type(start.model)
    before = start.model.state_dict()
    assert whole.state_dict().keys() == before.keys()
    for name, value in whole.state_dict().items():
        assert (value - before[name]).abs().max() <= _TOLERANCE, name
    expected = logits_of(start.model, start.samples)
    assert (logits_of(whole, start.samples) - expected).abs().max() <= _TOLERANCE
    if "Classification" in type(whole).__name__:
        assert whole.config.id2label == label_names(packaged)

    tier = next(path.name for path in (tmp_path / "artifacts" / arch).glob("w0.50*"))
    options = ["--tier", tier, "--format", "transformers", "--out", "half"]
    typed("export-weights", "--store", store, *options)
    half = own_class(type(start.model).__name__).from_pretrained("half")
    infer = tmp_path / "artifacts" / arch / tier / "infer.onnx"
    from_graph = run_graph(infer, half.state_dict(), start.samples)
    assert np.abs(logits_of(half, start.samples).numpy() - from_graph).max() <= _GRAPH_TOLERANCE


def loaded(printed: str) -> Any:
    """Return the model that the printed lines load, which are indented."""
    lines = [line.strip() for line in printed.splitlines() if line.startswith("  ")]
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)
    return names["model"]


def set_options(packaged: Packaged) -> list[str]:
    """Return the arguments of a model as options."""
    options: list[str] = []
    for name, value in packaged.arguments.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else value
        options += ["--set", f"{name}={text}"]
    return options


def run_graph(path: Path, state: Mapping[str, torch.Tensor], samples: torch.Tensor) -> Any:
    """Return what the graph of a tier predicts with a model's parameters."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feed: dict[str, Any] = {}
    for port in session.get_inputs():
        name = port.name.removeprefix("param.")
        feed[port.name] = state[name].numpy() if name in state else samples.numpy()
    return session.run(["logits"], feed)[0]


def test_adapters_come_back_merged_and_for_peft(tmp_path: Path, monkeypatch: Any) -> None:
    """A BERT with trained adapters: both folders compute the same, in every tier."""
    peft = pytest.importorskip("peft")
    (packaged,) = (entry for entry in GALLERY if entry.title == "BERT")
    start = start_of(packaged, tmp_path / "start")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_models.py").write_text(ADAPTED.format(folder=tmp_path / "start"))
    typed("export", "--models", "my_models.py", "--arch", "bert", "--start", "start",
          "--start-partial", "--widths", "1,0.5", "--formats", "onnx", "--jobs", 1)  # fmt: skip
    draw_factors(tmp_path / "artifacts" / "bert" / "init.safetensors")
    store = store_of(tmp_path / "artifacts", "bert", tmp_path / "store")
    base = own_class("BertForSequenceClassification")
    for tier in ("w1.00-d1", "w0.50-d1"):
        options = ["--store", store, "--tier", tier]
        typed("export-weights", *options, "--format", "transformers", "--out", f"{tier}-merged")
        typed("export-weights", *options, "--format", "peft", "--out", f"{tier}-peft")
        merged = logits_of(base.from_pretrained(f"{tier}-merged"), start.samples)
        own = base.from_pretrained(f"{tier}-peft/base")
        adapted = peft.PeftModel.from_pretrained(own, f"{tier}-peft")
        assert (logits_of(adapted, start.samples) - merged).abs().max() <= _GRAPH_TOLERANCE
        assert (merged - logits_of(start.model, start.samples)).abs().max() > 0.01
        # The folder of a download serves as the base, too.
        theirs = peft.PeftModel.from_pretrained(base.from_pretrained("start"), f"{tier}-peft")
        assert (logits_of(theirs, start.samples) - merged).abs().max() <= _GRAPH_TOLERANCE


def draw_factors(path: Path) -> None:
    """Give the adapters other factors than the first ones, of which half are zeros."""
    tensors = load_file(path)
    draw = np.random.default_rng(5).standard_normal
    for name, value in tensors.items():
        if name.endswith((".up", ".down")):
            tensors[name] = (0.3 * draw(value.shape)).astype(np.float32)
    path.unlink()
    path.write_bytes(encode_weights(tensors))
