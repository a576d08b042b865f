"""Sources of data, a frozen model for each kind.

They are the table ``[data]`` of a board, ``[evaluation.data]`` of a server, and those of a
simulation.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from fleet_protocol.data.augment import Augment, FunctionName, file_of, relocated
from fleet_protocol.data.bounds import ReadBounds
from fleet_protocol.frozen import FiniteJson, FrozenModel

PerChannel = float | tuple[float, ...]
Positive = Annotated[float, Field(gt=0)]


class Source(FrozenModel):
    """What every source has.

    A sample becomes ``(x * scale - mean) / std`` when it is put into a batch; in memory it keeps
    the type it came with.

    Attributes:
        shape: shape of one sample to give to flat or squeezed samples, as in ``[1, 28, 28]``.
        scale: factor of every value.
        mean: subtracted after scaling; a number, or one per column of a table or channel of an
            image (the first axis of a sample).
        std: divides last; a number, or one per column or channel.
        classes: number of labels, checked when the data is read; without it labels are checked when
            a task names a model.
        transforms: functions of yours, ``file.py:function``, through which all samples go in this
            order when they are
            read: each takes an array ``[N, ...]`` and returns one of as many samples.
        augment: random changes to the samples of every training step, in this order, never to those
            that are
            evaluated: ``crop`` (images, at a random place after a padding by 4 black pixels),
                ``flip`` (every other one mirrored), or a function of yours that takes a batch as
                the model does, and numpy's generator of the step, from which alone it may draw.
        black: a black pixel as the source has it, before scaling; a number, or one per channel.
        limit: use only the first samples; None for all.
        bounds: the most that is read; what exceeds them is refused.
    """

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
        y_path: an ``.npy`` file with the labels, needed beside an ``.npy`` file.
        x_key: name of the samples in an ``.npz`` file; for a model of several inputs their names,
            in its order.
        y_key: name of the labels in it; for a loss of several targets likewise.
    """

    kind: Literal["npz"] = "npz"
    path: Path
    y_path: Path | None = None
    x_key: str | tuple[str, ...] = "x"
    y_key: str | tuple[str, ...] = "y"


class ImagesData(Source):
    """A folder with one folder of images per label; needs the extra ``images``.

    Attributes:
        path: the folder; each folder in it that holds images, at any depth, is a label. Hidden
            folders, those of the system (``@eaDir``, ``lost+found``) and those without images are
            left out.
        labels: names of the folders in the order of the labels. Without it the fleet's contract
            sets the order; if there is no contract (on a server, in a simulation), folders are
            sorted by name.
        targets: instead of folders a table without header: the file of an image, from ``path``,
            then its number or numbers. Where a number is a label, ``labels`` says its name, as for
            a table.
        size: height and width to resize to, by Pillow's bicubic filter; None where all images have
            one size.
        channels: 1 for grey, 3 for colour.
        scale: factor of every value; pixels are 0 to 255.
    """

    kind: Literal["images"] = "images"
    path: Path
    labels: tuple[str, ...] | None = None
    targets: Path | None = None
    size: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] | None = None
    channels: Literal[1, 3] = 3
    scale: Positive = 1 / 255


class CsvData(Source):
    """A table with one sample per line.

    Attributes:
        path: the file, plain or ``.gz``.
        label_column: name (with a header) or number, from 0, of the column with the label or number
            to learn.
        label_columns: several of them, instead of one: a target of several numbers, or of labels
            that hold or do not.
        columns: columns to use, in order; by default all but the label.
        delimiter: between the fields.
        header: whether the first line names the columns.
        labels: names in the order of the labels. The column may have these names, or numbers, of
            which 0 means the first name. Without it names are as for images, and numbers are
            refused where the fleet's labels have names.
        missing: number that stands for a missing value of a column that is read; None refuses a
            table that has one.
    """

    kind: Literal["csv"] = "csv"
    path: Path
    label_column: str | int = "label"
    label_columns: tuple[str | int, ...] | None = Field(default=None, min_length=1)
    columns: tuple[str | int, ...] | None = None
    delimiter: str = Field(default=",", min_length=1, max_length=1)
    header: bool = True
    labels: tuple[str, ...] | None = Field(default=None, min_length=1)
    missing: float | None = None

    @model_validator(mode="after")
    def _one_column_has_names(self) -> Self:
        if self.labels is not None and self.label_columns is not None:
            raise ValueError("labels applies only to one label_column; label_columns are numbers")
        return self


class IdxData(Source):
    """Two IDX files, as MNIST comes; plain or ``.gz``.

    Attributes:
        path: the samples.
        labels: the labels.
        scale: factor of every value; pixels are 0 to 255.
    """

    kind: Literal["idx"] = "idx"
    path: Path
    labels: Path
    scale: Positive = 1 / 255


class PythonData(Source):
    """The user's own loader.

    Attributes:
        entry_point: ``file.py:function``; the function returns ``(x, y)`` as numpy arrays, several
            as a dictionary.
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
