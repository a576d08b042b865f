"""A model of a package: the arguments it is built with, and the call that it gets."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from models.architecture import Dtype
from models.inputs import small_pictures
from models.zoo.package_call import PackageCall, PackageOutput, adapt_call
from trainer_export.packages.sizes import sizes_of, with_sizes

INPUT_SHAPE = "input_shape"
INPUT_DTYPE = "input_dtype"
OUTPUT_NAME = "output_name"
SAMPLE_SHAPE = "sample_shape"
SETTINGS_OF_SHOAL = (INPUT_SHAPE, INPUT_DTYPE, OUTPUT_NAME, SAMPLE_SHAPE)
"""Settings that no constructor of a package gets.

`SAMPLE_SHAPE` takes the place of `INPUT_SHAPE` for a constructor that has an argument of that name.
"""

_SHORT = 8  # tokens


@dataclass(frozen=True)
class PackageModel:
    """How a package's model is built, with other sizes if asked for.

    Example:
        >>> mlp = PackageModel("timm:x", "x", nn.Linear, {"in_features": 4, "out_features": 8})
        >>> mlp.sizes
        {'in_features': 4, 'out_features': 8}
        >>> mlp.build({"out_features": 6})
        Linear(in_features=4, out_features=6, bias=True)
    """

    spec: str  # as the user wrote it
    name: str  # of the architecture
    make: Callable[..., nn.Module]  # takes the arguments as keywords
    arguments: Mapping[str, Any]
    labels: str = ""  # the place of the number of labels; "" if no argument has it
    input_shape: tuple[int, ...] | None = None  # of a sample; None if nothing tells it
    input_dtype: Dtype = "float32"
    call: PackageCall = field(default_factory=PackageCall)
    output: PackageOutput = field(default_factory=PackageOutput)
    changes: Mapping[str, Any] = field(default_factory=dict)  # arguments that the user gave
    # Returns the call that suits the samples of a model; None if every sample gets the same.
    choose_call: Callable[["PackageModel"], PackageCall] | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """The whole numbers of its arguments by place, which may be widths and depths."""
        return sizes_of(self.arguments)

    def build(self, sizes: Mapping[str, int]) -> nn.Module:
        """Build the model with some sizes; it takes a batch and returns one tensor.

        Raises:
            ConfigError: if there is no argument for a size.
        """
        module = self.make(**with_sizes(self.arguments, sizes))
        return adapt_call(module, self.call, self.output)

    def with_chosen_call(self) -> "PackageModel":
        """Return the model with the call that suits the shape of its samples."""
        if self.choose_call is None:
            return self
        return replace(self, call=self.choose_call(self))

    def for_samples(self, shape: int | Sequence[int]) -> "PackageModel":
        """Return the model for samples of a shape.

        Args:
            shape: the shape; a number for samples with one dimension.
        """
        own = (shape,) if isinstance(shape, int) else tuple(shape)
        if own == self.input_shape:
            return self
        return replace(self, input_shape=own).with_chosen_call()

    def with_arguments(self, arguments: Mapping[str, Any]) -> "PackageModel":
        """Return the model with other arguments."""
        return replace(self, arguments=arguments)

    def with_small_samples(self) -> Iterator["PackageModel"]:
        """Yield the model for short texts or small pictures, on which it is cheaper to run.

        It may not run on such samples. The smallest come first; of other samples there are none.
        """
        shape = self.input_shape
        if shape is None:
            return
        smaller: list[tuple[int, ...]] = []
        if self.input_dtype == "int64" and len(shape) == 1 and shape[0] > _SHORT:
            smaller.append((_SHORT,))
        elif self.input_dtype == "float32":
            smaller += small_pictures(shape)
        for small in smaller:
            # The call stays that of samples of the usual length, which the axes are for.
            yield replace(self, input_shape=small)
