"""Readers of the data formats: each turns one kind of ``[data]`` table into samples and labels."""

import csv
import gzip
import importlib
import io
import itertools
import math
import struct
import zipfile
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.data.augment import user_function
from fleet_protocol.data.sources import CsvData, IdxData, ImagesData, NpzData, PythonData
from fleet_protocol.errors import ConfigError, DataError
from fleet_protocol.foreign_files import name_problem, quoted

Named = NDArray[Any] | Mapping[str, NDArray[Any]]
Arrays = tuple[Named, Named]
"""Samples and targets; several inputs or targets by name."""

IMAGE_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
_IDX_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP_MAGIC = b"\x1f\x8b"


def _open(path: Path) -> IO[bytes]:
    """Open a file, unpacking it if its content says gzip."""
    try:
        with path.open("rb") as file:
            packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        return gzip.GzipFile(path, "rb") if packed else path.open("rb")  # type: ignore[return-value]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _rows(path: Path, delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
    """The lines of a table that are not empty, plain or gzipped, each with its number."""
    try:
        with _open(path) as raw:
            text = io.TextIOWrapper(raw, "utf-8-sig", errors="replace", newline="")
            lines = csv.reader(text, delimiter=delimiter)
            yield from ((lines.line_num, row) for row in lines if row)
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise DataError(f"{path} is truncated or damaged: {error}; copy it again") from error


def _need(path: Path, *, folder: bool = False) -> None:
    try:
        there = path.is_dir() if folder else path.is_file()
    except OSError as error:
        why = f"{error.strerror}; the agent's user needs the folders above it, and its unit none below /home"
        raise DataError(f"cannot look at {path}: {why}") from error
    if not there:
        what = (
            "folder {} does not exist; expected one folder per label in it"
            if folder
            else "file {} does not exist, or is a folder"
        )
        raise DataError(f"the data {what.format(path)}")


def _load_numpy(path: Path) -> Any:
    _need(path)
    try:
        with path.open("rb") as file:  # as np.load leaves a damaged archive open
            begun = file.read(2) == b"PK" and not zipfile.is_zipfile(file)
        if begun:
            raise DataError(f"{path} is the beginning of an archive: it is copied in part, or still being written")
        return np.load(path, mmap_mode="r" if path.suffix == ".npy" else None, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is not a numpy file of plain arrays: {error}") from error


def read_npz(config: NpzData, *, labelled: bool = True) -> Arrays:
    """Read arrays saved by numpy, or the samples alone; an ``.npy`` file stays on disk and is read page by page.

    A DataError where a file or key is missing, or holds something else than plain arrays.
    """
    loaded = _load_numpy(config.path)
    if isinstance(loaded, np.ndarray):
        if not labelled:
            return loaded, {}
        if config.y_path is None:
            raise DataError(f"{config.path} holds samples only; name the file with the labels as `y_path`")
        labels = _load_numpy(config.y_path)
        if not isinstance(labels, np.ndarray):
            raise DataError(f"{config.y_path} is not an .npy file")
        return loaded, np.asarray(labels)
    with loaded:
        named = (config.x_key, config.y_key if labelled else ())
        keys = [(key,) if isinstance(key, str) else key for key in named]
        missing = [key for names in keys for key in names if key not in loaded.files]
        if missing:
            raise DataError(
                f"{config.path} has no array {missing[0]!r} (it has {', '.join(loaded.files) or 'none'}); "
                "set `x_key` and `y_key`"
            )
        try:
            x, y = ({key: loaded[key] for key in names} for names in keys)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"{config.path} is damaged or holds Python objects: {error}") from error
    return x if len(x) > 1 else x[keys[0][0]], y if len(y) != 1 else y[keys[1][0]]


def _image_module() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise ConfigError(
            "reading a folder of images needs Pillow: pip install 'shoal[images]' (or convert the images to .npz)"
        ) from error


