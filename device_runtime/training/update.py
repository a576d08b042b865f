"""Turns a routine's result into the update that is sent: the board's part of the way.

`finish` leaves out what the tier does not train, then takes steps 1 to 4 in this order, and the
agent step 5. Each step takes the result of the previous one, so the order decides what the server
can learn, and must not change:

1. `hide` bounds the change and adds noise (local privacy) before any of it is written to disk.
2. `prepare_sum` turns the update into integers for a secure sum.
3. `encode` makes it smaller, and keeps the rounding error for the next update.
4. `seal` writes it to disk under its digest: the record of the task names it before it is sent.
5. `mask` masks the sealed integers as soon as the cohort has exchanged its shares. It needs
  messages from the server, so the agent calls it during the upload.

The rounding error of an encoding is kept in a file, like optimizer states, and added to the
device's next update of the same run and tier: error feedback (Karimireddy, Rebjock, Stich and
Jaggi, ICML 2019, https://arxiv.org/abs/1901.09847, algorithm 1). So in the long run nothing is
lost; it is only delayed.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.board import peak_resident_bytes
from device_runtime.training.labels import present_labels
from device_runtime.training.own_model_files import OwnModelFiles
from device_runtime.training.routines import Result, routine_of
from device_runtime.training.task import DeviceSetup, Task
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.encodings import decode, open_weights
from fleet_protocol.encodings import encode as encode_tensors
from fleet_protocol.errors import BlobError
from fleet_protocol.messages import BlobRef, TaskMetrics
from fleet_protocol.noise import bounded, gaussian
from fleet_protocol.rounding import LEVELS
from fleet_protocol.weights import MASKED, encode_weights

if TYPE_CHECKING:
    from fleet_protocol.secure_sum import Member

Tensors = Mapping[str, NDArray[Any]]
NewTensors = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class FinishedUpdate:
    """An update on disk, with the values that are sent beside it."""

    update: BlobRef
    metrics: TaskMetrics
    step_seconds: float | None  # mean time of a training step; None if nothing was trained


def finish(task: Task, setup: DeviceSetup, result: Result) -> FinishedUpdate:
    """Turn a routine's result into an update, and save it on disk.

    Args:
        task: its instructions define how the update is sent.
        setup: setup of the device, with its blobs and files.
        result: the routine's tensors and measurements.

    Returns:
        The sealed update; `mask` masks it later if it goes into a secure sum.

    Raises:
        RefusedError: the result cannot be encoded, or nothing can be kept here.
        BlobError: the sent weights are damaged on disk.
        StorageError: the disk is full.
    """
    tensors = hide(task, setup, leave_out_frozen(task, result.tensors))
    tensors = prepare_sum(task, setup, tensors)
    tensors = encode(task, setup, tensors)
    update = seal(task, setup.blobs, tensors)
    return FinishedUpdate(
        update,
        metrics=_metrics(task, setup, result),
        step_seconds=_step_seconds(task, result),
    )


def leave_out_frozen(task: Task, tensors: Tensors) -> Tensors:
    """Return the tensors of an update without the parameters that the tier does not train."""
    frozen = frozenset(task.manifest.frozen)
    return {name: value for name, value in tensors.items() if name not in frozen}


def hide(task: Task, setup: DeviceSetup, tensors: Tensors) -> Tensors:
    """Bound the change of an update, and add noise to every entry, if the task requires it."""
    hiding = task.instructions.upload.hiding
    if hiding is None:
        return tensors
    sent = _sent_weights(task, setup)
    change = bounded(tensors, sent, hiding.clip)
    hidden: NewTensors = {}
    for name, value in change.items():  # the order of the names is the order of the random bytes
        noise = hiding.deviation * gaussian(setup.noise, value.shape)
        hidden[name] = (sent[name] + value + noise).astype(np.float32)
    return hidden


def prepare_sum(task: Task, setup: DeviceSetup, tensors: Tensors) -> Tensors:
    """Return the change as integers in one tensor, if the update goes into a secure sum."""
    summing = task.instructions.upload.summing
    if summing is None:
        return tensors
    # It needs cryptography, whose memory small boards need for other tasks.
    from fleet_protocol.secure_sum import whole_numbers  # noqa: PLC0415

    return {MASKED: whole_numbers(tensors, _sent_weights(task, setup), summing.clip)}


def encode(task: Task, setup: DeviceSetup, tensors: Tensors) -> Tensors:
    """Return the encoded change to the sent weights; an update in fp32 is sent whole."""
    upload = task.instructions.upload
    if upload.encoding == "fp32":
        return tensors
    sent = _sent_weights(task, setup)
    change: NewTensors = {}
    for spec in task.manifest.parameters:
        if spec.name in tensors:
            change[spec.name] = tensors[spec.name] - sent[spec.name]
    if upload.feedback and upload.encoding in LEVELS:
        return _encode_with_feedback(task, setup.files("residual", runs=1), change)
    return encode_tensors(
        change,
        upload.encoding,
        keep=upload.keep,
        at_random=True,
    )


def seal(task: Task, blobs: BlobStore, tensors: Tensors) -> BlobRef:
    """Write an update to disk as it is sent, with its task in the metadata.

    It is sent only once the blob is whole on disk: after a power cut the same bytes are sent.
    """
    metadata = {
        "task": task.id,
        "run": task.run,
        "round": str(task.round),
        "version": str(task.version),
        "tier": task.tier,
    }
    data = encode_weights(tensors, metadata)
    digest = blobs.put(data)
    return BlobRef(
        digest=digest,
        size=len(data),
        chunk_bytes=task.weights.chunk_bytes,
    )


def mask(blobs: BlobStore, update: BlobRef, member: "Member") -> BlobRef:
    """Mask a sealed update for a secure sum, in a separate blob.

    An update is masked once: the caller records that it was, together with the new blob, and then
    removes the unmasked blob.

    Raises:
        BlobError: the update is damaged on disk.
        StorageError: the disk is full.
    """
    data = member.masked(blobs.read(update.digest))
    return BlobRef(
        digest=blobs.put(data),
        size=len(data),
        chunk_bytes=update.chunk_bytes,
    )


def _sent_weights(task: Task, setup: DeviceSetup) -> Tensors:
    return open_weights(setup.blobs.path(task.weights.digest))


def _encode_with_feedback(task: Task, files: OwnModelFiles, change: NewTensors) -> Tensors:
    """Encode a change plus the rounding error of earlier rounds; keep the new error for the next.

    A residual is what an encoding lost: the change before encoding minus the change that the server
    decodes. Each tier has a separate residual, because its entries are those of its units.

    `change` is overwritten, so that memory holds no further copy of the model.
    """
    upload = task.instructions.upload
    residuals: dict[str, NewTensors] = {}
    with contextlib.suppress(BlobError):  # a damaged file is worth less than the round
        residuals = files.load_tiers(task.run, task.round)
    # The residual of the round in which the device last trained this tier.
    residual = residuals.get(task.tier, {})
    for name, value in change.items():
        change[name] = value + residual.get(name, np.float32(0))
    encoded = encode_tensors(change, upload.encoding, keep=upload.keep)
    shapes = {name: value.shape for name, value in change.items()}
    decoded = decode(encoded, shapes, upload.encoding, keep=upload.keep)
    residuals[task.tier] = {name: value - decoded[name] for name, value in change.items()}
    files.save_tiers(task.run, task.round, residuals)
    return encoded


def _metrics(task: Task, setup: DeviceSetup, result: Result) -> TaskMetrics:
    """Return the metrics that the server receives beside the update."""
    instructions = task.instructions
    labels = () if instructions.board_defines_labels else _present_labels(task, setup)
    metrics = TaskMetrics(
        examples=setup.examples,
        batches=result.batches,
        labels=labels,
        train_loss=result.loss,
        mean_loss=result.mean_loss,
        fetch_seconds=round(task.fetch_seconds, 3),
        train_seconds=round(result.seconds, 3),
        resident_bytes=peak_resident_bytes(),
        evaluation=result.evaluation,
        shared_evaluation=result.shared_evaluation,
    )
    if not routine_of(instructions).tells_samples:
        metrics = metrics.model_copy(update={"examples": None, "batches": None})
    if not instructions.upload.silent:
        return metrics
    # The update is hidden, so the values beside it must not reveal single samples either.
    hidden = ("train_loss", "mean_loss", "evaluation", "shared_evaluation")
    untold = {"labels": (), **dict.fromkeys(hidden)}
    return metrics.model_copy(update=untold)


def _present_labels(task: Task, setup: DeviceSetup) -> tuple[int, ...]:
    training, _held_out = setup.split()
    targets = setup.data.fit_to(task.manifest).y[training]
    return tuple(present_labels(targets, task.manifest.classes).tolist())


def _step_seconds(task: Task, result: Result) -> float | None:
    if routine_of(task.instructions).phase != "training":
        return None
    return result.seconds / max(result.batches, 1)
