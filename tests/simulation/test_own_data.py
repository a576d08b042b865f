"""A user's own files in a simulation: what its devices train on is what boards with these files
would.
"""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from pydantic import TypeAdapter, ValidationError

from broker_server.store import Store
from device_runtime.training.schedule import StepSeed, training_batch
from fleet_protocol.data import DataConfig, load_data
from fleet_protocol.data.contract import complete_contract, reconcile
from fleet_protocol.errors import ConfigError, DataError, MismatchError
from models import Registry
from models.pretrained import MINILM_VOCAB
from simulation.data.held import SampleSplit, VirtualData
from simulation.data.own import own_data
from simulation.exporting import ChosenArchitecture
from simulation.preparing import prepare
from simulation.runner import simulate
from tests.simulation.simulations import settings

CONFIG = TypeAdapter(DataConfig)
NOISE = """
def double(x):
    return x * 2

def noise(x, generator):
    return x + generator.normal(size=x.shape)
"""


def config(folder, **table):
    return CONFIG.validate_python(table).resolved(folder)


def own(folder, train, test, **tables):
    """A simulation of two devices with these files."""
    data = {"name": "", "train": train, "test": test, "train_limit": None, "test_limit": None}
    wanted = {
        "model": {"arch": "mlp", "settings": {"hidden": (4,)}, "widths": (1.0,)},
        "partition": {"kind": "subject"},
        "devices": {"count": 2},
        "round": {"rounds": 1, "fraction": 1.0},
        "tiers": {"assign": "capacity", "levels": None},
        "engine": {"workers": 1},
    }
    return settings(folder / "out", folder / "cache", data=data, **{**wanted, **tables}).resolved(
        folder
    )


