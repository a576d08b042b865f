"""CIFAR-100's binary files."""

import gzip

import numpy as np
import pytest

from fleet_protocol.errors import DataError
from simulation.data.datasets import load_dataset
from simulation.data.images import CIFAR


def records(labels, seed):
    rng = np.random.default_rng(seed)
    made = rng.integers(0, 256, (len(labels), 2 + 3072), dtype=np.uint8)
    made[:, 0] = 7  # the coarse label, which is not used
    made[:, 1] = labels
    return made


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "cifar100").mkdir()
    (tmp_path / "cifar100" / "train.bin").write_bytes(records([3, 99, 0, 41], 1).tobytes())
    (tmp_path / "cifar100" / "test.bin.gz").write_bytes(gzip.compress(records([5, 6], 2).tobytes()))
    return tmp_path


def test_records_become_normalised_images_with_their_fine_labels(folder):
    """Planes of red, green and blue, row by row; a gzipped file is read as well."""
    data = load_dataset("cifar100", folder)
    assert data.train_y.tolist() == [3, 99, 0, 41]
    assert data.test_y.tolist() == [5, 6]
    assert data.classes == 100
    assert data.input_shape == (3, 32, 32)
    raw = records([3, 99, 0, 41], 1)
    pixel = raw[1, 2 + 1024 + 5 * 32 + 7]  # sample 1, green, row 5, column 7
    assert data.train_x[1, 1, 5, 7] == pytest.approx(
        (pixel / 255 - CIFAR.mean[1]) / CIFAR.std[1], rel=1e-5
    )
    assert data.train_x.dtype == np.float32


def test_a_limit_spreads_over_the_set(folder):
    assert load_dataset("cifar100", folder, limit=2).train_y.tolist() == [3, 0]


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "0 bytes"), (b"x" * 3000, "3000 bytes"), (b"\0\xff" + bytes(3072), "label above 99")],
)
def test_other_files_are_refused(folder, content, words):
    (folder / "cifar100" / "train.bin").write_bytes(content)
    with pytest.raises(DataError, match=words):
        load_dataset("cifar100", folder)


def test_a_missing_file_is_named(folder):
    (folder / "cifar100" / "train.bin").unlink()
    with pytest.raises(DataError, match=r"train\.bin"):
        load_dataset("cifar100", folder)
