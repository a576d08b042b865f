"""Reads the user's own files as the data set of a simulation."""

import glob
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.data import DataConfig, DataSet, load_data
from fleet_protocol.data.contract import reconcile
from fleet_protocol.data.dataset import check_sample_sizes
from fleet_protocol.data.inspection import inspect
from fleet_protocol.data.places import naming_table
from fleet_protocol.data.terms import DataContract
from fleet_protocol.data.unused_labels import describe_unused
from fleet_protocol.errors import DataError
from simulation.data.contract import common_contract
from simulation.data.dataset import Dataset

Array = NDArray[Any]

_LOG = logging.getLogger(__name__)

_TRAIN = "[data.train] of sim.toml"
_TEST = "[data.test] of sim.toml"
_IMAGE_DIMENSIONS = 4
"""Dimensions of an array of images, whose samples have black pixels."""


def own_data(train: DataConfig, test: DataConfig, ignored: int | None = None) -> Dataset:
    """Read training and test samples from the user's files.

    Args:
        train: source with absolute paths; ``*`` matches any text. Every match is a separate group.
        test: the same for the test set.
        ignored: a label to ignore, which is not a class.

    Returns:
        Samples, normalised by the settings of the tables; integers without normalisation stay
        integers. Without ``classes``, the number of classes is the number of labels. For numeric
        targets it is the number of targets of a sample.

    Raises:
        DataError: something is missing or malformed, or the files are inconsistent.
        ConfigError: a package for this kind of data is not installed.
    """
    train_files = _read(train, _TRAIN)
    test_files = _read(test, _TEST)
    with naming_table(_TEST):
        contract = common_contract(train_files, test_files)
    train_sets = _reconciled(train_files, contract, _TRAIN)
    test_sets = _reconciled(test_files, contract, _TEST)
    _examine(train_sets, _TRAIN)
    _examine(test_sets, _TEST)
    train_x, train_y = _samples_and_targets(train_sets)
    test_x, test_y = _samples_and_targets(test_sets)
    _require_equal_shapes((train_x, train_y), (test_x, test_y))
    # One file may contain only whole numbers by chance.
    are_numbers = "f" in (train_y.dtype.kind, test_y.dtype.kind)
    kind = np.float32 if are_numbers else np.int64
    train_y = train_y.astype(kind, copy=False)
    test_y = test_y.astype(kind, copy=False)
    classes = train.classes or len(contract.labels)
    if not classes and are_numbers:
        classes = math.prod(train_y.shape[1:])
    elif not classes:
        classes = 1 + max(_largest(train_y, ignored), _largest(test_y, ignored))
        unused = describe_unused(_TRAIN, train_y[train_y != ignored], classes)
        if unused:
            _LOG.warning("%s", unused)
    tokens = 0
    # Whole numbers are token ids, unless a table normalises them.
    if train_x.dtype.kind in "iu":
        tokens = 1 + max(int(train_x.max()), int(test_x.max()))
    # All sets have the scaling of one table, so the first one suffices.
    first = train_sets[0]
    for data in (*train_sets, *test_sets):
        check_sample_sizes(data.source, data.sample_sizes, first.sample_sizes)
    black: tuple[float, ...] | float = 0.0
    # One black per channel, after normalisation.
    if first.x.ndim == _IMAGE_DIMENSIONS:
        black = tuple(first.normal_black.ravel().tolist())
    return Dataset(
        "own",
        train_x,
        train_y,
        test_x,
        test_y,
        classes,
        tokens=tokens,
        train_group=_groups(train_sets),
        test_group=_groups(test_sets),
        black=black,
        own=True,
        sample_sizes=first.sample_sizes,
    )


def _read(config: DataConfig, table: str) -> list[DataSet]:
    """Read the sources of a table, which errors name."""
    sets = []
    # Errors name the table, because a file does not say which one it belongs to.
    with naming_table(table):
        for source in _sources(config):
            sets.append(load_data(source))
    return sets