@pytest.fixture
def boards(tmp_path):
    """A file of numbers to learn for each of two boards, a test set, and the user's functions."""
    draw = np.random.default_rng(0)
    for name, count in (("boards/a", 12), ("boards/b", 20), ("test", 16)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        x = draw.integers(0, 9, (count, 3))
        lines = [",".join(map(str, [*row, row.sum() / 4])) for row in x]
        (tmp_path / f"{name}.csv").write_text("\n".join(["a,b,c,label", *lines]))
    (tmp_path / "own.py").write_text(NOISE)
    return tmp_path


REGRESSION = {
    "arch": "mlp",
    "settings": {"hidden": (4,)},
    "widths": (1.0,),
    "recipe": {"loss": "mean-squared-error"},
}
TABLE = {
    "kind": "csv",
    "path": "boards/*.csv",
    "shape": [1, 1, 3],
    "mean": 4.5,
    "std": 2.5,
    "transforms": ["own.py:double"],
    "augment": ["flip", "own.py:noise"],
}


def test_devices_have_the_batches_of_boards(boards):
    """Files, transforms and random changes give each virtual device the bits that a board with its
    file trains on.
    """
    simulation = own(boards, TABLE, {**TABLE, "path": "test.csv"}, model=REGRESSION)
    prepared = prepare(simulation)
    devices = VirtualData(prepared.data, prepared.split, simulation.data.changes)
    for index, name in enumerate("ab"):
        board = load_data(config(boards, **TABLE | {"path": f"boards/{name}.csv"}))
        mine = devices.samples_of(index)
        step_seed = StepSeed(3, 1, 0, 2)
        chosen = np.array([5, 0, 11])
        found, wanted = (
            training_batch(data, chosen, "float32", step_seed) for data in (mine, board)
        )
        np.testing.assert_array_equal(found[0], wanted[0])
        np.testing.assert_array_equal(found[1], wanted[1])
        plain = board.batch(chosen, "float32")[0]
        np.testing.assert_allclose(plain, (board.x[chosen] - 4.5) / 2.5, rtol=1e-6)
        assert abs(found[0] - plain).min() > 0  # noise everywhere
        np.testing.assert_array_equal(
            training_batch(mine, chosen, "float32", step_seed)[0], found[0]
        )
        other = training_batch(mine, chosen, "float32", StepSeed(3, 1, 0, 3))[0]
        assert not np.array_equal(other, found[0])
    raw = np.loadtxt(boards / "boards/a.csv", delimiter=",", skiprows=1)
    doubled = load_data(config(boards, **TABLE | {"path": "boards/a.csv"})).x[:, 0, 0]
    np.testing.assert_array_equal(doubled, raw[:, :3] * 2)
    assert devices.samples_of(0).y.dtype == np.float32


def test_columns_in_another_order_are_matched_by_name(boards):
    """As in a fleet: the test set says which columns and in what order; further ones of a board are
    left out.
    """
    lines = (boards / "boards/b.csv").read_text().splitlines()
    rows = [line.split(",") for line in lines]
    moved = [
        ",".join([str(number), row[1], row[0], row[2], row[3]])
        for number, row in enumerate(rows[1:])
    ]
    (boards / "boards/b.csv").write_text("\n".join([",b,a,c,label", *moved]))
    plain = {"kind": "csv", "path": "boards/*.csv"}
    x = np.load(
        prepare(own(boards, plain, {**plain, "path": "test.csv"}, model=REGRESSION)).data
        / "train_x.npy"
    )
    assert x[12].tolist() == [float(rows[1][place]) for place in range(3)]


def test_numbers_are_learnt_and_a_changed_file_is_refused(boards):
    """A simulation of a regression on CSV files runs; with other content in them it is not gone on
    with.
    """
    plain = {"kind": "csv", "path": "boards/*.csv"}
    ending = {
        "round": {"rounds": 9, "fraction": 1.0},
        "evaluation": {"metric": "loss", "patience": 1, "min_delta": 1e6},
    }
    wanted = own(boards, plain, plain | {"path": "test.csv"}, model=REGRESSION, **ending)
    result = simulate(wanted)
    assert result.finished.status == "finished", result.finished.error
    dealt = wanted.partition.model_copy(update={"kind": "iid"})
    local = {"evaluation": wanted.evaluation.model_copy(update={"local": True}), "partition": dealt}
    with pytest.raises(
        ConfigError,
        match=r"counts correct predictions, which the loss mean-squared-error does not have",
    ):
        simulate(wanted.model_copy(update={**local, "out": boards / "local"}))
    assert (result.finished.rounds, result.rounds[-1].round) == (
        2,
        2,
    )  # patience ends a simulation as a run of a fleet
    assert "loss did not improve" in result.finished.early
    assert result.rounds[-1].loss is not None
    rows = (boards / "boards/a.csv").read_text().replace(",label", ",label\n1,1,1,1.5")
    (boards / "boards/a.csv").write_text(rows)
    with pytest.raises(ConfigError, match="changed since"):
        prepare(wanted)


def test_folders_of_images_share_their_labels(tmp_path):
    """A device that lacks a folder numbers its labels as the others do; each folder of folders is a
    group.
    """
    for place in ("boards/a/cat", "boards/a/dog", "boards/b/dog", "test/cat", "test/dog"):
        (tmp_path / place).mkdir(parents=True)
        Image.new("L", (3, 2), 51).save(tmp_path / place / "1.png")
    table = {"kind": "images", "channels": 1}
    data = own_data(
        config(tmp_path, path="boards/*", **table), config(tmp_path, path="test", **table)
    )
    assert data.train_y.tolist() == [0, 1, 1]
    assert data.train_group.tolist() == [0, 0, 1]
    assert data.test_y.tolist() == [0, 1]
    assert data.classes == 2
    np.testing.assert_allclose(data.train_x, np.full((3, 1, 2, 3), 0.2), rtol=1e-6)


def test_a_simulation_has_the_labels_of_a_fleet(tmp_path):
    """What a system puts beside the folders, and empty ones, shift no label, on either side."""
    for place in ("a/bee", "a/cat", "test/bee", "test/cat", "test/dog"):
        (tmp_path / place).mkdir(parents=True)
        Image.new("L", (3, 2), 51).save(tmp_path / place / "1.png")
    for place in ("a/.ipynb_checkpoints", "a/ant", "test/@eaDir"):
        (tmp_path / place).mkdir()
    table = {"kind": "images", "channels": 1}
    train = config(tmp_path, path="a", **table)
    test = config(tmp_path, path="test", **table)
    data = own_data(train, test)
    contract = complete_contract(load_data(test))
    assert (data.train_y.tolist(), data.test_y.tolist(), data.classes) == ([0, 1], [0, 1, 2], 3)
    assert reconcile(load_data(train), contract).y.tolist() == data.train_y.tolist()


def write_table(path, labels, values="12"):
    """A table of one column."""
    path.write_text(
        "\n".join(
            ["a,label", *(f"{value},{label}" for value, label in zip(values, labels, strict=True))]
        )
    )


def test_a_label_that_the_test_set_lacks_is_refused(tmp_path):
    """A folder that was renamed on one device had made a class of its own; a fleet refuses it as
    well.
    """
    for place in ("boards/a/six", "boards/a/seven", "boards/b/Seven", "test/six", "test/seven"):
        (tmp_path / place).mkdir(parents=True)
        Image.new("L", (3, 2), 51).save(tmp_path / place / "1.png")
    table = {"kind": "images", "channels": 1}
    train = config(tmp_path, path="boards/*", **table)
    test = config(tmp_path, path="test", **table)
    with pytest.raises(
        MismatchError, match=r"/boards/b has the label 'Seven', which is not among .*\(seven, six\)"
    ) as refusal:
        own_data(train, test)
    assert "in [data.test] of sim.toml: labels = [" in str(refusal.value)
    said = config(tmp_path, path="test", labels=["six", "seven", "Seven"], **table)
    data = own_data(train, said)
    assert (data.train_y.tolist(), data.classes) == ([1, 0, 2], 3)


def test_names_and_numbers_do_not_mix_unless_labels_names_them(tmp_path):
    """On either side: sorted names need not have the order of the other's numbers."""
    write_table(tmp_path / "names.csv", ["benign", "malignant"])
    write_table(tmp_path / "numbers.csv", [1, 0])
    names, numbers = ({"kind": "csv", "path": f"{name}.csv"} for name in ("names", "numbers"))
    with pytest.raises(
        MismatchError,
        match=r"/names\.csv has the labels benign, malignant, but .*numbers\.csv has numbers without names",
    ):
        own_data(config(tmp_path, **names), config(tmp_path, **numbers))
    with pytest.raises(
        MismatchError, match=r"numbers as labels.* in \[data\.train\] of sim\.toml, labels = \["
    ):
        own_data(config(tmp_path, **numbers), config(tmp_path, **names))
    numbers["labels"] = ["malignant", "benign"]
    for sides in ((names, numbers), (numbers, names)):
        data = own_data(*(config(tmp_path, **side) for side in sides))
        assert (data.train_y.tolist(), data.test_y.tolist()) == ([1, 0], [1, 0])


def test_several_files_share_one_order(tmp_path):
    """That which one says, else the names of the test set sorted; two orders are a mistake."""
    write_table(tmp_path / "train.csv", ["cat", "bee"])
    write_table(tmp_path / "test.csv", ["cat", "ant", "bee"], "123")

    def labels(train, test):
        tables = (
            {"kind": "csv", "path": f"{name}.csv", **keys}
            for name, keys in (("train", train), ("test", test))
        )
        return own_data(*(config(tmp_path, **table) for table in tables)).train_y.tolist()

    assert labels({}, {}) == [2, 1]
    said = {"labels": ["cat", "bee", "ant"]}
    assert labels(said, {}) == labels({}, said) == [0, 1]
    with pytest.raises(MismatchError, match="set the same `labels`"):
        labels(said, {"labels": ["ant", "bee", "cat"]})


def test_what_stands_for_missing_values_is_one_number(tmp_path):
    """A rule of either table holds; messages name the table in which it is to be changed."""
    for name in ("train", "test"):
        (tmp_path / f"{name}.csv").write_text("a,b,label\n1,,0\n2,3,1\n")
    train, test = (
        {"kind": "csv", "path": f"{name}.csv", "missing": -1} for name in ("train", "test")
    )
    assert own_data(config(tmp_path, **train), config(tmp_path, **test)).train_x.tolist() == [
        [1, -1],
        [2, 3],
    ]
    with pytest.raises(MismatchError, match=r"set missing = -1 in \[data\.train\] of sim\.toml"):
        own_data(config(tmp_path, **{**train, "missing": 0}), config(tmp_path, **test))
    del train["missing"]
    with pytest.raises(
        DataError, match=r"set `missing` in \[data\.train\] of sim\.toml to the number"
    ):
        own_data(config(tmp_path, **train), config(tmp_path, **test))
    del test["missing"]
    (tmp_path / "train.csv").write_text("a,b,label\n1,1,0\n2,3,1\n")
    with pytest.raises(
        DataError, match=r"set `missing` in \[data\.test\] of sim\.toml to the number"
    ):
        own_data(config(tmp_path, **train), config(tmp_path, **test))


@pytest.mark.parametrize("folder", ["data [v2]", "[ab]", "what?", "a*b"])
def test_stars_match_below_any_folder(tmp_path, folder):
    """Only stars stand for something else."""
    for name, label in (("b1", 0), ("b2", 1), ("c1", 2)):
        path = tmp_path / folder / f"{name}.npz"
        path.parent.mkdir(exist_ok=True)
        np.savez(path, x=np.full((2, 1), label), y=np.full(2, label))
    train = config(tmp_path, kind="npz", path=f"{folder}/b*.npz")
    data = own_data(train, config(tmp_path, kind="npz", path=f"{folder}/c1.npz"))
    assert data.train_y.tolist() == [0, 0, 1, 1]


def test_any_split_of_one_file(tmp_path):
    """One file for all devices is dealt as the sets by name are; integers stay as they are, for
    tokens.
    """
    np.savez(tmp_path / "d.npz", x=np.arange(80).reshape(40, 2), y=np.arange(40) % 4)
    table = {"kind": "npz", "path": "d.npz"}
    kinds = {"kind": "shards", "per_device": 2}
    prepared = prepare(own(tmp_path, table, table, partition=kinds))
    parts = SampleSplit.load(prepared.split)
    assert [len(np.unique(np.arange(40)[part] % 4)) for part in parts.train] == [2, 2]
    assert not any(
        map(len, parts.test)
    )  # of which none would be judged, and a small set has too few for shards
    data = own_data(*2 * [config(tmp_path, **table)])
    assert (data.train_x.dtype.kind, data.tokens, data.classes) == ("i", 80, 4)


@pytest.fixture
def ignoring(tmp_path):
    """A simulation whose loss ignores the label 255, of samples that have it, judged on the
    devices' own ones.
    """
    draw = np.random.default_rng(0)
    y = draw.choice([0, 1, 2, 255], 40)
    np.savez(tmp_path / "d.npz", x=draw.normal(size=(40, 3)).astype(np.float32), y=y)
    table = {"kind": "npz", "path": "d.npz"}
    model = {**REGRESSION, "recipe": {"loss": {"name": "cross-entropy", "ignore_label": 255}}}
    return own(
        tmp_path,
        table,
        table,
        model=model,
        partition={"kind": "dirichlet"},
        evaluation={"local": True},
    )


def test_a_label_that_the_loss_ignores_is_no_class(ignoring):
    """The 255 of a map of labels had made a model of 256 classes; what it marks is dealt as all
    else is.
    """
    prepared = prepare(ignoring)
    assert prepared.settings["classes"] == 3
    assert sorted(np.concatenate(SampleSplit.load(prepared.split).train)) == list(range(40))


@pytest.mark.slow
def test_devices_are_judged_where_the_loss_ignores_a_label(ignoring, tmp_path):
    """The ignored label is none that a device holds: its mask has a place for each class alone."""
    result = simulate(ignoring)
    assert result.finished.status == "finished", result.finished.error
    assert 0 <= result.rounds[-1].local_accuracy <= 1
    with closing(Store(tmp_path / "out" / "store", read_only=True)) as store:
        version = store.version(result.finished.run)
    labels = np.load(tmp_path / "d.npz")["y"]
    assert version.evaluation.examples == np.count_nonzero(labels != 255)


@pytest.mark.slow
def test_a_device_of_one_sample_ends_no_simulation(tmp_path):
    """It has no variance to tell, and was asked for one after the round; a fleet goes on without
    it.
    """
    draw = np.random.default_rng(0)
    for name, count in (("a", 8), ("b", 8), ("c", 1)):
        x = draw.normal(size=(count, 1, 8, 8)).astype(np.float32)
        np.savez(tmp_path / f"part-{name}.npz", x=x, y=np.arange(count) % 2)
    train = {"kind": "npz", "path": "part-*.npz"}
    model = {"arch": "conv", "settings": {"channels": (4, 4)}, "widths": (1.0,)}
    table = {"kind": "npz", "path": "part-a.npz"}
    result = simulate(own(tmp_path, train, table, model=model, devices={"count": 3}))
    assert result.finished.status == "finished", result.finished.error


def test_text_may_have_a_part_of_a_vocabulary(tmp_path):
    """A pre-trained model has all of its own, and so no text that lacks the last of its words could
    be simulated.
    """
    np.savez(tmp_path / "d.npz", x=np.arange(80).reshape(40, 2), y=np.arange(40) % 4)
    data = own_data(*2 * [config(tmp_path, kind="npz", path="d.npz")])
    minilm = Registry.zoo().get("minilm_encoder")
    untrained = {"pretrained": False}  # pre-trained, it has no other vocabulary than its own
    sizes = [
        ChosenArchitecture.from_data(minilm, given, replace(data, **changes)).settings["vocab"]
        for given, changes in (
            ({}, {}),
            (untrained, {"tokens": 40_000}),
            (untrained, {"own": False}),
            ({**untrained, "vocab": 99}, {}),
        )
    ]
    assert sizes == [MINILM_VOCAB, 40_000, 80, 99]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"path": "boards/*.txt"}, "match at least one file"),
        ({"columns": ["a"]}, "has no column 'b', which the fleet's model reads"),
        ({"transforms": ["own.py:nothing"]}, "has no function 'nothing'"),
        ({"transforms": ["own.py:noise"]}, "missing 1 required positional argument"),
    ],
)
def test_files_that_do_not_go_together_are_named(boards, changes, words):
    """No match, other columns, a function that is not there or takes something else."""
    train = config(boards, **{**TABLE, "shape": None, "augment": [], **changes})
    with pytest.raises(DataError, match=words):
        own_data(
            train, config(boards, **{**TABLE, "shape": None, "augment": [], "path": "test.csv"})
        )


