"""One task from weights on disk to an update on disk."""

from __future__ import annotations

from dataclasses import dataclass

from device_runtime.board import peak_resident_bytes
from device_runtime.training.hooks import Hooks
from device_runtime.training.labels import present_labels
from device_runtime.training.routines import Result, routine_of
from device_runtime.training.task import Bench, Task
from fleet_protocol.messages import BlobRef, TaskMetrics
from fleet_protocol.weights import encode_weights

__all__ = ["Outcome", "compute"]


@dataclass(frozen=True)
class Outcome:
    """A finished update.

    Attributes:
        update: on disk.
        metrics: what goes with it.
        step_seconds: mean time of a training step, None where nothing was trained.
    """

    update: BlobRef
    metrics: TaskMetrics
    step_seconds: float | None


def compute(task: Task, bench: Bench, hooks: Hooks) -> Outcome:
    """Do a task and keep its update.

    Args:
        task: what to do.
        bench: what to do it with.
        hooks: told of epochs and self-tests, asked when to stop.

    Raises:
        TaskStopped: the hooks said so.
        DataError: the data does not fit the model.
        RefusedError: a self-test failed, or a loss, parameter or statistic is not finite, or the board lacks what the
            routine needs.
        ConfigError: a file that the operator put on the board is missing or damaged.
        BlobError: a blob is damaged on disk.
        StorageError: the update cannot be written.
    """
    routine = routine_of(task.instructions)
    result = routine.run(task, bench, hooks)
    chosen, _ = bench.split()
    update = _keep(task, bench, result)
    # Where a part of the model stays, what a label means may be the board's own business.
    labels = () if task.instructions.stays else _labels(task, bench)
    metrics = TaskMetrics(
        examples=len(chosen),
        batches=result.batches,
        labels=labels,
        train_loss=result.loss,
        mean_loss=result.mean_loss,
        fetch_seconds=task.fetch_seconds,
        train_seconds=result.seconds,
        resident_bytes=peak_resident_bytes(),
        evaluation=result.evaluation,
    )
    trained = routine.phase == "training"
    return Outcome(update, metrics, result.seconds / max(result.batches, 1) if trained else None)


def _labels(task: Task, bench: Bench) -> tuple[int, ...]:
    targets = bench.data.fitted(task.manifest).y[bench.split()[0]]
    return tuple(present_labels(targets, task.manifest.classes).tolist())


def _keep(task: Task, bench: Bench, result: Result) -> BlobRef:
    metadata = {
        "task": task.id,
        "run": task.run,
        "round": str(task.round),
        "version": str(task.version),
        "tier": task.tier,
    }
    data = encode_weights(result.tensors, metadata)
    return BlobRef(digest=bench.blobs.put(data), size=len(data), chunk_bytes=task.weights.chunk_bytes)
