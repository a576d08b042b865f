"""What stands on disk before a simulation starts: exported graphs, initial weights, data, and who holds which samples.

    <cache>/artifacts/<key>/     see `simulation.exporting`
    <cache>/data/<key>/          train_x.npy, train_y.npy (workers map them into memory) and test.npz
    <out>/parts.npz              indices of every device's training and test samples
    <out>/init.safetensors       initial global weights

Whatever is there already is not made again, so a simulation that goes on starts at once.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.data import Augment, DataSet
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.blobs import storage_error
from fleet_protocol.errors import ConfigError, DataError
from models.registry import Registry
from simulation.config import DataTable, SimulationConfig
from simulation.dataset import Dataset, evenly
from simulation.datasets import load_dataset
from simulation.exporting import Stage, cache_key, export_personal, export_tiers, initial_blob, with_data
from simulation.partition import by_subject, deal_shards, dirichlet, iid

__all__ = ["Parts", "Prepared", "VirtualData", "prepare", "split_data"]

Indices = NDArray[np.int64]
_TEST_DRAW = 1  # keeps the deal of test shards apart from that of the training shards


@dataclass(frozen=True)
class Parts:
    """Who holds which samples.

    Attributes:
        train: indices of the training samples, by device.
        test: indices of the test samples that are like a device's training samples, by device.
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
        _save(path, lambda file: np.savez(file, **arrays))

    @staticmethod
    def load(path: Path) -> Parts:
        """Read what `save` wrote.

        Raises:
            DataError: the file is missing or damaged.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                pieces = {
                    name: tuple(
                        file[f"{name}_index"][start:stop]
                        for start, stop in zip(file[f"{name}_offset"], file[f"{name}_offset"][1:], strict=False)
                    )
                    for name in ("train", "test")
                }
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise DataError(f"cannot read {path}: {error}; remove it and start the simulation again") from error
        return Parts(**pieces)


@dataclass(frozen=True)
class Prepared:
    """Where everything lies.

    Attributes:
        artifacts: folder of the exported architecture.
        data: folder of the arrays.
        parts: file with the split.
        weights: file with the initial global weights.
        settings: of the architecture, complete.
        personal: mutual sets of the devices' own models, in the order in which they are dealt.
    """

    artifacts: Path
    data: Path
    parts: Path
    weights: Path
    settings: Mapping[str, Any]
    personal: tuple[Path, ...] = ()

    @property
    def test_set(self) -> Path:
        """The server's test set."""
        return self.data / "test.npz"


class VirtualData:
    """The samples of every virtual device, read from one mapped file.

    Args:
        folder: of the arrays.
        parts: who holds which.
        augment: as in `DataTable`.
        tasks: what each label is to the devices, dealt in turn; None where it is itself.

    Raises:
        DataError: a file is missing or damaged.
    """

    def __init__(
        self,
        folder: Path,
        parts: Path,
        augment: Augment = "none",
        tasks: Sequence[Sequence[int] | None] = (),
    ) -> None:
        try:
            self._x: NDArray[Any] = np.load(folder / "train_x.npy", mmap_mode="r", allow_pickle=False)
            self._y: NDArray[np.int64] = np.load(folder / "train_y.npy", mmap_mode="r", allow_pickle=False)
            black = np.load(folder / "black.npy", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"cannot read the samples in {folder}: {error}; remove the folder") from error
        self._parts = Parts.load(parts)
        self._folder = folder
        self._test: tuple[NDArray[Any], NDArray[np.int64]] | None = None
        self._augment = augment
        self._tasks = [None if labels is None else np.array(labels, np.int64) for labels in tasks]
        self._black: NDArray[np.float32] = black.reshape(-1, *[1] * (self._x.ndim - 2)) if black.ndim else black

    def examples(self, index: int) -> int:
        """Number of training samples of a device."""
        return len(self._parts.train[index])

    def of(self, index: int) -> DataSet:
        """The training samples of a device, copied out of the file."""
        chosen = self._parts.train[index]
        return self._dataset(index, self._x[chosen], np.asarray(self._y[chosen]))

    def with_test(self, index: int) -> tuple[DataSet, tuple[Indices, Indices]]:
        """The training samples of a device followed by its own part of the test set, and the indices of the two.

        Args:
            index: number of the device.

        Raises:
            DataError: the test set cannot be read.
        """
        if self._test is None:
            try:
                with np.load(self._folder / "test.npz", allow_pickle=False) as file:
                    self._test = file["x"], file["y"]
            except (OSError, ValueError, KeyError, EOFError) as error:
                raise DataError(f"cannot read the test set in {self._folder}: {error}; remove the folder") from error
        train, test = self._parts.train[index], self._parts.test[index]
        x = np.concatenate([self._x[train], self._test[0][test]])
        y = np.concatenate([self._y[train], self._test[1][test]])
        count = len(train)
        return self._dataset(index, x, y), (np.arange(count), np.arange(count, count + len(test)))

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
            augment=self._augment,
            black=self._black,
        )