def read_images(config: ImagesData) -> Arrays:
    """Read a folder with one folder of images per label, as uint8 samples ``[N, channels, height, width]`` and labels.

    Raises:
        DataError: no folder, no images, unreadable ones, or sizes that differ.
        ConfigError: Pillow is not installed.
    """
    _need(config.path, folder=True)
    _image_module()  # without Pillow nothing is looked for
    listed = _listed(config) if config.targets is not None else _sorted_into_folders(config)
    samples: list[NDArray[np.uint8]] = []
    for path, _ in listed:
        pixels = read_image(path, config)
        if samples and pixels.shape != samples[0].shape:
            raise DataError(
                f"image {path} has shape {list(pixels.shape)}, the others {list(samples[0].shape)}; "
                "set `size = [height, width]` in [data]"
            )
        samples.append(pixels)
    if not samples:
        raise DataError(f"{config.path} is empty: expected <label>/<image> files in it")
    return np.stack(samples), np.array([target for _, target in listed])


def read_image(path: Path, config: ImagesData) -> NDArray[np.uint8]:
    """Read one image as a source has them, ``[channels, height, width]``; it raises what `read_images` does."""
    try:
        with _image_module().open(path) as opened:
            if opened.mode[0] in "IF":
                raise DataError(f"{path} has more than 8 bits a channel, which would be cut; save its numbers as .npz")
            shown = opened
            if "A" in opened.getbands() or "transparency" in opened.info:  # as viewers show it, on white
                shown = _image_module().new("RGBA", opened.size, "white")
                shown.alpha_composite(opened.convert("RGBA"))
            picture = shown.convert("L" if config.channels == 1 else "RGB")
            if config.size is not None:
                picture = picture.resize((config.size[1], config.size[0]))
            pixels = np.asarray(picture, np.uint8)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the image {path}: {error}") from error
    return pixels[None] if config.channels == 1 else pixels.transpose(2, 0, 1)


def _sorted_into_folders(config: ImagesData) -> list[tuple[Path, int]]:
    """The images with their labels."""
    names = config.labels or tuple(sorted(p.name for p in config.path.iterdir() if p.is_dir()))
    unknown = sorted({p.name for p in config.path.iterdir() if p.is_dir()} - set(names))
    if unknown:
        raise DataError(f"{config.path} has a folder {unknown[0]!r} that `labels` does not name")
    # A label that a device has no folder for is normal in a fleet; a folder that `labels` forgets is not.
    return [
        (path, label)
        for label, name in enumerate(names)
        for path in sorted((config.path / name).glob("*"))
        if path.suffix.lower() in IMAGE_SUFFIXES
    ]


def _listed(config: ImagesData) -> list[tuple[Path, Any]]:
    """The images with their number, or numbers, in the order of the table."""
    table = config.targets
    assert table is not None
    _need(table)
    found: list[tuple[Path, Any]] = []
    for line, row in _rows(table):
        try:
            numbers = [float(field) for field in row[1:]]
        except ValueError as error:
            raise DataError(f"line {line} of {table}: {error}; expected numbers") from error
        if not numbers or (found and len(np.atleast_1d(found[0][1])) != len(numbers)):
            raise DataError(f"line {line} of {table} has {len(numbers)} numbers; all need equally many")
        problem = name_problem(row[0])
        if problem is not None:
            raise DataError(f"line {line} of {table}: {quoted(row[0])} names no image in {config.path}: {problem}")
        found.append((config.path / row[0], numbers if len(numbers) > 1 else numbers[0]))
    return found


def csv_names(config: CsvData) -> tuple[str, ...]:
    """The names of a table's columns but those that are learnt, in order; none without a header."""
    learnt, rows = config.label_columns or (config.label_column,), _rows(config.path, config.delimiter)
    found = [field.strip() for _, row in itertools.islice(rows, int(config.header)) for field in row]
    return tuple(name for name in found if name not in learnt)


