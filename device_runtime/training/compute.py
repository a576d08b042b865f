"""One task from weights on disk to an update on disk.

What an encoding loses in rounding is kept in a file, as what optimizers leave is, and added to the
device's next update of the same run and tier: error feedback (Karimireddy, Rebjock, Stich and
Jaggi, ICML 2019, https://arxiv.org/abs/1901.09847, algorithm 1). So in the long run nothing is lost
but time.
"""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.board import peak_resident_bytes
from device_runtime.training.hooks import Hooks
from device_runtime.training.labels import present_labels
from device_runtime.training.routines import Result, routine_of
from device_runtime.training.task import Bench, Task
from fleet_protocol.encodings import LEVELS, decode, encode, open_weights
from fleet_protocol.errors import BlobError
from fleet_protocol.messages import BlobRef, TaskMetrics
from fleet_protocol.messages.instructions import Hiding
from fleet_protocol.noise import bounded, gaussian
from fleet_protocol.weights import MASKED, encode_weights

_FEW = 5  # steps


@dataclass(frozen=True)
class Outcome:
    """A finished update."""

    update: BlobRef
    metrics: TaskMetrics
    step_seconds: float | None  # mean time of a training step, None where nothing was trained


def compute(task: Task, bench: Bench, hooks: Hooks) -> Outcome:
    """Do a task and keep its update.

    Raises:
        TaskStopped: the hooks said so.
        DataError: the data does not fit the model.
        RefusedError: a self-test failed, or a loss, parameter or statistic is not finite, or the
            board lacks what the routine needs.
        ConfigError: a file that the operator put on the board is missing or damaged.
        BlobError: a blob is damaged on disk.
        StorageError: the update cannot be written.
    """
    return finished(task, bench, routine_of(task.instructions).run(task, bench, hooks))


def timed(task: Task, bench: Bench, hooks: Hooks) -> float:
    """Seconds of a training step now, the median of a few that leave nothing.

    Raises what `compute` does.
    """
    few = task.instructions.train.model_copy(update={"steps": _FEW, "optimizer_state": "reset"})
    asked = task.instructions.model_copy(update={"train": few})
    began = list[float]()

    def stopped() -> bool:  # asked before every step, of which the first has a session to warm
        began.append(time.monotonic())
        return hooks.stopped()

    bench = replace(bench, parts=(bench.split()[0], np.zeros(0, np.int64)))
    routine_of(asked).run(replace(task, instructions=asked), bench, Hooks(hooks.report, stopped))
    return float(np.median(np.diff(began[-_FEW:])))


def finished(task: Task, bench: Bench, result: Result) -> Outcome:
    """Keep the update that a routine made, with what goes with it.

    Raises what `keep_update` does.
    """
    update = keep_update(task, bench, result.tensors)
    # Where a part of the model stays, what a label means may be the board's own business.
    labels = () if task.instructions.stays else _labels(task, bench)
    metrics = TaskMetrics(
        examples=bench.examples,
        batches=result.batches,
        labels=labels,
        train_loss=result.loss,
        mean_loss=result.mean_loss,
        fetch_seconds=round(task.fetch_seconds, 3),
        train_seconds=round(result.seconds, 3),
        resident_bytes=peak_resident_bytes(),
        evaluation=result.evaluation,
    )
    if task.instructions.upload.silent:  # the device's part is hidden
        metrics = metrics.model_copy(
            update={
                "labels": (),
                "train_loss": None,
                "mean_loss": None,
                "evaluation": None,
            }
        )
    trained = routine_of(task.instructions).phase == "training"
    return Outcome(update, metrics, result.seconds / max(result.batches, 1) if trained else None)


def _labels(task: Task, bench: Bench) -> tuple[int, ...]:
    return tuple(
        present_labels(
            bench.data.fit_to(task.manifest).y[bench.split()[0]], task.manifest.classes
        ).tolist()
    )


def keep_update(task: Task, bench: Bench, tensors: Mapping[str, NDArray[Any]]) -> BlobRef:
    """Put the tensors of an update, by name, on the disk as it travels.

    Raises:
        RefusedError: what was learnt cannot be encoded, or nothing can be kept here.
        BlobError: the weights that were sent are damaged on disk.
        StorageError: the disk is full.
    """
    metadata = {
        "task": task.id,
        "run": task.run,
        "round": str(task.round),
        "version": str(task.version),
        "tier": task.tier,
    }
    if task.instructions.upload.hiding is not None:
        tensors = _hidden(task, bench, tensors, task.instructions.upload.hiding)
    summing = task.instructions.upload.summing
    if summing is not None:
        from fleet_protocol.secure_sum import whole_numbers  # noqa: PLC0415  (cryptography: memory of a small board)

        sent = open_weights(bench.blobs.path(task.weights.digest))
        tensors = {MASKED: whole_numbers(tensors, sent, summing.clip)}  # masked when it is sent
    if task.instructions.upload.encoding != "fp32":
        tensors = _encoded(task, bench, tensors)
    data = encode_weights(tensors, metadata)
    return BlobRef(
        digest=bench.blobs.put(data),
        size=len(data),
        chunk_bytes=task.weights.chunk_bytes,
    )


def _hidden(
    task: Task, bench: Bench, tensors: Mapping[str, NDArray[Any]], hiding: Hiding
) -> dict[str, NDArray[np.float32]]:
    """The update with its difference bounded and noise on every entry."""
    sent = open_weights(bench.blobs.path(task.weights.digest))
    change = bounded(tensors, sent, hiding.clip)
    return {
        name: (sent[name] + value + hiding.deviation * gaussian(bench.noise, value.shape)).astype(
            np.float32
        )
        for name, value in change.items()
    }


def _encoded(
    task: Task, bench: Bench, tensors: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """The difference to what was sent and what earlier rounds lost.

    What is lost now is kept for the next.
    """
    asked = task.instructions.upload
    sent = open_weights(bench.blobs.path(task.weights.digest))
    names = [spec.name for spec in task.manifest.parameters if spec.name in tensors]
    if not asked.feedback or asked.encoding not in LEVELS:
        change = {name: tensors[name] - sent[name] for name in names}
        return encode(change, asked.encoding, keep=asked.keep, at_random=True)
    files = bench.files("residual", runs=1)
    lost = {}
    with contextlib.suppress(BlobError):  # a damaged file is worth less than the round
        lost = files.load_tiers(task.run, task.round)
    left = lost.get(task.tier, {})
    whole = {name: tensors[name] - sent[name] + left.get(name, np.float32(0)) for name in names}
    parts = encode(whole, asked.encoding, keep=asked.keep)
    told = decode(
        parts,
        {name: whole[name].shape for name in names},
        asked.encoding,
        keep=asked.keep,
    )
    files.save_tiers(
        task.run,
        task.round,
        lost | {task.tier: {name: whole[name] - told[name] for name in names}},
    )
    return parts
