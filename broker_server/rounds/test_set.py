"""The server's test set: an npz file or two IDX files, checked once, handed out in normalised batches."""

from __future__ import annotations

import gzip
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker_server.settings.fleet import IdxTestSet, NpzTestSet
from fleet_protocol.errors import DataError
from fleet_protocol.manifest import Manifest
from fleet_protocol.targets import Targets, counted, fit_targets

__all__ = ["TestSet", "load_test_set"]

_IDX_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class TestSet:
    """Labelled samples.

    Attributes:
        x: raw samples ``[N, *input_shape]``.
        y: targets ``[N, ...]`` as the model's loss takes them; of several labels negative ones do not count.
        input_dtype: what the model takes, ``float32`` or ``int64``.
        scale: factor of every value.
        mean: subtracted after scaling, broadcast against a sample.
        std: divides last, broadcast against a sample.
    """

    __test__ = False  # the name looks like a test to pytest

    x: NDArray[Any]
    y: Targets
    input_dtype: str
    scale: float
    mean: NDArray[np.float32]
    std: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.y)

    def batches(self, size: int) -> Iterator[tuple[NDArray[Any], Targets]]:
        """Normalised batches in order.

        Args:
            size: samples per batch; the last may be smaller.

        Yields:
            Samples, float32 or int64, and labels.
        """
        for first in range(0, len(self), size):
            yield self.take(slice(first, first + size))

    def take(self, chosen: slice | NDArray[np.int64]) -> tuple[NDArray[Any], Targets]:
        """Some samples, normalised.

        Args:
            chosen: which.

        Returns:
            Samples, float32 or int64, and labels.
        """
        rows, labels = self.x[chosen], self.y[chosen]
        if self.input_dtype == "int64":
            return rows.astype(np.int64), labels
        return (rows.astype(np.float32) * np.float32(self.scale) - self.mean) / self.std, labels


def _read_idx(path: Path) -> NDArray[Any]:
    data = _bytes(path)
    try:
        zeros, code, dimensions = struct.unpack_from(">HBB", data)
        dtype = np.dtype(_IDX_DTYPES[code])
        shape = struct.unpack_from(f">{dimensions}I", data, 4)
    except (struct.error, KeyError) as error:
        raise DataError(f"{path} is not an IDX file: {error!r}") from error
    body = data[4 + 4 * dimensions :]
    if zeros or len(body) != math.prod(shape) * dtype.itemsize:
        raise DataError(f"{path} is truncated or not an IDX file: {len(body)} bytes for shape {list(shape)}")
    return np.frombuffer(body, dtype).reshape(shape)


def _bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data[:2] == _GZIP else data
    except (OSError, EOFError) as error:
        raise DataError(f"cannot read the test set {path}: {getattr(error, 'strerror', None) or error}") from error


def _read_npz(config: NpzTestSet) -> tuple[NDArray[Any], NDArray[Any]]:
    try:
        with np.load(config.path, allow_pickle=False) as file:
            missing = [key for key in (config.x_key, config.y_key) if key not in file]
            if missing:
                raise DataError(f"{config.path} has no array {missing[0]!r}; it has {', '.join(file.files) or 'none'}")
            return np.asarray(file[config.x_key]), np.asarray(file[config.y_key])
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"cannot read the test set {config.path}: {error}") from error


def _per_channel(value: float | tuple[float, ...], manifest: Manifest, key: str) -> NDArray[np.float32]:
    array = np.asarray(value, np.float32)
    if array.ndim == 0:
        return array
    if array.size != manifest.input_shape[0]:
        raise DataError(f"evaluation.data.{key} has {array.size} values, a sample {manifest.input_shape[0]} channels")
    return array.reshape(-1, *[1] * (len(manifest.input_shape) - 1))


def load_test_set(config: NpzTestSet | IdxTestSet, manifest: Manifest) -> TestSet:
    """Read a test set.

    Args:
        config: what to read.
        manifest: of the tier that shall be judged by it.

    Raises:
        DataError: a file or array is missing, damaged or empty, or does not fit the model.
    """
    if isinstance(config, NpzTestSet):
        x, y = _read_npz(config)
    else:
        x, y = _read_idx(config.path), _read_idx(config.labels)
    if not len(y) or len(x) != len(y):
        raise DataError(f"{config.path}: {len(x)} samples and labels of shape {list(y.shape)}; a label each is needed")
    if config.limit is not None:
        x, y = x[: config.limit], y[: config.limit]
    shape = config.shape or manifest.input_shape
    if tuple(shape) != manifest.input_shape or x[0].size != math.prod(manifest.input_shape):
        raise DataError(
            f"{config.path}: a sample has shape {list(x.shape[1:])}, {manifest.arch} takes {list(manifest.input_shape)}"
        )
    if y.dtype.kind not in "biuf" or not np.isfinite(y).all():
        raise DataError(f"{config.path}: labels are {y.dtype}; they must be whole numbers from 0, or finite numbers")
    whole = y.dtype.kind != "f" or bool((y == np.floor(y)).all())
    targets = fit_targets(str(config.path), y.astype(np.int64) if whole else y.astype(np.float32), manifest)
    if not counted(targets):
        raise DataError(f"{config.path}: every label is negative, so none counts")
    return TestSet(
        x=x.reshape(len(x), *manifest.input_shape),
        y=targets,
        input_dtype=manifest.input_dtype,
        scale=config.scale,
        mean=_per_channel(config.mean, manifest, "mean"),
        std=_per_channel(config.std, manifest, "std"),
    )
