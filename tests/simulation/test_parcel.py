"""Parcels: a worker elsewhere finds every file that the setup names, and devices' memories move
with their tasks.
"""

import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from fleet_protocol.errors import DataError
from simulation.data.held import SampleSplit
from simulation.engines.parcel import packing_list, read_state, relocated, write_state
from simulation.orders import WorkerSetup


@pytest.fixture
def setup(tmp_path) -> WorkerSetup:
    for name in (
        "cache/artifacts/mlp/w1.00-d1/manifest.json",
        "cache/artifacts/objects/ab/abc",
        "cache/data/train_x.npy",
        "cache/data/train_y.npy",
        "cache/data/black.npy",
        "cache/data/test.npz",
        "run/parts.npz",
        "mine.py",
        "noise.py",
        "sets/a/manifest.json",
        "sets/b/deep/graph.onnx",
        "run/store/blobs/objects/cd/cde",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return WorkerSetup(
        artifacts=tmp_path / "cache/artifacts",
        arch="mlp",
        data=tmp_path / "cache/data",
        split=tmp_path / "run/parts.npz",
        blobs=tmp_path / "run/store/blobs",
        updates=tmp_path / "run/store/updates",
        devices=tmp_path / "run/devices",
        models=tmp_path / "mine.py",
        pairs=(tmp_path / "sets/a", tmp_path / "sets/b"),
        holdout=0.25,
        augment=("flip", f"{tmp_path / 'noise.py'}:noise"),
    )


def named(setup: WorkerSetup) -> list[Path]:
    """The files and folders that stay the same, in the order of the fields."""
    assert setup.models is not None
    return [
        setup.artifacts / "mlp/w1.00-d1/manifest.json",
        setup.artifacts / "objects/ab/abc",
        setup.data / "train_x.npy",
        setup.data / "train_y.npy",
        setup.data / "black.npy",
        setup.split,
        setup.models,
        Path(setup.augment[1].removesuffix(":noise")),
        setup.pairs[0] / "manifest.json",
        setup.pairs[1] / "deep/graph.onnx",
    ]


def test_every_file_is_where_the_relocated_setup_says(setup, tmp_path):
    """Unpacking the list makes the relocated setup name the same contents; the test set stays with
    the server.
    """
    listed = packing_list(setup)
    for place, path in listed.items():
        target = tmp_path / "elsewhere" / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    moved = relocated(setup, tmp_path / "elsewhere", tmp_path / "own")
    assert [path.read_text() for path in named(moved)] == [
        path.read_text() for path in named(setup)
    ]
    assert len(listed) == len(named(setup))
    for folder in (moved.blobs, moved.updates, moved.devices):
        assert folder.is_relative_to(tmp_path / "own")
    everything = {name: getattr(moved, name) for name in WorkerSetup.model_fields}
    assert not [name for name, value in everything.items() if str(tmp_path / "run") in str(value)]
    assert moved.holdout == setup.holdout


def test_a_setup_without_extras_needs_less(setup, tmp_path):
    """No architectures and no models of one's own: none in the list, none after moving."""
    plain = setup.model_copy(update={"models": None, "pairs": (), "augment": ()})
    assert len(packing_list(plain)) == 6
    moved = relocated(plain, tmp_path / "elsewhere", tmp_path / "own")
    assert (moved.models, moved.pairs) == (None, ())


def test_the_test_set_travels_to_workers_that_judge_by_it(setup):
    """Devices with models of their own are judged on their part of it, where they train."""
    listed = packing_list(setup.model_copy(update={"own_test": True}))
    assert listed.keys() - packing_list(setup).keys() == {"data/test.npz"}


def test_who_holds_what_is_in_memory_once(tmp_path):
    """Every device's part was a view of a copy of its own of all indices, 200 of them here."""
    ends = np.linspace(0, 100_000, 200).astype(int)
    held = SampleSplit(
        tuple(np.arange(*pair) for pair in pairwise([0, 0, *ends])), (np.zeros(0, np.int64),) * 201
    )
    held.save(tmp_path / "parts.npz")
    tracemalloc.start()
    found = SampleSplit.load(tmp_path / "parts.npz")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * 8 * 100_000
    for mine, theirs in ((found.train, held.train), (found.test, held.test)):
        assert [part.tolist() for part in mine] == [part.tolist() for part in theirs]


def test_a_missing_file_is_named(setup):
    """The error comes before anything travels."""
    (setup.data / "train_y.npy").unlink()
    with pytest.raises(DataError, match=r"train_y\.npy is missing"):
        packing_list(setup)


def test_what_a_device_keeps_is_replaced_as_a_whole(tmp_path):
    """A folder becomes what is written to it, with older files gone and half-written ones left
    out.
    """
    folder = tmp_path / "device-1"
    assert read_state(folder) == {}
    write_state(folder, {"round-1": b"one", "round-2": b"two"})
    (folder / ".round-3.part").write_bytes(b"thr")
    assert read_state(folder) == {"round-1": b"one", "round-2": b"two"}
    write_state(folder, {"round-2": b"TWO", "round-3": b"three"})
    assert read_state(folder) == {"round-2": b"TWO", "round-3": b"three"}
    write_state(folder, {})
    assert read_state(folder) == {}
