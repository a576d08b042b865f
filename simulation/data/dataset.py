"""A loaded data set, and common functions of the loaders."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.data.files import decoding, open_file
from fleet_protocol.errors import ConfigError, DataError
from fleet_protocol.manifest import UNNAMED, SampleSizes
from fleet_protocol.targets import Targets


@dataclass(frozen=True)
class Dataset:
    """A data set with a label for each sample or each token, ready to train on.

    Attributes:
        name: the requested name.
        train_x: samples, float32 [n, *shape], or token ids, int64 [n, length]; id 0 is padding if
            texts differ in length.
        train_y: labels, int64 [n], or [n, length] with a label for each token; or numbers, float32
            [n, ...].
        test_x: samples, [m, *shape].
        test_y: the same of the test samples.
        classes: number of labels.
        tokens: number of token ids, the size of a model's embedding; 0 for data other than text.
        train_group: the subject or holder of each training sample, int64 [n], from 0; None without
            groups.
        test_group: the same for the test samples, int64 [m].
        own: whether the data comes from the user's files, not from a named set.
        sample_sizes: sizes of the samples, as in `DataSet`.
        black: value of a black pixel in the samples, for images; a number, or one per
            channel.
    """

    name: str
    train_x: NDArray[Any]
    train_y: Targets
    test_x: NDArray[Any]
    test_y: Targets
    classes: int
    tokens: int = 0
    train_group: NDArray[np.int64] | None = None
    test_group: NDArray[np.int64] | None = None
    black: float | tuple[float, ...] = 0.0
    own: bool = False
    sample_sizes: SampleSizes = UNNAMED

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Return the shape of one sample."""
        return tuple(self.train_x.shape[1:])


def digest_of(data: Dataset) -> str:
    """Return a digest of all samples and targets, and of their groups."""
    sha = hashlib.sha256()
    arrays = (
        data.train_x,
        data.test_x,
        data.train_y,
        data.test_y,
        data.train_group,
        data.test_group,
    )
    for array in arrays:
        if array is not None:
            # Type and shape, too, because equal bytes may be different arrays.
            sha.update(f"{array.dtype}{array.shape}".encode())
            sha.update(np.ascontiguousarray(array).view(np.uint8).data)
    return sha.hexdigest()


def dataset_folder(root: Path | None, name: str, holds: str) -> Path:
    """Return the folder of a data set that is not included; the folder may be missing.

    Args:
        root: folder of all data sets.
        name: name of the set.
        holds: required contents of the folder, for messages.

    Raises:
        DataError: no root is set.
    """
    if root is None:
        raise DataError(
            f"the data set {name} is not included: set SHOAL_DATA to a folder that contains"
            f" {name}/{holds}"
        )
    return root / name


def read_arrays(path: Path, names: tuple[str, ...]) -> tuple[NDArray[Any], ...]:
    """Read arrays of an npz file, in the order of the names; it must not contain Python objects.

    Raises:
        DataError: the file is missing, damaged or lacks an array.
    """
    # Opened here, because np.load does not close the file of a damaged archive.
    with (
        decoding(path, f"an archive of {', '.join(names)}"),
        path.open("rb") as file,
        np.load(file, allow_pickle=False) as stored,
    ):
        return tuple(stored[name] for name in names)


def read_packed(path: Path) -> bytes:
    """Read a file, or the file with ``.gz`` added to its name if it is missing.

    Raises:
        DataError: both are missing, or the file is damaged.
    """
    packed = path.with_name(f"{path.name}.gz")
    stored = path if path.is_file() else packed
    if not stored.is_file():
        raise DataError(f"cannot read {path} or {packed.name}: there is neither")
    with decoding(stored, "a gzip file"), open_file(stored) as file:
        return file.read()


def evenly(count: int, limit: int | None) -> NDArray[np.int64]:
    """Choose up to this many samples, evenly spread because the set may be sorted by label.

    Returns:
        Ascending indices.

    Raises:
        ConfigError: the limit is below 1.
    """
    if limit is None or limit >= count:
        return np.arange(count, dtype=np.int64)
    if limit < 1:
        raise ConfigError(f"a limit of {limit} leaves no samples; use at least 1")
    # Whole numbers, so that the choice is exact and ascending.
    return np.arange(limit, dtype=np.int64) * count // limit
