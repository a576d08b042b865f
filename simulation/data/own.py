"""A user's own samples as a data set: files that a board or a server would read, one or many."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.data import CsvData, DataConfig, DataSet, ImagesData, load_data
from fleet_protocol.data.dataset import check_parts
from fleet_protocol.data.readers import csv_names
from fleet_protocol.errors import DataError
from simulation.data.dataset import Dataset

_IMAGES = 4  # dimensions of samples that have black pixels


def own_data(train: DataConfig, test: DataConfig, ignored: int | None = None) -> Dataset:
    """Read training and test samples of the user's.

    Args:
        train: with absolute paths, in which a star stands for anything; every match is a group of its own.
        test: likewise.
        ignored: a label that counts for nothing, and is no class.

    Returns:
        Samples normalised as the tables say; integers that nothing is done to stay integers. Without ``classes``
        there are as many as labels, and of targets that are numbers as many as a sample has.

    Raises:
        DataError: something is missing or malformed, or the files do not go together.
        ConfigError: a package for this kind of data is not installed.
    """
    sides = [_each(train), _each(test)]
    folders = tuple(sorted({path.name for side in sides for config in side for path in _label_folders(config)}))
    tables = [it for side in sides for it in side if isinstance(it, CsvData) and it.columns is None]
    other = next((it for it in tables if csv_names(it) != csv_names(tables[0])), None)
    if other is not None:
        text = f"{other.path} has other columns than {tables[0].path}, or in another order"
        raise DataError(f"{text}; say `columns` by their names, on the boards too")
    labelled = {"labels": folders}  # of all folders of images, which one may not have
    sets = [[load_data(it.model_copy(update=labelled) if _label_folders(it) else it) for it in side] for side in sides]
    xs = [_joined([_ready(data) for data in side], side) for side in sets]
    ys = [_joined([data.y for data in side], side) for side in sets]
    if any(mine.shape[1:] != theirs.shape[1:] for mine, theirs in (xs, ys)):
        shapes = [f"{list(x.shape[1:])} with targets {list(y.shape[1:])}" for x, y in zip(xs, ys, strict=True)]
        raise DataError(
            f"training samples have shape {shapes[0]}, those of the test set {shapes[1]}; say the same keys in "
            "[data.train] and [data.test]"
        )
    groups = [np.repeat(np.arange(len(side)), [len(data) for data in side]) for side in sets]
    numbers = any(y.dtype.kind == "f" for y in ys)
    ys = [y.astype(np.float32 if numbers else np.int64, copy=False) for y in ys]
    classes = math.prod(ys[0].shape[1:]) if numbers else 1 + max(int(y.max(initial=-1, where=y != ignored)) for y in ys)
    first = sets[0][0]
    for data in (data for side in sets for data in side):
        check_parts(data.source, data.parts, first.parts)
    return Dataset(
        "own",
        xs[0],
        ys[0],
        xs[1],
        ys[1],
        train.classes or len(folders) or classes,
        tokens=1 + max(int(x.max()) for x in xs) if xs[0].dtype.kind in "iu" else 0,
        train_group=groups[0],
        test_group=groups[1],
        black=tuple(first.normal_black.ravel().tolist()) if first.x.ndim == _IMAGES else 0.0,
        own=True,
        parts=first.parts,
    )


def _each(config: DataConfig) -> list[DataConfig]:
    """The sources that a table with stars stands for, in the order of their names."""
    found = {
        name: sorted(Path(value.anchor).glob(str(value.relative_to(value.anchor))))
        for name, value in config
        if isinstance(value, Path) and "*" in str(value)
    }
    if not found:
        return [config]
    if {len(paths) for paths in found.values()} != {max(1, *map(len, found.values()))}:
        counts = ", ".join(f"{len(paths)} for {name}" for name, paths in found.items())
        raise DataError(f"{getattr(config, 'path', '')} must match at least one file, and each path as many: {counts}")
    rows = zip(*found.values(), strict=True)
    return [config.model_copy(update=dict(zip(found, row, strict=True))) for row in rows]


def _label_folders(config: DataConfig) -> list[Path]:
    """The folders of images that nobody gave labels to."""
    if not isinstance(config, ImagesData) or config.labels is not None or config.targets is not None:
        return []
    return [path for path in config.path.glob("*") if path.is_dir()]


def _ready(data: DataSet) -> NDArray[Any]:
    plain = data.scale == 1 and not data.mean.any() and bool((data.std == 1).all())
    return np.asarray(data.x) if plain and data.x.dtype.kind in "iu" else data.batch(slice(None), "float32")[0]


def _joined(arrays: Sequence[NDArray[Any]], sources: Sequence[DataSet]) -> NDArray[Any]:
    for array, data in zip(arrays, sources, strict=True):
        if array.shape[1:] != arrays[0].shape[1:]:
            raise DataError(
                f"{data.source} has shape {list(array.shape[1:])} per sample, {sources[0].source} "
                f"{list(arrays[0].shape[1:])}; all files need the same"
            )
    return np.concatenate(arrays)
