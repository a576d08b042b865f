"""Labelled samples in memory, checked once, handed out in batches of the type a model takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.data.augment import Augment
from fleet_protocol.errors import DataError

__all__ = ["DataSet", "make_dataset"]

_IMAGES = 4  # dimensions of the samples: which, channels, height, width
_CHECK_ROWS = 4096  # values are looked at in pieces, so that a check needs no second copy of the data


@dataclass(frozen=True)
class DataSet:
    """Samples with labels.

    Attributes:
        source: where they came from, for messages.
        x: raw samples ``[N, ...]``, any real type, not yet normalised.
        y: labels ``[N]``, int64, not negative; or ``[N, T]``, one per token, of which negative ones do not count.
        scale: factor of every value.
        mean: subtracted after scaling, broadcast against one sample.
        std: divides last, broadcast against one sample.
        augment: random changes to the samples of a training step; see `device_runtime.data.augment`.
        black: a black pixel among the raw samples, broadcast against one sample.

    Raises:
        DataError: the samples are no images, and are to be changed as such.
    """

    source: str
    x: NDArray[Any]
    y: NDArray[np.int64]
    scale: float
    mean: NDArray[np.float32]
    std: NDArray[np.float32]
    augment: Augment = "none"
    black: NDArray[np.float32] = field(default_factory=lambda: np.zeros((), np.float32))

    def __post_init__(self) -> None:
        if self.augment != "none" and self.x.ndim != _IMAGES:
            raise DataError(
                f'[data] augment = "{self.augment}" is for images [channels, height, width]; samples in {self.source} '
                f"have shape {list(self.x.shape[1:])}; set `shape`, or leave augment out"
            )

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, indices: NDArray[np.int64], dtype: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Some samples, ready for a graph.

        Args:
            indices: which, ``[B]``.
            dtype: ``float32`` (normalised) or ``int64`` (tokens, as they are).

        Returns:
            Samples ``[B, ...]`` and labels ``[B]`` (or ``[B, T]``), both new arrays.
        """
        rows = self.x[indices]
        values = self._normalised(rows.astype(np.float32)) if dtype == "float32" else rows.astype(np.int64)
        return values, self.y[indices]

    @property
    def normal_black(self) -> NDArray[np.float32]:
        """A black pixel as it is in a batch, bit by bit, float32 that broadcasts against one sample."""
        shape = (self.x.shape[1], *[1] * (self.x.ndim - 2))
        return self._normalised(np.broadcast_to(self.black, shape).copy())

    def _normalised(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scale and shift in place."""
        if self.scale != 1:
            values *= np.float32(self.scale)
        if self.mean.any():
            values -= self.mean
        if (self.std != 1).any():
            values /= self.std
        return values

    def check(self, shape: Sequence[int], dtype: str, classes: int, label_shape: Sequence[int] = ()) -> None:
        """See that a model can take these samples.

        Args:
            shape: of one sample.
            dtype: ``float32`` or ``int64``.
            classes: number of labels of the model.
            label_shape: of the labels of one sample: empty, or ``(T,)`` for a label per token.

        Raises:
            DataError: another shape, labels the model does not have, or values that are no tokens.
        """
        if tuple(shape) != self.x.shape[1:]:
            raise DataError(
                f"samples in {self.source} have shape {list(self.x.shape[1:])}, the model takes {list(shape)}; "
                "set `shape` (or `size`) in [data], or give the model other settings"
            )
        if tuple(label_shape) != self.y.shape[1:]:
            raise DataError(
                f"labels in {self.source} have shape {list(self.y.shape[1:])} per sample, the model takes "
                f"{list(label_shape)}; {'give one label per token' if label_shape else 'give one label per sample'}"
            )
        check_labels(self.source, self.y, classes)
        if dtype == "int64" and not np.issubdtype(self.x.dtype, np.integer):
            raise DataError(f"samples in {self.source} are {self.x.dtype}, the model takes integer tokens")
        if dtype == "int64" and self.augment != "none":
            raise DataError(
                f'the model takes tokens, but [data] augment = "{self.augment}" is for images; leave it out'
            )


def check_labels(source: str, y: NDArray[np.int64], classes: int) -> None:
    """See that labels lie in ``[0, classes)``; with a label per token, negative ones are allowed and do not count.

    Raises:
        DataError: the first label outside, with its position.
    """
    wrong = np.argwhere((y >= classes) | ((y < 0) & (y.ndim == 1)))
    if len(wrong):
        raise DataError(
            f"label {int(y[tuple(wrong[0])])} of sample {int(wrong[0][0])} in {source} is outside 0 to {classes - 1} "
            f"({len(wrong)} such labels)"
        )


def _check_finite(source: str, x: NDArray[Any]) -> None:
    if not np.issubdtype(x.dtype, np.floating):
        return
    for start in range(0, len(x), _CHECK_ROWS):
        piece = np.isfinite(x[start : start + _CHECK_ROWS])
        if not piece.all():
            row = start + int(np.argwhere(~piece)[0][0])
            raise DataError(f"sample {row} in {source} has a value that is not finite; clean the data")


def _per_channel(source: str, key: str, value: float | Sequence[float], shape: Sequence[int]) -> NDArray[np.float32]:
    array = np.asarray(value, np.float32)
    if array.ndim == 0:
        return array
    if not shape or len(array) != shape[0]:
        raise DataError(f"[data] {key} has {len(array)} values, samples in {source} have {list(shape)[:1]} channels")
    return array.reshape(-1, *[1] * (len(shape) - 1))


def make_dataset(
    source: str,
    x: NDArray[Any],
    y: NDArray[Any],
    *,
    shape: Sequence[int] | None = None,
    scale: float = 1.0,
    mean: float | Sequence[float] = 0.0,
    std: float | Sequence[float] = 1.0,
    classes: int | None = None,
    augment: Augment = "none",
    black: float | Sequence[float] = 0.0,
) -> DataSet:
    """Check what a source delivered.

    Args:
        source: path, for messages.
        x: samples ``[N, ...]``.
        y: labels ``[N]``, or ``[N, T]`` with one per token, whole numbers.
        shape: shape to give to a sample.
        scale: factor of every value.
        mean: subtracted after scaling; a number or one per channel.
        std: divides last; a number or one per channel.
        classes: number of labels, where it is known.
        augment: random changes to the samples of a training step.
        black: a black pixel among the raw samples; a number or one per channel.

    Raises:
        DataError: empty, lengths that differ, wrong types, labels outside their range, values that are not finite, or
            no images where images are to be changed.
    """
    if x.ndim < 1 or y.ndim not in (1, 2):
        raise DataError(
            f"{source} holds samples of shape {list(x.shape)} and labels of shape {list(y.shape)}; "
            "expected [N, ...] and [N] (or [N, T], a label per token)"
        )
    if len(x) != len(y):
        raise DataError(f"{source} holds {len(x)} samples but {len(y)} labels")
    if not len(y):
        raise DataError(f"{source} is empty: it holds no sample to train on")
    real = np.issubdtype(x.dtype, np.integer) or np.issubdtype(x.dtype, np.floating) or x.dtype == np.bool_
    if not real or x.dtype.itemsize > 8:
        raise DataError(f"samples in {source} are {x.dtype}; expected real numbers")
    if not np.issubdtype(y.dtype, np.integer) and not (
        np.issubdtype(y.dtype, np.floating) and bool((y == np.floor(y)).all())
    ):
        raise DataError(f"labels in {source} are {y.dtype}; expected whole numbers from 0")
    if shape is not None:
        if math.prod(x.shape[1:]) != math.prod(shape):
            raise DataError(
                f"samples in {source} have shape {list(x.shape[1:])}, which cannot become `shape` {list(shape)}"
            )
        x = x.reshape(len(x), *shape)
    labels = y.astype(np.int64)
    check_labels(source, labels, classes if classes is not None else int(np.iinfo(np.int64).max))
    _check_finite(source, x)
    return DataSet(
        source=source,
        x=x,
        y=labels,
        scale=scale,
        mean=_per_channel(source, "mean", mean, x.shape[1:]),
        std=_per_channel(source, "std", std, x.shape[1:]),
        augment=augment,
        black=_per_channel(source, "black", black, x.shape[1:]),
    )
