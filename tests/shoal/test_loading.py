"""What `export-weights` writes loads into the class as its author wrote it, and scores there what
the run says.

The oracle is plain PyTorch, or plain onnxruntime, over the test set of the run.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file
from sqlalchemy import text
from torch import nn
from torch.nn import functional

from broker_server.rounds.artifacts import load_artifacts
from broker_server.rounds.tier_version import stored_context
from broker_server.settings.fleet import FleetConfig
from broker_server.store import RunRecord, Store, VersionRecord
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.data.terms import ContractTerms
from fleet_protocol.errors import ConfigError
from fleet_protocol.messages import Evaluation
from fleet_protocol.weights import encode_weights
from models.own_class import Builder
from models.tier import Tier
from models.zoo.loading import load_weights
from shoal.cli.main import main
from shoal.downloads import ELSEWHERE, Download, FileFormat, Selection, save_version
from shoal.load_lines import load_lines
from simulation.runner import simulate
from tests.marking import mostly_slow
from tests.shoal.own_classes import CLASSES, FAITHFUL
from tests.simulation.simulations import settings

FILE = Path(__file__).with_name("own_classes.py")
WHOLE = Tier(1.0, 1)
SMALL = Tier(0.5, 1)
FORMATS: tuple[FileFormat, ...] = ("torch", "safetensors", "onnx")
HIDDEN = 12
QUICK = {"bn2d", "no_norm"}
DIGITS = {"name": "digits", "train_limit": 160, "test_limit": 90}

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.nn.utils.weight_norm.*:FutureWarning",
    "ignore:.*weight_norm.* is deprecated:FutureWarning",
)


@dataclass(frozen=True)
class Run:
    """A simulation that judged a tier: its store, what it says of the tier in its last version, and
    its test set.
    """

    store: Path
    said: Evaluation
    version: int
    x: np.ndarray
    y: np.ndarray


def simulated(kind: str, folder: Path, judged: Tier, **tables: Any) -> Run:
    """Train one of the classes for a round or two; what is exported is kept in the folder for
    another run.
    """
    config = settings(
        folder / f"{judged.id}-{len([*folder.iterdir()])}",
        folder / "cache",
        model={"arch": kind, "settings": {}, "widths": (1.0, 0.5), "models": FILE},
        data=DIGITS,
        devices={"count": 2},
        round={"rounds": 1, "fraction": 1.0},
        train={"epochs": 2, "batch_size": 16, "learning_rate": 0.1},
        tiers={"assign": "dynamic", "levels": "a1-b1"},
        engine={"workers": 1},
        evaluation={"tier": judged.id},
        **tables,
    )
    result = simulate(config)
    with closing(Store(result.folder / "store", read_only=True)) as store:
        last = store.versions(result.run)[-1]
        test_set = np.load(stored_context(store).config.evaluation.data.path)
    assert last.evaluation is not None
    return Run(result.folder / "store", last.evaluation, last.number, test_set["x"], test_set["y"])


def saved(run: Run, tier: Tier, file_format: FileFormat, path: Path) -> Download:
    with closing(Store(run.store, read_only=True)) as store:
        chosen = None if tier == WHOLE else tier.id
        return save_version(store, Selection(None, run.version, chosen, file_format), path)


def scored(logits: torch.Tensor, y: np.ndarray) -> dict[str, float]:
    truth = torch.from_numpy(y)
    accuracy = (logits.argmax(1) == truth).double().mean()
    return {"accuracy": float(accuracy), "loss": float(functional.cross_entropy(logits, truth))}


def of_torch(model: nn.Module, run: Run) -> dict[str, float]:
    with torch.no_grad():
        return scored(model(torch.from_numpy(run.x).float()), run.y)


def of_onnx(path: Path, run: Run) -> dict[str, float]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return scored(torch.from_numpy(session.run(None, {"x": run.x.astype(np.float32)})[0]), run.y)


def dtypes(state: Mapping[str, torch.Tensor]) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in state.items()}


def written(kind: str, tier: Tier) -> nn.Module:
    """A fresh model of the class as it was written, at a tier's width, in no mode but PyTorch's
    own.
    """
    return CLASSES[kind](round(HIDDEN * tier.width), 10)


def loaded_by(lines: tuple[str, ...]) -> Mapping[str, Any]:
    """What the printed lines leave behind, run as they are."""
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        exec("\n".join(lines), names)
    return names


@pytest.mark.parametrize("kind", mostly_slow(FAITHFUL, lambda kind: kind in QUICK))
@pytest.mark.slow
def test_every_file_scores_in_the_untouched_class_what_the_run_says(
    kind: str, tmp_path: Path
) -> None:
    """Whole and as a tier, for torch and from safetensors strictly; ONNX and the printed lines
    likewise.

    Statistics were missing in files for torch: they failed to load, and scored 0.333 with
    strict=False.
    """
    for judged in (WHOLE, SMALL):
        run = simulated(f"{kind}_converted", tmp_path, judged)
        said = pytest.approx(
            {"accuracy": run.said.accuracy, "loss": run.said.loss}, rel=2e-4, abs=1e-5
        )
        paths = {name: tmp_path / f"{judged.id}.{name}" for name in FORMATS}
        lines = {name: saved(run, judged, name, path).lines for name, path in paths.items()}

        of_user = written(kind, judged)
        state = torch.load(paths["torch"], weights_only=True)
        of_user.load_state_dict(state, strict=True)
        assert of_torch(of_user.eval(), run) == said
        assert dtypes(state) == dtypes(of_user.state_dict())
        assert of_onnx(paths["onnx"], run) == said

        for name in ("torch", "safetensors"):
            model = loaded_by(lines[name])["model"]
            assert model.state_dict().keys() == of_user.state_dict().keys()
            assert of_torch(model, run) == said
        assert loaded_by(lines["onnx"])["logits"].shape == (1, 10)


def exported_by_hand(kind: str, folder: Path, *options: str) -> Path:
    """A store with one judged version of a class as it was written, exported by the command with
    ``--convert``.
    """
    typed(
        "export",
        "--arch",
        kind,
        "--models",
        FILE,
        "--convert",
        "--widths",
        "1,0.5",
        "--formats",
        "onnx",
        *options,
    )
    artifacts = load_artifacts(folder / "artifacts", kind, chunk_bytes=2**18)
    rng = np.random.default_rng(1)
    data = {"kind": "npz", "path": str(folder / "test.npz")}
    np.savez(
        folder / "test.npz",
        x=rng.standard_normal((40, 1, 8, 8)).astype(np.float32),
        y=np.arange(40) % 10,
    )
    config = FleetConfig.model_validate(
        {
            "fleet": "f",
            "store": folder / "store",
            "broker": {"url": "mqtt://127.0.0.1:1"},
            "model": {"artifacts": folder / "artifacts", "arch": kind},
            "evaluation": {"data": data},
        }
    )
    channels = {spec.name: spec.channels for spec in artifacts.full.manifest.statistics}
    statistics = {
        f"stat.{name}.mean": rng.standard_normal(count) for name, count in channels.items()
    }
    statistics |= {f"stat.{name}.var": rng.random(count) + 0.5 for name, count in channels.items()}
    blobs = BlobStore(folder / "store" / "blobs")
    digests = [
        blobs.put(
            encode_weights({name: np.asarray(value, np.float32) for name, value in tensors.items()})
        )
        for tensors in (artifacts.initial_weights(), statistics)
    ]
    version = VersionRecord("r1", 0, 0, digests[0], None, digests[1], 0.0, None)
    with closing(Store(folder / "store")) as store:
        run = RunRecord("r1", "f", kind, config.model_dump_json(), "running", None, 0.0, None, 0, 0)
        store.add_run(run, version)
    return folder / "store"


def typed(*words: object) -> None:
    """A command in this process, which must go well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["shoal", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            main()
    assert caught.value.code in (0, None)


@pytest.mark.parametrize("tier", mostly_slow([WHOLE, SMALL], lambda tier: tier is WHOLE))
@pytest.mark.slow
def test_the_printed_lines_run_as_they_are(
    tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process of their own, for each format, of a model that `export --convert` took; the
    outputs are the same.
    """
    monkeypatch.chdir(tmp_path)
    exported_by_hand("two_names", tmp_path)
    capsys.readouterr()
    program = ["import numpy, torch", "given = numpy.load('test.npz')['x']"]
    for file_format in FORMATS:
        which = [] if tier == WHOLE else ["--tier", tier.id]
        typed(
            "export-weights",
            "--store",
            "store",
            "--format",
            file_format,
            "--out",
            f"w.{file_format}",
            *which,
        )
        told = capsys.readouterr().out.splitlines()
        lines = [line.strip() for line in told if line.startswith("  ")]
        assert lines
        program += lines
        if file_format == "onnx":
            program += ["outputs_of_onnx = session.run(None, {'x': given})[0]"]
        else:
            program += [
                "with torch.no_grad():",
                f"    outputs_of_{file_format} = model(torch.from_numpy(given))",
            ]
    program += [
        "assert numpy.abs(outputs_of_onnx).max() > 0.1",
        "numpy.testing.assert_allclose(outputs_of_torch, outputs_of_onnx, rtol=1e-3, atol=1e-4)",
        (
            "numpy.testing.assert_allclose(outputs_of_safetensors, outputs_of_onnx, rtol=1e-3, "
            "atol=1e-4)"
        ),
    ]
    (tmp_path / "program.py").write_text("\n".join(program))
    path = os.pathsep.join([str(FILE.parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "program.py"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_class_without_a_place_for_statistics_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`track_running_stats=False`: a file for torch would score by what else is in a batch; ONNX
    has the statistics.
    """
    monkeypatch.chdir(tmp_path)
    store = exported_by_hand("untracked", tmp_path)
    capsys.readouterr()
    with closing(Store(store, read_only=True)) as opened:
        with pytest.raises(
            ConfigError, match=r"norm is a BatchNorm1d with track_running_stats=False.*running_mean"
        ):
            save_version(opened, Selection(None, 0, None, "torch"), tmp_path / "w.pt")
        assert (
            save_version(
                opened, Selection(None, 0, None, "safetensors"), tmp_path / "w.safetensors"
            ).lines
            == ()
        )
        save_version(opened, Selection(None, 0, None, "onnx"), tmp_path / "w.onnx")
    assert not (tmp_path / "w.pt").exists()
    with pytest.raises(ConfigError, match="track_running_stats=False"):
        load_weights(written("untracked", WHOLE), load_file(tmp_path / "w.safetensors"))


def test_a_class_that_is_another_after_the_conversion_is_found_at_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exporter loads weights into a fresh one and compares; the refusal says what it found."""
    monkeypatch.chdir(tmp_path)
    store = exported_by_hand("two_faced", tmp_path)
    capsys.readouterr()
    refused = pytest.raises(ConfigError, match="gives different outputs with the same weights")
    with closing(Store(store, read_only=True)) as opened, refused:
        save_version(opened, Selection(None, 0, None, "torch"), tmp_path / "w.pt")
    assert not (tmp_path / "w.pt").exists()


def test_files_of_a_page_come_with_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `--url` gets them; where the user's file lies is not told to another machine."""
    monkeypatch.chdir(tmp_path)
    store = exported_by_hand("two_names", tmp_path)
    capsys.readouterr()
    with closing(Store(store, read_only=True)) as opened:
        lines = save_version(
            opened, Selection(None, 0, None, "torch"), tmp_path / "w.pt", ELSEWHERE
        ).lines
    assert any(repr(str(ELSEWHERE)) in line for line in lines)
    assert not any(str(FILE.parent) in line for line in lines)
    assert any(
        line.startswith("from own_classes import two_names  # from 'own_classes.py'")
        for line in lines
    )


def test_the_lines_say_what_inputs_and_outputs_mean() -> None:
    """Without the order of the labels and the scale of the samples nobody can use the weights."""
    data = {"kind": "npz", "path": "t.npz", "scale": 0.25, "mean": [1.0, 2.0], "std": 0.5}
    contract = {"labels": ["owl", "cat", "dog"], "columns": ["area", "age"], "missing": 0.0}
    tables = {"model": {"arch": "a"}, "evaluation": {"data": data}, "contract": contract}
    config = FleetConfig.model_validate({"fleet": "f", **tables})
    manifest = SimpleNamespace(input_dtype="float32", input_shape=(2,))
    content: Any = SimpleNamespace(config=config, artifacts=SimpleNamespace(manifest=manifest))
    comments = (
        "# input: float32 [batch, 2], each (x * 0.25 - (1.0, 2.0)) / 0.5",
        "# columns of the input, in order: area, age",
        "# a missing value of a column: 0.0",
        "# labels of the outputs, in order: owl, cat, dog",
    )
    assert load_lines(content, "onnx", Path("w.onnx"))[-4:] == comments
    many = config.model_copy(
        update={"contract": ContractTerms(labels=[f"k{n}" for n in range(999)])}
    )
    content.config = many
    assert load_lines(content, "onnx", Path("w.onnx"))[-1].endswith(
        "... (999 in all, see contract in `shoal runs --json`)"
    )


@pytest.mark.parametrize(
    ("tier", "depth", "built"),
    [
        (Tier(1.0, 1), 1, "net"),
        (Tier(1.0, 6), 6, "net"),
        (Tier(1.0, 1), 6, "net, shoal.Tier(1.0, 1)"),
        (Tier(0.5, 6), 6, "net, shoal.Tier(0.5, 6)"),
    ],
)
def test_the_line_that_builds_a_model_names_the_tier_unless_it_is_the_whole(
    tier: Tier, depth: int, built: str
) -> None:
    """Without a tier, `shoal.build` takes all blocks, whose tensors the file of one lacks."""
    manifest = SimpleNamespace(input_dtype="float32", input_shape=(2,), base={})
    config = SimpleNamespace(contract=None, evaluation=SimpleNamespace(data=None))
    artifacts = SimpleNamespace(manifest=manifest, tier=tier, folder=Path("/sets/net/w"))
    own = SimpleNamespace(builder=Builder(module="zoo", name="net"), package=None, problem="")
    content: Any = SimpleNamespace(
        config=config, artifacts=artifacts, depth=depth, lacking="", own_class=(own, {})
    )
    lines = load_lines(content, "torch", Path("w.pt"))
    assert f"model = shoal.build({built})" in lines


@pytest.mark.slow
def test_lines_of_each_format_end_with_the_labels_that_the_run_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The database has them, since they come from the test set; the saved configuration has not."""
    monkeypatch.chdir(tmp_path)
    store = exported_by_hand("two_names", tmp_path)
    capsys.readouterr()
    contract = {"labels": [f"kind {number}" for number in range(10)]}
    with closing(Store(store)) as opened:
        with opened._begin() as connection:
            changed = "update runs set config = json_set(config, '$.contract', json(:contract))"
            connection.execute(text(changed), {"contract": json.dumps(contract)})
        for file_format in FORMATS:
            selection = Selection(None, 0, None, file_format)
            lines = save_version(opened, selection, tmp_path / "w").lines
            assert (
                lines[-1] == f"# labels of the outputs, in order: {', '.join(contract['labels'])}"
            )
