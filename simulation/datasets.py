"""Data sets by name: digits ships with scikit-learn; the others are read from the folder that SHOAL_DATA names."""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import ConfigError, DataError

__all__ = ["DATASETS", "Dataset", "load_dataset", "read_idx"]

_IDX_TYPES = {0x08: np.dtype(np.uint8), 0x0D: np.dtype(">f4")}
_MNIST_MEAN, _MNIST_STD = 0.1307, 0.3081  # METHODS 1.8
_DIGITS_TEST_SHARE = 0.2


@dataclass(frozen=True)
class Dataset:
    """A classification data set, ready to train on.

    Attributes:
        name: as asked for.
        train_x: samples, float32 [n, *shape].
        train_y: labels, int64 [n].
        test_x: samples, float32 [m, *shape].
        test_y: labels, int64 [m].
        classes: number of labels.
    """

    name: str
    train_x: NDArray[np.float32]
    train_y: NDArray[np.int64]
    test_x: NDArray[np.float32]
    test_y: NDArray[np.int64]
    classes: int

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.train_x.shape[1:])


def read_idx(path: Path) -> NDArray[Any]:
    """Read an IDX file, gzipped or not.

    Args:
        path: the file.

    Returns:
        The array, with the shape the file declares.

    Raises:
        DataError: the file is missing, truncated or no IDX file.
    """
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _IDX_TYPES:
        raise DataError(f"{path} is not an IDX file")
    dtype, dimensions = _IDX_TYPES[raw[2]], raw[3]
    shape = struct.unpack(f">{dimensions}I", raw[4 : 4 + 4 * dimensions])
    body = raw[4 + 4 * dimensions :]
    if len(body) != int(np.prod(shape)) * dtype.itemsize:
        raise DataError(f"{path} is truncated: {len(body)} bytes of data for shape {shape}")
    return np.frombuffer(body, dtype).reshape(shape)


def _digits(_root: Path | None) -> Dataset:
    from sklearn.datasets import load_digits  # noqa: PLC0415  (seconds to import, needed for this set alone)

    bunch: Any = load_digits()
    images = (bunch.images[:, None] / 16.0).astype(np.float32)
    labels = bunch.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    cut = int(len(labels) * _DIGITS_TEST_SHARE)
    test, train = order[:cut], order[cut:]
    return Dataset("digits", images[train], labels[train], images[test], labels[test], 10)


def _mnist(root: Path | None) -> Dataset:
    if root is None:
        raise DataError(
            "MNIST is not shipped: set SHOAL_DATA to a folder that holds mnist/train-images-idx3-ubyte.gz, "
            "train-labels-idx1-ubyte.gz and the two t10k files"
        )
    folder = root / "mnist"

    def images(stem: str) -> NDArray[np.float32]:
        raw = read_idx(folder / f"{stem}-images-idx3-ubyte.gz").astype(np.float32)[:, None]
        return np.asarray((raw / 255.0 - _MNIST_MEAN) / _MNIST_STD, np.float32)

    def labels(stem: str) -> NDArray[np.int64]:
        return read_idx(folder / f"{stem}-labels-idx1-ubyte.gz").astype(np.int64)

    return Dataset("mnist", images("train"), labels("train"), images("t10k"), labels("t10k"), 10)


DATASETS: Mapping[str, Callable[[Path | None], Dataset]] = MappingProxyType({"digits": _digits, "mnist": _mnist})


def load_dataset(name: str, root: Path | None = None) -> Dataset:
    """Load a data set.

    Args:
        name: one of :data:`DATASETS`.
        root: folder of the data sets that are not shipped; by default what SHOAL_DATA names.

    Raises:
        ConfigError: there is no set of this name.
        DataError: its files are missing or damaged.
    """
    if name not in DATASETS:
        raise ConfigError(f"no data set {name!r}; there are {', '.join(DATASETS)}")
    if root is None and os.environ.get("SHOAL_DATA"):
        root = Path(os.environ["SHOAL_DATA"])
    return DATASETS[name](root)
