"""Reads arrays: each reader turns one kind of ``[data]`` table into samples and labels without
names.
"""

import math
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.data.augment import user_function
from fleet_protocol.data.file_rows import Samples, read_npy, unmapped
from fleet_protocol.data.files import need, open_file
from fleet_protocol.data.sources import IdxData, NpzData, PythonData
from fleet_protocol.errors import DataError

Named = Samples | Mapping[str, NDArray[Any]]
Arrays = tuple[Named, Named]
"""Samples and targets; several inputs or targets by name."""

_IDX_DTYPES = {
    0x08: ">u1",
    0x09: ">i1",
    0x0B: ">i2",
    0x0C: ">i4",
    0x0D: ">f4",
    0x0E: ">f8",
}
_NPY_MAGIC = b"\x93NUMPY"


def _load_numpy(path: Path) -> Any:
    """Return the array of an ``.npy`` file, or an open ``.npz`` file."""
    need(path)
    try:
        with path.open("rb") as file:  # as np.load leaves a damaged archive open
            begins = file.read(len(_NPY_MAGIC))
            partial = begins.startswith(b"PK") and not zipfile.is_zipfile(file)
        if partial:
            raise DataError(
                f"{path} is the beginning of an archive: it is copied in part, or still being written"
            )
        if begins == _NPY_MAGIC:
            return read_npy(path)
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is not a numpy file of plain arrays: {error}") from error


def read_npz(config: NpzData, *, labelled: bool = True) -> Arrays:
    """Read arrays saved by numpy, or the samples alone.

    A large ``.npy`` file stays on disk (see `read_npy`).

    A DataError where a file or key is missing, or holds something else than plain arrays.
    """
    loaded = _load_numpy(config.path)
    if not isinstance(loaded, np.lib.npyio.NpzFile):
        if not labelled:
            return loaded, {}
        if config.y_path is None:
            raise DataError(
                f"{config.path} holds samples only; name the file with the labels as `y_path`"
            )
        labels = _load_numpy(config.y_path)
        if isinstance(labels, np.lib.npyio.NpzFile):
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


def read_idx_file(path: Path) -> NDArray[Any]:
    """An array of the shape that an IDX file, plain or gzipped, declares.

    A DataError where it is none or damaged.
    """
    need(path)
    try:
        with open_file(path) as file:
            zeros, code, dimensions = struct.unpack(">HBB", file.read(4))
            if zeros or code not in _IDX_DTYPES:
                raise DataError(
                    f"{path} is not an IDX file: it starts with {zeros:#06x} {code:#04x}"
                )
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


def _unmapped_part(part: Any) -> Named:
    """Convert the user's array, or several by name.

    A mapped array is read from its file instead.
    """
    if isinstance(part, dict):
        return {name: np.asarray(unmapped(np.asarray(array))) for name, array in part.items()}
    return unmapped(np.asarray(part))


def read_python(config: PythonData) -> Arrays:
    """Call the user's own loader.

    A DataError where it is missing, raises, or returns no two arrays.
    """
    function = user_function(config.entry_point)
    try:
        result = function(**config.options)
    except DataError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise DataError(f"{config.entry_point} failed: {type(error).__name__}: {error}") from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise DataError(
            f"{config.entry_point} returned {type(result).__name__}; expected a pair (x, y) of arrays"
        )
    try:
        x, y = (_unmapped_part(part) for part in result)
    except ValueError as error:
        raise DataError(
            f"{config.entry_point} returned no arrays: {error}; make all samples of one shape"
        ) from error
    return x, y
