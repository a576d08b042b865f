"""Reads samples row by row from their file, so that a truncated file causes an error.

If another program truncates a mapped file, access to a lost page ends the process with SIGBUS. So
no data file is mapped: a small file is read into memory, and from a large one the rows of a batch
are read when they are needed.
"""

import math
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.data.bounds import ReadBounds
from fleet_protocol.errors import DataChangedError, DataError
from fleet_protocol.free_memory import free_bytes

MEMORY_BYTES = 64 * 2**20
MEMORY_SHARE = 1 / 8
"""Limits, in bytes and as a share of free memory, below which an array is read into memory."""

_BLOCK_BYTES = 2**22

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class _Descriptor:
    """A file that is open for reading as long as this object exists."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Not inherited: a worker process would keep a file open that its parent has closed.
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.number)
        self._at_first = os.fstat(self.number)

    @property
    def size(self) -> int:
        """Current size of the file in bytes."""
        return os.fstat(self.number).st_size

    @property
    def rewritten(self) -> bool:
        """Whether the file was written into since it was opened.

        Another file may have replaced its name.
        """
        # For the open file, not the name, which may lead to another file by now.
        first = self._at_first
        now = os.fstat(self.number)
        if (first.st_size, first.st_mtime_ns) != (now.st_size, now.st_mtime_ns):
            return True
        # Setting a timestamp back does not change this one; adding or removing a name does.
        return first.st_nlink == now.st_nlink and first.st_ctime_ns != now.st_ctime_ns

    def fill(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer with bytes of the file from an offset.

        Raises:
            DataChangedError: the file ends earlier.
            DataError: it cannot be read.
        """
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self.number, [buffer[done:]], offset + done)
            except OSError as error:
                raise DataError(f"cannot read {self.path}: {error.strerror or error}") from error
            # Reading past the end gives nothing instead of an error, and would loop here for ever.
            if not count:
                raise DataChangedError(
                    f"{self.path} is shorter than when it was opened: it has {self.size} bytes, "
                    f"and its samples need {offset + len(buffer)}; write a new file beside it and "
                    "rename it"
                )
            done += count


