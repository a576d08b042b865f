"""The server's test set and the judgement of a global version, against plain numpy."""

import gzip
import os
import struct
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from broker_server.rounds.artifacts import load_artifacts
from broker_server.rounds.evaluation import Evaluator, load_test_set
from broker_server.rounds.norm_statistics import batch_statistics
from broker_server.settings.evaluation import EvaluationConfig
from fleet_protocol.data import CsvData, IdxData, NpzData, make_dataset
from fleet_protocol.data.sources import Source
from fleet_protocol.errors import DataChangedError, DataError
from tests.broker_server.artifacts import ARCH, CLASSES, INPUTS, tiny_layout, tiny_weights


@pytest.fixture
def full(artifacts):
    return load_artifacts(artifacts, ARCH, chunk_bytes=1024).full


def reference(weights, mean, variance, x, y):
    """The tiny net in numpy: loss and accuracy."""
    a = x @ weights["hidden.weight"].T + weights["hidden.bias"]
    h = np.maximum((a - mean) / np.sqrt(variance + 1e-5), 0)
    z = h @ weights["head.weight"].T + weights["head.bias"]
    log = (
        z
        - np.log(np.exp(z - z.max(1, keepdims=True)).sum(1, keepdims=True))
        - z.max(1, keepdims=True)
    )
    return -log[np.arange(len(y)), y].mean(), (z.argmax(1) == y).mean(), a


def test_a_version_is_judged_as_numpy_judges_it(full, test_set):
    """Loss and accuracy over uneven batches equal those of the whole set at once."""
    data = load_test_set(NpzData(path=test_set), full.manifest)
    weights = tiny_weights(tiny_layout(), 3)
    mean = np.full(8, 0.25, np.float32)
    variance = np.full(8, 2.0, np.float32)
    found = Evaluator(full, data, batch_size=7, threads=1).evaluate(
        weights, {"stat.norm.mean": mean, "stat.norm.var": variance}
    )
    loss, accuracy, _ = reference(weights, mean, variance, data.x, data.y)
    assert found.examples == 40
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert found.accuracy == accuracy


@pytest.mark.parametrize("size", [1e25, 1e35])
def test_a_loss_that_nobody_can_be_told_is_an_error(full, test_set, size):
    """Of a run that diverges: finite at first, and beyond what a message carries, which had ended
    the server.
    """
    data = load_test_set(NpzData(path=test_set), full.manifest)
    weights = {
        name: value * np.float32(size) for name, value in tiny_weights(tiny_layout(), 3).items()
    }
    channel = np.full(8, 1e-5, np.float32)
    with pytest.raises(
        DataError, match=r"the loss or a metric of .* w1\.00-d1 on 40 test samples is not finite"
    ):
        Evaluator(full, data, batch_size=7, threads=1).evaluate(
            weights, {"stat.norm.mean": channel, "stat.norm.var": channel}
        )


def test_samples_on_which_the_graph_does_not_run_are_an_error_of_the_data(full, test_set):
    """As a token beyond the vocabulary, which only the graph finds: the runtime's own error had
    ended the server.
    """
    data = load_test_set(NpzData(path=test_set), full.manifest)
    judge = Evaluator(full, replace(data, x=data.x[:, 1:]), batch_size=7, threads=1)
    weights = tiny_weights(tiny_layout(), 3)
    channel = np.ones(8, np.float32)
    given = weights, {"stat.norm.mean": channel, "stat.norm.var": channel}
    for judging in (
        lambda: judge.evaluate(*given),
        lambda: judge.losses(*given, 15),
        lambda: judge.hits(*given, np.arange(9), np.ones(CLASSES, np.float32)),
    ):
        with pytest.raises(
            DataError, match=r"the graph does not run on samples of .*test\.npz: .*INVALID_ARGUMENT"
        ):
            judging()


