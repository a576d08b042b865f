"""Deals the samples of a simulation to its devices."""

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import ConfigError
from simulation.data.dataset import Dataset
from simulation.data.held import Parts
from simulation.data.partition import by_subject, deal_shards, dirichlet, iid, in_proportion
from simulation.settings import SimulationConfig

Indices = NDArray[np.int64]

_TEST_DRAW = 1
"""Added to the seed of the deal of test samples, so that it differs from that of the others."""


def split_data(config: SimulationConfig, data: Dataset) -> Parts:
    """Deal training samples, and test samples of the same kind, to the devices.

    Raises:
        ConfigError: the data cannot be dealt like this.
    """
    table = config.partition
    count = config.devices.count
    seed = config.seed if table.seed is None else table.seed
    test_seed = seed + _TEST_DRAW
    if table.kind == "subject":
        return _by_subject(data, count)
    if table.kind == "iid":
        test = _nothing(count)
        if len(data.test_y) >= count:
            test = tuple(iid(len(data.test_y), count, test_seed))
        return Parts(tuple(iid(len(data.train_y), count, seed)), test)
    if data.train_y.ndim != 1 or data.train_y.dtype.kind == "f":
        raise ConfigError(
            f'partition kind = "{table.kind}" needs one label a sample; {data.name} has one a '
            "token, or numbers"
        )
    if table.kind == "dirichlet":
        train = dirichlet(data.train_y, count, table.alpha, seed)
        test = tuple(in_proportion(train, data.train_y, data.test_y, test_seed))
        return Parts(tuple(train), test)
    shards = deal_shards(data.classes, count, table.per_device, seed, as_released=table.as_released)
    test = _nothing(count)
    if config.evaluation.local:
        test = tuple(shards.split(data.test_y, test_seed, of="test"))
    return Parts(tuple(shards.split(data.train_y, seed)), test)


def _by_subject(data: Dataset, count: int) -> Parts:
    """Give each device the samples of one subject, of test samples too if they have the same."""
    if data.train_group is None:
        raise ConfigError(
            f'partition kind = "subject": nobody in particular recorded the samples of {data.name}'
        )
    train = tuple(by_subject(data.train_group, count))
    if data.test_group is None:
        return Parts(train, _nothing(count))
    if not np.array_equal(np.unique(data.test_group), np.unique(data.train_group)):
        return Parts(train, _nothing(count))
    return Parts(train, tuple(by_subject(data.test_group, count)))


def _nothing(count: int) -> tuple[Indices, ...]:
    """Return no indices for each of so many devices."""
    return tuple(np.zeros(0, np.int64) for _ in range(count))
