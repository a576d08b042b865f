"""Reads safetensors in place: files are mapped, so that all processes share the page cache."""

import json
import math
import mmap
import os
import shlex
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import BlobError
from fleet_protocol.foreign_files import open_regular

_FORMATS = {
    "F32": "<f4",
    "F64": "<f8",
    "I64": "<i8",
    "U32": "<u4",
    "F16": "<f2",
    "U16": "<u2",
    "I8": "i1",
    "U8": "u1",
}
DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {name: np.dtype(form) for name, form in _FORMATS.items()}
)
"""Types that blobs may contain, by their names in a file."""

_LENGTH_BYTES = 8  # of the header's length, which a file begins with
_HEADER_LIMIT = 16 * 1024 * 1024  # a header of 100,000 parameters is 10 MB; larger is not a model
_READ_BYTES = 1 << 20  # for a smaller file the pages of a map cost more than a copy
# Files of torch.save begin like this, in the new and the old format. 80 02 by itself would not
# distinguish them from safetensors with a header of 640 bytes.
_PICKLED = (b"PK\x03\x04", b"\x80\x02\x8a\n")


def open_tensors(
    path: Path, opener: Callable[[Path], BinaryIO] = open_regular
) -> dict[str, NDArray[Any]]:
    """Map a file that was checked when it arrived, or read a small one.

    Args:
        path: path of the file.
        opener: opens it, and refuses links where they matter.

    Returns:
        Read-only views by name, in the order of the file.

    Raises:
        BlobError: the file is missing, is a link or not a regular file, is truncated, has a header
            that does not fit it, or comes from torch.save.
    """
    try:
        with opener(path) as file:
            is_small = os.fstat(file.fileno()).st_size <= _READ_BYTES
            if is_small:
                data = np.frombuffer(file.read(), np.uint8)
            else:
                # The arrays keep the mapping open after the file is closed.
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                data = np.frombuffer(mapping, np.uint8)
    except (OSError, ValueError) as error:
        raise BlobError(f"cannot read the tensors in {path}: {error!r}") from error
    if data[:4].tobytes().startswith(_PICKLED):
        raise BlobError(
            f"{path} is a file of torch.save, which may run code when it is read; on a "
            f"machine with torch, convert it to safetensors: {_conversion(path)}"
        )
    return tensors_in(data, path)


def _conversion(path: Path) -> str:
    """Return the shell command that converts a file to safetensors, however it is named."""
    source = json.dumps(str(path))
    target = json.dumps(str(path.with_suffix(".safetensors")))
    program = (
        "import torch, safetensors.torch as s; "
        f"s.save_file(torch.load({source}, weights_only=True), {target})"
    )
    return shlex.join(["python", "-c", program])


def tensors_in(
    blob: bytes | NDArray[np.uint8], source: object = "a blob"
) -> dict[str, NDArray[Any]]:
    """Return the tensors of `blob_in`."""
    _, tensors = blob_in(blob, source)
    return tensors


def blob_in(
    blob: bytes | NDArray[np.uint8],
    source: object = "a blob",
    dtypes: Mapping[str, np.dtype[Any]] = DTYPES,
) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Read a blob from any writer in place.

    The safetensors library makes a copy, and is not installed on boards.

    Args:
        blob: all of its bytes.
        source: its name in an error.
        dtypes: types that are accepted, by their names in a file.

    Returns:
        The strings in its header, and views by name, in the order of the blob.

    Raises:
        BlobError: it is truncated, or has a header that does not fit it: tensors must follow one
            another without gaps or remaining bytes.
    """
    metadata, tensors, size = first_blob(blob, source, dtypes)
    if size != len(blob):
        raise BlobError(
            f"cannot read the tensors in {source}: they end at {size} of {len(blob)} bytes"
        )
    return metadata, tensors


def first_blob(
    blob: bytes | NDArray[np.uint8],
    source: object = "a blob",
    dtypes: Mapping[str, np.dtype[Any]] = DTYPES,
) -> tuple[dict[str, str], dict[str, NDArray[Any]], int]:
    """Read the blob at the beginning of some bytes as `blob_in` does; also return its length.

    The errors are the same.
    """
    try:
        return _parse(np.frombuffer(blob, np.uint8), dtypes)
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
        struct.error,
    ) as error:
        raise BlobError(
            f"cannot read the tensors in {source} of {len(blob)} bytes: {error!r}"
        ) from error


def _parse(
    data: NDArray[np.uint8], dtypes: Mapping[str, np.dtype[Any]]
) -> tuple[dict[str, str], dict[str, NDArray[Any]], int]:
    """Read a header and its tensors; a malformed header may raise any error."""
    (length,) = struct.unpack("<Q", data[:_LENGTH_BYTES].tobytes())
    if length > min(_HEADER_LIMIT, data.size - _LENGTH_BYTES):
        raise ValueError(f"the header claims {length} bytes")
    start = _LENGTH_BYTES + length
    header = json.loads(data[_LENGTH_BYTES:start].tobytes())
    metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
    tensors: dict[str, NDArray[Any]] = {}
    end = 0
    for name, entry in sorted(header.items(), key=_offsets_of):
        dtype = dtypes.get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"tensor {name} has the type {entry['dtype']}, which is not supported")
        first, last = entry["data_offsets"]
        shape = entry["shape"]
        count = math.prod(shape)
        is_exact = last - first == count * dtype.itemsize and min(shape, default=0) >= 0
        if first != end or not is_exact:
            raise ValueError(
                f"tensor {name} of shape {shape} is at {first} to {last}; the previous one "
                f"ends at {end}"
            )
        tensors[name] = np.frombuffer(data, dtype, count, start + first).reshape(shape)
        end = last
    return metadata, tensors, start + end


def _offsets_of(named_entry: tuple[str, Any]) -> Any:
    """Return the offset of a tensor, by which the entries of a header are sorted."""
    _, entry = named_entry
    return entry["data_offsets"]
