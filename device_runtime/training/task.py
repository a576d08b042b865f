"""One device's part in a round, and what it is done with, as frozen values."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.training.accelerators import Accelerators
from device_runtime.training.backends import Sessions
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
    """What a device computes with; the same for every task.

    Attributes:
        data: the samples.
        blobs: files by their content.
        backend: ``onnx`` or ``ort-training``.
        threads: of a training step; 0 takes every core.
        holdout: share of the samples kept for evaluation.
        own_model: the board's own, None where it has none.
        folder: where files lie between rounds, None where nothing can be kept.
        sessions: opens the graphs; None opens each anew on `threads`.
        parts: training and held-out indices to use instead of a split by `holdout`.
        noise: random bytes for what hides the device's update.
        accelerators: what is tried for training steps beside the CPU; None for nothing.
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
            prefix: of their names, for what they are.
            runs: of so many runs they are kept.

        Raises:
            RefusedError: nothing can be kept here.
        """
        if self.folder is None:
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                f"this device keeps no {prefix} files between rounds",
            )
        return OwnModelFiles(self.folder, runs, f"{prefix}-")

    @property
    def opening(self) -> Sessions:
        """What opens the graphs."""
        return self.sessions or Sessions(self.threads)


@dataclass(frozen=True)
class Task:
    """One device's part in a round, with everything it names on disk.

    Attributes:
        run: its id.
        round: number of the round, from 1.
        id: of the task.
        version: number of the global version that the weights were cut from.
        tier: of the sub-model.
        instructions: of the offer.
        manifest: of the artifact set.
        weights: the plan's slice of the global weights.
        tested: graphs that passed their self-test here, with the runtime.
        fetch_seconds: from the offer to the weights on disk, for the metrics.
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
        """Return what the task trains on, in which order."""
        training, _held_out = setup.split()
        return TrainingSchedule(setup.data, training, self.instructions.train, self.round)


def base_tensors(manifest: Manifest, blobs: BlobStore) -> dict[str, NDArray[Any]]:
    """Return the frozen tensors of an artifact set, mapped and not read.

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
