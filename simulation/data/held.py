"""The samples of virtual devices: arrays on disk that workers map into memory.

    <folder>/     train_x.npy, train_y.npy, black.npy and test.npz
    parts.npz     indices of every device's training and test samples

Workers read only these files and do not import the exporter, so they start quickly and stay small.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.blob_store import replacing
from fleet_protocol.data import DataSet
from fleet_protocol.data.files import decoding
from fleet_protocol.errors import DataError
from simulation.data.dataset import Dataset

Indices = NDArray[np.int64]
Array = NDArray[Any]

_REMEDY = "remove it, and the simulation writes it again"


@dataclass(frozen=True)
class SampleSplit:
    """The samples of each device, as indices.

    A device's test samples are distributed like its training samples.
    """

    train: tuple[Indices, ...]
    test: tuple[Indices, ...]

    def save(self, path: Path) -> None:
        """Write them to an npz file, atomically."""
        arrays: dict[str, Any] = {}
        for name, by_device in (("train", self.train), ("test", self.test)):
            sizes = map(len, by_device)
            # All devices in one array with offsets: one entry for each device would make thousands
            # of members.
            arrays[f"{name}_index"] = np.concatenate(by_device)
            arrays[f"{name}_offset"] = np.cumsum([0, *sizes])
        with replacing(path) as file:
            np.savez(file, **arrays)

    @staticmethod
    def load(path: Path) -> "SampleSplit":
        """Read a file of `save`; raises a DataError if it is missing or damaged."""
        with (
            decoding(path, "a split of samples", "remove it and start the simulation again"),
            path.open("rb") as opened,
            np.load(opened, allow_pickle=False) as file,
        ):
            train = _split(file["train_index"], file["train_offset"])
            test = _split(file["test_index"], file["test_offset"])
        return SampleSplit(train, test)


def _split(indices: Indices, offsets: Indices) -> tuple[Indices, ...]:
    # The first offset is 0 and the last is the end; only those between cut.
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
            folder: folder with the arrays of `write_data`.
            split: the file of `SampleSplit.save`.
            augment: augmentations of the training samples.
            tasks: assigned to the devices in turn: the device's label for each label of the set, -1
                for none; None if labels are unchanged.

        Raises:
            DataError: a file is missing or damaged.
        """
        with decoding(folder, "a folder of samples", _REMEDY):
            self._x = _map(folder / "train_x.npy")
            self._y = _map(folder / "train_y.npy")
            # Small, so it is read and not kept mapped.
            black = np.array(_map(folder / "black.npy"))
        self._split = SampleSplit.load(split)
        self._folder = folder
        self._test: tuple[Array, Indices] | None = None
        self._augment = augment
        self._tasks: list[Indices | None] = []
        for labels in tasks:
            self._tasks.append(None if labels is None else np.array(labels, np.int64))
        # One number per channel broadcasts over the pixels of an image.
        if black.ndim:
            pixels = [1] * (self._x.ndim - 2)
            black = black.reshape(-1, *pixels)
        self._black: NDArray[np.float32] = black

    def examples(self, index: int) -> int:
        """Return the number of training samples of a device."""
        return len(self._split.train[index])

    def samples_of(self, index: int) -> DataSet:
        """Return a copy of the training samples of a device."""
        chosen = self._split.train[index]
        # Only the rows of one device are read from the mapped file.
        x = self._x[chosen]
        y = np.asarray(self._y[chosen])
        return self._dataset(index, x, y)

    def with_test(self, index: int) -> tuple[DataSet, tuple[Indices, Indices]]:
        """Return the training samples of a device, followed by its part of the test set.

        Returns:
            The samples, and the indices of both kinds in them.

        Raises:
            DataError: the test set cannot be read.
        """
        test_x, test_y = self._test_set()
        train = self._split.train[index]
        test = self._split.test[index]
        # Copied, so that a worker does not change samples that others read.
        x = np.concatenate([self._x[train], test_x[test]])
        y = np.concatenate([self._y[train], test_y[test]])
        train_count = len(train)
        train_places = np.arange(train_count)
        test_places = np.arange(train_count, train_count + len(test))
        return self._dataset(index, x, y), (train_places, test_places)

    def _test_set(self) -> tuple[Array, Indices]:
        """Return the test set, which is read on first use."""
        if self._test is None:
            path = self._folder / "test.npz"
            with (
                decoding(path, "a test set", _REMEDY),
                path.open("rb") as opened,
                np.load(opened, allow_pickle=False) as file,
            ):
                self._test = file["x"], file["y"]
        return self._test

    def _dataset(self, index: int, x: Array, y: Indices) -> DataSet:
        source = f"{self._folder}, device {index}"
        task = None
        if self._tasks:
            # Tasks are assigned in turn, like personal models.
            task = self._tasks[index % len(self._tasks)]
        if task is not None:
            y = _as_task(task, y, source)
        return DataSet(
            source=source,
            x=x,
            y=y,
            # The samples were normalised when the set was read.
            scale=1.0,
            mean=np.zeros((), np.float32),
            std=np.ones((), np.float32),
            augment=tuple(self._augment),
            black=self._black,
        )


def _map(path: Path) -> Array:
    """Return the memory-mapped array of a file."""
    # Not np.load, which leaves a damaged file open.
    return np.lib.format.open_memmap(path, mode="r")


def write_data(folder: Path, data: Dataset) -> None:
    """Write the arrays that `VirtualData` reads, unless they exist.

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
        # Written directly to the file, because a large array may not fit into memory twice.
        with replacing(folder / f"{name}.npy") as file:
            np.save(file, array)
    with replacing(folder / "test.npz") as file:
        np.savez(file, x=data.test_x, y=data.test_y)


def _as_task(task: Indices, y: Indices, source: str) -> Indices:
    """Return the labels of a device with its own task.

    Args:
        task: the device's label for each label of the data set; -1 for none.
        y: labels of the data set.
        source: source of the samples, for messages.

    Raises:
        DataError: a label does not belong to the task.
    """
    # A device without samples has no label to check.
    if not len(y):
        return task[y]
    largest = y.max()
    if largest >= len(task):
        raise DataError(
            f"{source} has the label {largest}, but the largest label of the task is"
            f" {len(task) - 1}"
        )
    labels = task[y]
    smallest_place = labels.argmin()
    if labels[smallest_place] < 0:
        raise DataError(
            f"{source} has the label {y[smallest_place]}, which the device's task excludes;"
            " assign other samples to it"
        )
    return labels
