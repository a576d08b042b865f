"""A fleet in which boards read data differently: each trains what the others train, or is refused
by name.

Boards that hold the same samples do the same arithmetic, so the loss of each is that of a reference
board, bit by bit.
"""

import contextlib

import numpy as np
import pytest
from PIL import Image

from broker_server.settings.evaluation import EvaluationConfig
from broker_server.settings.fleet import ModelConfig
from broker_server.store import Store
from device_runtime.doctor import examine
from fleet_protocol.data.terms import ContractTerms, read_contract
from models.registry import Registry, infer_layout
from simulation.data.datasets import load_dataset
from tests.brokers import embedded_broker
from tests.device_runtime.device_process import DeviceProcess
from tests.fleet.conftest import Watcher, run
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.recipe import Recipe

SAMPLES = 120
NAMES = ("nought", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ORDERED = tuple(sorted(NAMES))


@pytest.fixture(scope="module")
def digits():
    """Bytes ``[N, 1, 8, 8]`` and digits of boards and of the server, in the order in which folders
    are read.
    """
    data = load_dataset("digits")

    def in_order(x, y, count):
        numbers = np.array([ORDERED.index(NAMES[digit]) for digit in y[:count]])
        order = np.argsort(numbers, kind="stable")
        return np.round(x[:count] * 255 / x.max()).astype(np.uint8)[order], numbers[order]

    return in_order(data.train_x, data.train_y, SAMPLES), in_order(data.test_x, data.test_y, 200)


def write_images(folder, samples, keep=range(10)):
    """A folder for each label."""
    for place, (pixels, label) in enumerate(zip(*samples, strict=True)):
        if label in keep:
            path = folder / ORDERED[label] / f"{place:04}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels[0]).save(path)


def write_arrays(path, samples, keep=range(10)):
    """The same samples in the same order, with numbers as labels."""
    chosen = np.isin(samples[1], list(keep))
    np.savez(path, x=samples[0][chosen], y=samples[1][chosen])


@contextlib.contextmanager
def boards(folder, url, tables):
    """An agent for each ``[data]`` table, by name."""
    processes = {
        name: DeviceProcess(folder / name, url, table, device=name, fleet="test", holdout=0.0)
        for name, table in tables.items()
    }
    try:
        for process in processes.values():
            process.start()
        yield processes
    finally:
        for process in processes.values():
            process.kill()


def trained(config, run_id):
    """Of each device the loss of its first update, and why it was refused."""
    with contextlib.closing(Store(config.store, read_only=True)) as store:
        tasks = store.tasks(run_id, 1, "train")
    losses = {task.device: task.metrics.train_loss for task in tasks if task.metrics is not None}
    return losses, {task.device: task.detail for task in tasks if task.metrics is None}


@pytest.mark.slow
def test_boards_with_folders_that_differ_train_alike_or_are_refused(ground, digits, tmp_path):
    """Hidden and empty folders, a class less, another order of `labels`; a class that nobody named
    is refused.
    """
    own, test = digits
    write_images(tmp_path / "test", test)
    for name in ("plain", "hidden", "nested", "ordered", "extra"):
        write_images(tmp_path / name, own)
    few = [label for label in range(10) if label not in {0, 4}]
    write_images(tmp_path / "missing", own, few)
    write_arrays(tmp_path / "reference.npz", own)
    write_arrays(tmp_path / "few.npz", own, few)
    by_name = np.argsort([NAMES.index(ORDERED[label]) for label in own[1]], kind="stable")
    write_arrays(tmp_path / "by_name.npz", (own[0][by_name], own[1][by_name]))
    for aside in (
        "hidden/.ipynb_checkpoints",
        "hidden/@eaDir",
        "hidden/aardvark",
        "extra/aardvark",
    ):
        (tmp_path / aside).mkdir()
    (tmp_path / "nested" / ORDERED[3]).rename(tmp_path / "moved")
    (tmp_path / "nested" / ORDERED[3]).mkdir()
    (tmp_path / "moved").rename(tmp_path / "nested" / ORDERED[3] / "monday")
    Image.fromarray(own[0][0][0]).save(tmp_path / "extra" / "aardvark" / "1.png")
    images = {"kind": "images", "channels": 1}
    arrays = {"kind": "npz", "scale": 1 / 255}
    tables = {
        name: {**images, "path": str(tmp_path / name)}
        for name in ("plain", "hidden", "nested", "missing")
    }
    tables["ordered"] = {**images, "path": str(tmp_path / "ordered"), "labels": NAMES}
    tables["extra"] = {**images, "path": str(tmp_path / "extra")}
    tables["reference"] = {**arrays, "path": str(tmp_path / "reference.npz")}
    tables["by_name"] = {**arrays, "path": str(tmp_path / "by_name.npz")}
    tables["few"] = {**arrays, "path": str(tmp_path / "few.npz")}
    with (
        embedded_broker(tmp_path) as broker,
        boards(tmp_path / "boards", broker.url, tables) as processes,
    ):
        config = ground.config(
            broker.url,
            rounds=1,
            wait_seconds=240.0,
            deadline_seconds=240.0,
            min_devices=len(tables),
        )
        config = config.model_copy(
            update={
                "evaluation": EvaluationConfig(data={**images, "path": tmp_path / "test"}),
                "round": config.round,
            }
        )
        finished = run(
            config.model_copy(update={"round": config.round.model_copy(update={"quorum": 0.8})}),
            Watcher(),
        )
        hidden_log = processes["hidden"].log()
        findings = {finding.check: finding for finding in examine(processes["extra"].config)}
    assert finished.status == "finished", finished.error
    losses, refused = trained(config, finished.run)
    same = {losses[name] for name in ("plain", "hidden", "nested", "reference")}
    assert len(same) == 1
    assert (
        losses["ordered"] == losses["by_name"] != losses["plain"]
    )  # its folders are read in another order
    assert losses["missing"] == losses["few"] != losses["plain"]
    assert [*refused] == ["extra"]
    assert "data-mismatch: " in refused["extra"]
    assert (
        f"{tmp_path}/extra has the label 'aardvark', which is not a label of the fleet"
        in refused["extra"]
    )
    assert (
        "left out: 1 folders without images, 1 hidden files or folders, 1 system folders"
        in hidden_log
    )
    assert read_contract(processes["extra"].state_dir).labels == ORDERED
    assert findings["data"].level == "failed"
    assert "has the label 'aardvark'" in findings["data"].detail


@pytest.mark.slow
def test_boards_with_disjoint_classes_learn_as_with_one_numbering(ground, digits, tmp_path):
    """Four digits on each board: each had numbered its folders 0 to 3."""
    own, test = digits
    shares = ([0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9], [9, 0, 4, 7])
    write_images(tmp_path / "test", test)
    folders = {}
    arrays = {}
    for number, keep in enumerate(shares):
        write_images(tmp_path / f"d{number}", own, keep)
        write_arrays(tmp_path / f"d{number}.npz", own, keep)
        folders[f"d{number}"] = {
            "kind": "images",
            "channels": 1,
            "path": str(tmp_path / f"d{number}"),
        }
        arrays[f"d{number}"] = {
            "kind": "npz",
            "scale": 1 / 255,
            "path": str(tmp_path / f"d{number}.npz"),
        }
    evaluation = EvaluationConfig(data={"kind": "images", "channels": 1, "path": tmp_path / "test"})
    found = []
    for kind, tables in (("folders", folders), ("arrays", arrays)):
        (tmp_path / kind).mkdir()
        with (
            embedded_broker(tmp_path / kind) as broker,
            boards(tmp_path / kind / "boards", broker.url, tables),
        ):
            config = ground.config(
                broker.url,
                rounds=3,
                wait_seconds=240.0,
                deadline_seconds=240.0,
                min_devices=len(tables),
            )
            config = config.model_copy(
                update={"evaluation": evaluation, "store": tmp_path / kind / "store"}
            )
            found.append(run(config, Watcher()))
    assert [each.status for each in found] == ["finished", "finished"]
    assert found[0].evaluation == found[1].evaluation
    assert found[0].evaluation.accuracy > 0.2


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    """An mlp over 64 columns, exported at one width."""
    folder = tmp_path_factory.mktemp("flat")
    architecture = Registry.zoo().get("mlp")
    settings = architecture.settings({"input_shape": (64,)})
    tiers = (infer_layout(architecture, settings).tier(1.0),)
    export_architecture(
        ExportRequest(architecture, settings, tiers, Recipe()),
        folder / "artifacts",
        ExportOptions(formats=("onnx",)),
    )
    return folder / "artifacts"


def write_table(path, samples, *, order=range(64), text=True, index=None, header=True, twice=False):
    """A table with a column for each pixel, as one program or another writes it."""
    names = [
        *([] if index is None else [index]),
        *(f"p{place}" for place in order),
        *["label"] * (1 + twice),
    ]
    lines = [",".join(names)] * header
    for number, (pixels, label) in enumerate(zip(*samples, strict=True)):
        values = [*([] if index is None else [number]), *pixels.ravel()[list(order)]]
        name = ORDERED[label] if text else label
        lines.append(",".join(map(str, [*values, *[name] * (1 + twice)])))
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.slow
def test_boards_with_tables_that_differ_train_alike_or_are_refused(ground, flat, digits, tmp_path):
    """Another order of columns, an index, more columns; what lacks one, or has a header that is
    none, is refused.
    """
    own, test = digits
    write_table(tmp_path / "test.csv", test)
    write_table(tmp_path / "plain.csv", own)
    write_table(tmp_path / "turned.csv", own, order=range(63, -1, -1))
    write_table(tmp_path / "index.csv", own, index="")
    write_table(tmp_path / "more.csv", own, index="row")
    write_table(tmp_path / "lacks.csv", own, order=range(63))
    write_table(tmp_path / "bare.csv", own, header=False)
    write_table(tmp_path / "twice.csv", own, twice=True)
    table = {"kind": "csv", "scale": 1 / 255}
    paths = {path.stem: path for path in tmp_path.glob("*.csv") if path.stem != "test"}
    tables = {name: {**table, "path": str(path)} for name, path in paths.items()}
    tables["bare"]["label_column"] = 64
    tables["ordered"] = {**tables["plain"], "labels": NAMES}
    write_arrays(tmp_path / "reference.npz", own)
    tables["reference"] = {
        "kind": "npz",
        "scale": 1 / 255,
        "shape": [64],
        "path": str(tmp_path / "reference.npz"),
    }
    with (
        embedded_broker(tmp_path) as broker,
        boards(tmp_path / "boards", broker.url, tables) as processes,
    ):
        config = ground.config(
            broker.url,
            rounds=1,
            wait_seconds=240.0,
            deadline_seconds=240.0,
            min_devices=len(tables) - 2,
        ).model_copy(
            update={
                "model": ModelConfig(artifacts=flat, arch="mlp"),
                "evaluation": EvaluationConfig(data={**table, "path": tmp_path / "test.csv"}),
            }
        )
        config = config.model_copy(
            update={"round": config.round.model_copy(update={"quorum": 0.8})}
        )
        finished = run(config, Watcher())
        codes = {name: processes[name].wait_exit() for name in ("bare", "twice")}
        logs = {name: processes[name].log() for name in codes}
    assert finished.status == "finished", finished.error
    losses, refused = trained(config, finished.run)
    assert losses.keys() == {"plain", "turned", "index", "more", "ordered", "reference"}
    assert len(set(losses.values())) == 1
    assert [*refused] == ["lacks"]
    assert (
        f"data-mismatch: {tmp_path}/lacks.csv has no column 'p63', which the fleet's model reads"
        in refused["lacks"]
    )
    assert codes == {"bare": 4, "twice": 4}
    assert "bare.csv contains a sample" in logs["bare"]
    assert "set header = false in [data]" in logs["bare"]
    assert "twice.csv has 2 columns with the name 'label'" in logs["twice"]


def test_labels_that_nobody_names_are_refused(ground, digits, tmp_path):
    """The server's test set has numbers: only the operator can say which folder is which."""
    own, _ = digits
    write_images(tmp_path / "images", own)
    write_arrays(tmp_path / "reference.npz", own)
    images = {"kind": "images", "channels": 1, "path": str(tmp_path / "images")}
    tables = {
        "unsaid": images,
        "said": {**images, "labels": ORDERED},
        "reference": {"kind": "npz", "scale": 1 / 255, "path": str(tmp_path / "reference.npz")},
    }
    with embedded_broker(tmp_path) as broker, boards(tmp_path / "boards", broker.url, tables):
        config = ground.config(
            broker.url, rounds=1, wait_seconds=240.0, deadline_seconds=240.0, min_devices=3
        )
        config = config.model_copy(
            update={"round": config.round.model_copy(update={"quorum": 0.5})}
        )
        first = run(config, Watcher())
        terms = {"contract": ContractTerms(labels=ORDERED), "store": tmp_path / "other"}
        agreed = config.model_copy(update=terms)
        second = run(agreed, Watcher())
    losses, refused = trained(config, first.run)
    assert [*refused] == ["unsaid"]
    assert "nothing sets their order" in refused["unsaid"]
    assert losses["said"] == losses["reference"]
    losses, refused = trained(agreed, second.run)
    assert not refused
    assert len({losses[name] for name in tables}) == 1