def prepare(config: SimulationConfig, stage: Stage = lambda _text: None) -> Prepared:
    """Make what is not there yet.

    Args:
        config: with absolute paths.
        stage: told what is being done.

    Raises:
        ConfigError: a name or setting is wrong, or an extra is not installed.
        DataError: the data set is missing or damaged.
        PlanError: the model cannot have one of the tiers.
        ExportError: a graph does not agree with PyTorch.
        StorageError: the disk is full.
    """
    cache = config.cache or config.out
    stage(f"reading {config.data.name}")
    data = _limited(load_dataset(config.data.name, config.data.root, **config.data.options), config.data)
    folder = cache / "data" / cache_key({"data": config.data.model_dump(mode="json", exclude={"augment"})}, data.name)
    _write_data(folder, data)
    parts = config.out / "parts.npz"
    if not parts.is_file():
        split_data(config, data).save(parts)
    registry = Registry.zoo() if config.model.models is None else Registry.zoo().with_file(config.model.models)
    architecture = registry.get(config.model.arch)
    settings = architecture.settings(with_data(architecture, config.model.settings, data))
    artifacts = export_tiers(config, architecture, settings, cache, stage)
    personal = export_personal(config, registry, architecture, settings, data, cache, stage)
    weights = config.out / "init.safetensors"
    if not weights.is_file():
        weights.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(weights, initial_blob(config, architecture, settings))
    return Prepared(artifacts, folder, parts, weights, settings, personal)


def split_data(config: SimulationConfig, data: Dataset) -> Parts:
    """Deal training samples, and test samples of the same kind, to the devices.

    Args:
        config: partition, number of devices, seed.
        data: what is dealt.

    Raises:
        ConfigError: the data cannot be dealt like this.
    """
    table, count = config.partition, config.devices.count
    seed = config.seed if table.seed is None else table.seed
    empty = tuple(np.zeros(0, np.int64) for _ in range(count))
    if table.kind == "subject":
        if data.train_group is None:
            raise ConfigError(f'partition kind = "subject": nobody in particular recorded the samples of {data.name}')
        train = by_subject(data.train_group, count)
        same = data.test_group is not None and np.array_equal(np.unique(data.test_group), np.unique(data.train_group))
        held = by_subject(data.test_group, count) if same and data.test_group is not None else empty
        return Parts(tuple(train), tuple(held))
    if table.kind == "iid":
        test = iid(len(data.test_y), count, seed + _TEST_DRAW) if len(data.test_y) >= count else empty
        return Parts(tuple(iid(len(data.train_y), count, seed)), tuple(test))
    if data.train_y.ndim != 1:
        raise ConfigError(f'partition kind = "{table.kind}" needs one label a sample; {data.name} has one a token')
    if table.kind == "dirichlet":
        return Parts(tuple(dirichlet(data.train_y, count, table.alpha, seed)), empty)
    dealt = deal_shards(data.classes, count, table.per_device, seed, as_released=table.as_released)
    return Parts(tuple(dealt.split(data.train_y, seed)), tuple(dealt.split(data.test_y, seed + _TEST_DRAW)))


def _limited(data: Dataset, table: DataTable) -> Dataset:
    train, test = evenly(len(data.train_y), table.train_limit), evenly(len(data.test_y), table.test_limit)
    if len(train) == len(data.train_y) and len(test) == len(data.test_y):
        return data
    return Dataset(
        data.name,
        data.train_x[train],
        data.train_y[train],
        data.test_x[test],
        data.test_y[test],
        data.classes,
        data.tokens,
        None if data.train_group is None else data.train_group[train],
        None if data.test_group is None else data.test_group[test],
        data.black,
    )


def _as_task(task: NDArray[np.int64], y: NDArray[np.int64], source: str) -> NDArray[np.int64]:
    if len(y) and y.max() >= len(task):
        raise DataError(f"{source} has the label {y.max()}, and the task's labels end at {len(task) - 1}")
    labels = task[y]
    if len(labels) and labels.min() < 0:
        raise DataError(
            f"{source} has the label {y[labels.argmin()]}, which its task leaves out; deal it other samples"
        )
    return labels


def _write_data(folder: Path, data: Dataset) -> None:
    if all((folder / name).is_file() for name in ("black.npy", "test.npz")):  # the first and the last
        return
    black = np.asarray(data.black, np.float32)
    _save(folder / "black.npy", lambda file: np.save(file, black))
    _save(folder / "train_x.npy", lambda file: np.save(file, data.train_x))
    _save(folder / "train_y.npy", lambda file: np.save(file, data.train_y))
    _save(folder / "test.npz", lambda file: np.savez(file, x=data.test_x, y=data.test_y))


def _save(path: Path, write: Callable[[Any], None]) -> None:
    """Write a file whose content is too large to be held as bytes once more, atomically."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise storage_error("write", path, error) from error