class FileRows:
    """An array ``[N, ...]`` whose rows lie one after the other in a file.

    It supports numpy's indexing, and every index reads the file: consecutive rows need one system
    call. `numpy.asarray` reads the whole array. If another file takes the name, the array still
    reads the file that it opened.

    Args:
        source: the open file.
        dtype: type of a value.
        shape: shape of the array.
        offset: bytes before the first row.
    """

    def __init__(
        self,
        source: _Descriptor,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        offset: int,
    ) -> None:
        self._source = source
        self._offset = offset
        self.dtype = dtype
        self.shape = shape

    @property
    def path(self) -> Path:
        """The file."""
        return self._source.path

    @property
    def rewritten(self) -> bool:
        """Whether the rows may have changed since the file was opened."""
        return self._source.rewritten

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError(f"{self.path} is read from disk, so an array of it is always a copy")
        return self[:].astype(dtype or self.dtype, copy=False)

    def __getitem__(self, key: Any) -> NDArray[Any]:
        """Return the same as numpy; raise a DataChangedError if the file has become too short."""
        first, *inner = key if isinstance(key, tuple) and key else (key,)
        if not _picks_rows(first):
            whole: NDArray[Any] = self[:][key]
            return whole
        numbers = self._numbers(first)
        rows = self._rows(numbers.ravel())
        if numbers.ndim == 1 and not inner:
            return rows
        # Apply the same pattern to the rows that were read.
        place: Any = np.arange(numbers.size).reshape(numbers.shape) if numbers.ndim else 0
        pattern = (slice(None) if isinstance(first, slice) else place, *inner)
        picked: NDArray[Any] = rows[pattern]
        return picked

    def _numbers(self, key: Any) -> NDArray[np.int64]:
        """Return the row numbers of an index, from 0; raise an IndexError if one does not exist."""
        count = len(self)
        if isinstance(key, slice):
            return np.arange(*key.indices(count))
        if not isinstance(key, np.ndarray) or key.dtype.kind not in "iu":
            return np.asarray(np.arange(count)[key])
        if key.size and (key.min() < -count or key.max() >= count):
            raise IndexError(
                f"{self.path} has {count} samples; samples {key.min()} to {key.max()} were "
                f"requested"
            )
        return np.where(key < 0, key + count, key).astype(np.int64, copy=False)

    def _rows(self, numbers: NDArray[np.int64]) -> NDArray[Any]:
        """Read rows by their numbers, ``[K, ...]``."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        # As bytes, so that the file is read right into the array that is returned.
        values = np.empty(len(numbers) * row_bytes, np.uint8)
        if values.size:
            breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
            starts = [0, *breaks.tolist()]
            ends = [*breaks.tolist(), len(numbers)]
            first_rows = numbers[starts].tolist()
            # Consecutive rows are read by one system call.
            buffer = values.data
            for start, end, row in zip(
                starts,
                ends,
                first_rows,
                strict=True,
            ):
                self._source.fill(
                    buffer[start * row_bytes : end * row_bytes],
                    self._offset + row * row_bytes,
                )
        return values.view(self.dtype).reshape(len(numbers), *self.shape[1:])

    def head(self, count: int) -> "FileRows":
        """Return the first rows, still in the file."""
        return FileRows(
            self._source,
            self.dtype,
            (min(count, len(self)), *self.shape[1:]),
            self._offset,
        )

    def reshape(self, count: int, *shape: int) -> "FileRows":
        """Return the same rows, each in another shape, still in the file.

        One size of a row may be -1.

        Raises:
            ValueError: the number of rows, or of values per row, differs.
        """
        if count != len(self):
            raise ValueError(
                f"{self.path} contains {len(self)} samples, which cannot become {count}"
            )
        # numpy resolves a size of -1, and refuses shapes of other sizes.
        row = np.zeros(self.shape[1:], np.bool_).reshape(shape).shape
        return FileRows(
            self._source,
            self.dtype,
            (count, *row),
            self._offset,
        )


Samples = NDArray[Any] | FileRows
"""Samples ``[N, ...]``, in memory or in a file."""


def iterate_blocks(x: Samples) -> Iterator[NDArray[Any]]:
    """Yield all samples that have a value, in order, in blocks of a few megabytes.

    So a check of all values needs no second copy of the data.
    """
    row_bytes = math.prod(x.shape[1:]) * x.dtype.itemsize
    if not row_bytes:
        return
    block_rows = max(1, _BLOCK_BYTES // row_bytes)
    for start in range(0, len(x), block_rows):
        yield x[start : start + block_rows]


def _picks_rows(key: Any) -> bool:
    """Return whether an index selects rows, and not all of them, a new axis, or by several axes."""
    if key is None or key is Ellipsis or isinstance(key, bool | np.bool_ | tuple):
        return False
    return not (isinstance(key, np.ndarray) and key.dtype == np.bool_ and key.ndim != 1)


def read_npy(path: Path, bounds: ReadBounds | None = None) -> Samples:
    """Read the array of an ``.npy`` file; a large one stays in its file (see `MEMORY_BYTES`).

    Values that are not stored row by row (Fortran's order) are always read into memory.

    Raises:
        DataError: the file cannot be read, or exceeds a bound.
        ValueError: it is not such a file, or too short for its array.
    """
    source = _opened(path)
    with os.fdopen(os.dup(source.number), "rb") as file:
        version = np.lib.format.read_magic(file)
        # Version 3 is for names of fields beyond Latin letters, which samples do not have.
        if version not in _HEADERS:
            raise ValueError(f"it has version {version} of the format, for names of fields")
        shape, fortran, dtype = _HEADERS[version](file)
        offset = file.tell()
    # They would be unpickled, and a pickle may run any code.
    if dtype.hasobject:
        raise ValueError("it contains Python objects")
    needed = offset + math.prod(shape) * dtype.itemsize
    if source.size < needed:
        raise ValueError(
            f"it has {source.size} bytes, and its array needs {needed}: it was only partly copied, "
            "or is still being written"
        )
    # Stored column by column, so that its rows are scattered over the file.
    if fortran or not shape:
        (bounds or ReadBounds()).check_bytes(path, needed - offset)
        stored: NDArray[Any] = np.asarray(
            FileRows(
                source,
                dtype,
                (1, *shape[::-1]),
                offset,
            )[0]
        )
        columns: NDArray[Any] = stored.T
        return columns
    rows = FileRows(
        source,
        dtype,
        shape,
        offset,
    )
    return rows if _is_large(rows.nbytes) else rows[:]


def _is_large(size: int) -> bool:
    """Return whether this many bytes stay in their file."""
    return size > MEMORY_BYTES and size > MEMORY_SHARE * free_bytes()


def _opened(path: Path) -> _Descriptor:
    try:
        return _Descriptor(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def unmapped(array: NDArray[Any]) -> Samples:
    """Return the same values without a mapped file; an array that is not mapped is not changed.

    Raises:
        DataError: its file cannot be read.
    """
    # A function of the user may return a part of a mapped array, in any order of axes.
    root, mapped = _mapping(array)
    if not mapped:
        return array
    # In mode c the values may differ from the file's.
    if root is None or root.filename is None or root.mode == "c":
        return np.array(array)
    low, high = _bounds(array)
    source = _opened(Path(str(root.filename)))
    offset = root.offset + low - root.ctypes.data
    if array.flags.c_contiguous and array.ndim and _is_large(array.nbytes):
        return FileRows(
            source,
            array.dtype,
            array.shape,
            offset,
        )
    values = FileRows(
        source,
        np.dtype(np.uint8),
        (high - low,),
        offset,
    )[:]
    copied: NDArray[Any] = np.ndarray(
        array.shape, array.dtype, values.data, array.ctypes.data - low, array.strides
    )
    return copied


def _mapping(array: NDArray[Any]) -> tuple["np.memmap[Any, Any] | None", bool]:
    """Return the mapped array that an array is a part of, if any, and whether it is mapped."""
    base: Any = array
    root: np.memmap[Any, Any] | None = None
    while isinstance(base, np.ndarray | memoryview):
        root = base if isinstance(base, np.memmap) else root
        base = base.obj if isinstance(base, memoryview) else base.base
    return root, isinstance(base, mmap.mmap)


def _bounds(array: NDArray[Any]) -> tuple[int, int]:
    """Return the addresses of its first byte in memory, and of the byte after its last."""
    reach = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    first = array.ctypes.data
    low = first + sum(min(0, step) for step in reach)
    high = first + sum(max(0, step) for step in reach) + array.itemsize
    return low, high if array.size else low
