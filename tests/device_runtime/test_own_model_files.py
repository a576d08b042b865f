"""What a board keeps of its own model: which round it starts from, and which files are removed."""

import os

import numpy as np
import pytest

from device_runtime.training.own_model_files import KEPT_RUNS, OwnModelFiles
from fleet_protocol.errors import BlobError, RefusedError
from fleet_protocol.manifest import StateSpec
from fleet_protocol.weights import encode_weights


def tensors(value):
    return {"model/a": np.full((2, 3), value, np.float32)}


def save(files, run, number, age_seconds=0):
    """Save a round as it would have been so long ago."""
    files.save(run, number, tensors(number))
    path = files.folder / f"own-model-{run}-{number}.safetensors"
    now = path.stat().st_mtime
    os.utime(path, (now - age_seconds, now - age_seconds))


def names(files):
    return {
        path.name.removeprefix("own-model-").removesuffix(".safetensors")
        for path in files.folder.iterdir()
    }


def test_a_round_starts_from_the_latest_one_before_it(tmp_path):
    """A task that is computed again starts from where it started the first time, although its
    result is there.
    """
    files = OwnModelFiles(tmp_path)
    assert files.load("r", 1) is None
    for number in (1, 2, 4):
        save(files, "r", number)
    kept = [files.load("r", before) for before in (3, 4, 5)]
    assert [item.tensors["model/a"][0, 0] for item in kept] == [2, 2, 4]
    assert files.load("r2", 5) is None
    assert names(files) == {"r-2", "r-4"}


def test_old_runs_are_removed_and_the_current_never(tmp_path):
    """The newest few runs stay, whatever their names; of the current one the last two rounds."""
    files = OwnModelFiles(tmp_path, runs=3)
    for age, run in enumerate(["new", "b-1", "old-7", "a"]):
        save(files, run, 9, age_seconds=1000 * (age + 1))
    # Other things in the folder are none of its business.
    (tmp_path / "own-model-notes.txt").write_text("mine")
    (tmp_path / "own-model-x-first.safetensors").write_bytes(b"mine")
    for number in (1, 2, 3):
        save(files, "now", number, age_seconds=10**6)
    assert names(files) == {"new-9", "b-1-9", "now-2", "now-3", "notes.txt", "x-first"}
    OwnModelFiles(tmp_path, runs=1).save("now", 4, tensors(4))
    assert names(files) == {"now-3", "now-4", "notes.txt", "x-first"}
    assert (
        KEPT_RUNS >= 2
    )  # a run that ended cannot be told from one whose server is away for a while


def test_files_of_another_set_or_damaged_ones_are_named(tmp_path):
    """The messages name the file and what to do with it."""
    files = OwnModelFiles(tmp_path)
    save(files, "r", 1)
    kept = files.load("r", 2)
    expected = {"a": StateSpec(name="a", shape=(2, 3))}
    assert kept.under("model/", expected)["a"].shape == (2, 3)
    with pytest.raises(
        RefusedError, match=r"own-model-r-1.*another pair.* instead of float32 \[3, 3\].*delete"
    ):
        kept.under("model/", {"a": StateSpec(name="a", shape=(3, 3))})
    with pytest.raises(RefusedError, match=r"state/a is missing"):
        kept.under("state/", expected)
    with pytest.raises(
        RefusedError, match=r"model/a is float32 \[2, 3\] instead of int64 \[2, 3\]"
    ):
        kept.under("model/", {"a": StateSpec(name="a", shape=(2, 3), dtype="int64")})
    path = tmp_path / "own-model-r-1.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(BlobError, match=r"own-model-r-1.safetensors is damaged; delete it"):
        files.load("r", 2)


def test_a_changed_bit_never_becomes_a_value(tmp_path):
    """A card that returns other bits is noticed, although the file has the right form."""
    files = OwnModelFiles(tmp_path)
    values = np.linspace(0.5, 3, 6, dtype=np.float32).reshape(2, 3)
    files.save("r", 1, {"model/a": values})
    path = tmp_path / "own-model-r-1.safetensors"
    whole = path.read_bytes()
    noticed = 0
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(changed)
        try:
            kept = files.load("r", 2)
        except BlobError:
            noticed += 1
        else:
            np.testing.assert_array_equal(kept.tensors["model/a"], values)
    assert noticed > values.nbytes


def test_a_file_of_an_earlier_version_has_no_digest(tmp_path):
    """It is read as before."""
    values = {"model/a": np.ones((2, 3), np.float32)}
    (tmp_path / "own-model-r-1.safetensors").write_bytes(encode_weights(values))
    kept = OwnModelFiles(tmp_path).load("r", 2)
    np.testing.assert_array_equal(kept.tensors["model/a"], values["model/a"])
