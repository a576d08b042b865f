"""Checks the arrays that a source delivered, and assembles a data set of them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.data.dataset import DataSet
from fleet_protocol.data.file_rows import Samples, iterate_blocks
from fleet_protocol.errors import DataError
from fleet_protocol.targets import Targets, check_labels

_LARGEST_ITEM_BYTES = 8
_EXACT_FLOAT64 = 2.0**53  # whole numbers below are exact as float64


def make_dataset(  # noqa: PLR0913  (options by keyword)
    source: str,
    x: Samples,
    y: NDArray[Any],
    *,
    shape: Sequence[int] | None = None,
    scale: float = 1.0,
    mean: float | Sequence[float] = 0.0,
    std: float | Sequence[float] = 1.0,
    classes: int | None = None,
    augment: Sequence[str] = (),
    black: float | Sequence[float] = 0.0,
) -> DataSet:
    """Check samples and targets, and return them as a data set.

    The keyword arguments are the keys of a source's table (`fleet_protocol.data.sources`), which
    messages name.

    Samples are ``[N, ...]``; targets are labels ``[N]``, or ``[N, ...]`` for labels per token or
    pixel, or for numbers.

    Raises:
        DataError: the data is empty, lengths differ, types are wrong, labels are outside their
            range, values are not finite, or samples with changes for images are not images.
    """
    # First, because all further steps assume equal lengths.
    _check_arrays(source, x, y)
    targets = _make_targets(source, y)
    if shape is not None:
        x = _reshape(source, x, shape)
    if classes is not None:
        if targets.dtype.kind == "f":
            raise DataError(
                f"labels in {source} are not whole numbers; leave `classes` out if they are targets"
            )
        check_labels(source, targets.astype(np.int64, copy=False), classes)
    _check_finite(source, x)
    return DataSet(
        source=source,
        x=x,
        y=targets,
        scale=scale,
        mean=_per_channel(
            source,
            "mean",
            mean,
            x.shape[1:],
        ),
        std=_per_channel(
            source,
            "std",
            std,
            x.shape[1:],
        ),
        augment=tuple(augment),
        black=_per_channel(
            source,
            "black",
            black,
            x.shape[1:],
        ),
    )


def join_arrays(
    source: str, value: Samples | Mapping[str, NDArray[Any]]
) -> tuple[Samples, Mapping[str, int]]:
    """Return several arrays of the same samples as one, with the number of values of each by name.

    Args:
        source: where they came from, for messages.
        value: arrays ``[N, ...]`` by name, or a single one, which stays as it is.

    Returns:
        An array ``[N, numbers]``, int64 if all numbers are whole, else float32; and how many
        numbers of a sample come from each array.

    Raises:
        DataError: the arrays have different numbers of samples.
    """
    if not isinstance(value, Mapping):
        return value, {}
    # An array without axes has no samples.
    counts = {name: len(array) if array.ndim else 0 for name, array in value.items()}
    if len(set(counts.values())) != 1:
        raise DataError(
            f"{source} contains arrays of {counts} samples; all must have the same samples"
        )
    flat = {}
    for name, array in value.items():
        # Not -1, which fails for arrays without samples.
        flat[name] = array.reshape(len(array), math.prod(array.shape[1:]))
    # Whole numbers among fractions become float32, as one row has one type.
    is_whole = all(array.dtype.kind in "biu" for array in flat.values())
    dtype = np.int64 if is_whole else np.float32
    joined = np.concatenate([array.astype(dtype) for array in flat.values()], 1)
    return joined, {name: array.shape[1] for name, array in flat.items()}


def _check_arrays(
    source: str,
    x: Samples,
    y: NDArray[Any],
) -> None:
    """Check dimensions, lengths and the type of the samples."""
    if x.ndim < 1 or y.ndim < 1:
        raise DataError(
            f"{source} contains samples of shape {list(x.shape)} and labels of shape "
            f"{list(y.shape)}; expected [N, ...] and [N] (or [N, ...], a label per token or "
            "pixel, or several numbers)"
        )
    if len(x) != len(y):
        raise DataError(f"{source} contains {len(x)} samples but {len(y)} labels")
    if not len(y):
        raise DataError(f"{source} is empty: it contains no samples to train on")
    is_real = _is_whole(x.dtype) or np.issubdtype(x.dtype, np.floating)
    if not is_real or x.dtype.itemsize > _LARGEST_ITEM_BYTES:
        raise DataError(
            f"samples in {source} are {x.dtype}; expected real numbers of at most 64 bits"
        )
    if not math.prod(x.shape[1:]):
        raise DataError(
            f"samples in {source} have shape {list(x.shape[1:])}, which holds no values; correct "
            "the code that saves them"
        )


def _make_targets(source: str, y: NDArray[Any]) -> Targets:
    """Return whole numbers as int64, which a loss of numbers also takes, and others as float32."""
    if _is_whole(y.dtype):
        if y.dtype == np.uint64 and y.size and y.max() > np.iinfo(np.int64).max:
            raise DataError(
                f"labels in {source} go up to {y.max()}, beyond int64; number them from 0"
            )
        return y.astype(np.int64)
    if not np.issubdtype(y.dtype, np.floating):
        raise DataError(
            f"labels in {source} are {y.dtype}; expected whole numbers from 0, or numbers as "
            "targets; for names, number them from 0, or write a table with a label in each line"
        )
    is_finite = _finite_as_float32(y)
    if not is_finite.all():
        row = int(np.argwhere(~is_finite)[0][0])
        raise DataError(
            f"the target of sample {row} in {source} is not finite as float32; clean the data"
        )
    # NaN was refused above; float64 does not hold all larger whole numbers.
    is_whole = (y == np.floor(y)) & (np.abs(y) < _EXACT_FLOAT64)
    return y.astype(np.int64) if is_whole.all() else y.astype(np.float32)


def _is_whole(dtype: np.dtype[Any]) -> bool:
    # By kind, because numpy counts times such as timedelta64 as integers.
    return dtype.kind in "iub"


def _reshape(
    source: str,
    x: Samples,
    shape: Sequence[int],
) -> Samples:
    """Give each sample another shape, unless that would mix the numbers of its axes."""
    own = x.shape[1:]
    if math.prod(own) != math.prod(shape):
        raise DataError(
            f"samples in {source} have shape {list(own)}, which cannot become `shape` {list(shape)}"
        )
    own_sizes = [size for size in own if size > 1]
    new_sizes = [size for size in shape if size > 1]
    # Axes of size 1 may come and go, but the others must keep their order.
    if own_sizes != new_sizes and sorted(own_sizes) == sorted(new_sizes):
        raise DataError(
            f"samples in {source} have shape {list(own)}; `shape` {list(shape)} would mix their"
            " numbers; move their axes with a function in `transforms`"
        )
    return x.reshape(len(x), *shape)


def _check_finite(source: str, x: Samples) -> None:
    if not np.issubdtype(x.dtype, np.floating):
        return
    start = 0
    # In blocks, because samples may stay on disk.
    for block in iterate_blocks(x):
        is_finite = _finite_as_float32(block)
        if not is_finite.all():
            row = start + int(np.argwhere(~is_finite)[0][0])
            raise DataError(
                f"sample {row} in {source} has a value that is not finite as float32; "
                "clean the data"
            )
        start += len(block)


def _finite_as_float32(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which values are finite and remain finite as float32."""
    # NaN compares as false, so it counts as not finite.
    return np.asarray(np.abs(values) <= np.finfo(np.float32).max)


def _per_channel(
    source: str, key: str, value: float | Sequence[float], shape: Sequence[int]
) -> NDArray[np.float32]:
    """Return a number, or one per channel, as an array that broadcasts against one sample."""
    array = np.asarray(value, np.float32)
    if array.ndim == 0:
        return array
    if not shape or len(array) != shape[0]:
        raise DataError(
            f"[data] {key} has {len(array)} values, samples in {source} have {list(shape)[:1]} "
            "channels"
        )
    if (array == array[0]).all():
        # A single number fits samples of any shape, also those laid flat for several inputs.
        return array[:1].reshape(())
    # Channels are the first axis of a sample.
    return array.reshape(-1, *[1] * (len(shape) - 1))
