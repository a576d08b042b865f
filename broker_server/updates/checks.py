"""Checks an update before it may be merged; pure functions without I/O."""

import math
from collections.abc import Mapping

import numpy as np

from broker_server.stages.update import Tensors
from broker_server.store import TaskRecord
from broker_server.updates.values import ExpectedUpdate
from fleet_protocol.chunk_sizes import least_chunk_bytes
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.manifest import statistic_mean, statistic_variance
from fleet_protocol.messages import Done
from fleet_protocol.weights import MASKED

HEADER_ALLOWANCE_BYTES = 1024 * 1024  # a safetensors header of 10,000 parameters


def expected_shapes(expected: ExpectedUpdate) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that an update must have, in the order of the manifest.

    A trained update has the parameters that the tier trains, except those that stay on the device.
    Statistics are a mean and a variance for each static batch norm.
    """
    manifest = expected.manifest
    shapes: dict[str, tuple[int, ...]] = {}
    if expected.task.kind == "train":
        for spec in manifest.trained:
            # Parameters that stay on the device are in no update.
            if spec.name not in expected.instructions.stays:
                shapes[spec.name] = spec.shape
        return shapes
    for norm in manifest.statistics:
        shapes[statistic_mean(norm.name)] = (norm.channels,)
        shapes[statistic_variance(norm.name)] = (norm.channels,)
    return shapes


def size_limit(expected: ExpectedUpdate) -> int:
    """Return the most bytes that an update may have."""
    values = sum(math.prod(shape) for shape in expected_shapes(expected).values())
    # Four bytes for each value: no encoding takes more.
    return 4 * values + HEADER_ALLOWANCE_BYTES


def check_done(done: Done, expected: ExpectedUpdate) -> None:
    """Check a device's description of its update.

    Raises:
        RefusedError: the update is of another run, round or tier, too large, or has labels that do
            not exist.
    """
    task = expected.task
    # Before anything else: an update of another round is late, and not wrong.
    if (done.run, done.round) != (task.run, task.round):
        raise RefusedError(
            RefusalReason.WRONG_ROUND,
            f"task {task.id} belongs to round {task.round} of run {task.run},"
            f" not to {done.round} of {done.run}",
        )
    if done.tier != task.tier:
        offered = ", ".join(choice.tier for choice in task.choices)
        raise RefusedError(
            RefusalReason.UNSUPPORTED,
            f"task {task.id} was offered as {offered}, not {done.tier}",
        )
    _check_size(done, expected)
    _check_labels(done, expected)


def _check_size(done: Done, expected: ExpectedUpdate) -> None:
    # Many small chunks would cost more memory and time than the update.
    least = least_chunk_bytes(done.update.size, expected.task.weights.chunk_bytes)
    if done.update.chunk_bytes < least:
        raise RefusedError(
            RefusalReason.OVERSIZED,
            f"chunks of {done.update.chunk_bytes} bytes; the smallest allowed have {least}",
        )
    most = size_limit(expected)
    if done.update.size > most:
        raise RefusedError(
            RefusalReason.OVERSIZED,
            f"an update of {done.update.size} bytes; {expected.task.tier} has at most {most}",
        )


def _check_labels(done: Done, expected: ExpectedUpdate) -> None:
    labels = done.metrics.labels
    stays = expected.instructions.stays
    if stays:
        # The head may belong to the device, and with it the meaning of a label: labels then stay,
        # too.
        if labels:
            raise RefusedError(
                RefusalReason.BAD_LABELS,
                f"labels, which must stay on the device with its {min(stays)}",
            )
        return
    classes = expected.manifest.classes
    for label in labels:
        if not 0 <= label < classes:
            raise RefusedError(
                RefusalReason.BAD_LABELS,
                f"label {label}; the model has labels 0 to {classes - 1}",
            )
    # A device that hides its part sends no labels.
    if not labels and not expected.instructions.upload.silent:
        raise RefusedError(
            RefusalReason.BAD_LABELS,
            f"no labels; the model has labels 0 to {classes - 1}",
        )


def check_metadata(metadata: Mapping[str, str], task: TaskRecord) -> None:
    """Check that an update belongs to a task.

    Raises:
        RefusedError: it is of another task, run, round, version or tier.
    """
    due = {
        "task": task.id,
        "run": task.run,
        "round": str(task.round),
        "version": str(task.version),
        "tier": task.tier,
    }
    for key, value in due.items():
        stated = metadata.get(key)
        if stated != value:
            # A late update is counted differently from one that belongs to no task.
            late = key in {"run", "round", "version"}
            reason = RefusalReason.WRONG_ROUND if late else RefusalReason.UNKNOWN_TASK
            raise RefusedError(
                reason,
                f"the update's metadata has {key} {stated}, but the task has {value}",
            )


def check_tensors(tensors: Tensors, expected: ExpectedUpdate) -> None:
    """Check names, shapes and types of an update's tensors, but not their values.

    In a masked update only the number of its integers is visible.

    Raises:
        RefusedError: a tensor is missing, unknown, or of another shape or type.
    """
    tier = expected.task.tier
    shapes = expected_shapes(expected)
    dtype = "float32"
    if expected.masked:
        values = sum(map(math.prod, shapes.values()))
        # The masked integers of all tensors are one vector.
        shapes = {MASKED: (values,)}
        dtype = "uint32"
    # Named first, because a device with another model has both foreign and missing tensors.
    foreign = tensors.keys() - shapes.keys()
    if foreign:
        raise RefusedError(
            RefusalReason.BAD_SHAPE, f"an update of {tier} has no tensor {min(foreign)}"
        )
    for name, shape in shapes.items():
        value = tensors.get(name)
        if value is None or value.shape != shape:
            actual = "missing" if value is None else f"of shape {value.shape}"
            raise RefusedError(
                RefusalReason.BAD_SHAPE, f"tensor {name} is {actual}; {tier} has {shape}"
            )
        if value.dtype != dtype:
            raise RefusedError(
                RefusalReason.BAD_DTYPE,
                f"tensor {name} is {value.dtype} instead of {dtype}",
            )


def check_variances(tensors: Tensors, expected: ExpectedUpdate) -> None:
    """Check that no variance of batch norm statistics is negative.

    Raises:
        RefusedError: one is.
    """
    for norm in expected.manifest.statistics:
        name = statistic_variance(norm.name)
        if tensors[name].min() < 0:
            raise RefusedError(RefusalReason.MALFORMED, f"tensor {name} has a negative variance")


def check_finite(tensors: Tensors) -> None:
    """Check that all values are finite.

    Raises:
        RefusedError: some are not.
    """
    for name, value in tensors.items():
        count = int(value.size - np.isfinite(value).sum())
        if count:
            raise RefusedError(
                RefusalReason.NOT_FINITE,
                f"tensor {name} has {count} values that are not finite",
            )
