"""What a simulation and its workers send each other, as JSON, and the protocol of an engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import BlobRef, Instructions, TaskMetrics


class WorkerSetup(FrozenModel):
    """What a worker needs once, before its first order.

    Attributes:
        artifacts: folder of the exported architecture.
        arch: its name.
        data: folder of the samples.
        split: file that says which samples each device holds.
        blobs: folder of the global versions and slices.
        updates: folder of what is trained.
        devices: folder for what single devices keep between rounds.
        holdout: share of a device's samples that its sub-model is judged on.
        augment: changes of samples.
        backend: what trains.
        device: of the torch backend.
        settings: of the architecture as JSON, for the torch backend.
        models: file with the user's architectures, for the torch backend.
        pairs: sets of the devices' own models, dealt in turn; empty for none.
        tasks: what each label of the data is to the devices, dealt in the same turn; None where
            it is itself.
        own_test: whether to judge what a device trains on its own part of the test set, not on a
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
    settings: str = "{}"
    models: Path | None = None
    pairs: tuple[Path, ...] = ()
    tasks: tuple[tuple[int, ...] | None, ...] = ()
    own_test: bool = False


class DeviceTask(FrozenModel):
    """One task of one virtual device.

    `weights` is the slice of the global version of that number.
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
    """Tasks that one worker does together, all of one tier and routine."""

    tasks: tuple[DeviceTask, ...]


class Finished(FrozenModel):
    """A task is done; its update is among the updates."""

    type: Literal["finished"] = "finished"
    task: str
    update: BlobRef
    metrics: TaskMetrics


class Failed(FrozenModel):
    """A task could not be done, and would fail again."""

    type: Literal["failed"] = "failed"
    task: str
    reason: str = ""  # value of a `RefusalReason`, empty for an error that is not the device's
    detail: str
    exit_code: int = 1  # what the command line should end with


class Engine(Protocol):
    """Computes tasks, on this machine or elsewhere.

    A worker that dies is replaced and its order computed once more; if that fails as well the
    engine raises `fleet_protocol.errors.ShoalError`.
    """

    def submit(self, orders: Sequence[WorkOrder]) -> None:
        """Give it work, in the order in which it should be begun; returns at once."""

    def receive(self, timeout_seconds: float) -> list[Finished | Failed]:
        """Wait for results; none after the timeout.

        Raises:
            ShoalError: a worker died over an order for the second time, or cannot be started.
        """

    def close(self) -> None:
        """End the workers; what they work on is lost."""