def test_losses_are_those_of_runs_of_samples(full, test_set):
    """Each run of consecutive samples by itself, whatever the batch size; the last may be short."""
    data = load_test_set(NpzData(path=test_set), full.manifest)
    weights = tiny_weights(tiny_layout(), 3)
    mean = np.full(8, 0.25, np.float32)
    variance = np.full(8, 2.0, np.float32)
    found = Evaluator(full, data, batch_size=7, threads=1).losses(
        weights, {"stat.norm.mean": mean, "stat.norm.var": variance}, 15
    )
    runs = [slice(0, 15), slice(15, 30), slice(30, 40)]
    expected = [reference(weights, mean, variance, data.x[run], data.y[run])[0] for run in runs]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_server_batches_give_the_mean_of_batch_statistics(full, test_set):
    """Specification 1.6 c: every batch counts alike, variances unbiased; a last batch of one is
    left out.
    """
    data = load_test_set(NpzData(path=test_set, limit=31), full.manifest)
    weights = tiny_weights(tiny_layout(), 3)
    found = batch_statistics(full, weights, data, batch_size=10, threads=1)
    _, _, a = reference(weights, 0, 1, data.x, data.y)
    batches = [a[first : first + 10] for first in range(0, 30, 10)]
    np.testing.assert_allclose(
        found["stat.norm.mean"], np.mean([b.mean(0) for b in batches], 0), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        found["stat.norm.var"], np.mean([b.var(0, ddof=1) for b in batches], 0), rtol=1e-4
    )
    with pytest.raises(DataError, match="no batch of two"):
        batch_statistics(full, weights, data, batch_size=1, threads=1)


def test_useless_statistics_are_an_error(full, test_set):
    """A loss that is not finite is reported, not returned."""
    data = load_test_set(NpzData(path=test_set), full.manifest)
    nan = {
        "stat.norm.mean": np.full(8, np.nan, np.float32),
        "stat.norm.var": np.ones(8, np.float32),
    }
    with pytest.raises(DataError, match="not finite"):
        Evaluator(full, data, batch_size=7, threads=1).evaluate(tiny_weights(tiny_layout()), nan)


def judged(full, folder, monkeypatch, most):
    """An evaluator on an .npy file, of which so many bytes at most are read into memory, and a
    function that judges.
    """
    monkeypatch.setattr("fleet_protocol.data.file_rows.MEMORY_BYTES", most)
    monkeypatch.setattr("fleet_protocol.data.file_rows.MEMORY_SHARE", 0)
    draw = np.random.default_rng(5)
    np.save(folder / "x.npy", draw.normal(size=(40, INPUTS)))
    np.save(folder / "y.npy", draw.integers(0, CLASSES, 40))
    data = load_test_set(NpzData(path=folder / "x.npy", y_path=folder / "y.npy"), full.manifest)
    evaluator = Evaluator(full, data, batch_size=7, threads=1)
    statistics = {
        "stat.norm.mean": np.zeros(8, np.float32),
        "stat.norm.var": np.ones(8, np.float32),
    }
    return evaluator, lambda: evaluator.evaluate(tiny_weights(tiny_layout(), 3), statistics)


@pytest.mark.parametrize("most", [0, 2**20], ids=["in-the-file", "in-memory"])
def test_a_test_set_that_is_replaced_leaves_judgements_comparable(
    full, tmp_path, monkeypatch, caplog, most
):
    """All versions of a run are judged by the same samples; that there are others now is said
    once.
    """
    _, judge = judged(full, tmp_path, monkeypatch, most)
    first = judge()
    assert not caplog.text
    np.save(tmp_path / "new.npy", np.zeros((3, INPUTS)))
    (tmp_path / "new.npy").rename(tmp_path / "x.npy")
    assert [judge(), judge()] == [first, first]
    assert caplog.text.count(f"{tmp_path / 'x.npy'} changed after this run had read it") == 1


def test_a_test_set_in_memory_is_that_of_the_beginning(full, tmp_path, monkeypatch, caplog):
    """Whatever is written into its files."""
    _, judge = judged(full, tmp_path, monkeypatch, 2**20)
    first = judge()
    (tmp_path / "x.npy").write_bytes(b"")
    assert judge() == first
    assert "x.npy changed after" in caplog.text


