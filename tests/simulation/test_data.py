"""Data sets and partitions: what a device gets is disjoint, complete and reproducible."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_protocol.data.readers import read_idx_file
from fleet_protocol.errors import ConfigError, DataError
from simulation.data.datasets import load_dataset
from simulation.data.partition import dirichlet, iid
from simulation.data_tables import DataTable
from simulation.preparing import _limited

SHARED = Path(__file__).parents[3] / "shared" / "data"
FOLDER = Path(os.environ.get("SHOAL_DATA", SHARED))


def test_digits_need_no_files():
    """The shipped set: 8x8 images in [0, 1], ten classes, test apart from training."""
    data = load_dataset("digits")
    assert data.input_shape == (1, 8, 8)
    assert (len(data.train_y), len(data.test_y), data.classes) == (1438, 359, 10)
    assert (data.train_x.min(), data.train_x.max()) == (0, 1)
    assert set(data.train_y) == set(data.test_y) == set(range(10))


@pytest.mark.skipif(not (FOLDER / "mnist").is_dir(), reason="MNIST is not here; set SHOAL_DATA")
def test_mnist_is_read_and_normalised():
    """The four IDX files give 60,000 and 10,000 images with mean 0 and deviation 1."""
    data = load_dataset("mnist", FOLDER)
    assert data.train_x.shape == (60_000, 1, 28, 28)
    assert len(data.test_y) == 10_000
    assert abs(float(data.train_x.mean())) < 1e-2
    assert abs(float(data.train_x.std()) - 1) < 1e-2


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [("mnsit", ConfigError, "digits, mnist"), ("mnist", DataError, "does not exist")],
)
def test_missing_sets_are_named(tmp_path, name, error, says):
    """An unknown name lists the known ones; a missing file is named."""
    with pytest.raises(error, match=says):
        load_dataset(name, tmp_path)


def test_mnist_without_a_folder_says_what_to_set(monkeypatch):
    """Without SHOAL_DATA the error says what it must hold."""
    monkeypatch.delenv("SHOAL_DATA", raising=False)
    with pytest.raises(DataError, match="set SHOAL_DATA"):
        load_dataset("mnist")


@pytest.mark.parametrize("body", [b"", b"\0\0\x08", b"PNG!", b"\0\0\x08\x01\0\0\0\x05abc"])
def test_damaged_idx_files_are_refused(tmp_path, body):
    """Truncated and foreign files are data errors."""
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(body))
    with pytest.raises(DataError):
        read_idx_file(path)


@given(st.integers(1, 200), st.integers(1, 10), st.integers(0, 5))
def test_iid_parts_are_equal_and_disjoint(samples, devices, seed):
    """Every device gets floor(n / devices) samples, none twice."""
    if samples < devices:
        with pytest.raises(ConfigError):
            iid(samples, devices, seed)
        return
    parts = iid(samples, devices, seed)
    assert {len(part) for part in parts} == {samples // devices}
    assert len(set(np.concatenate(parts))) == devices * (samples // devices)


@settings(max_examples=25)
@given(st.integers(2, 6), st.sampled_from([0.5, 1.0, 100.0]), st.integers(0, 3))
def test_dirichlet_parts_make_up_the_set(devices, alpha, seed):
    """Nothing is lost or given twice; the same seed gives the same split; every part is large
    enough.
    """
    labels = np.repeat(np.arange(10), 40)
    parts = dirichlet(labels, devices, alpha, seed, at_least=5)
    assert sorted(np.concatenate(parts)) == list(range(400))
    assert min(map(len, parts)) >= 5
    again = dirichlet(labels, devices, alpha, seed, at_least=5)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_small_concentration_is_less_even():
    """Dirichlet(0.1) gives devices fewer labels than Dirichlet(100)."""
    labels = np.repeat(np.arange(10), 100)

    def labels_held(alpha):
        return np.mean(
            [len(set(labels[part])) for part in dirichlet(labels, 5, alpha, 0, at_least=1)]
        )

    assert labels_held(100.0) == 10
    assert labels_held(0.1) < 10


def test_impossible_splits_are_errors():
    """A concentration of 0, or more samples asked for than there are."""
    with pytest.raises(ConfigError, match="above 0"):
        dirichlet(np.zeros(10, np.int64), 2, 0.0, 0)
    with pytest.raises(ConfigError, match="use a larger concentration"):
        dirichlet(np.zeros(10, np.int64), 3, 1.0, 0, at_least=10)


def test_what_is_held_out_to_choose_a_setting_is_trained_on_by_nobody():
    """The test samples judge nothing then; what is left is limited as usual."""
    data = load_dataset("digits")
    table = DataTable(name="digits", validation=200, train_limit=300, test_limit=50)
    limited = _limited(data, table)
    assert (len(limited.train_y), len(limited.test_y)) == (300, 50)
    trained = {image.tobytes() for image in limited.train_x}
    judging = {image.tobytes() for image in limited.test_x}
    assert judging <= {image.tobytes() for image in data.train_x}
    assert not judging & trained
    with pytest.raises(ConfigError, match=r"data\.validation: of 1\d\d\d training samples"):
        _limited(data, DataTable(name="digits", validation=len(data.train_y)))