def _reconciled(sets: Sequence[DataSet], contract: DataContract, table: str) -> list[DataSet]:
    """Return the samples of a table in the form of the contract."""
    reconciled = []
    with naming_table(table):
        for data in sets:
            reconciled.append(reconcile(data, contract))
    return reconciled


def _examine(sets: Sequence[DataSet], table: str) -> None:
    """Warn about what looks wrong in the samples of a table, once for each finding."""
    for data in sets:
        for finding in inspect(data):
            _LOG.warning("%s may be faulty, %s: %s", table, data.source, finding.text)


def _sources(config: DataConfig) -> list[DataConfig]:
    """Return the sources that match a table with stars, in the order of their names."""
    matches = {}
    for name, value in config:
        if isinstance(value, Path) and "*" in str(value):
            matches[name] = _matches(value)
    if not matches:
        return [config]
    counts = set()
    by_name = []
    for name, paths in matches.items():
        counts.add(len(paths))
        by_name.append(f"{len(paths)} for {name}")
    # Stars in several paths of a table match file by file, in the order of their names.
    if 0 in counts or len(counts) > 1:
        path = getattr(config, "path", "")
        raise DataError(
            f"{path} must match at least one file, and all paths the same number of files:"
            f" {', '.join(by_name)}"
        )
    sources = []
    for matching in zip(*matches.values(), strict=True):
        update = dict(zip(matches, matching, strict=True))
        sources.append(config.model_copy(update=update))
    return sources


def _matches(pattern: Path) -> list[Path]:
    """Return the sorted files that match a path with stars; other characters are literal."""
    root = Path(pattern.anchor)
    between_stars = str(pattern.relative_to(root)).split("*")
    # Brackets and question marks in a path are part of a name.
    return sorted(root.glob("*".join(map(glob.escape, between_stars))))


def _samples_and_targets(sets: Sequence[DataSet]) -> tuple[Array, Array]:
    """Return the samples and the targets of several files, one file after the other."""
    samples: list[Array] = []
    targets: list[Array] = []
    for data in sets:
        samples.append(_samples(data))
        targets.append(data.y)
    return _joined(samples, sets), _joined(targets, sets)


def _samples(data: DataSet) -> Array:
    """Return normalised samples; integers that are not changed stay integers."""
    is_shifted = data.mean.any()
    is_scaled = data.scale != 1 or (data.std != 1).any()
    is_unchanged = not (is_shifted or is_scaled)
    # Normalising would make token ids numbers.
    if is_unchanged and data.x.dtype.kind in "iu":
        return np.asarray(data.x)
    samples, *_ = data.batch(slice(None), "float32")
    return samples


def _joined(arrays: Sequence[Array], sources: Sequence[DataSet]) -> Array:
    """Return the joined arrays of several files; raises a DataError if shapes differ."""
    first_shape = _sample_shape(arrays[0])
    for array, data in zip(arrays, sources, strict=True):
        shape = _sample_shape(array)
        if shape != first_shape:
            raise DataError(
                f"{data.source} has shape {shape} per sample, {sources[0].source} {first_shape};"
                " all files need the same shape"
            )
    return np.concatenate(arrays)


def _sample_shape(array: Array) -> list[int]:
    """Return the shape of one sample, as messages write it."""
    return list(array.shape[1:])


def _require_equal_shapes(train: tuple[Array, Array], test: tuple[Array, Array]) -> None:
    """Raise a DataError if samples or targets of the test set have a different shape."""
    texts = []
    for x, y in (train, test):
        texts.append(f"{_sample_shape(x)} with targets {_sample_shape(y)}")
    if texts[0] != texts[1]:
        raise DataError(
            f"training samples have shape {texts[0]}, but test samples have {texts[1]}; set the"
            " same keys in [data.train] and [data.test]"
        )


def _largest(labels: Array, ignored: int | None) -> int:
    """Return the largest label that is not ignored; -1 if there is none."""
    return int(labels.max(initial=-1, where=labels != ignored))


def _groups(sets: Sequence[DataSet]) -> NDArray[np.int64]:
    """Return the number of the file that each sample comes from."""
    numbers = np.arange(len(sets))
    counts = list(map(len, sets))
    return np.repeat(numbers, counts)