@pytest.mark.parametrize("change", ["rewritten", "fewer", "set back"])
def test_a_test_set_that_is_written_into_is_named(full, tmp_path, monkeypatch, change):
    """Where its samples are still in the file: no judgement by half of them, and no end of the
    server.
    """
    evaluator, judge = judged(full, tmp_path, monkeypatch, 0)
    before = (tmp_path / "x.npy").stat()
    np.save(
        tmp_path / "x.npy",
        np.random.default_rng(6).normal(size=(20 if change == "fewer" else 40, INPUTS)),
    )
    if change == "set back":
        os.utime(tmp_path / "x.npy", ns=(before.st_atime_ns, before.st_mtime_ns))
    weights = tiny_weights(tiny_layout(), 3)
    channel = np.ones(8, np.float32)
    given = weights, {"stat.norm.mean": channel, "stat.norm.var": channel}
    for judging in (
        judge,
        lambda: evaluator.losses(*given, 15),
        lambda: evaluator.hits(*given, np.arange(9), np.ones(CLASSES, np.float32)),
        lambda: batch_statistics(full, weights, evaluator.data, batch_size=10, threads=1),
    ):
        with pytest.raises(
            DataChangedError, match=r"x\.npy (was changed in place|is shorter than when it was)"
        ):
            judging()


def write_idx(path, array, *, packed=False):
    head = struct.pack(">HBB", 0, 0x08, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    data = head + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(data) if packed else data)


def test_idx_files_are_scaled_and_normalised(tmp_path, full):
    """Plain or gzip; bytes are divided by 255, then mean and deviation are applied."""
    x = np.arange(3 * INPUTS).reshape(3, INPUTS)
    write_idx(tmp_path / "x", x)
    write_idx(tmp_path / "y.gz", np.array([0, 3, 1]), packed=True)
    data = load_test_set(
        IdxData(path=tmp_path / "x", labels=tmp_path / "y.gz", mean=0.1, std=0.5), full.manifest
    )
    (first, labels), (second, _) = data.batches(2, "float32")
    np.testing.assert_allclose(np.concatenate([first, second]), (x / 255 - 0.1) / 0.5, rtol=1e-6)
    assert labels.tolist() == [0, 3]


def test_every_reader_of_a_board_reads_a_test_set(tmp_path, full):
    """A table, a folder of images and the user's own function, by the same keys as in
    `device.toml`.
    """
    x = np.arange(2.0 * INPUTS).reshape(2, INPUTS)
    y = [3, 1]
    lines = [",".join(map(str, [*row, label])) for row, label in zip(x, y, strict=True)]
    (tmp_path / "t.csv").write_text("\n".join([",".join([*"abcdef", "label"]), *lines]))
    (tmp_path / "own.py").write_text(
        "import numpy as np\ndef load(y): return np.arange(12.).reshape(2, 6), y\n"
    )
    for label, row in zip(y, x, strict=True):
        (tmp_path / "images" / str(label)).mkdir(parents=True)
        Image.fromarray(row.astype(np.uint8).reshape(2, 3)).save(
            tmp_path / "images" / str(label) / "a.png"
        )
    tables = [
        {"kind": "csv", "path": "t.csv"},
        {"kind": "python", "entry_point": "own.py:load", "options": {"y": y}},
        {
            "kind": "images",
            "path": "images",
            "channels": 1,
            "scale": 1,
            "labels": ["0", "1", "2", "3"],
        },
    ]
    for table in tables:
        config = EvaluationConfig.model_validate({"data": table}).data.resolved(tmp_path)
        data = load_test_set(config, full.manifest)
        ((found, labels),) = data.batches(9, "float32")
        order = np.argsort(-labels)  # a folder of images has them by label
        np.testing.assert_array_equal(found[order], x)
        assert labels[order].tolist() == y


