"""What samples are compared with: labels or numbers, as a loss takes them.

The same on boards and server (numpy).
"""

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import DataError
from fleet_protocol.manifest import Manifest
from fleet_protocol.recipe_spec import LossSpec

EXACT = 2**24  # whole numbers up to here are exact as float32
Targets = NDArray[np.int64] | NDArray[np.float32]


def counted(y: Targets) -> int:
    """How many targets count: of labels those that are not negative, else every sample."""
    return len(y) if y.dtype.kind == "f" else int(np.count_nonzero(y >= 0))


def check_labels(source: str, y: NDArray[np.int64], classes: int) -> None:
    """See that labels lie in ``[0, classes)``; of several for a sample, negative ones are allowed
    and do not count.

    A DataError has the first label outside, with its position.
    """
    wrong = np.argwhere((y >= classes) | ((y < 0) & (y.ndim == 1)))
    if len(wrong):
        raise DataError(
            f"label {int(y[tuple(wrong[0])])} of sample {int(wrong[0][0])} in {source} is outside 0 to {classes - 1} "
            f"({len(wrong)} such labels)"
        )


def fit_targets(source: str, y: Targets, manifest: Manifest) -> Targets:
    """Targets, int64 or float32 ``[n, ...]``, as a model's loss takes them: of its type, ``[n,
    *label_shape]``.

    Labels that the loss ignores are -1.

    Raises:
        DataError: another shape, labels that the model does not have, or numbers where labels or
            others are wanted.
    """
    loss = manifest.recipe.loss
    shape = tuple(manifest.label_shape)
    if y.shape[1:] != shape:
        raise DataError(
            f"labels in {source} have shape {list(y.shape[1:])} per sample, the model takes {list(shape)}; "
            + _remedy(y, manifest)
        )
    if loss.target == "float32":
        _check_whole(source, y, loss)
        numbers = y.astype(np.float32, copy=False)
        if loss.bounds is not None and len(numbers):
            low, high = loss.bounds
            if numbers.min() < low or numbers.max() > high:
                raise DataError(
                    f"targets in {source} lie in {numbers.min():g} to {numbers.max():g}; {loss.name} takes {low:g} to "
                    f"{high:g}"
                )
        return numbers
    if y.dtype.kind == "f":
        raise DataError(
            f"targets in {source} are not whole numbers, but {loss.name} takes labels; export with a loss of numbers, "
            "such as --loss mean-squared-error, or write labels from 0"
        )
    labels = y.astype(np.int64, copy=False)
    if loss.ignored is not None:
        ignored = labels == loss.ignored
        check_labels(source, np.where(ignored, 0, labels), manifest.classes)
        return np.where(ignored, -1, labels)
    check_labels(source, labels, manifest.classes)
    return labels


def _check_whole(source: str, y: Targets, loss: LossSpec) -> None:
    """See that targets that a loss takes as labels are those that it knows, which stay whole as
    float32.
    """
    flat = y.reshape(len(y), -1)
    start = 0
    for name, size in (loss.parts or {"": flat.shape[1]}).items():
        part = flat[:, start : start + size]
        start = start + size
        if name not in loss.whole:
            continue
        low, high, *ignored = loss.whole[name]
        wrong = np.argwhere(
            (part != np.floor(part)) | (((part < low) | (part > high)) & ~np.isin(part, ignored))
        )
        if len(wrong):
            raise DataError(
                f"label {part[tuple(wrong[0])]:g} of sample {wrong[0][0]} in {source} is no whole number from {low} to "
                f"{high}, as the loss {loss.name} takes{' for ' + name if name else ''} ({len(wrong)} such labels); "
                "number labels from 0, give the model more `classes`, or declare targets that are numbers as float32"
            )


def _remedy(y: Targets, manifest: Manifest) -> str:
    name = manifest.recipe.loss.name
    shape = manifest.label_shape
    if manifest.recipe.loss.target == "int64" and not shape and y.shape[1:] == (manifest.classes,):
        return "if several labels hold for a sample, export with --loss binary-cross-entropy; else give one label each"
    if manifest.recipe.loss.target == "float32":
        return (
            f"{name} takes {'a number' if not shape else f'numbers {list(shape)}'} for each sample"
        )
    if not shape:
        return "give one label per sample"
    return (
        "give one label per token"
        if len(shape) == 1
        else f"give one label for each place {list(shape)}"
    )
