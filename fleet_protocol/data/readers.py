"""Reads arrays without names: numpy's files, IDX files, and the user's own loaders."""

import math
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.data.augment import user_function
from fleet_protocol.data.bounds import ReadBounds
from fleet_protocol.data.file_rows import Samples, read_npy, unmapped
from fleet_protocol.data.files import decoding, need, open_file
from fleet_protocol.data.sources import IdxData, NpzData, PythonData
from fleet_protocol.errors import BlobError, DataError
from fleet_protocol.foreign_archives import Bounds, open_archive
from fleet_protocol.foreign_files import quoted
from fleet_protocol.python_files import refusing_exits

ArrayOrNamed = Samples | Mapping[str, NDArray[Any]]
"""One array ``[N, ...]``, or several by name."""

Arrays = tuple[ArrayOrNamed, ArrayOrNamed]
"""Samples and targets."""

_IDX_DTYPES = {
    # The codes of types in the header, and numpy's names; all big-endian.
    0x08: ">u1",
    0x09: ">i1",
    0x0B: ">i2",
    0x0C: ">i4",
    0x0D: ">f4",
    0x0E: ">f8",
}
_NPY_MAGIC = b"\x93NUMPY"
_ZIP_MAGIC = b"PK"
_NUMPY_FILE = "a numpy file of plain arrays, without Python objects"
_SAVED_AGAIN = "copy it again, or save its arrays as numbers with numpy.savez"


def read_npz(config: NpzData, *, labelled: bool = True) -> Arrays:
    """Read arrays saved by numpy; a large ``.npy`` file stays on disk (see `read_npy`).

    Args:
        config: the files, and the names of their arrays.
        labelled: whether to read targets, too; else they are empty.

    Raises:
        DataError: a file or an array is missing, or contains something other than plain arrays.
    """
    loaded = _load_numpy(config.path, config.bounds)
    if isinstance(loaded, np.lib.npyio.NpzFile):
        with loaded:
            return _read_archive(config, loaded, labelled=labelled)
    # Only samples are needed, and an .npy file has nothing else.
    if not labelled:
        return loaded, {}
    if config.y_path is None:
        raise DataError(
            f"{config.path} contains only samples; name the file with the labels as `y_path`"
        )
    labels = _load_numpy(config.y_path, config.bounds)
    if isinstance(labels, np.lib.npyio.NpzFile):
        raise DataError(f"{config.y_path} is not an .npy file")
    return loaded, np.asarray(labels)


def read_idx(config: IdxData) -> Arrays:
    """Read a pair of IDX files; errors as in `read_idx_file`."""
    bounds = config.bounds
    return read_idx_file(config.path, bounds), read_idx_file(config.labels, bounds)


def read_idx_file(path: Path, bounds: ReadBounds | None = None) -> NDArray[Any]:
    """Return the array of an IDX file, plain or gzipped, in the shape that the file announces.

    Raises:
        DataError: it is another file, damaged, or exceeds a bound.
    """
    need(path)
    bounds = bounds or ReadBounds()
    with decoding(path, "an IDX file"), open_file(path) as file:
        zeros, code, dimensions = struct.unpack(">HBB", file.read(4))
        if zeros or code not in _IDX_DTYPES:
            raise DataError(f"{path} is not an IDX file: it starts with {zeros:#06x} {code:#04x}")
        shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
        dtype = np.dtype(_IDX_DTYPES[code])
        # Announced, not read yet: a damaged header must not fill the memory.
        size = math.prod(shape) * dtype.itemsize
        bounds.check_bytes(path, size)
        # One byte more shows that there are others; a packed file may have any number of them.
        data = file.read(size + 1)
        if len(data) != size:
            held = f"{len(data)} bytes" if len(data) < size else "more"
            raise DataError(
                f"{path} announces {list(shape)} values of {dtype.itemsize} bytes but contains"
                f" {held}; it is truncated or damaged"
            )
        # IDX is big-endian; later arithmetic is faster in the order of the machine.
        values = np.frombuffer(data, dtype).reshape(shape)
        return values.astype(dtype.newbyteorder("="), copy=False)


