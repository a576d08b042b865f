"""One device's part in a round, and the board it is done on, as the training room sees them: frozen
values.
"""

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
    """What a board computes with; the same for every task."""

    data: DataSet
    blobs: BlobStore
    backend: str  # ``onnx`` or ``ort-training``
    threads: int
    holdout: float  # share of the samples kept for evaluation
    own_model: OwnModel | None = None
    folder: Path | None = None  # where files lie between rounds, None where nothing can be kept
    sessions: Sessions | None = None  # opens the graphs; None opens each anew on `threads`
    # training and held-out indices to use instead of a split by `holdout`
    parts: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    noise: Draw = os.urandom  # random bytes for what hides its part
    accelerators: Accelerators | None = (
        None  # what is tried for training steps beside the CPU; None for nothing
    )

    @property
    def examples(self) -> int:
        """Number of training samples."""
        return len(self.split()[0])

    def split(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Indices of the training and of the held-out samples."""
        return self.parts or holdout_split(len(self.data), self.holdout)

    def files(self, prefix: str, runs: int = KEPT_RUNS) -> OwnModelFiles:
        """Files kept between rounds, for so many runs, with a prefix for what they are.

        Or else a RefusedError.
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
    """One device's part in a round, with everything it names on disk."""

    run: str
    round: int  # number of the round, from 1
    id: str
    version: int  # number of the global version that the weights were cut from
    tier: str
    instructions: Instructions
    manifest: Manifest
    weights: BlobRef  # the plan's slice of the global weights
    tested: frozenset[str] = (
        frozenset()
    )  # graphs that passed their self-test here, with the runtime
    fetch_seconds: float = 0.0  # from the offer to the weights on disk, for the metrics

    def schedule(self, setup: DeviceSetup) -> TrainingSchedule:
        """What the task trains on."""
        return TrainingSchedule(setup.data, setup.split()[0], self.instructions.train, self.round)


def base_tensors(manifest: Manifest, blobs: BlobStore) -> dict[str, NDArray[Any]]:
    """The frozen tensors of an artifact set, mapped and not read: all graphs share one copy in the
    page cache.

    Raises:
        BlobError: the file is missing or damaged.
        RefusedError: it lacks a tensor, or has one of another shape.
    """
    if not manifest.base:
        return {}
    found = open_tensors(blobs.path(manifest.files[BASE].digest))
    for spec in manifest.base:
        value = found.get(spec.name)
        if value is None or (value.shape, value.dtype.name) != (spec.shape, spec.dtype):
            raise RefusedError(
                RefusalReason.BAD_SHAPE,
                f"frozen tensor {spec.name} of {manifest.tier} is not {spec.dtype} {list(spec.shape)} in the"
                " base that its manifest names; export the architecture again",
            )
    return {spec.name: found[spec.name] for spec in manifest.base}
