"""Models of several inputs: a sample is one row of numbers, which is split before the module runs.

Graphs, boards and server handle samples of one tensor. The inputs of a sample lie in it one behind
the other, in the order of ``input_shape``, each flattened; whole numbers beside others are float32,
exact up to 2^24.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Row:
    """How a row of numbers is split into inputs, by their names.

    As a forward pre-hook of a module it makes a row the keywords of ``forward``.

    Attributes:
        shapes: shapes of one sample.
        dtypes: ``float32`` or ``int64``.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]

    @property
    def dtype(self) -> Literal["float32", "int64"]:
        """The dtype of the whole row."""
        return "int64" if set(self.dtypes.values()) == {"int64"} else "float32"

    @property
    def named(self) -> bool:
        """Whether there are several inputs, or one with a name."""
        return "" not in self.shapes

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a sample: of a row, or of the single input as it is."""
        if self.named:
            return (sum(map(math.prod, self.shapes.values())),)
        return self.shapes[""]

    def places(self) -> Iterator[tuple[str, slice]]:
        """Yield each input with its place in a row."""
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
        flat = x.flatten(1) if x.dim() > 1 else x[:, None]
        # All are cut out before any is converted: a graph keeps this order of operations.
        inputs: dict[str, Any] = {}
        for name, place in self.places():
            inputs[name] = flat[:, place].reshape(x.shape[0], *self.shapes[name])
        for name, value in inputs.items():
            if self.dtypes[name] == "int64":
                inputs[name] = value.long()
        return inputs

    def with_tokens(self, x: Any, vocabulary: int) -> Any:
        """Make random numbers whole where a row has tokens, in place.

        Args:
            x: float [batch, *shape].
            vocabulary: number of tokens; the numbers are below it.

        Returns:
            `x`.
        """
        for name, place in self.places():
            if self.dtypes[name] == "int64":
                tokens = x[:, place] if self.named else x
                tokens[:] = (tokens.abs() * 1000).floor() % vocabulary
        return x
