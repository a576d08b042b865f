"""Every data set arrives with the sizes it is known for, and damaged files are errors that name the
file.
"""

import io

import numpy as np
import pytest

from fleet_protocol.errors import ConfigError, DataError
from simulation.data.dataset import evenly
from simulation.data.datasets import load_dataset
from simulation.data.watch import windows
from tests.simulation.data_folder import FOLDER, needs


@needs("cifar10")
def test_cifar10_is_decoded_and_normalised():
    """A tenth of each split, evenly spread: all classes alike, 32x32 in three normalised
    channels.
    """
    data = load_dataset("cifar10", FOLDER, limit=1000)
    assert data.train_x.shape == data.test_x.shape == (1000, 3, 32, 32)
    assert data.train_x.dtype == np.float32
    assert np.bincount(data.train_y).tolist() == np.bincount(data.test_y).tolist() == [100] * 10
    assert np.abs(data.train_x.mean((0, 2, 3))).max() < 0.1
    assert np.abs(data.train_x.std((0, 2, 3)) - 1.2).max() < 0.1
    np.testing.assert_array_equal(data.train_x.min((0, 2, 3)), np.array(data.black, np.float32))


@needs("mnist")
def test_a_limit_takes_samples_from_the_whole_set():
    """The last sample asked for comes from the end of the file, not from its start."""
    whole = load_dataset("mnist", FOLDER)
    some = load_dataset("mnist", FOLDER, limit=100)
    np.testing.assert_array_equal(some.train_x, whole.train_x[::600])
    np.testing.assert_array_equal(some.test_y, whole.test_y[::100])
    assert whole.train_x.min() == np.float32(whole.black)


@needs("watch")
def test_watch_windows_belong_to_people():
    """Seven exercises of ten people, normalised; the end of each recording is kept for testing."""
    data = load_dataset("watch", FOLDER)
    assert data.input_shape == (6, 128)
    assert (len(data.train_y), len(data.test_y), data.classes) == (2648, 745, 7)
    assert set(data.train_group) == set(data.test_group) == set(range(10))
    for person in range(10):
        assert set(data.train_y[data.train_group == person]) == set(range(7))
    np.testing.assert_allclose(data.train_x.mean((0, 2)), 0, atol=1e-4)
    np.testing.assert_allclose(data.train_x.std((0, 2)), 1, atol=1e-4)


@needs("watch")
def test_people_can_be_held_out():
    """Subjects to test on have no part in the training."""
    data = load_dataset("watch", FOLDER, test_subjects=(9, 10))
    assert set(data.train_group) == set(range(8))
    assert set(data.test_group) == {8, 9}
    with pytest.raises(ConfigError, match="the watch data has no subject 11"):
        load_dataset("watch", FOLDER, test_subjects=(11,))
    with pytest.raises(ConfigError, match="no window of 5000 steps fits"):
        load_dataset("watch", FOLDER, window=5000)


def test_windows_start_a_step_apart():
    """Windows have time last, overlap as asked, and never reach over the end."""
    signal = np.arange(20, dtype=np.float32).reshape(10, 2)
    cut = windows(signal, size=4, step=3)
    assert cut.shape == (3, 2, 4)
    assert cut[:, 0].tolist() == [[0, 2, 4, 6], [6, 8, 10, 12], [12, 14, 16, 18]]
    assert windows(signal, size=11, step=1).shape == (0, 2, 11)


@pytest.mark.parametrize("name", ["cifar10", "watch", "wikitext2", "sst2", "cola"])
def test_sets_that_are_not_there_say_what_is_missing(monkeypatch, tmp_path, name):
    """Without a folder the error says what to set; with a wrong one it names the file."""
    monkeypatch.delenv("SHOAL_DATA", raising=False)
    with pytest.raises(DataError, match=f"set SHOAL_DATA to a folder that contains {name}/"):
        load_dataset(name)
    with pytest.raises(DataError, match=f"{name}/"):
        load_dataset(name, tmp_path)


def test_unknown_options_are_refused():
    """A loader's options are named."""
    with pytest.raises(ConfigError, match="digits has no option 'limit'; its options: none"):
        load_dataset("digits", limit=5)
    with pytest.raises(ConfigError, match="its options: tokens, length, vocab, test"):
        load_dataset("sst2", lenght=5)
    with pytest.raises(ConfigError, match="limit of 0"):
        evenly(10, 0)


def _cifar(root, code, *, offsets=None):
    (root / "cifar10").mkdir()
    for stem in ("train", "test"):
        np.savez(
            root / "cifar10" / f"{stem}.npz",
            jpeg=np.frombuffer(code, np.uint8),
            offset=np.array([0, len(code)] if offsets is None else offsets),
            label=np.zeros(1, np.uint8),
        )
    return root


def test_damaged_images_are_refused(tmp_path):
    """Bytes that are no JPEG, an image of another size, a file that is no archive."""
    pillow = pytest.importorskip("PIL.Image")
    with pytest.raises(DataError, match=r"image 0 of .* is not a JPEG"):
        load_dataset("cifar10", _cifar(tmp_path, b"no jpeg"))
    small = io.BytesIO()
    pillow.new("RGB", (8, 8)).save(small, "JPEG")
    (tmp_path / "other").mkdir()
    with pytest.raises(DataError, match="has shape"):
        load_dataset("cifar10", _cifar(tmp_path / "other", small.getvalue()))
    (tmp_path / "cifar10" / "train.npz").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(
        DataError, match=r"train\.npz is not an archive of jpeg, offset, label, or is"
    ):
        load_dataset("cifar10", tmp_path)


def test_pickled_arrays_are_not_opened(tmp_path):
    """An npz file of Python objects could run code; it is refused."""
    (tmp_path / "watch").mkdir()
    arrays = dict.fromkeys(
        ("signal", "length", "label", "subject"), np.array([{}, 1], dtype=object)
    )
    np.savez(tmp_path / "watch" / "watch.npz", **arrays)
    with pytest.raises(DataError, match="allow_pickle"):
        load_dataset("watch", tmp_path)
