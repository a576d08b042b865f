"""The samples of virtual devices: arrays on disk that workers map into memory.

    <folder>/     train_x.npy, train_y.npy, black.npy and test.npz
    parts.npz     indices of every device's training and test samples

Workers read these and nothing of the exporter, so that they start quickly and stay small.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.blob_store import replacing
from fleet_protocol.data import DataSet
from fleet_protocol.errors import DataError
from simulation.data.dataset import Dataset

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Parts:
    """Which samples each device holds: indices, by device.

    Its test samples are like its training samples.
    """

    train: tuple[Indices, ...]
    test: tuple[Indices, ...]

    def save(self, path: Path) -> None:
        """Write them to an npz file, atomically."""
        arrays: dict[str, Any] = {}
        for name, held in (("train", self.train), ("test", self.test)):
            arrays[f"{name}_index"] = np.concatenate(held)
            arrays[f"{name}_offset"] = np.cumsum([0, *map(len, held)])
        with replacing(path) as file:
            np.savez(file, **arrays)

    @staticmethod
    def load(path: Path) -> "Parts":
        """Read what `save` wrote; a DataError where the file is missing or damaged."""
        try:
            with np.load(path, allow_pickle=False) as file:
                train = _split(file["train_index"], file["train_offset"])
                test = _split(file["test_index"], file["test_offset"])
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise DataError(
                f"cannot read {path}: {error}; remove it and start the simulation again"
            ) from error
        return Parts(train, test)


def _split(indices: Indices, offsets: Indices) -> tuple[Indices, ...]:
    return tuple(np.split(indices, offsets[1:-1]))


class VirtualData:
    """The samples of every virtual device, read from one mapped file."""

    def __init__(
        self,
        folder: Path,
        parts: Path,
        augment: Sequence[str] = (),
        tasks: Sequence[Sequence[int] | None] = (),
    ) -> None:
        """Open the files.

        Args:
            folder: with the arrays of `write_data`.
            parts: the file of `Parts.save`.
            augment: augmentations of the training samples.
            tasks: dealt to the devices in turn: what each label of the set is to a device, -1 for
                none of its own; None where it is itself.

        Raises:
            DataError: a file is missing or damaged.
        """
        try:
            self._x: NDArray[Any] = np.load(
                folder / "train_x.npy", mmap_mode="r", allow_pickle=False
            )
            self._y: NDArray[np.int64] = np.load(
                folder / "train_y.npy", mmap_mode="r", allow_pickle=False
            )
            black = np.load(folder / "black.npy", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(
                f"cannot read the samples in {folder}: {error}; remove the folder"
            ) from error
        self._parts = Parts.load(parts)
        self._folder = folder
        self._test: tuple[NDArray[Any], NDArray[np.int64]] | None = None
        self._augment = augment
        self._tasks = [None if labels is None else np.array(labels, np.int64) for labels in tasks]
        self._black: NDArray[np.float32] = (
            black.reshape(-1, *[1] * (self._x.ndim - 2)) if black.ndim else black
        )

    def examples(self, index: int) -> int:
        """Return the number of training samples of a device."""
        return len(self._parts.train[index])

    def of(self, index: int) -> DataSet:
        """Return the training samples of a device, copied out of the file."""
        chosen = self._parts.train[index]
        return self._dataset(index, self._x[chosen], np.asarray(self._y[chosen]))

    def with_test(self, index: int) -> tuple[DataSet, tuple[Indices, Indices]]:
        """Return the training samples of a device, followed by its part of the test set.

        Returns:
            The samples, and the indices of the two parts in them.

        Raises:
            DataError: the test set cannot be read.
        """
        test_x, test_y = self._test_set()
        train = self._parts.train[index]
        test = self._parts.test[index]
        x = np.concatenate([self._x[train], test_x[test]])
        y = np.concatenate([self._y[train], test_y[test]])
        count = len(train)
        indices = (np.arange(count), np.arange(count, count + len(test)))
        return self._dataset(index, x, y), indices

    def _test_set(self) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the test set, which is read when the first device needs it."""
        if self._test is None:
            try:
                with np.load(self._folder / "test.npz", allow_pickle=False) as file:
                    self._test = file["x"], file["y"]
            except (OSError, ValueError, KeyError, EOFError) as error:
                raise DataError(
                    f"cannot read the test set in {self._folder}: {error}; remove the folder"
                ) from error
        return self._test

    def _dataset(self, index: int, x: NDArray[Any], y: NDArray[np.int64]) -> DataSet:
        task = self._tasks[index % len(self._tasks)] if self._tasks else None
        if task is not None:
            y = _as_task(task, y, f"{self._folder}, device {index}")
        return DataSet(
            source=f"{self._folder}, device {index}",
            x=x,
            y=y,
            scale=1.0,
            mean=np.zeros((), np.float32),
            std=np.ones((), np.float32),
            augment=tuple(self._augment),
            black=self._black,
        )


def write_data(folder: Path, data: Dataset) -> None:
    """Write the arrays that `VirtualData` reads, unless they are there.

    Raises:
        StorageError: the disk is full.
    """
    # The first and the last that are written.
    if (folder / "black.npy").is_file() and (folder / "test.npz").is_file():
        return
    arrays = {
        "black": np.asarray(data.black, np.float32),
        "train_x": data.train_x,
        "train_y": data.train_y,
    }
    for name, array in arrays.items():
        # Written to the file, since an array may be too large to be held as bytes once more.
        with replacing(folder / f"{name}.npy") as file:
            np.save(file, array)
    with replacing(folder / "test.npz") as file:
        np.savez(file, x=data.test_x, y=data.test_y)


def _as_task(task: NDArray[np.int64], y: NDArray[np.int64], source: str) -> NDArray[np.int64]:
    if len(y) and y.max() >= len(task):
        raise DataError(
            f"{source} has the label {y.max()}, and the task's labels end at {len(task) - 1}"
        )
    labels = task[y]
    if len(labels) and labels.min() < 0:
        raise DataError(
            f"{source} has the label {y[labels.argmin()]}, which its task leaves out; deal it other"
            " samples"
        )
    return labels
