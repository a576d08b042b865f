"""Safetensors as they lie: files mapped, so that what is read lies in the page cache, once for all
who read it.
"""

import json
import math
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import BlobError
from fleet_protocol.foreign_files import open_regular

_KINDS = {
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
    {name: np.dtype(kind) for name, kind in _KINDS.items()}
)
"""Types that blobs carry, by their names in a file."""

_HEADER_LIMIT = 16 * 1024 * 1024  # a header of 100,000 parameters is 10 MB; larger is not a model
_READ_BYTES = 1 << 20  # of a smaller file the pages of a map cost more than a copy
# How files of torch.save begin, of today and of old; 80 02 alone is how safetensors with a header
# of 640 bytes do.
_PICKLED = (b"PK\x03\x04", b"\x80\x02\x8a\n")


def open_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Map a file that was checked when it arrived, or read a small one: read-only views by name in
    its order.

    Raises:
        BlobError: the file is not there, is a link or no regular file, is truncated, has a header
            that does not fit it, or is one of torch.save.
    """
    try:
        with open_regular(path) as file:
            small = os.fstat(file.fileno()).st_size <= _READ_BYTES
            whole = file.read() if small else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        data = np.frombuffer(whole, np.uint8)
        if data[:4].tobytes().startswith(_PICKLED):
            raise BlobError(
                f"{path} is a file of torch.save, which may run code when it is read; where torch is, make it one of"
                ' safetensors: python -c "import torch, safetensors.torch as s;'
                f" s.save_file(torch.load('{path}', weights_only=True), '{path.with_suffix('.safetensors')}')\""
            )
    except (OSError, ValueError) as error:
        raise BlobError(f"cannot read the tensors in {path}: {error!r}") from error
    return tensors_in(data, path)


def tensors_in(
    blob: bytes | NDArray[np.uint8], source: object = "a blob"
) -> dict[str, NDArray[Any]]:
    """The tensors of `blob_in`."""
    return blob_in(blob, source)[1]


def blob_in(
    blob: bytes | NDArray[np.uint8],
    source: object = "a blob",
    dtypes: Mapping[str, np.dtype[Any]] = DTYPES,
) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Read a blob of any writer where it lies, without the library, which makes a copy and is not
    on boards.

    Args:
        blob: all of its bytes.
        source: what an error calls it.
        dtypes: those that are read, by their names in a file; by default those that blobs carry.

    Returns:
        The strings in its header, and views by name, in the order of the blob.

    Raises:
        BlobError: it is truncated, or has a header that does not fit it: as the format wants,
            tensors lie one behind the other and leave nothing over.
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
    """What `blob_in` reads of the blob that some bytes begin with, and how long it is.

    Errors are the same.
    """
    try:
        return _parsed(np.frombuffer(blob, np.uint8), dtypes)
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


def _parsed(
    data: NDArray[np.uint8], dtypes: Mapping[str, np.dtype[Any]]
) -> tuple[dict[str, str], dict[str, NDArray[Any]], int]:
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    if length > min(_HEADER_LIMIT, data.size - 8):
        raise ValueError(f"the header claims {length} bytes")
    header = json.loads(data[8 : 8 + length].tobytes())
    metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
    start = 8 + length
    at = 0
    tensors: dict[str, NDArray[Any]] = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        kind = dtypes.get(entry["dtype"])
        if kind is None:
            raise ValueError(f"tensor {name} is of type {entry['dtype']}, which is not read")
        (first, last), shape = entry["data_offsets"], entry["shape"]
        count = math.prod(shape)
        if first != at or last - first != count * kind.itemsize or min(shape, default=0) < 0:
            raise ValueError(
                f"tensor {name} of shape {shape} lies at {first} to {last}; the one before ends at {at}"
            )
        tensors[name], at = (
            np.frombuffer(data, kind, count, start + first).reshape(shape),
            last,
        )
    return metadata, tensors, start + at
