"""What an update must be before it may come near an accumulator; pure checks, no I/O."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker_server.store import TaskRecord
from fleet_protocol.errors import BlobError, RefusalReason, RefusedError
from fleet_protocol.manifest import Manifest, statistic_mean, statistic_variance
from fleet_protocol.mapped_tensors import blob_in
from fleet_protocol.messages import Done
from fleet_protocol.weights import MASKED

Tensors = Mapping[str, NDArray[Any]]
HEADER_ALLOWANCE_BYTES = 1024 * 1024  # a safetensors header of 10,000 parameters


def expected_shapes(
    task: TaskRecord, manifest: Manifest, stays: Collection[str] = ()
) -> dict[str, tuple[int, ...]]:
    """Tensors that the update of a task must have: the tier's parameters but those that stay on the
    device.

    Of statistics they are a mean and a variance for each static batch norm.
    """
    if task.kind == "train":
        return {spec.name: spec.shape for spec in manifest.parameters if spec.name not in stays}
    return {
        name: (spec.channels,)
        for spec in manifest.statistics
        for name in (statistic_mean(spec.name), statistic_variance(spec.name))
    }


def size_limit(task: TaskRecord, manifest: Manifest, stays: Collection[str] = ()) -> int:
    """The most bytes the update of a task may have.

    The arguments are those of `expected_shapes`.
    """
    shapes = expected_shapes(task, manifest, stays)
    return 4 * sum(math.prod(shape) for shape in shapes.values()) + HEADER_ALLOWANCE_BYTES


def check_done(
    done: Done,
    task: TaskRecord,
    manifest: Manifest,
    stays: Collection[str] = (),
    *,
    hides: bool = False,
) -> None:
    """Check what a device says about its update.

    Args:
        done: the message.
        task: the task it names.
        manifest: of the task's tier.
        stays: parameters that stay on the device. If there are any, its labels stay as well: its
            head, and with it what a label means, may be its own.
        hides: the device hides its part, and tells no labels.

    Raises:
        RefusedError: it is of another run, round or tier, too large, or has labels that do not
            exist.
    """
    if (done.run, done.round) != (task.run, task.round):
        raise RefusedError(
            RefusalReason.WRONG_ROUND,
            f"task {task.id} belongs to round {task.round} of run {task.run}, not to {done.round} of {done.run}",
        )
    if done.tier != task.tier:
        offered = ", ".join(choice.tier for choice in task.choices)
        raise RefusedError(
            RefusalReason.UNSUPPORTED,
            f"task {task.id} was offered as {offered}, not {done.tier}",
        )
    limit = size_limit(task, manifest, stays)
    cut = task.weights.chunk_bytes
    if done.update.chunk_bytes < cut:  # what is missing is counted chunk by chunk
        raise RefusedError(
            RefusalReason.OVERSIZED,
            f"chunks of {done.update.chunk_bytes} bytes, of {cut} at least",
        )
    if done.update.size > limit:
        raise RefusedError(
            RefusalReason.OVERSIZED,
            f"an update of {done.update.size} bytes; {task.tier} has at most {limit}",
        )
    if stays:
        if done.metrics.labels:
            raise RefusedError(
                RefusalReason.BAD_LABELS,
                f"labels, which stay on the device with its {min(stays)}",
            )
        return
    wrong = [label for label in done.metrics.labels if not 0 <= label < manifest.classes]
    if wrong or not (done.metrics.labels or hides):
        found = f"label {wrong[0]}" if wrong else "no labels"
        raise RefusedError(
            RefusalReason.BAD_LABELS,
            f"{found}; the model has labels 0 to {manifest.classes - 1}",
        )


def check_update(
    data: bytes,
    task: TaskRecord,
    manifest: Manifest,
    stays: Collection[str] = (),
    *,
    masked: bool = False,
) -> Tensors:
    """Check the bytes of an update, whose digest is known to be right, but for their values.

    See `expected_shapes`.

    Of one that is masked for a secure sum nothing but the count of its whole numbers can be seen.

    Returns:
        Its tensors.

    Raises:
        RefusedError: it is no safetensors blob, belongs to another task or round, or has a tensor
            that is missing, foreign, or of another shape or type.
    """
    try:
        metadata, tensors = blob_in(data)
    except BlobError as error:
        raise RefusedError(RefusalReason.MALFORMED, str(error)) from error
    _check_metadata(metadata, task)
    shapes = expected_shapes(task, manifest, stays)
    if masked:
        shapes = {MASKED: (sum(map(math.prod, shapes.values())),)}
    _check_tensors(tensors, shapes, task, "uint32" if masked else "float32")
    return tensors


def check_finite(tensors: Tensors) -> None:
    """Refuse, with a RefusedError, an update with values that are not finite."""
    for name, value in tensors.items():
        if count := int(value.size - np.isfinite(value).sum()):
            raise RefusedError(
                RefusalReason.NOT_FINITE,
                f"tensor {name} has {count} values that are not finite",
            )


def _check_metadata(metadata: Mapping[str, str], task: TaskRecord) -> None:
    expected = {
        "task": task.id,
        "run": task.run,
        "round": str(task.round),
        "version": str(task.version),
        "tier": task.tier,
    }
    for key, value in expected.items():
        found = metadata.get(key)
        if found != value:
            reason = (
                RefusalReason.WRONG_ROUND
                if key in {"run", "round", "version"}
                else RefusalReason.UNKNOWN_TASK
            )
            raise RefusedError(
                reason,
                f"the update's metadata says {key} {found}, the task has {value}",
            )


def _check_tensors(
    tensors: Tensors,
    shapes: Mapping[str, tuple[int, ...]],
    task: TaskRecord,
    dtype: str,
) -> None:
    foreign = tensors.keys() - shapes.keys()
    if foreign:
        raise RefusedError(
            RefusalReason.BAD_SHAPE,
            f"an update of {task.tier} has no tensor {min(foreign)}",
        )
    for name, shape in shapes.items():
        value = tensors.get(name)
        if value is None or value.shape != shape:
            found = "missing" if value is None else f"of shape {value.shape}"
            raise RefusedError(
                RefusalReason.BAD_SHAPE,
                f"tensor {name} is {found}; {task.tier} has {shape}",
            )
        if value.dtype != dtype:
            raise RefusedError(
                RefusalReason.BAD_DTYPE,
                f"tensor {name} is {value.dtype} instead of {dtype}",
            )
