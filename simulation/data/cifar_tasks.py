"""CIFAR-10 and CIFAR-100 as two tasks of one fleet, for devices that want different things and share a trunk.

Shen et al., 2020, https://arxiv.org/abs/2006.16765; specification 5.4. Labels 0 to 9 are those of CIFAR-10, 10 to 109
those of CIFAR-100; the groups say which device holds a sample.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import ConfigError
from simulation.data.dataset import Dataset
from simulation.data.images import cifar10, cifar100

_TENS, _HUNDREDS = 10, 100
CIFAR_TASKS = ((*range(_TENS), *[-1] * _HUNDREDS), (*[-1] * _TENS, *range(_HUNDREDS)))
"""What each label of the joint set is to the devices of even and of odd number; -1 for none of theirs."""


def cifar_tasks(root: Path | None, *, devices: int = 5, limit: int | None = None) -> Dataset:
    """Load both sets, for devices whose own models have the labels of `CIFAR_TASKS`, and a partition by subject.

    Args:
        root: folder that holds ``cifar10/`` and ``cifar100/``.
        devices: those of even number share CIFAR-10, the others CIFAR-100, in equal parts.
        limit: samples of each split of each set at most.

    Returns:
        Images, float32 [n, 3, 32, 32], 110 classes; groups are the devices.

    Raises:
        ConfigError: there are fewer devices than tasks.
        DataError: a file is missing or damaged.
    """
    if devices < len(CIFAR_TASKS):
        raise ConfigError(f"cifar_tasks: {devices} devices cannot have both tasks; take at least 2")
    tens, hundreds = cifar10(root, limit=limit), cifar100(root, limit=limit)
    return Dataset(
        "cifar_tasks",
        np.concatenate([tens.train_x, hundreds.train_x]),
        np.concatenate([tens.train_y, hundreds.train_y + _TENS]),
        np.concatenate([tens.test_x, hundreds.test_x]),
        np.concatenate([tens.test_y, hundreds.test_y + _TENS]),
        _TENS + _HUNDREDS,
        train_group=_dealt(len(tens.train_y), len(hundreds.train_y), devices),
        test_group=_dealt(len(tens.test_y), len(hundreds.test_y), devices),
        black=tens.black,
    )


def _dealt(tens: int, hundreds: int, devices: int) -> NDArray[np.int64]:
    """The device of each sample: one after the other among those that share the task."""
    even, odd = np.arange(0, devices, 2, dtype=np.int64), np.arange(1, devices, 2, dtype=np.int64)
    return np.concatenate([even[np.arange(tens) % len(even)], odd[np.arange(hundreds) % len(odd)]])
