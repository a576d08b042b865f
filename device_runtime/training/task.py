"""One device's part in a round, and the setup that computes it, as frozen values."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.training.accelerators import Accelerators
from device_runtime.training.backends import Sessions
from device_runtime.training.kept_outputs import KeptOutputs
from device_runtime.training.own_model import OwnModel
from device_runtime.training.own_model_files import KEPT_RUNS, OwnModelFiles
from device_runtime.training.schedule import TrainingSchedule, holdout_split
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.data import DataSet
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.manifest import BASE, Manifest
from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.messages import BlobRef, Instructions
from fleet_protocol.noise import Draw


@dataclass(frozen=True)
class DeviceSetup:
    """The setup of a device's computations; the same for every task.

    Attributes:
        data: the samples.
        blobs: files by their digest.
        backend: ``onnx`` or ``ort-training``.
        threads: threads of a training step; 0 uses every core.
        holdout: share of the samples kept for evaluation.
        own_model: the board's own model; None if it has none.
        folder: folder for files between rounds; None if nothing can be kept.
        sessions: opens the graphs; None opens each again on `threads`.
        parts: training and held-out indices to use instead of a split by `holdout`.
        noise: source of random bytes for the noise that hides the device's update.
        accelerators: what is tried for training steps beside the CPU; None for nothing.
        kept_outputs: where outputs of frozen layers are kept between passes; None for nowhere.
        keeps_files: whether what a task leaves between rounds is kept; not for one that is timed.
    """

    data: DataSet
    blobs: BlobStore
    backend: str
    threads: int
    holdout: float
    own_model: OwnModel | None = None
    folder: Path | None = None
    sessions: Sessions | None = None
    parts: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    noise: Draw = os.urandom
    accelerators: Accelerators | None = None
    kept_outputs: KeptOutputs | None = None
    keeps_files: bool = True

    @property
    def examples(self) -> int:
        """Number of training samples."""
        training, _held_out = self.split()
        return len(training)

    def split(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the indices of the training and of the held-out samples."""
        return self.parts or holdout_split(len(self.data), self.holdout)

    def files(self, prefix: str, runs: int = KEPT_RUNS) -> OwnModelFiles:
        """Return files kept between rounds.

        Args:
            prefix: prefix of the files' names.
            runs: number of runs whose files are kept.

        Raises:
            RefusedError: nothing can be kept here.
        """
        if self.folder is None:
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                f"this device keeps no {prefix} files between rounds",
            )
        return OwnModelFiles(self.folder, runs, f"{prefix}-", writes=self.keeps_files)

    @property
    def opening(self) -> Sessions:
        """The factory that opens the graphs."""
        return self.sessions or Sessions(self.threads)


@dataclass(frozen=True)
class Task:
    """One device's part in a round, with all files that it names on disk.

    Attributes:
        run: its id.
        round: number of the round, from 1.
        id: id of the task.
        version: number of the global version from which the weights were cut.
        tier: tier of the sub-model.
        instructions: instructions of the offer.
        manifest: manifest of the artifact set.
        weights: the plan's slice of the global weights.
        tested: graphs that passed their self-test here, with the runtime.
        fetch_seconds: seconds from the offer to the weights on disk, for the metrics.
    """

    run: str
    round: int
    id: str
    version: int
    tier: str
    instructions: Instructions
    manifest: Manifest
    weights: BlobRef
    tested: frozenset[str] = frozenset()
    fetch_seconds: float = 0.0

    def schedule(self, setup: DeviceSetup) -> TrainingSchedule:
        """Return the samples on which the task trains, and their order."""
        training, _held_out = setup.split()
        return TrainingSchedule(setup.data, training, self.instructions.train, self.round)


def base_tensors(manifest: Manifest, blobs: BlobStore) -> dict[str, NDArray[Any]]:
    """Return the frozen tensors of an artifact set; they are mapped, not read.

    All graphs share one copy in the page cache.

    Raises:
        BlobError: the file is missing or damaged.
        RefusedError: it lacks a tensor, or has one of another shape.
    """
    base: dict[str, NDArray[Any]] = {}
    if not manifest.base:
        return base
    tensors = open_tensors(blobs.path(manifest.files[BASE].digest))
    for spec in manifest.base:
        value = tensors.get(spec.name)
        if value is None or (value.shape, value.dtype.name) != (spec.shape, spec.dtype):
            raise RefusedError(
                RefusalReason.BAD_SHAPE,
                f"frozen tensor {spec.name} of {manifest.tier} is not {spec.dtype} "
                f"{list(spec.shape)} in the base that its manifest names; "
                "export the architecture again",
            )
        base[spec.name] = value
    return base
