"""Devices with tasks of their own: labels, the joint set of two tasks, and what is refused."""

import io

import numpy as np
import pytest
from pydantic import ValidationError

from fleet_protocol.errors import ConfigError, DataError
from simulation.data.dataset import Dataset
from simulation.data.datasets import load_dataset
from simulation.data.held import SampleSplit, VirtualData
from simulation.data.images import CIFAR_TASKS
from simulation.data.split import split_data
from simulation.model_tables import OwnModel
from simulation.settings import SimulationConfig
from tests.simulation.test_cifar100 import records


@pytest.fixture
def joint(tmp_path):
    """Four images of CIFAR-10 and six of CIFAR-100, for training and for testing alike."""
    pillow = pytest.importorskip("PIL.Image")
    code = io.BytesIO()
    pillow.new("RGB", (32, 32), (255, 0, 0)).save(code, "JPEG")
    size = len(code.getvalue())
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar100").mkdir()
    for stem in ("train", "test"):
        np.savez(
            tmp_path / "cifar10" / f"{stem}.npz",
            jpeg=np.frombuffer(code.getvalue() * 4, np.uint8),
            offset=np.arange(5) * size,
            label=np.array([9, 0, 3, 3], np.uint8),
        )
        (tmp_path / "cifar100" / f"{stem}.bin").write_bytes(
            records([99, 0, 3, 3, 50, 7], 1).tobytes()
        )
    return load_dataset("cifar_tasks", tmp_path, devices=3)


def test_two_sets_become_one_with_a_device_for_each_sample(joint):
    """Devices 0 and 2 share CIFAR-10, device 1 has CIFAR-100; no label means two things."""
    assert joint.train_y.tolist() == [9, 0, 3, 3, 109, 10, 13, 13, 60, 17]
    assert joint.train_group is not None
    assert joint.train_group.tolist() == [0, 2, 0, 2, 1, 1, 1, 1, 1, 1]
    assert joint.classes == 110
    np.testing.assert_array_equal(joint.test_group, joint.train_group)


def test_a_task_turns_the_labels_of_its_devices_into_its_own(joint, tmp_path):
    """The devices' samples, training and test, with labels from 0."""
    config = SimulationConfig.model_validate(
        {
            "model": {"arch": "cnn2"},
            "data": {"name": "cifar_tasks"},
            "devices": {"count": 3},
            "partition": {"kind": "subject"},
        }
    )
    parts = split_data(config, joint)
    assert [part.tolist() for part in parts.test] == [[0, 2], [4, 5, 6, 7, 8, 9], [1, 3]]
    parts.save(tmp_path / "parts.npz")
    np.save(tmp_path / "train_x.npy", joint.train_x)
    np.save(tmp_path / "train_y.npy", joint.train_y)
    np.save(tmp_path / "black.npy", np.zeros(3, np.float32))
    np.savez(tmp_path / "test.npz", x=joint.test_x, y=joint.test_y)
    data = VirtualData(tmp_path, tmp_path / "parts.npz", tasks=CIFAR_TASKS)
    assert data.samples_of(0).y.tolist() == [9, 3]
    assert data.samples_of(1).y.tolist() == [99, 0, 3, 3, 50, 7]
    assert data.with_test(2)[0].y.tolist() == [
        0,
        3,
        0,
        3,
    ]  # the third device has the first task again
    wrong = VirtualData(tmp_path, tmp_path / "parts.npz", tasks=CIFAR_TASKS[::-1])
    with pytest.raises(DataError, match="the device's task excludes"):
        wrong.samples_of(0)
    short = VirtualData(tmp_path, tmp_path / "parts.npz", tasks=[CIFAR_TASKS[0][:5]])
    with pytest.raises(DataError, match="largest label of the task is 4"):
        short.samples_of(0)


def test_both_tasks_need_a_device(tmp_path):
    with pytest.raises(ConfigError, match="at least 2"):
        load_dataset("cifar_tasks", tmp_path, devices=1)


def test_without_groups_of_test_samples_devices_have_none():
    """A set whose test samples are of other subjects has no part for a device."""
    data = Dataset(
        "people",
        np.zeros((4, 1), np.float32),
        np.zeros(4, np.int64),
        np.zeros((2, 1), np.float32),
        np.zeros(2, np.int64),
        2,
        train_group=np.array([0, 0, 1, 1]),
        test_group=np.array([2, 2]),
    )
    config = SimulationConfig.model_validate(
        {
            "model": {"arch": "mlp"},
            "data": {"name": "watch"},
            "devices": {"count": 2},
            "partition": {"kind": "subject"},
        }
    )
    parts = split_data(config, data)
    assert isinstance(parts, SampleSplit)
    assert [len(part) for part in parts.test] == [0, 0]


@pytest.mark.parametrize("labels", [(0, 2), (), (0, 0), (-1, -1), (1, 2)])
def test_labels_of_a_task_go_from_zero_without_gaps(labels):
    with pytest.raises(ValidationError, match="labels must"):
        OwnModel(arch="mlp", labels=labels)


def test_the_classes_of_a_task():
    assert OwnModel(arch="mlp", labels=(1, -1, 0, 2)).classes == 3
    assert OwnModel(arch="mlp").classes is None
