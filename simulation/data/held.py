"""The samples of virtual devices: arrays on disk that workers map into memory, and who holds which
of them.

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
    """Who holds which samples: indices by device, of test samples those that are like its training
    samples.
    """

    train: tuple[Indices, ...]
    test: tuple[Indices, ...]

    def save(self, path: Path) -> None:
        """Write them to an npz file, atomically."""
        arrays: dict[str, Any] = {
            f"{name}_{what}": value
            for name, parts in (("train", self.train), ("test", self.test))
            for what, value in (
                ("index", np.concatenate(parts)),
                ("offset", np.cumsum([0, *map(len, parts)])),
            )
        }
        with replacing(path) as file:
            np.savez(file, **arrays)

    @staticmethod
    def load(path: Path) -> "Parts":
        """Read what `save` wrote; a DataError where the file is missing or damaged."""
        try:
            with np.load(path, allow_pickle=False) as file:
                pieces = {  # every access to a file reads the array anew
                    name: tuple(np.split(file[f"{name}_index"], file[f"{name}_offset"][1:-1]))
                    for name in ("train", "test")
                }
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise DataError(
                f"cannot read {path}: {error}; remove it and start the simulation again"
            ) from error
        return Parts(**pieces)


class VirtualData:
    """The samples of every virtual device, read from one mapped file.

    The tasks, dealt in turn, are what each label is to the devices; None where it is itself.

    Raises:
        DataError: a file is missing or damaged.
    """

    def __init__(
        self,
        folder: Path,
        parts: Path,
        augment: Sequence[str] = (),
        tasks: Sequence[Sequence[int] | None] = (),
    ) -> None:
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
        """Number of training samples of a device."""
        return len(self._parts.train[index])

    def of(self, index: int) -> DataSet:
        """The training samples of a device, copied out of the file."""
        chosen = self._parts.train[index]
        return self._dataset(index, self._x[chosen], np.asarray(self._y[chosen]))

    def with_test(self, index: int) -> tuple[DataSet, tuple[Indices, Indices]]:
        """The training samples of a device followed by its own part of the test set, and the
        indices of the two.

        Raises:
            DataError: the test set cannot be read.
        """
        if self._test is None:
            try:
                with np.load(self._folder / "test.npz", allow_pickle=False) as file:
                    self._test = file["x"], file["y"]
            except (OSError, ValueError, KeyError, EOFError) as error:
                raise DataError(
                    f"cannot read the test set in {self._folder}: {error}; remove the folder"
                ) from error
        train = self._parts.train[index]
        test = self._parts.test[index]
        x = np.concatenate([self._x[train], self._test[0][test]])
        y = np.concatenate([self._y[train], self._test[1][test]])
        count = len(train)
        return self._dataset(index, x, y), (
            np.arange(count),
            np.arange(count, count + len(test)),
        )

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

    A StorageError where the disk is full.
    """
    if all(
        (folder / name).is_file() for name in ("black.npy", "test.npz")
    ):  # the first and the last
        return
    arrays = {
        "black": np.asarray(data.black, np.float32),
        "train_x": data.train_x,
        "train_y": data.train_y,
    }
    for (
        name,
        array,
    ) in arrays.items():  # which may be too large to be held as bytes once more
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
            f"{source} has the label {y[labels.argmin()]}, which its task leaves out; deal it other samples"
        )
    return labels
