"""Models with several inputs: a sample is one row of numbers, split before the module runs.

Graphs, boards and server handle samples of one tensor. A row contains the flattened inputs of a
sample in the order of ``input_shape``; integers next to floats are stored as float32, exact up to
2^24.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

_SMALL_SIDES = (64, 128)  # pixels; networks make them 32 times fewer, and some take 75 or more
_PICTURE_DIMENSIONS = 3  # at least: channels, height, width


def small_pictures(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the shapes of smaller pictures, with at most 64 or 128 pixels on each side.

    Which entries of the parameters a unit has does not depend on the size of pictures, and a model
    runs on small ones in less time, if it takes them.

    Args:
        shape: channels, then the sides; of any other sample there are no smaller ones.
    """
    smaller: list[tuple[int, ...]] = []
    if len(shape) < _PICTURE_DIMENSIONS:
        return smaller
    channels, *sides = shape
    for most in _SMALL_SIDES:
        small = (channels, *[min(most, side) for side in sides])
        if small != shape:
            smaller.append(small)
    return smaller


@dataclass(frozen=True)
class Row:
    """The layout of a row of numbers: its inputs by name.

    As a forward pre-hook of a module, it converts a row into the keywords of ``forward``.

    Attributes:
        shapes: shapes of one sample.
        dtypes: ``float32`` or ``int64``.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]

    @property
    def dtype(self) -> Literal["float32", "int64"]:
        """The dtype of the whole row."""
        # One float among the inputs makes the whole row float32.
        return "int64" if set(self.dtypes.values()) == {"int64"} else "float32"

    @property
    def named(self) -> bool:
        """Return whether there are several inputs, or a named one."""
        # A single input without a name is the row itself.
        return "" not in self.shapes

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a sample: of a row, or of the single input."""
        if self.named:
            return (sum(map(math.prod, self.shapes.values())),)
        return self.shapes[""]

    def with_shape(self, shape: tuple[int, ...]) -> "Row":
        """Return the row with another shape of its single input, which has no name."""
        return replace(self, shapes={"": shape})

    def places(self) -> Iterator[tuple[str, slice]]:
        """Yield each input with its position in a row."""
        start = 0
        for name, shape in self.shapes.items():
            end = start + math.prod(shape)
            yield name, slice(start, end)
            start = end

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[()], Any]:
        """Return the arguments of ``forward`` for rows, float [batch, numbers]."""
        del module
        return (), {**kwargs, **self.parts(*args)}

    def parts(self, x: Any) -> dict[str, Any]:
        """Split rows [batch, *shape] into inputs, whole numbers as int64."""
        # A row of one number may come without its dimension.
        if x.dim() > 1:
            flat = x.flatten(1)
        else:
            flat = x[:, None]
        # All are sliced before any is converted, because a graph keeps this order of operations.
        inputs: dict[str, Any] = {}
        for name, place in self.places():
            columns = flat[:, place]
            inputs[name] = columns.reshape(x.shape[0], *self.shapes[name])
        for name, value in inputs.items():
            if self.dtypes[name] == "int64":
                inputs[name] = value.long()
        return inputs

    def with_tokens(
        self,
        x: Any,
        vocabulary: int,
    ) -> Any:
        """Convert random numbers to token ids where a row has tokens, in place.

        Args:
            x: float [batch, *shape].
            vocabulary: number of tokens; the numbers are below it.

        Returns:
            `x`.
        """
        for name, place in self.places():
            if self.dtypes[name] == "int64":
                tokens = x[:, place] if self.named else x
                # Any real number becomes a token id below the vocabulary.
                tokens[:] = (tokens.abs() * 1000).floor() % vocabulary
        return x