def npz(path, **arrays):
    np.savez(path, **arrays)
    return NpzData(path=path)


GOOD = {"x": np.zeros((2, INPUTS), np.float32), "y": np.array([0, 1])}


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": GOOD["x"]}, "no array 'y' .it has x"),
        ({**GOOD, "y": np.array([0])}, "2 samples but 1 labels"),
        ({**GOOD, "y": np.array([0, CLASSES])}, "0 to 3"),
        ({**GOOD, "y": np.array([0.5, 1])}, "not whole numbers"),
        ({**GOOD, "x": np.zeros((2, 5))}, r"shape \[5\], which cannot become `shape` \[6\]"),
        ({"x": np.zeros((0, INPUTS)), "y": np.zeros(0, int)}, "is empty"),
    ],
)
def test_a_test_set_that_does_not_fit_says_why(tmp_path, full, arrays, words):
    """Missing arrays, missing labels, labels the model lacks, another shape, nothing at all."""
    with pytest.raises(DataError, match=words):
        load_test_set(npz(tmp_path / "t.npz", **arrays), full.manifest)


def test_a_label_per_token_may_be_negative(tmp_path, full):
    """As many labels as the manifest says; negative ones do not count, but not all may be
    negative.
    """
    tagged = full.manifest.model_copy(update={"label_shape": (3,)})
    y = np.array([[0, -1, 3], [-1, -1, 2]])
    data = load_test_set(npz(tmp_path / "t.npz", **{**GOOD, "y": y}), tagged)
    ((_, labels),) = data.batches(9, "float32")
    np.testing.assert_array_equal(labels, y)
    for wrong, words in (
        (y[:, :2], r"the model takes \[3\]; give one label per token"),
        (y + 1, "0 to 3"),
        (np.full_like(y, -1), "every label is negative"),
    ):
        with pytest.raises(DataError, match=words):
            load_test_set(npz(tmp_path / "t.npz", **{**GOOD, "y": wrong}), tagged)


def test_a_missing_or_damaged_file_is_named(tmp_path, full):
    """For npz and IDX alike."""
    with pytest.raises(DataError, match=r"nothing\.npz"):
        load_test_set(NpzData(path=tmp_path / "nothing.npz"), full.manifest)
    write_idx(tmp_path / "x", np.zeros((2, INPUTS)))
    write_idx(tmp_path / "y", np.zeros(2))
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes()[:-1])
    with pytest.raises(DataError, match="truncated"):
        load_test_set(IdxData(path=tmp_path / "x", labels=tmp_path / "y"), full.manifest)
    (tmp_path / "x").write_bytes(b"\x00\x00\x77\x01abcd")
    with pytest.raises(DataError, match="not an IDX file"):
        load_test_set(IdxData(path=tmp_path / "x", labels=tmp_path / "y"), full.manifest)


class Rows(Source):
    """A table of another kind than CSV."""

    has_columns: ClassVar[bool] = True


@pytest.mark.parametrize("kind", [Rows, Source])
def test_only_a_table_is_read_without_the_shape_of_the_model(full, monkeypatch, kind):
    """Of any kind: its columns are counted after the contract has chosen among them."""
    width = full.manifest.input_shape
    read = []

    def load(source):
        read.append(source.shape)
        return make_dataset("rows", np.zeros((3, *width), np.float32), np.zeros(3, np.int64))

    monkeypatch.setattr("broker_server.rounds.evaluation.load_data", load)
    load_test_set(kind(), full.manifest)
    assert read == [None if kind is Rows else width]


def test_a_table_keeps_its_own_number_for_missing_values(tmp_path):
    """Other sources have none to keep or to get."""
    table = CsvData(path=tmp_path / "a.csv")
    assert table.with_missing(2.0).missing_value == 2.0
    assert table.with_missing(3.0).with_missing(2.0).missing_value == 3.0
    assert NpzData(path=tmp_path / "a.npz").with_missing(2.0).missing_value is None
