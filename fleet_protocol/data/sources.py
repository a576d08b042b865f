"""Sources of data, a frozen model for each kind.

They are the table ``[data]`` of a board, ``[evaluation.data]`` of a server, and the tables of a
simulation.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import Self

from fleet_protocol.data.augment import Augment, FunctionName, file_of, relocated
from fleet_protocol.data.bounds import ReadBounds
from fleet_protocol.data.facts import plain_name
from fleet_protocol.frozen import FiniteJson, FrozenModel


def _check_different(names: tuple[str, ...]) -> tuple[str, ...]:
    """Check that no two names are the same."""
    for name, count in Counter(map(plain_name, names)).items():
        if count > 1:
            raise ValueError(f"the name {name!r} is listed {count} times; list it once")
    return names


Names = Annotated[tuple[str, ...], AfterValidator(_check_different)]
"""Names of labels in their order, all different."""

PerChannel = float | tuple[float, ...]
Positive = Annotated[float, Field(gt=0)]

_LABEL_COLUMN = "label"


class Source(FrozenModel):
    """The settings of every source.

    A sample becomes ``(x * scale - mean) / std`` when it is put into a batch; in memory it keeps
    its original type.

    Attributes:
        shape: shape of one sample, such as ``[1, 28, 28]``; required if the samples in the file
            are flattened, or if their axes of size 1 were removed.
        scale: factor by which every value is multiplied.
        mean: number that is subtracted after scaling: one number, or one per column of a table or
            per channel of an image (the first axis of a sample).
        std: number by which the values are divided after the subtraction: one number, or one per
            column or channel.
        classes: number of labels; labels are checked against this number when the data is read.
            Without it, labels are checked when a task names a model.
        transforms: your own functions, as ``file.py:function``, applied to all samples in this
            order when the samples are read. Each function takes an array ``[N, ...]``, and returns
            an array with the same number of samples.
        augment: random changes, applied in this order to the samples of training steps; evaluations
            use unchanged samples. ``crop`` pads an image with 4 black pixels on each side, and
            crops it back to its original size at a random
            position. ``flip`` mirrors an image with probability 1/2.
            ``box-crop`` enlarges a random box in an image to the size of the image. Your own
            function receives a batch, in the shape that the model expects, and the step's numpy
            generator, which is the only permitted source of randomness.
        black: value of a black pixel in the source, before scaling: one number, or one per channel.
        limit: maximum number of samples to use, from the start of the data; None for all.
        bounds: limits of what is read; a source that exceeds them is refused.
    """

    has_columns: ClassVar[bool] = False
    """Whether a contract chooses among the columns of flat samples after they are read."""

    shape: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    scale: Positive = 1.0
    mean: PerChannel = 0.0
    std: Positive | tuple[Positive, ...] = 1.0
    classes: int | None = Field(default=None, ge=1)
    transforms: tuple[FunctionName, ...] = ()
    augment: Augment = ()
    black: PerChannel = 0.0
    limit: int | None = Field(default=None, ge=1)
    bounds: ReadBounds = ReadBounds()

    @property
    def missing_value(self) -> float | None:
        """The number that the source uses for missing values; None if it defines none."""
        return None

    def with_missing(self, value: float | None) -> Self:
        """Return the source with a number for missing values, if it can have one and lacks it."""
        del value
        return self

    def reads_flat_table(self, shape: Sequence[int]) -> bool:
        """Return whether samples of this shape are rows of a table with columns to choose from."""
        return self.has_columns and len(shape) == 1

    def relocated(self, move: Callable[[Path], Path]) -> Self:
        """Apply `move` to the files of the source, including those of functions."""
        transforms = tuple(relocated(move, name) for name in self.transforms)
        augment = tuple(relocated(move, name) for name in self.augment)
        return (
            super()
            .relocated(move)
            .model_copy(update={"transforms": transforms, "augment": augment})
        )

    def functions(self) -> tuple[str, ...]:
        """Return the user's functions, ``file.py:function``, that read or change the samples."""
        return tuple(
            name for name in (*self.transforms, *self.augment) if file_of(name) is not None
        )

    def python_files(self) -> Iterator[Path]:
        """Yield the files of these functions."""
        for name in self.functions():
            file = file_of(name)
            if file is not None:
                yield file


class NpzData(Source):
    """Arrays saved by numpy.

    Attributes:
        path: an ``.npz`` file, or an ``.npy`` file with the samples.
        y_path: an ``.npy`` file with the labels; required if ``path`` is an ``.npy`` file.
        x_key: name of the samples in an ``.npz`` file; for a model with several inputs, the names
            of the inputs' arrays, in the model's order.
        y_key: name of the labels in an ``.npz`` file; for a loss with several targets, the names of
            the targets' arrays.
    """

    kind: Literal["npz"] = "npz"
    path: Path
    y_path: Path | None = None
    x_key: str | tuple[str, ...] = "x"
    y_key: str | tuple[str, ...] = "y"

    @model_validator(mode="after")
    def _no_array_is_input_and_target(self) -> Self:
        inputs = (self.x_key,) if isinstance(self.x_key, str) else self.x_key
        targets = (self.y_key,) if isinstance(self.y_key, str) else self.y_key
        for key in targets:
            if key in inputs and self.y_path is None:
                raise ValueError(
                    f"array {key!r} is in x_key and in y_key, so a model would read the answer; "
                    "name different arrays"
                )
        return self


