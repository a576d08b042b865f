"""Deals the samples of a simulation to its devices."""

import numpy as np

from fleet_protocol.errors import ConfigError
from simulation.data.dataset import Dataset
from simulation.data.held import SampleSplit
from simulation.data.partition import (
    ByDevice,
    by_subject,
    deal_shards,
    dirichlet,
    iid,
    in_proportion,
)
from simulation.settings import SimulationConfig

_TEST_DRAW = 1
"""Added to the seed of the deal of test samples, so that it differs from that of the others."""


def split_data(config: SimulationConfig, data: Dataset) -> SampleSplit:
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
        train = iid(len(data.train_y), count, seed)
        test = _nothing(count)
        if len(data.test_y) >= count:
            test = iid(len(data.test_y), count, test_seed)
        return SampleSplit(tuple(train), tuple(test))
    if data.train_y.ndim != 1 or data.train_y.dtype.kind == "f":
        raise ConfigError(
            f'partition kind = "{table.kind}" needs one label a sample; {data.name} has one a '
            "token, or numbers"
        )
    if table.kind == "dirichlet":
        train = dirichlet(data.train_y, count, table.alpha, seed)
        test = in_proportion(train, data.train_y, data.test_y, test_seed)
        return SampleSplit(tuple(train), tuple(test))
    shards = deal_shards(data.classes, count, table.per_device, seed, as_released=table.as_released)
    test = _nothing(count)
    # A small test set may have fewer samples of a label than there are shards of it, which is an
    # error only where somebody asks for these samples.
    if config.evaluation.local:
        test = shards.split(data.test_y, test_seed, of="test")
    train = shards.split(data.train_y, seed)
    return SampleSplit(tuple(train), tuple(test))


def _by_subject(data: Dataset, count: int) -> SampleSplit:
    """Give each device the samples of one subject, of test samples too if they have the same."""
    if data.train_group is None:
        raise ConfigError(
            f'partition kind = "subject": nobody in particular recorded the samples of {data.name}'
        )
    train = by_subject(data.train_group, count)
    test = _nothing(count)
    if data.test_group is not None:
        subjects = np.unique(data.train_group)
        test_subjects = np.unique(data.test_group)
        if np.array_equal(subjects, test_subjects):
            test = by_subject(data.test_group, count)
    return SampleSplit(tuple(train), tuple(test))


def _nothing(count: int) -> ByDevice:
    """Return no indices for each of so many devices."""
    return [np.zeros(0, np.int64)] * count