def read_python(config: PythonData) -> Arrays:
    """Call the user's own loader.

    Raises:
        DataError: it is missing, raises, or does not return two arrays.
    """
    function = user_function(config.entry_point)
    try:
        with refusing_exits():
            result = function(**config.options)
    # The user's own message is kept.
    except DataError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise DataError(f"{config.entry_point} failed: {type(error).__name__}: {error}") from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise DataError(
            f"{config.entry_point} returned {type(result).__name__}; expected a pair (x, y) of "
            "arrays"
        )
    samples, targets = result
    try:
        return _without_mapping(samples), _without_mapping(targets)
    except ValueError as error:
        raise DataError(
            f"{config.entry_point} returned no arrays: {error}; make all samples of one shape"
        ) from error


def _load_numpy(path: Path, bounds: ReadBounds) -> Any:
    """Return the array of an ``.npy`` file, or an open ``.npz`` file."""
    need(path)
    with decoding(path, _NUMPY_FILE, _SAVED_AGAIN):
        # Opened here, because np.load leaves a damaged archive open.
        with path.open("rb") as file:
            start = file.read(len(_NPY_MAGIC))
            is_archive = start.startswith(_ZIP_MAGIC)
            is_partial = is_archive and not zipfile.is_zipfile(file)
        if is_partial:
            raise DataError(
                f"{path} is the beginning of an archive: it is copied in part, or still being "
                "written"
            )
        # An .npy file may stay on disk, so it has its own reader.
        if start == _NPY_MAGIC:
            return read_npy(path, bounds)
        if not is_archive:
            # np.load takes anything else for Python objects, and advises to load them.
            raise DataError(
                f"{path} is not {_NUMPY_FILE}, or is truncated or damaged; {_SAVED_AGAIN}"
            )
        # np.load would unpack an array before its size is known.
        _check_archive(path, bounds)
        return np.load(path, allow_pickle=False)


def _check_archive(path: Path, bounds: ReadBounds) -> None:
    """Check what an archive unpacks to, before anything in it is unpacked."""
    # Arrays of one number are packed to a thousandth, so a bound on the ratio means nothing here.
    unlimited = Bounds(unpacked_bytes=2**63, ratio=math.inf)
    try:
        with open_archive(path, unlimited) as archive:
            bounds.check_bytes(path, sum(archive.members.values()))
    except BlobError as error:
        raise DataError(f"{error}; write the file again") from error


def _read_archive(
    config: NpzData,
    archive: Any,
    *,
    labelled: bool,
) -> Arrays:
    """Read the arrays of an open ``.npz`` file that the configuration names."""
    x_keys = _as_tuple(config.x_key)
    y_keys = _as_tuple(config.y_key) if labelled else ()
    if any(name.endswith("/data.pkl") for name in archive.files):
        raise DataError(
            f"{config.path} is a file of torch.save; save its tensors with "
            "numpy.savez(path, x=x.numpy(), y=y.numpy())"
        )
    for key in (*x_keys, *y_keys):
        if key not in archive.files:
            raise DataError(
                f"{config.path} has no array {key!r} (it has "
                f"{', '.join(archive.files) or 'none'}); set `x_key` and `y_key`"
            )
    with decoding(config.path, _NUMPY_FILE, _SAVED_AGAIN):
        x = {key: _array_in(archive, key, config.path) for key in x_keys}
        y = {key: _array_in(archive, key, config.path) for key in y_keys}
    samples: ArrayOrNamed = x if len(x) > 1 else x[x_keys[0]]
    # Without labels there are no keys, and the result is empty.
    targets: ArrayOrNamed = y if len(y) != 1 else y[y_keys[0]]
    return samples, targets


def _array_in(archive: Any, key: str, path: Path) -> NDArray[Any]:
    """Return an array of an archive; for a member that is not one, numpy returns bytes."""
    array = archive[key]
    if not isinstance(array, np.ndarray):
        raise DataError(f"{quoted(key)} in {path} is not an array; save it with numpy.savez")
    return array


def _as_tuple(key: str | tuple[str, ...]) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def _without_mapping(value: Any) -> ArrayOrNamed:
    """Return the user's array, or several by name, without a mapping of a file.

    A mapped array is read from its file instead.
    """
    if not isinstance(value, dict):
        return unmapped(np.asarray(value))
    arrays = {}
    for name, array in value.items():
        arrays[name] = np.asarray(unmapped(np.asarray(array)))
    return arrays