def test_a_set_has_a_name_or_files(tmp_path):
    """Neither both nor none, and random changes belong to the samples."""
    table = {"kind": "npz", "path": "d.npz"}
    for data in (
        {"name": ""},
        {"name": "digits", "train": table, "test": table},
        {"name": "", "train": table},
    ):
        with pytest.raises(ValidationError, match="name a data set, or describe your own files"):
            settings(tmp_path, tmp_path, data=data)
    with pytest.raises(
        ValidationError, match=r'evaluation.holdout requires engine.backend = "onnx"'
    ):
        settings(tmp_path, tmp_path, engine={"backend": "torch"}, evaluation={"holdout": 0.2})
    with pytest.raises(ValidationError, match="use the keys of"):
        settings(
            tmp_path,
            tmp_path,
            data={"name": "", "train": table, "test": table, "augment": "crop-flip"},
        )


def test_what_looks_wrong_in_own_files_is_said(tmp_path, caplog):
    """An index, a mark for missing values, and labels from 1: as a board's doctor says it."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(60, 4)).astype(np.float32)
    np.savez(tmp_path / "plain.npz", x=x, y=np.arange(60) % 3)
    plain = config(tmp_path, kind="npz", path="plain.npz")
    own_data(plain, plain)
    assert caplog.messages == []
    x[:, 0] = np.arange(60)
    x[::6, 2] = -999
    np.savez(tmp_path / "odd.npz", x=x, y=np.arange(60) % 3 + 1)
    assert own_data(config(tmp_path, kind="npz", path="odd.npz"), plain).classes == 4
    index, mark, labels = caplog.messages
    assert index.startswith("[data.train] of sim.toml may be faulty, ")
    assert "column 0 numbers the samples" in index
    assert "column 2 is -999 in 10 of 60" in mark
    assert "no sample has the label 0" in labels
