"""Labelled samples that were checked once, in batches of the type that a model takes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.data.augment import apply_function, box_crop, crop, flip
from fleet_protocol.data.facts import NO_FACTS, SourceFacts, shape_remedy
from fleet_protocol.data.file_rows import FileRows, Samples, iterate_blocks
from fleet_protocol.data.stamps import REPLACING, Stamps, list_paths
from fleet_protocol.errors import DataChangedError, DataError
from fleet_protocol.manifest import UNNAMED, Manifest, SampleSizes
from fleet_protocol.targets import Targets, fit_targets

_IMAGES = 4  # dimensions of a set of images: sample, channels, height, width


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
        sample_sizes: numbers of each input and of each target, in order, where the source names
            several.
        facts: what the source provides besides the numbers, such as names.
        stamps: the state of its files when they were read; None if it was not read from files.

    Raises:
        DataError: the samples are not images, but have changes for images.
    """

    source: str
    x: Samples
    y: Targets
    scale: float
    mean: NDArray[np.float32]
    std: NDArray[np.float32]
    augment: tuple[str, ...] = ()
    black: NDArray[np.float32] = field(default_factory=lambda: np.zeros((), np.float32))
    sample_sizes: SampleSizes = UNNAMED
    facts: SourceFacts = NO_FACTS
    stamps: Stamps | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self._image_changes and self.x.ndim != _IMAGES:
            raise DataError(
                f'[data] augment = "{self._image_changes[0]}" is for images [channels, height, '
                f"width]; samples in {self.source} have shape {list(self.x.shape[1:])}; "
                "set `shape`, or leave augment out"
            )

    @property
    def _image_changes(self) -> list[str]:
        """The changes that are built in for images, without functions of the user."""
        # A function of the user may take samples of any shape.
        return [name for name in self.augment if ":" not in name]

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
        """Check that no file has changed since the samples were read.

        Raises:
            DataChangedError: it names the files that changed.
        """
        changes = self.changes()
        if changes:
            raise DataChangedError(f"{list_paths(changes)} changed after it was read; {REPLACING}")

    def check_kept(self) -> None:
        """Check that samples that stay in their open file have not changed there.

        Another file may have taken the name: the samples are those of the open one.

        Raises:
            DataChangedError: a program has written into the file.
        """
        if isinstance(self.x, FileRows) and self.x.rewritten:
            raise DataChangedError(
                f"{self.x.path} was changed in place after it was read; {REPLACING}"
            )

    def equals(self, other: "DataSet") -> bool:
        """Return whether a model sees the same samples and targets in both.

        Samples that stay in their file count as different.
        """
        if isinstance(self.x, FileRows) or isinstance(other.x, FileRows):
            return False
        # The cheap differences first.
        own_form = (self.scale, self.x.dtype, self.y.dtype)
        if own_form != (other.scale, other.x.dtype, other.y.dtype):
            return False
        # Mean, deviation and black may go by column, and columns can change places.
        names = ("mean", "std", "black", "x", "y")
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names)

    def batches(self, size: int, dtype: str) -> Iterator[tuple[NDArray[Any], Targets]]:
        """Yield all samples in order, in batches like those of `batch`; the last may be smaller."""
        for first in range(0, len(self), size):
            yield self.batch(slice(first, first + size), dtype)

    def batch(self, indices: NDArray[np.int64] | slice, dtype: str) -> tuple[NDArray[Any], Targets]:
        """Return samples and targets ``[B, ...]`` in new arrays, as a graph takes them.

        Args:
            indices: indices of the samples.
            dtype: ``float32`` for normalised samples, ``int64`` for samples as they are.
        """
        rows = self.x[indices]
        if dtype == "float32":
            # A copy as float32, which normalisation then changes in place.
            return self._normalise(rows.astype(np.float32)), self.y[indices]
        return rows.astype(np.int64), self.y[indices]

    def augmented(self, x: NDArray[Any], generator: np.random.Generator) -> NDArray[Any]:
        """Return a batch of training samples with random changes, which may be made in place.

        Args:
            x: a batch as `batch` makes it.
            generator: the only source of chance.

        Raises:
            DataError: a function of the user fails.
        """
        for name in self.augment:
            if name == "crop":
                x = crop(x, self.normal_black, generator)
            elif name == "flip":
                x = flip(x, generator)
            elif name == "box-crop":
                x = box_crop(x, generator)
            else:
                x = apply_function(name, x, generator)
        return x

    @property
    def normal_black(self) -> NDArray[np.float32]:
        """A black pixel with exactly the bits that it has in a batch.

        It is float32 and broadcasts against one sample.
        """
        # Normalised like samples, because a shorter formula would round differently.
        pixel = np.broadcast_to(self.black, (self.x.shape[1], *[1] * (self.x.ndim - 2)))
        return self._normalise(pixel.copy())

    def _normalise(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scale and shift values in place, and return them."""
        # Always all three steps: looking whether one changes a small batch takes longer.
        values *= np.float32(self.scale)
        values -= self.mean
        values /= self.std
        return values

    def fit_to(self, manifest: Manifest, *, labelled: bool = True) -> "DataSet":
        """Return the same samples with their targets as a model's loss takes them.

        Args:
            manifest: manifest of the model.
            labelled: whether the targets have a meaning; otherwise they are not changed.

        Raises:
            DataError: the samples do not fit the model: they have another shape, labels that it
                does not have, numbers instead of labels, or values that are not tokens.
        """
        x = self.x
        check_sample_sizes(self.source, self.sample_sizes, manifest.sample_sizes)
        has_same_size = math.prod(x.shape[1:]) == math.prod(manifest.input_shape)
        if (
            manifest.sample_sizes.inputs and has_same_size
        ):  # a model of several inputs takes flat samples
            x = x.reshape(len(x), -1)
        self._check_samples(x, manifest.input_shape, manifest.input_dtype)
        y = fit_targets(self.source, self.y, manifest) if labelled else self.y
        return replace(self, x=x, y=y)

    def _check_samples(
        self,
        x: Samples,
        shape: Sequence[int],
        dtype: str,
    ) -> None:
        own = x.shape[1:]
        if tuple(shape) != own:
            raise DataError(
                f"samples in {self.source} have shape {list(own)}, but the model takes "
                f"{list(shape)}; {shape_remedy(own, shape)}, or give the model other settings"
            )
        if dtype == "int64":
            self._check_tokens(x)

    def _check_tokens(self, x: Samples) -> None:
        if not np.issubdtype(self.x.dtype, np.integer):
            raise DataError(
                f"samples in {self.source} are {self.x.dtype}, but the model takes integer tokens"
            )
        for block in iterate_blocks(x):
            if block.min() < 0:  # a graph would count it from the end of its table
                raise DataError(
                    f"samples in {self.source} have negative tokens; number them from 0"
                )
        if self._image_changes:
            raise DataError(
                f'the model takes tokens, but [data] augment = "{self._image_changes[0]}" is for '
                "images; leave it out"
            )


def check_sample_sizes(
    source: str,
    sizes: SampleSizes,
    wanted: SampleSizes,
) -> None:
    """Check that named inputs and targets are those that a model takes, in its order.

    A single array has no names, so it is not checked.

    Args:
        source: where the data came from, for messages.
        sizes: numbers of each input and of each target in the data.
        wanted: numbers of those of the model.

    Raises:
        DataError: they differ.
    """
    kinds = ("inputs", "targets")
    for kind, own, model in zip(
        kinds,
        sizes,
        wanted,
        strict=True,
    ):
        # A single array has no names to compare, so it passes.
        if own and list(own.items()) != list(model.items()):
            raise DataError(
                f"{source} has the {kind} {_list_sizes(own)}; name {_list_sizes(model)}, "
                "in this order"
            )


def _list_sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({size})" for name, size in sizes.items()) or "one array"
