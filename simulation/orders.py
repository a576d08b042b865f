"""The JSON messages between a simulation and its workers, and the interface of an engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import BlobRef, Instructions, TaskMetrics


class WorkerSetup(FrozenModel):
    """The setup of a worker, sent before its first order.

    Attributes:
        artifacts: folder of the exported architecture.
        arch: name of the architecture.
        data: folder of the samples.
        split: file with the samples of each device.
        blobs: folder of the global versions and slices.
        updates: folder of the trained updates.
        devices: folder of the states that devices keep between rounds.
        holdout: share of a device's samples on which its sub-model is evaluated.
        augment: augmentations of samples.
        backend: the training backend.
        device: device of the torch backend.
        settings: settings of the architecture as JSON, for the torch backend.
        models: file with the user's architectures, for the torch backend.
        pairs: sets of the personal models, assigned in turn; may be empty.
        tasks: the devices' label for each label of the data, assigned in the same order; None if
            labels are unchanged.
        own_test: whether to evaluate a device's model on its part of the test set instead of a
            share of its samples.
    """

    artifacts: Path
    arch: str
    data: Path
    split: Path
    blobs: Path
    updates: Path
    devices: Path
    holdout: float = 0.0
    augment: tuple[str, ...] = ()
    backend: Literal["onnx", "torch"] = "onnx"
    device: Literal["cpu", "cuda"] = "cpu"
    # JSON, because settings may hold any values.
    settings: str = "{}"
    models: Path | None = None
    pairs: tuple[Path, ...] = ()
    tasks: tuple[tuple[int, ...] | None, ...] = ()
    own_test: bool = False


class DeviceTask(FrozenModel):
    """One task of one virtual device.

    `weights` is the slice of the global version with this number.
    """

    id: str
    run: str
    round: int
    device: str
    index: int
    version: int
    tier: str
    artifact_set: BlobRef
    weights: BlobRef
    instructions: Instructions


class WorkOrder(FrozenModel):
    """Tasks of one tier and routine that a worker processes together."""

    tasks: tuple[DeviceTask, ...]


class Finished(FrozenModel):
    """A finished task; its update is in the folder of updates."""

    type: Literal["finished"] = "finished"
    task: str
    update: BlobRef
    metrics: TaskMetrics


class Failed(FrozenModel):
    """A failed task, which would fail again."""

    type: Literal["failed"] = "failed"
    task: str
    reason: str = ""  # value of a `RefusalReason`; empty for an error that the device did not cause
    detail: str
    exit_code: int = 1  # exit code of the command line


class Engine(Protocol):
    """Computes tasks, on this machine or elsewhere.

    A worker that dies is replaced, and its order is repeated; if that fails, too, the engine raises
    `fleet_protocol.errors.ShoalError`.
    """

    def submit(self, orders: Sequence[WorkOrder]) -> None:
        """Add orders in the order in which they should begin; returns immediately."""

    def receive(self, timeout_seconds: float) -> list[Finished | Failed]:
        """Wait for results; returns none after the timeout.

        Raises:
            ShoalError: a worker died during an order for the second time, or cannot be started.
        """

    def close(self) -> None:
        """Stop the workers; their current work is lost."""
