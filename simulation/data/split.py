"""Assigns the samples of a simulation to its devices."""

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
"""Added to the seed for test samples, so that their assignment is independent."""


def split_data(config: SimulationConfig, data: Dataset) -> SampleSplit:
    """Assign training samples and similar test samples to the devices.

    Raises:
        ConfigError: the data does not allow this partition.
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
        # With fewer test samples than devices, no device has any.
        if len(data.test_y) >= count:
            test = iid(len(data.test_y), count, test_seed)
        return SampleSplit(tuple(train), tuple(test))
    if data.train_y.ndim != 1 or data.train_y.dtype.kind == "f":
        raise ConfigError(
            f'partition kind = "{table.kind}" needs one label per sample, but {data.name} '
            "has one per token, or numbers"
        )
    if table.kind == "dirichlet":
        train = dirichlet(data.train_y, count, table.alpha, seed)
        test = in_proportion(train, data.train_y, data.test_y, test_seed)
        return SampleSplit(tuple(train), tuple(test))
    shards = deal_shards(data.classes, count, table.per_device, seed, as_released=table.as_released)
    test = _nothing(count)
    # A small test set may have fewer samples of a label than shards. That is an error only if these
    # samples are requested.
    if config.evaluation.local:
        test = shards.split(data.test_y, test_seed, of="test")
    train = shards.split(data.train_y, seed)
    return SampleSplit(tuple(train), tuple(test))


def _by_subject(data: Dataset, count: int) -> SampleSplit:
    """Give each device the training samples of one subject, and its test samples if any."""
    if data.train_group is None:
        raise ConfigError(
            f'partition kind = "subject": the data set {data.name} does not record subjects;'
            " use another kind"
        )
    train = by_subject(data.train_group, count)
    test = _nothing(count)
    if data.test_group is not None:
        subjects = np.unique(data.train_group)
        test_subjects = np.unique(data.test_group)
        # Devices match by the numbers of their subjects, so both sets must have the same ones.
        if np.array_equal(subjects, test_subjects):
            test = by_subject(data.test_group, count)
    return SampleSplit(tuple(train), tuple(test))


def _nothing(count: int) -> ByDevice:
    """Return empty indices for this many devices."""
    return [np.zeros(0, np.int64)] * count