class ImagesData(Source):
    """A folder with one folder of images per label; needs the extra ``images``.

    Attributes:
        path: folder of the images. Each subfolder, at any depth, that contains images represents a
            label. Hidden folders, system folders (``@eaDir``, ``lost+found``) and folders without
            images are ignored.
        labels: names of the folders in the order of the labels. Without this list, the fleet's
            contract sets the order; if there is no contract (on a server or in a simulation), the
            folders are sorted by name.
        targets: a table without a header, used instead of folders. Each line contains the file name
            of an image, relative to ``path``, followed by the number or numbers to learn for it. If
            the numbers are labels, ``labels`` lists their names, as with ``kind = "csv"``.
        size: height and width to which images are resized with Pillow's bicubic filter; None if all
            images have the same size.
        channels: number of channels: 1 for grey, 3 for colour.
        scale: factor by which every value is multiplied; pixels have values from 0 to 255.
    """

    kind: Literal["images"] = "images"
    path: Path
    labels: Names | None = None
    targets: Path | None = None
    size: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] | None = None
    channels: Literal[1, 3] = 3
    scale: Positive = 1 / 255


class CsvData(Source):
    """A table with one sample per line.

    Attributes:
        path: file of the table, plain or ``.gz``.
        label_column: column with the label or number to learn: its name (if there is a header), or
            its number, counted from 0.
        label_columns: several columns to learn instead of one: either a target of several numbers,
            or several labels that are each true or false.
        columns: columns to use as inputs, in this order; by default, all columns except those to
            learn.
        delimiter: character between the fields.
        header: whether the first line contains the column names.
        labels: names of the labels, in order. The column may contain these names, or numbers, where
            0 means the first name. Without this list, the order of the names follows the same rules
            as for folders of images, and numbers are refused if the fleet's labels have names.
        missing: number that replaces missing values in the columns that are read. With None, a
            table with missing values is refused.
    """

    has_columns: ClassVar[bool] = True

    kind: Literal["csv"] = "csv"
    path: Path
    label_column: str | int = _LABEL_COLUMN
    label_columns: tuple[str | int, ...] | None = Field(default=None, min_length=1)
    columns: tuple[str | int, ...] | None = None
    delimiter: str = Field(default=",", min_length=1, max_length=1)
    header: bool = True
    labels: Names | None = Field(default=None, min_length=1)
    missing: float | None = None

    @property
    def missing_value(self) -> float | None:
        """The number that replaces missing values."""
        return self.missing

    def with_missing(self, value: float | None) -> Self:
        """Return the table with a number for missing values, unless it defines its own."""
        if self.missing is not None:
            return self
        return self.model_copy(update={"missing": value})

    @model_validator(mode="after")
    def _one_column_has_names(self) -> Self:
        if self.labels is not None and self.label_columns is not None:
            raise ValueError("labels applies only to one label_column; label_columns are numbers")
        return self

    @model_validator(mode="after")
    def _columns_to_learn_are_listed_once(self) -> Self:
        if self.label_columns is None:
            return self
        # A configuration that was saved lists its defaults too.
        if self.label_column != _LABEL_COLUMN:
            raise ValueError(
                "label_column and label_columns both name columns to learn; remove one of them"
            )
        for column, count in Counter(self.label_columns).items():
            if count > 1:
                raise ValueError(f"label_columns lists {column!r} {count} times; list it once")
        return self


class IdxData(Source):
    """Two IDX files, as MNIST comes; plain or ``.gz``.

    Attributes:
        path: file with the samples.
        labels: file with the labels.
        scale: factor by which every value is multiplied; pixels have values from 0 to 255.
    """

    kind: Literal["idx"] = "idx"
    path: Path
    labels: Path
    scale: Positive = 1 / 255


class PythonData(Source):
    """The user's own loader.

    Attributes:
        entry_point: the function that loads the data, as ``file.py:function``. It returns ``(x,
            y)`` as numpy arrays, or as dictionaries of several arrays.
        options: keyword arguments of the function.
    """

    kind: Literal["python"] = "python"
    entry_point: FunctionName
    options: Mapping[str, FiniteJson] = Field(default_factory=dict)

    def relocated(self, move: Callable[[Path], Path]) -> Self:
        """Apply `move` to the file of the source's function."""
        return (
            super()
            .relocated(move)
            .model_copy(update={"entry_point": relocated(move, self.entry_point)})
        )

    def functions(self) -> tuple[str, ...]:
        """Return its loader, and the functions that transform the loaded samples."""
        return (self.entry_point, *super().functions())


DataConfig = Annotated[
    NpzData | ImagesData | CsvData | IdxData | PythonData, Field(discriminator="kind")
]
