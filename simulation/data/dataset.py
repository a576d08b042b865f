"""A loaded data set, and functions that the loaders share."""

import gzip
import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import ConfigError, DataError
from fleet_protocol.manifest import NO_PARTS, Parts
from fleet_protocol.targets import Targets


@dataclass(frozen=True)
class Dataset:
    """A data set with a label for each sample or each token, ready to train on.

    Attributes:
        name: as asked for.
        train_x: samples, float32 [n, *shape], or token ids, int64 [n, length]; id 0 is padding
            where texts differ in length.
        train_y: labels, int64 [n], or [n, length] with a label for each token; or numbers, float32
            [n, ...].
        test_x: samples, [m, *shape].
        test_y: the same of the test samples.
        classes: number of labels.
        tokens: number of token ids, the size of a model's embedding; 0 for what is no text.
        train_group: who recorded or holds each training sample, int64 [n], 0-based; None if nobody
            in particular.
        test_group: the same for the test samples, int64 [m].
        own: whether the user has brought it, and it is no set by name.
        parts: as of a `DataSet`.
        black: of images, what a black pixel is among the samples; a number, or one per channel.
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
    parts: Parts = NO_PARTS

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
            sha.update(f"{array.dtype}{array.shape}".encode())
            sha.update(np.ascontiguousarray(array).view(np.uint8).data)
    return sha.hexdigest()


def dataset_folder(root: Path | None, name: str, holds: str) -> Path:
    """Return the folder of a data set that is not shipped, which need not exist.

    Args:
        root: folder of all data sets.
        name: of the set.
        holds: what the folder must hold, for messages.

    Raises:
        DataError: there is no root.
    """
    if root is None:
        raise DataError(
            f"{name} is not shipped: set SHOAL_DATA to a folder that holds {name}/{holds}"
        )
    return root / name


def read_arrays(path: Path, names: tuple[str, ...]) -> tuple[NDArray[Any], ...]:
    """Read arrays of an npz file, in the order of the names; it may hold no Python objects.

    Raises:
        DataError: the file is missing, damaged or lacks an array.
    """
    try:
        # Opened here, because np.load leaves the file of a damaged archive open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return tuple(stored[name] for name in names)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot read {', '.join(names)} from {path}: {error}") from error


def read_packed(path: Path) -> bytes:
    """Read a file, or the one of its name with ``.gz`` where it is not there.

    Raises:
        DataError: both are missing, or what is there is damaged.
    """
    packed = path.with_name(f"{path.name}.gz")
    try:
        if path.is_file():
            return path.read_bytes()
        return gzip.decompress(packed.read_bytes())
    except (OSError, EOFError) as error:
        raise DataError(f"cannot read {path} or {packed.name}: {error}") from error


def evenly(count: int, limit: int | None) -> NDArray[np.int64]:
    """Choose at most so many samples, evenly spread over a set that may be sorted by label.

    Returns:
        Ascending indices.

    Raises:
        ConfigError: the limit is below 1.
    """
    if limit is None or limit >= count:
        return np.arange(count, dtype=np.int64)
    if limit < 1:
        raise ConfigError(f"a limit of {limit} leaves no samples; choose at least 1")
    return np.arange(limit, dtype=np.int64) * count // limit
