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
Array = NDArray[Any]


@dataclass(frozen=True)
class SampleSplit:
    """Which samples each device holds: indices, by device.

    Its test samples are like its training samples.
    """

    train: tuple[Indices, ...]
    test: tuple[Indices, ...]

    def save(self, path: Path) -> None:
        """Write them to an npz file, atomically."""
        arrays: dict[str, Any] = {}
        for name, by_device in (("train", self.train), ("test", self.test)):
            sizes = map(len, by_device)
            arrays[f"{name}_index"] = np.concatenate(by_device)
            arrays[f"{name}_offset"] = np.cumsum([0, *sizes])
        with replacing(path) as file:
            np.savez(file, **arrays)

    @staticmethod
    def load(path: Path) -> "SampleSplit":
        """Read what `save` wrote; a DataError where the file is missing or damaged."""
        try:
            with np.load(path, allow_pickle=False) as file:
                train = _split(file["train_index"], file["train_offset"])
                test = _split(file["test_index"], file["test_offset"])
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise DataError(
                f"cannot read {path}: {error}; remove it and start the simulation again"
            ) from error
        return SampleSplit(train, test)


def _split(indices: Indices, offsets: Indices) -> tuple[Indices, ...]:
    return tuple(np.split(indices, offsets[1:-1]))


class VirtualData:
    """The samples of every virtual device, read from one mapped file."""

    def __init__(
        self,
        folder: Path,
        split: Path,
        augment: Sequence[str] = (),
        tasks: Sequence[Sequence[int] | None] = (),
    ) -> None:
        """Open the files.

        Args:
            folder: with the arrays of `write_data`.
            split: the file of `SampleSplit.save`.
            augment: augmentations of the training samples.
            tasks: dealt to the devices in turn: what each label of the set is to a device, -1 for
                none of its own; None where it is itself.

        Raises:
            DataError: a file is missing or damaged.
        """
        try:
            self._x = _map(folder / "train_x.npy")
            self._y = _map(folder / "train_y.npy")
            black = np.load(folder / "black.npy", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(
                f"cannot read the samples in {folder}: {error}; remove the folder"
            ) from error
        self._split = SampleSplit.load(split)
        self._folder = folder
        self._test: tuple[Array, Indices] | None = None
        self._augment = augment
        self._tasks: list[Indices | None] = []
        for labels in tasks:
            self._tasks.append(None if labels is None else np.array(labels, np.int64))
        # A number for each channel spreads over the pixels of an image.
        if black.ndim:
            pixels = [1] * (self._x.ndim - 2)
            black = black.reshape(-1, *pixels)
        self._black: NDArray[np.float32] = black

    def examples(self, index: int) -> int:
        """Return the number of training samples of a device."""
        return len(self._split.train[index])

    def of(self, index: int) -> DataSet:
        """Return the training samples of a device, copied out of the file."""
        chosen = self._split.train[index]
        x = self._x[chosen]
        y = np.asarray(self._y[chosen])
        return self._dataset(index, x, y)

    def with_test(self, index: int) -> tuple[DataSet, tuple[Indices, Indices]]:
        """Return the training samples of a device, followed by its part of the test set.

        Returns:
            The samples, and the places of both kinds in them.

        Raises:
            DataError: the test set cannot be read.
        """
        test_x, test_y = self._test_set()
        train = self._split.train[index]
        test = self._split.test[index]
        # Copied out of the files: a worker changes no sample that others read.
        x = np.concatenate([self._x[train], test_x[test]])
        y = np.concatenate([self._y[train], test_y[test]])
        train_count = len(train)
        train_places = np.arange(train_count)
        test_places = np.arange(train_count, train_count + len(test))
        return self._dataset(index, x, y), (train_places, test_places)

    def _test_set(self) -> tuple[Array, Indices]:
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

    def _dataset(self, index: int, x: Array, y: Indices) -> DataSet:
        source = f"{self._folder}, device {index}"
        task = None
        if self._tasks:
            task = self._tasks[index % len(self._tasks)]
        if task is not None:
            y = _as_task(task, y, source)
        return DataSet(
            source=source,
            x=x,
            y=y,
            scale=1.0,
            mean=np.zeros((), np.float32),
            std=np.ones((), np.float32),
            augment=tuple(self._augment),
            black=self._black,
        )


def _map(path: Path) -> Array:
    """Return the array of a file, which is read where it is used."""
    mapped: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    return mapped


def write_data(folder: Path, data: Dataset) -> None:
    """Write the arrays that `VirtualData` reads, unless they are there.

    Raises:
        StorageError: the disk is full.
    """
    # The first and the last that are written.
    first = folder / "black.npy"
    last = folder / "test.npz"
    if first.is_file() and last.is_file():
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


def _as_task(task: Indices, y: Indices, source: str) -> Indices:
    """Return what labels are to a device with a task of its own.

    Args:
        task: what each label of the data set is to the device; -1 for none of its own.
        y: labels of the data set.
        source: of the samples, for messages.

    Raises:
        DataError: a label is not one of the task's.
    """
    if not len(y):
        return task[y]
    largest = y.max()
    if largest >= len(task):
        raise DataError(
            f"{source} has the label {largest}, and the task's labels end at {len(task) - 1}"
        )
    labels = task[y]
    smallest_place = labels.argmin()
    if labels[smallest_place] < 0:
        raise DataError(
            f"{source} has the label {y[smallest_place]}, which its task leaves out; deal it other"
            " samples"
        )
    return labels