def _column(path: Path, column: str | int, names: Sequence[str] | None, width: int) -> int:
    if isinstance(column, int):
        if not -width <= column < width:
            raise DataError(f"{path} has {width} columns, there is no column {column}")
        return column % width
    if names is None or column not in names:
        shown = ", ".join(names[:12]) if names else "no header"
        raise DataError(
            f"{path} has no column {column!r} (it has {shown}); see `label_column`, `columns`, `delimiter`, `header`"
        )
    return list(names).index(column)


def read_csv(config: CsvData, *, labelled: bool = True) -> Arrays:
    """Read a table of float32 samples ``[N, columns]`` and labels ``[N]``, or ``[N, columns]`` where several are named.

    Without `labelled` their columns are skipped, and need not be there.

    Raises:
        DataError: a missing column, one that is learnt and read as well, or a field that is no number, with its line.
    """
    _need(config.path)
    values, labels = array("f"), array("d")
    targets, used, width = [0], [0], 0
    names: list[str] | None = None
    for line, row in _rows(config.path, config.delimiter):
        if not width:
            width = len(row)
            names = [field.strip() for field in row] if config.header else None
            wanted = config.label_columns or (config.label_column,)
            if not labelled:
                wanted = tuple(column for column in wanted if column in (*(names or ()), *range(width)))
            targets = [_column(config.path, column, names, width) for column in wanted]
            chosen = config.columns or tuple(i for i in range(width) if i not in targets)
            used = [_column(config.path, column, names, width) for column in chosen]
            both = next((place for place in used if place in targets), None)
            if both is not None:
                raise DataError(
                    f"{config.path}: column {names[both] if names else both} is to be learnt and is among `columns`, so"
                    " that a model would read the answer; take it out of `columns`"
                )
            if config.header:
                continue
        if len(row) != width:
            raise DataError(f"line {line} of {config.path} has {len(row)} fields instead of {width}")
        try:
            values.extend(float(row[i]) for i in used)
            labels.extend(float(row[i]) for i in targets)
        except ValueError as error:
            raise DataError(f"line {line} of {config.path}: {error}; expected numbers") from error
    if not values:
        raise DataError(f"{config.path} is empty: it holds no line of data")
    x = np.frombuffer(values, np.float32).reshape(-1, len(used))
    if not labelled:
        return x, {}
    y = np.frombuffer(labels, np.float64).reshape(len(x), len(targets))
    return x, y if config.label_columns else y[:, 0]


def read_idx_file(path: Path) -> NDArray[Any]:
    """An array of the shape that an IDX file, plain or gzipped, declares; a DataError where it is none or damaged."""
    _need(path)
    try:
        with _open(path) as file:
            zeros, code, dimensions = struct.unpack(">HBB", file.read(4))
            if zeros or code not in _IDX_DTYPES:
                raise DataError(f"{path} is not an IDX file: it starts with {zeros:#06x} {code:#04x}")
            shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            data = file.read()
    except (struct.error, OSError, EOFError) as error:
        raise DataError(f"{path} is not an IDX file, or is truncated: {error}") from error
    dtype = np.dtype(_IDX_DTYPES[code])
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise DataError(
            f"{path} announces {list(shape)} values of {dtype.itemsize} bytes but holds {len(data)} bytes; "
            "it is truncated or damaged"
        )
    return np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def read_idx(config: IdxData) -> Arrays:
    """Read a pair of IDX files; errors as of `read_idx_file`."""
    return read_idx_file(config.path), read_idx_file(config.labels)


def read_python(config: PythonData) -> Arrays:
    """Call the user's own loader; a DataError where it is missing, raises, or returns no two arrays."""
    function = user_function(config.entry_point)
    try:
        result = function(**config.options)
    except DataError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise DataError(f"{config.entry_point} failed: {type(error).__name__}: {error}") from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise DataError(f"{config.entry_point} returned {type(result).__name__}; expected a pair (x, y) of arrays")
    try:
        x, y = (part if isinstance(part, dict) else np.asarray(part) for part in result)
    except ValueError as error:
        raise DataError(f"{config.entry_point} returned no arrays: {error}; make all samples of one shape") from error
    return x, y
