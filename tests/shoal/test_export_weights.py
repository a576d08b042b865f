"""Versions of a store as files that other programs take: ONNX, PyTorch, safetensors; whole and as
one of the tiers.
"""

import copy
import json
import re
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.numpy import save as to_safetensors

from broker_server.settings.fleet import FleetConfig
from broker_server.store import RunRecord, Store, VersionRecord
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.control import VersionEvaluation
from fleet_protocol.messages import Evaluation
from fleet_protocol.weights import encode_weights
from models.architecture import build
from models.own_class import OWN_CLASS
from models.registry import Registry
from models.tier import Tier
from models.zoo.initial_state import initial_weights
from models.zoo.layers import StaticBatchNorm, set_mode
from shoal.cli.main import main
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.recipe import Recipe

SETTINGS = {"input_shape": (1, 8, 8), "classes": 5, "channels": (8, 12)}
TIERS = (Tier(1.0, 1), Tier(0.5, 1))
ARCH = Registry.zoo().get("conv")
SAMPLES = 35  # so that the last of the batches of 16 has fewer


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three versions of a convolutional model with static batch norm; the second was judged best,
    the last not.
    """
    folder = tmp_path_factory.mktemp("weights")
    export_architecture(
        ExportRequest(ARCH, SETTINGS, TIERS, Recipe()),
        folder / "artifacts",
        ExportOptions(formats=("onnx",)),
    )
    config = FleetConfig.model_validate(
        {
            "fleet": "f",
            "store": folder / "store",
            "broker": {"url": "mqtt://127.0.0.1:1"},
            "model": {"artifacts": folder / "artifacts", "arch": "conv"},
            "evaluation": {
                "data": {"kind": "npz", "path": folder / "test.npz", "scale": 0.5, "mean": 0.25}
            },
        }
    )
    opened = Store(folder / "store")
    blobs = BlobStore(folder / "store" / "blobs")
    rng = np.random.default_rng(3)
    samples = rng.standard_normal((SAMPLES, 1, 8, 8)).astype(np.float32)
    np.savez(folder / "test.npz", x=samples, y=np.arange(SAMPLES) % 5)
    module = build(ARCH, 1.0, settings=SETTINGS)
    norms = {
        name: layer.weight.shape
        for name, layer in module.named_modules()
        if isinstance(layer, StaticBatchNorm)
    }
    kinds = {"mean": rng.standard_normal, "var": lambda shape: rng.random(shape) + 0.5}
    statistics = {
        f"stat.{name}.{kind}": draw(shape).astype(np.float32)
        for name, shape in norms.items()
        for kind, draw in kinds.items()
    }
    for number, accuracy in enumerate((0.5, 0.75, None)):
        small = {"w0.50-d1": Evaluation(loss=2.0, accuracy=0.25, examples=10)} if number else {}
        judged = (
            None
            if accuracy is None
            else VersionEvaluation(loss=1.0, accuracy=accuracy, examples=10, tiers=small)
        )
        digest = blobs.put(encode_weights(initial_weights(ARCH, SETTINGS, number)))
        record = VersionRecord(
            "r1",
            number,
            number,
            digest,
            None,
            blobs.put(encode_weights(statistics)),
            float(number),
            judged,
        )
        if number == 0:
            run = RunRecord(
                "r1", "f", "conv", config.model_dump_json(), "running", None, 0.0, None, 0, 0
            )
            opened.add_run(run, record)
        else:
            opened.add_version(record, {})
    opened.close()
    return folder / "store"


def ended(store: Path, out: Path, *options: str) -> object:
    """The exit code of a command in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys,
            "argv",
            ["shoal", "export-weights", "--store", str(store), "--out", str(out), *options],
        )
        with pytest.raises(SystemExit) as caught:
            main()
    return caught.value.code


def exported(store: Path, out: Path, *options: str) -> Path:
    assert ended(store, out, *options) in (0, None)
    return out


def module_of(tensors: dict[str, np.ndarray], width: float) -> torch.nn.Module:
    module = build(ARCH, width, settings=SETTINGS)
    module.load_state_dict(
        {
            **module.state_dict(),
            **{name: torch.from_numpy(value) for name, value in tensors.items()},
        }
    )
    return set_mode(module, "eval")


