"""Labelled samples in memory, checked once, handed out in batches of the type a model takes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.data.augment import changed, crop, flip
from fleet_protocol.data.facts import NO_FACTS, SourceFacts, shape_remedy
from fleet_protocol.data.file_rows import FileRows, Samples
from fleet_protocol.data.stamps import REPLACING, Stamps, shown
from fleet_protocol.errors import DataChangedError, DataError
from fleet_protocol.manifest import NO_PARTS, Manifest, Parts
from fleet_protocol.targets import Targets, check_labels, fit_targets

_IMAGES = 4  # dimensions of the samples: which, channels, height, width
_CHECK_BYTES = (
    2**22
)  # values are checked in pieces, so that a check needs no second copy of the data


@dataclass(frozen=True)
class DataSet:
    """Samples with labels.

    Attributes:
        source: where they came from, for messages.
        x: raw samples ``[N, ...]``, any real type, not yet normalised.
        y: labels ``[N]``, int64; or ``[N, ...]``, one per token or pixel, of which negative ones do
            not count; or numbers, float32 ``[N, ...]``.
        scale: factor of every value.
        mean: subtracted after scaling, broadcast against one sample.
        std: divides last, broadcast against one sample.
        augment: random changes to the samples of a training step; see
            `fleet_protocol.data.augment`.
        black: a black pixel among the raw samples, broadcast against one sample.
        parts: numbers of each input and of each target, in order, where the source names several.
        facts: what the source provides besides the numbers, such as names.
        stamps: the state of its files when they were read; None if it was not read from files.

    Raises:
        DataError: the samples are no images, and are to be changed as such.
    """

    source: str
    x: Samples
    y: Targets
    scale: float
    mean: NDArray[np.float32]
    std: NDArray[np.float32]
    augment: tuple[str, ...] = ()
    black: NDArray[np.float32] = field(default_factory=lambda: np.zeros((), np.float32))
    parts: Parts = NO_PARTS
    facts: SourceFacts = NO_FACTS
    stamps: Stamps | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self._words and self.x.ndim != _IMAGES:
            raise DataError(
                f'[data] augment = "{self._words[0]}" is for images [channels, height, width]; samples in '
                f"{self.source} have shape {list(self.x.shape[1:])}; set `shape`, or leave augment out"
            )

    @property
    def _words(self) -> list[str]:
        """The changes that are for images, not functions of the user's."""
        return [item for item in self.augment if ":" not in item]

    def __len__(self) -> int:
        return len(self.y)

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the labels 0, 1, ...; empty if the source has none."""
        return self.facts.labels

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names of the columns of a table, in their order here; empty if the source has none."""
        return self.facts.columns

    def changes(self) -> tuple[str, ...]:
        """Return the paths of the files that have changed since the samples were read."""
        return () if self.stamps is None else self.stamps.changes(self.stamps.current())

    def check_unchanged(self) -> None:
        """Raise a DataChangedError that names the files that changed after they were read, if any."""
        changes = self.changes()
        if changes:
            raise DataChangedError(f"{shown(changes)} changed after it was read; {REPLACING}")

    def check_kept(self) -> None:
        """Check that samples that stay in their open file have not changed, even if its name was
        replaced.

        Raises:
            DataChangedError: a program has written into the file.
        """
        if isinstance(self.x, FileRows) and self.x.rewritten:
            raise DataChangedError(
                f"{self.x.path} was changed in place after it was read; {REPLACING}"
            )

    def equals(self, other: "DataSet") -> bool:
        """Return whether both have the same samples and targets in memory, and a model sees them
        alike.

        Samples in a file count as different.
        """
        if isinstance(self.x, FileRows) or isinstance(other.x, FileRows):
            return False
        if (self.scale, self.x.dtype, self.y.dtype) != (
            other.scale,
            other.x.dtype,
            other.y.dtype,
        ):
            return False
        names = (
            "mean",
            "std",
            "black",
            "x",
            "y",
        )  # the first may go by column, and columns change places
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names)

    def batches(self, size: int, dtype: str) -> Iterator[tuple[NDArray[Any], Targets]]:
        """All samples in order, in batches of a type as of `batch`; the last may be smaller."""
        for first in range(0, len(self), size):
            yield self.batch(slice(first, first + size), dtype)

    def batch(self, indices: NDArray[np.int64] | slice, dtype: str) -> tuple[NDArray[Any], Targets]:
        """Samples and targets ``[B, ...]``, new arrays for a graph: ``float32`` normalised,
        ``int64`` as they are.
        """
        rows = self.x[indices]
        values = (
            self._normalised(rows.astype(np.float32))
            if dtype == "float32"
            else rows.astype(np.int64)
        )
        return values, self.y[indices]

    def augmented(self, x: NDArray[Any], generator: np.random.Generator) -> NDArray[Any]:
        """A batch of training samples as `batch` makes it, changed at random, maybe in place.

        A function of the user's that fails is a DataError.
        """
        for item in self.augment:
            if item == "crop":
                x = crop(x, self.normal_black, generator)
            else:
                x = flip(x, generator) if item == "flip" else changed(item, x, generator)
        return x

    @property
    def normal_black(self) -> NDArray[np.float32]:
        """A black pixel as it is in a batch, bit by bit, float32 that broadcasts against one
        sample.
        """
        return self._normalised(
            np.broadcast_to(self.black, (self.x.shape[1], *[1] * (self.x.ndim - 2))).copy()
        )

    def _normalised(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scale and shift in place."""
        values *= np.float32(
            self.scale
        )  # all three always: to look whether a small batch changes takes longer
        values -= self.mean
        values /= self.std
        return values

    def fit_to(self, manifest: Manifest, *, labelled: bool = True) -> "DataSet":
        """The same samples with their targets as a model's loss takes them, or with targets that
        mean nothing.

        Raises:
            DataError: the model cannot take these samples: another shape, labels it does not have,
                numbers where it wants labels, or values that are no tokens.
        """
        x = self.x
        check_parts(self.source, self.parts, manifest.parts)
        if manifest.parts[0] and math.prod(x.shape[1:]) == math.prod(manifest.input_shape):
            x = x.reshape(len(x), -1)
        self._check_samples(x, manifest.input_shape, manifest.input_dtype)
        return replace(
            self,
            x=x,
            y=fit_targets(self.source, self.y, manifest) if labelled else self.y,
        )

    def _check_samples(self, x: Samples, shape: Sequence[int], dtype: str) -> None:
        if tuple(shape) != x.shape[1:]:
            raise DataError(
                f"samples in {self.source} have shape {list(x.shape[1:])}, the model takes {list(shape)}; "
                f"{shape_remedy(x.shape[1:], shape)}, or give the model other settings"
            )
        if dtype == "int64" and not np.issubdtype(self.x.dtype, np.integer):
            raise DataError(
                f"samples in {self.source} are {self.x.dtype}, the model takes integer tokens"
            )
        if dtype == "int64" and any(
            piece.min() < 0 for piece in _pieces(x)
        ):  # a graph would count them from the end of its table
            raise DataError(f"samples in {self.source} have negative tokens; number them from 0")
        if dtype == "int64" and self._words:
            raise DataError(
                f'the model takes tokens, but [data] augment = "{self._words[0]}" is for images; leave it out'
            )


def joined(
    source: str, value: Samples | Mapping[str, NDArray[Any]]
) -> tuple[Samples, Mapping[str, int]]:
    """Several arrays ``[N, ...]`` of the same samples, else a DataError, as ``[N, numbers]``.

    A single one stays.

    The numbers are whole if all are, else float32; with them goes how many are of each name.
    """
    if not isinstance(value, Mapping):
        return value, {}
    counts = {name: len(array) if array.ndim else 0 for name, array in value.items()}
    if len(set(counts.values())) != 1:
        raise DataError(
            f"{source} holds arrays of {counts} samples; all must be of the same samples"
        )
    rows = {
        name: array.reshape(len(array), math.prod(array.shape[1:])) for name, array in value.items()
    }
    whole = all(array.dtype.kind in "biu" for array in rows.values())
    return np.concatenate(
        [row.astype(np.int64 if whole else np.float32) for row in rows.values()], 1
    ), {name: row.shape[1] for name, row in rows.items()}


def check_parts(source: str, found: Parts, wanted: Parts) -> None:
    """See that inputs and targets are those wanted, in their order.

    Nothing is known of those of a single array.

    Others are a DataError.
    """
    for what, has, takes in zip(("inputs", "targets"), found, wanted, strict=True):
        if has and [*has.items()] != [*takes.items()]:
            pair = (
                ", ".join(f"{name} ({size})" for name, size in parts.items()) or "one array"
                for parts in (has, takes)
            )
            raise DataError("{} has the {} {}; name {}, in this order".format(source, what, *pair))


def _pieces(x: Samples) -> Iterator[NDArray[Any]]:
    """Yield all samples that have a value, in order, in pieces."""
    row_bytes = math.prod(x.shape[1:]) * x.dtype.itemsize
    rows = max(1, _CHECK_BYTES // max(1, row_bytes))
    for start in range(0, len(x) if row_bytes else 0, rows):
        yield x[start : start + rows]


def _check_finite(source: str, x: Samples) -> None:
    if not np.issubdtype(x.dtype, np.floating):
        return
    start = 0
    for values in _pieces(x):
        piece = _fits(values)
        if not piece.all():
            row = start + int(np.argwhere(~piece)[0][0])
            raise DataError(
                f"sample {row} in {source} has a value that is not finite as float32; clean the data"
            )
        start += len(values)


def _fits(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Which values are finite, and stay so as float32."""
    return np.asarray(np.abs(values) <= np.finfo(np.float32).max)


def _targets(source: str, y: NDArray[Any]) -> Targets:
    """Whole numbers as int64, which a loss of numbers takes as well; others as float32."""
    if np.issubdtype(y.dtype, np.integer) or y.dtype == np.bool_:
        if y.dtype == np.uint64 and y.size and y.max() > np.iinfo(np.int64).max:
            raise DataError(
                f"labels in {source} go up to {y.max()}, beyond int64; number them from 0"
            )
        return y.astype(np.int64)
    if not np.issubdtype(y.dtype, np.floating):
        raise DataError(
            f"labels in {source} are {y.dtype}; expected whole numbers from 0, or numbers as targets"
        )
    if not _fits(y).all():
        row = int(np.argwhere(~_fits(y))[0][0])
        raise DataError(
            f"the target of sample {row} in {source} is not finite as float32; clean the data"
        )
    whole = bool(((y == np.floor(y)) & (np.abs(y) < 2.0**53)).all())
    return y.astype(np.int64) if whole else y.astype(np.float32)


def _per_channel(
    source: str, key: str, value: float | Sequence[float], shape: Sequence[int]
) -> NDArray[np.float32]:
    array = np.asarray(value, np.float32)
    if array.ndim == 0:
        return array
    if not shape or len(array) != shape[0]:
        raise DataError(
            f"[data] {key} has {len(array)} values, samples in {source} have {list(shape)[:1]} channels"
        )
    if (
        array == array[0]
    ).all():  # one number goes with samples of any shape, those laid flat for several inputs too
        return array[:1].reshape(())
    return array.reshape(-1, *[1] * (len(shape) - 1))


def make_dataset(
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
    """Check what a source delivered: samples ``[N, ...]``, and labels ``[N]`` or one per token or
    pixel, or numbers.

    The rest is as in the table of a source (`fleet_protocol.data.sources`), which messages name.

    Raises:
        DataError: empty, lengths that differ, wrong types, labels outside their range, values that
            are not finite, or no images where images are to be changed.
    """
    if x.ndim < 1 or y.ndim < 1:
        raise DataError(
            f"{source} holds samples of shape {list(x.shape)} and labels of shape {list(y.shape)}; "
            "expected [N, ...] and [N] (or [N, ...], a label per token or pixel, or several numbers)"
        )
    if len(x) != len(y):
        raise DataError(f"{source} holds {len(x)} samples but {len(y)} labels")
    if not len(y):
        raise DataError(f"{source} is empty: it holds no sample to train on")
    real = (
        np.issubdtype(x.dtype, np.integer)
        or np.issubdtype(x.dtype, np.floating)
        or x.dtype == np.bool_
    )
    if not real or x.dtype.itemsize > 8:
        raise DataError(f"samples in {source} are {x.dtype}; expected real numbers")
    targets = _targets(source, y)
    if shape is not None:
        if math.prod(x.shape[1:]) != math.prod(shape):
            raise DataError(
                f"samples in {source} have shape {list(x.shape[1:])}, which cannot become `shape` {list(shape)}"
            )
        had, wanted = ([size for size in sizes if size > 1] for sizes in (x.shape[1:], shape))
        if had != wanted and sorted(had) == sorted(wanted):
            text = f"samples in {source} have shape {list(x.shape[1:])}; `shape` {list(shape)} would mix their numbers"
            raise DataError(f"{text}; move their axes by a function in `transforms`")
        x = x.reshape(len(x), *shape)
    if classes is not None:
        if targets.dtype.kind == "f":
            raise DataError(
                f"labels in {source} are not whole numbers; leave `classes` out where they are targets"
            )
        check_labels(source, targets.astype(np.int64, copy=False), classes)
    _check_finite(source, x)
    return DataSet(
        source=source,
        x=x,
        y=targets,
        scale=scale,
        mean=_per_channel(source, "mean", mean, x.shape[1:]),
        std=_per_channel(source, "std", std, x.shape[1:]),
        augment=tuple(augment),
        black=_per_channel(source, "black", black, x.shape[1:]),
    )
