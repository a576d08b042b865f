"""Models of several inputs: a sample is one row of numbers, which comes apart before the module
runs.

Graphs, boards and server know samples of one tensor. The inputs of a sample lie in it one behind
the other, in the order of ``input_shape``, each flattened; whole numbers beside others are float32,
exact up to 2^24.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Row:
    """How a row comes apart, by inputs' names.

    As a hook of a module it calls ``forward`` with them.

    Shapes are those of one sample, dtypes ``float32`` or ``int64``.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]

    @property
    def dtype(self) -> Literal["float32", "int64"]:
        """Of the row."""
        return "int64" if set(self.dtypes.values()) == {"int64"} else "float32"

    @property
    def named(self) -> bool:
        """Whether there are several inputs, or one with a name."""
        return "" not in self.shapes

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a sample: a row, or the one input as it is."""
        return (sum(map(math.prod, self.shapes.values())),) if self.named else self.shapes[""]

    def places(self) -> Iterator[tuple[str, slice]]:
        """Where each input lies in a row."""
        start = 0
        for name, shape in self.shapes.items():
            yield name, slice(start, start + math.prod(shape))
            start += math.prod(shape)

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[()], Any]:
        """The arguments of ``forward`` instead of rows [batch, numbers]."""
        del module
        return (), {**kwargs, **self.parts(*args)}

    def parts(self, x: Any) -> dict[str, Any]:
        """Rows [batch, *shape] taken apart, whole numbers as int64."""
        flat = x.flatten(1) if x.dim() > 1 else x[:, None]
        parts = {
            name: flat[:, place].reshape(x.shape[0], *self.shapes[name])
            for name, place in self.places()
        }
        return {
            name: part.long() if self.dtypes[name] == "int64" else part
            for name, part in parts.items()
        }

    def with_tokens(self, x: Any, vocabulary: int) -> Any:
        """Random rows, float [batch, numbers], with whole numbers below a bound where they belong,
        changed in place.
        """
        for name, place in self.places():
            if self.dtypes[name] == "int64":
                part = x[:, place] if self.named else x
                part[:] = (part.abs() * 1000).floor() % vocabulary
        return x
