"""Targets of samples, labels or numbers, in the form that a loss expects.

Boards and servers use the same numpy functions.
"""

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import DataError
from fleet_protocol.manifest import Manifest
from fleet_protocol.recipe_spec import LossSpec

EXACT = 2**24  # whole numbers up to here are exact as float32
Targets = NDArray[np.int64] | NDArray[np.float32]


def counted(y: Targets) -> int:
    """Return how many targets count: labels that are not negative, or all samples with numbers."""
    return len(y) if y.dtype.kind == "f" else int(np.count_nonzero(y >= 0))


def check_labels(
    source: str,
    y: NDArray[np.int64],
    classes: int,
) -> None:
    """Check that labels lie in ``[0, classes)``.

    If a sample has several labels, negative ones are allowed and do not count.

    Raises:
        DataError: it names the first label outside, with its position.
    """
    is_negative = (y < 0) & (y.ndim == 1)
    outside = np.argwhere((y >= classes) | is_negative)
    if len(outside):
        first = outside[0]
        # Labels that all fit after a shift by one were counted from 1.
        is_from_one = y.min() == 1 and y.max() == classes
        remedy = "; labels count from 0: subtract 1 from each" if is_from_one else ""
        raise DataError(
            f"label {int(y[tuple(first)])} of sample {int(first[0])} in {source} is outside 0 to "
            f"{classes - 1} ({len(outside)} such labels){remedy}"
        )


def fit_targets(
    source: str,
    y: Targets,
    manifest: Manifest,
) -> Targets:
    """Return targets in the type and shape that a model's loss expects.

    Args:
        source: their origin, for messages.
        y: int64 or float32 ``[n, ...]``.
        manifest: manifest of the model.

    Returns:
        Targets ``[n, *label_shape]``; labels that the loss ignores are -1.

    Raises:
        DataError: they have another shape, labels that the model does not have, or numbers instead
            of labels or other numbers.
    """
    loss = manifest.recipe.loss
    shape = tuple(manifest.label_shape)
    if y.shape[1:] != shape:
        raise DataError(
            f"labels in {source} have shape {list(y.shape[1:])} per sample, but the model takes "
            f"{list(shape)}; {_shape_remedy(y, manifest)}"
        )
    if loss.target == "float32":
        return _fit_numbers(source, y, loss)
    if y.dtype.kind == "f":
        raise DataError(
            f"targets in {source} are not whole numbers, but {loss.name} takes labels; export "
            "with a loss of numbers, such as --loss mean-squared-error, or write labels from 0"
        )
    # Without a copy if the type fits: targets may be large.
    labels = y.astype(np.int64, copy=False)
    if loss.ignored is None:
        check_labels(source, labels, manifest.classes)
        return labels
    # The ignored label may be outside the classes.
    is_ignored = labels == loss.ignored
    check_labels(source, np.where(is_ignored, 0, labels), manifest.classes)
    return np.where(is_ignored, -1, labels)


def _fit_numbers(
    source: str,
    y: Targets,
    loss: LossSpec,
) -> NDArray[np.float32]:
    _check_whole(source, y, loss)
    numbers = y.astype(np.float32, copy=False)
    if loss.bounds is None or not len(numbers):
        return numbers
    low, high = loss.bounds
    if numbers.min() < low or numbers.max() > high:
        raise DataError(
            f"targets in {source} lie in {numbers.min():g} to {numbers.max():g}; {loss.name} "
            f"takes {low:g} to {high:g}"
        )
    return numbers


def _check_whole(
    source: str,
    y: Targets,
    loss: LossSpec,
) -> None:
    """Check targets that a loss uses as labels, and which stay whole numbers in float32."""
    flat = y.reshape(len(y), -1)
    start = 0
    for name, size in (loss.parts or {"": flat.shape[1]}).items():
        values = flat[:, start : start + size]
        start += size
        if name not in loss.whole:
            continue
        low, high, *ignored = loss.whole[name]
        is_outside = ((values < low) | (values > high)) & ~np.isin(values, ignored)
        wrong = np.argwhere((values != np.floor(values)) | is_outside)
        if not len(wrong):
            continue
        first = wrong[0]
        target = f" for {name}" if name else ""
        raise DataError(
            f"label {values[tuple(first)]:g} of sample {first[0]} in {source} is not a whole "
            f"number from {low} to {high}, as the loss {loss.name} expects{target} "
            f"({len(wrong)} such labels); number labels from 0, give the model more "
            "`classes`, or declare targets that are numbers as float32"
        )


def choosing_loss(name: str) -> str:
    """Return how a user chooses a loss: with an option of the export, or in `sim.toml`."""
    return f'export with --loss {name} (in a simulation set loss = "{name}" in [model.recipe])'


def _shape_remedy(y: Targets, manifest: Manifest) -> str:
    loss = manifest.recipe.loss
    shape = manifest.label_shape
    has_column_per_class = y.shape[1:] == (manifest.classes,)
    if loss.target == "int64" and not shape and has_column_per_class:
        return (
            "if several labels hold for a sample, "
            f"{choosing_loss('binary-cross-entropy')}; else give one label each"
        )
    if loss.target == "float32":
        numbers = f"numbers {list(shape)}" if shape else "a number"
        return f"{loss.name} takes {numbers} for each sample"
    if not shape:
        return "give one label per sample"
    if len(shape) == 1:
        return "give one label per token"
    return f"give one label for each position {list(shape)}"