def test_an_onnx_file_runs_alone_as_pytorch_does(store: Path, tmp_path: Path) -> None:
    """Weights and statistics are inside; what it is and how a sample is prepared stands in its
    metadata.
    """
    path = exported(store, tmp_path / "m.onnx", "--best", "--format", "onnx")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [port.name for port in session.get_inputs()] == ["x"]
    module = module_of(initial_weights(ARCH, SETTINGS, 1), 1.0)
    statistics = load_file(exported(store, tmp_path / "m.safetensors", "--version", "1"))
    for name, norm in module.named_modules():
        if isinstance(norm, StaticBatchNorm):
            norm.running_mean = torch.from_numpy(statistics[f"stat.{name}.mean"])
            norm.running_var = torch.from_numpy(statistics[f"stat.{name}.var"])
    x = np.random.default_rng(0).standard_normal((3, 1, 8, 8), np.float32)
    with torch.no_grad():
        wanted = module(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(
        session.run(None, {"x": x})[0], wanted, rtol=0, atol=1e-5 * np.abs(wanted).max()
    )
    metadata = session.get_modelmeta().custom_metadata_map
    assert (metadata["run"], metadata["version"], metadata["tier"], metadata["classes"]) == (
        "r1",
        "1",
        "w1.00-d1",
        "5",
    )
    assert json.loads(metadata["preprocessing"])["scale"] == 0.5
    assert json.loads(metadata["preprocessing"])["mean"] == 0.25


def without_artifacts_of_today(store: Path, to: Path) -> Path:
    """A copy of a store whose artifacts an older exporter made."""
    artifacts = shutil.copytree(store.parent / "artifacts", to / "artifacts")
    for path in artifacts.glob(f"*/*/{OWN_CLASS}"):
        path.unlink()
    return changed(store, to / "store", model={"artifacts": str(artifacts)})


def changed(store: Path, to: Path, **tables: dict[str, object]) -> Path:
    """A copy of a store with another configuration of its run."""
    copied = shutil.copytree(store, to)
    with closing(Store(copied)) as opened:
        config = json.loads(opened.runs()[0].config)
        for name, table in tables.items():
            config[name] |= table
        opened.record_config("r1", json.dumps(config))
    return copied


def test_a_torch_file_is_a_state_dict(store: Path, tmp_path: Path) -> None:
    """Of the tier, by the module's names, without anything else; the newest version if none is
    said.
    """
    path = exported(store, tmp_path / "m.pt", "--tier", "w0.50-d1", "--format", "torch")
    module = build(ARCH, 0.5, settings=SETTINGS)
    module.load_state_dict(torch.load(path, weights_only=True))
    whole = initial_weights(ARCH, SETTINGS, 2)
    for name, value in module.named_parameters():
        leading = tuple(slice(size) for size in value.shape)
        np.testing.assert_array_equal(value.detach().numpy(), whole[name][leading])
    same = load_file(exported(store, tmp_path / "m.safetensors", "--tier", "w0.50-d1"))
    weights = {name: value.shape for name, value in same.items() if not name.startswith("stat.")}
    assert weights == {name: tuple(value.shape) for name, value in module.named_parameters()}
    statistics = {name for name in same if name.startswith("stat.")}
    assert len(statistics) == len([name for name, _ in module.named_buffers()])


def test_statistics_of_a_tier_that_is_not_judged_are_of_the_servers_test_set(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In batches of training, each alike, as PyTorch's own batch norm takes them; the user is told.

    ONNX of such a tier was refused, as the store had no statistics that fit it.
    """
    path = exported(
        store, tmp_path / "m.pt", "--tier", "w0.50-d1", "--format", "torch", "--version", "1"
    )
    assert "statistics from the server's test set" in capsys.readouterr().err
    module = build(ARCH, 0.5, settings=SETTINGS)
    module.load_state_dict(torch.load(path, weights_only=True))
    own = copy.deepcopy(module)
    for name, norm in list(own.named_modules()):
        if isinstance(norm, StaticBatchNorm):
            theirs = torch.nn.BatchNorm2d(len(norm.weight), norm.eps, momentum=None)
            theirs.weight = norm.weight
            theirs.bias = norm.bias
            own.set_submodule(name, theirs)
    x = torch.from_numpy(np.load(store.parent / "test.npz")["x"]) * 0.5 - 0.25
    size = FleetConfig.model_validate_json(
        Store(store, read_only=True).runs()[0].config
    ).train.batch_size
    assert SAMPLES % size > 1
    set_mode(own, "statistics")
    for layer in own.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.train()
    with torch.no_grad():
        for batch in x.split(size):
            own(batch)
        logits = set_mode(module, "eval")(x)
        wanted = set_mode(own, "eval")(x)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    session = onnxruntime.InferenceSession(
        exported(
            store, tmp_path / "m.onnx", "--tier", "w0.50-d1", "--format", "onnx", "--version", "1"
        ),
        providers=["CPUExecutionProvider"],
    )
    np.testing.assert_allclose(session.run(None, {"x": x.numpy()})[0], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("file_format", ["torch", "onnx"])
def test_without_statistics_no_file_is_written(
    store: Path, tmp_path: Path, file_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which are missing is said, and why; safetensors hold what there is."""
    unjudged = changed(store, tmp_path / "other", evaluation={"data": None})
    names = {"torch": r"units\.0\.norm\.running_mean", "onnx": r"stat\.units\.0\.norm\.mean"}
    out = tmp_path / "out"
    assert ended(unjudged, out, "--tier", "w0.50-d1", "--format", file_format) == 2
    printed = capsys.readouterr().err.replace("\n", " ")
    assert re.search(rf"w0\.50-d1 lacks {names[file_format]}.* test set.*evaluation\.data", printed)
    assert not out.exists()
    exported(unjudged, out, "--tier", "w0.50-d1")
    assert "no statistics" in capsys.readouterr().err
    assert not any(name.startswith("stat.") for name in load_file(out))


def test_artifacts_of_an_older_exporter_are_exported_again(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They do not say what a class calls its statistics; the refusal says what to do, and the other
    formats work.
    """
    older = without_artifacts_of_today(store, tmp_path)
    assert ended(older, tmp_path / "m.pt", "--format", "torch") == 2
    assert re.search(
        r"older `shoal export`.*run the same `shoal export` again", capsys.readouterr().err
    )
    assert not (tmp_path / "m.pt").exists()
    exported(older, tmp_path / "m.onnx", "--format", "onnx")
    exported(older, tmp_path / "m.safetensors")
    same = exported(store, tmp_path / "same.safetensors").read_bytes()
    assert (tmp_path / "m.safetensors").read_bytes() == same


def described_by_another(store: Path, to: Path, **fields: object) -> Path:
    """A copy of a store whose artifact set somebody else wrote, who described the class in another
    way.
    """
    artifacts = shutil.copytree(store.parent / "artifacts", to / "artifacts")
    for path in artifacts.glob(f"*/*/{OWN_CLASS}"):
        with safe_open(path, "numpy") as file:
            description = json.loads(file.metadata()["own_class"])
            constants = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
        path.unlink()  # it is a link to the object of the set
        path.write_bytes(to_safetensors(constants, {"own_class": json.dumps(description | fields)}))
    return changed(store, to / "store", model={"artifacts": str(artifacts)})


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"name": "m", "kind": "mean"}, "'m', a mean, has 0 sources"),
        (
            {"name": "p", "kind": "parameter", "sources": ["head.weight", "head.bias"]},
            "entry 'p', a parameter",
        ),
        ({"name": "u", "kind": "left", "sources": ["head.bias"], "dim": 1}, "entry 'u', a left"),
        ({"name": "c", "kind": "count"}, "entry 'c'"),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)
def test_a_description_that_another_damaged_is_refused(
    store: Path,
    tmp_path: Path,
    entry: dict[str, object],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the names of its file and its entry; nothing is written, and the formats that need no
    class work.
    """
    damaged = described_by_another(store, tmp_path, entries=[entry])
    assert ended(damaged, tmp_path / "m.pt", "--format", "torch") == 6
    printed = " ".join(capsys.readouterr().err.split())
    assert OWN_CLASS in printed
    assert said in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "m.pt").exists()
    exported(damaged, tmp_path / "m.safetensors")


def test_a_description_that_is_a_link_is_not_followed(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is a file of the set like any other."""
    linked = described_by_another(store, tmp_path)
    for number, path in enumerate((tmp_path / "artifacts").glob(f"*/*/{OWN_CLASS}")):
        elsewhere = path.rename(tmp_path / f"elsewhere{number}")
        path.symlink_to(elsewhere)
    assert ended(linked, tmp_path / "m.pt", "--format", "torch") == 6
    assert "a link leads out of" in " ".join(capsys.readouterr().err.split())


def printed_lines(printed: str) -> list[str]:
    return [line.strip() for line in printed.splitlines() if line.startswith("  ")]


@pytest.mark.parametrize(
    "way", ["a file", "a link to a file", "a file in a linked folder", "a module", "its folder"]
)
def test_no_printed_line_runs_a_file_of_the_set(
    store: Path,
    tmp_path: Path,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whoever wrote the set may have put Python into it; the lines that load the weights say where
    it lies.
    """
    evil = tmp_path / "artifacts" / "conv" / "evil.py"
    monkeypatch.chdir(tmp_path)
    builder = {"module": "evil", "name": "net", "file": str(evil)}
    if way == "a link to a file":
        builder["file"] = str(tmp_path / "evil.py")
        (tmp_path / "evil.py").symlink_to(evil)
    elif way == "a file in a linked folder":
        builder["file"] = str(tmp_path / "linked" / "evil.py")
        (tmp_path / "linked").symlink_to(evil.parent)
    elif way == "a module":
        builder = {"module": "artifacts.conv.evil", "name": "net"}
    hostile = described_by_another(store, tmp_path, builder=builder)
    evil.write_text("raise SystemExit('it ran')")
    if way == "its folder":
        monkeypatch.chdir(evil.parent)
    capsys.readouterr()
    exported(hostile, tmp_path / "m.pt", "--format", "torch")
    lines = printed_lines(capsys.readouterr().out)
    assert any("is part of the artifact set" in line for line in lines)
    assert not any("sys.path" in line for line in lines)
    assert not any(
        line.startswith(("from evil", "from artifacts", "import evil")) for line in lines
    )


def test_a_file_beside_the_set_is_imported_from_there(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is the user's own, as `--models` named it."""
    own = tmp_path / "elsewhere" / "my_models.py"
    own.parent.mkdir()
    own.write_text("")
    monkeypatch.chdir(tmp_path)
    described = described_by_another(
        store, tmp_path, builder={"module": "my_models", "name": "net", "file": str(own)}
    )
    capsys.readouterr()
    exported(described, tmp_path / "m.pt", "--format", "torch")
    lines = printed_lines(capsys.readouterr().out)
    assert f"import sys; sys.path.append({str(own.parent)!r})" in lines
    assert "from my_models import net" in lines


@pytest.mark.attack(
    "file",
    "The description of a class has code in place of names",
    "refused; the code is not printed",
    "2026-11-28",
)
@pytest.mark.parametrize("field", ["module", "name", "file"])
def test_code_in_a_description_is_not_printed(
    store: Path, tmp_path: Path, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name with a line end would be a line of Python of its own, which the user is asked to
    run.
    """
    builder = {"module": "evil", "name": "net", "file": "/tmp/evil.py"}
    builder[field] += "\nprint('it ran')\n#"
    hostile = described_by_another(store, tmp_path, builder=builder)
    exported(hostile, tmp_path / "m.safetensors")
    assert "it ran" not in capsys.readouterr().out
    assert ended(hostile, tmp_path / "m.pt", "--format", "torch") == 6
    assert f"builder.{field}" in " ".join(capsys.readouterr().err.split())


def test_a_tier_has_its_own_evaluation_or_none(store: Path, tmp_path: Path) -> None:
    """The file of a small tier told the accuracy of the whole model."""

    def told(version: str, *options: str) -> str | None:
        path = exported(store, tmp_path / "m.safetensors", "--version", version, *options)
        with safe_open(path, "numpy") as file:
            return file.metadata().get("accuracy")

    assert (told("0"), told("0", "--tier", "w1.00-d1"), told("0", "--tier", "w0.50-d1")) == (
        "0.5",
        "0.5",
        None,
    )
    assert (told("1"), told("1", "--tier", "w0.50-d1")) == ("0.75", "0.25")


def test_what_is_printed_is_of_the_file(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was the number of what the run judges: of the whole model for a tier, of a tier for the
    whole model.
    """

    def printed(where: Path, *options: str) -> str:
        exported(where, tmp_path / "m.safetensors", "--version", "1", *options)
        return capsys.readouterr().out

    assert "accuracy 0.7500" in printed(store)
    assert "accuracy 0.2500" in printed(store, "--tier", "w0.50-d1")
    assert "accuracy" not in printed(store, "--tier", "w0.50-d1", "--version", "0")
    renamed = changed(store, tmp_path / "other", evaluation={"tier": "w0.50-d1"})
    with closing(Store(renamed)) as opened:
        opened.rename_run("r1", "baseline")
    named = printed(renamed)
    assert "version 1 of run baseline (r1)" in named
    assert "accuracy" not in named
    with safe_open(tmp_path / "m.safetensors", "numpy") as file:
        assert "accuracy" not in file.metadata()
    assert "accuracy 0.7500" in printed(renamed, "--tier", "w0.50-d1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--tier", "w0.25-d1"),
            r"'w0.25-d1' is not exported; the exported tiers are w1.00-d1, w0.50-d1",
        ),
        (("--version", "7"), r"no version 7; it has versions 0 to 2"),
        (("--best", "--version", "1"), r"--best and --version both"),
    ],
)
def test_what_is_not_there_is_said(
    store: Path,
    tmp_path: Path,
    options: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With what is there instead; no file is written."""
    out = tmp_path / "out"
    assert ended(store, out, *options) == 2
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))
    assert not out.exists()


def test_artifact_sets_of_a_restored_store_are_named_by_whoever_exports(
    store: Path, tmp_path: Path, capsys
) -> None:
    """The database's word for a folder is not taken: another's backup could have named any; an
    option says it.
    """
    restored = Path(shutil.copytree(store, tmp_path / "restored"))
    shutil.rmtree(restored / "configurations")
    options = ("--tier", "w0.50-d1")
    assert ended(restored, tmp_path / "m.safetensors", *options) == 2
    assert "--artifacts FOLDER" in "".join(capsys.readouterr().err.split("\n"))
    assert not (tmp_path / "m.safetensors").exists()
    exported(restored, tmp_path / "whole.safetensors")  # needs no artifacts
    sets = ("--artifacts", str(store.parent / "artifacts"))
    written = exported(restored, tmp_path / "m.safetensors", *options, *sets)
    kept = load_file(exported(store, tmp_path / "same.safetensors", *options))
    restored_tensors = load_file(written)
    # The test set that statistics could be taken over is named by the database alone, so there are
    # none.
    assert restored_tensors.keys() == {name for name in kept if not name.startswith("stat.")}
    for name, tensor in restored_tensors.items():
        np.testing.assert_array_equal(tensor, kept[name])


def test_an_architecture_in_the_database_is_no_path(store: Path, tmp_path: Path, capsys) -> None:
    """Beside the folder that the option names."""
    restored = Path(shutil.copytree(store, tmp_path / "restored"))
    shutil.rmtree(restored / "configurations")
    with closing(sqlite3.connect(restored / "shoal.db")) as database, database:
        (config,) = database.execute("SELECT config FROM runs").fetchone()
        database.execute(
            "UPDATE runs SET config = ?", (config.replace('"arch":"conv"', '"arch":"../../conv"'),)
        )
    sets = ("--artifacts", str(store.parent / "artifacts"))
    assert ended(restored, tmp_path / "m.safetensors", "--tier", "w0.50-d1", *sets) == 2
    assert "is not a valid file name" in " ".join(capsys.readouterr().err.split())
