"""Safetensors files as mapped arrays: a merge reads each update once, straight from the page cache."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import BlobError

__all__ = ["open_state", "open_tensors"]

_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F64": np.dtype("<f8"), "I64": np.dtype("<i8")}


def open_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Map a file that was checked when it arrived.

    Args:
        path: a safetensors file.

    Returns:
        Read-only views by name, in the order of the file; they keep the file mapped as long as they live.

    Raises:
        BlobError: the file is not there, is truncated, or has a header that does not fit it.
    """
    try:
        data = np.memmap(path, np.uint8, "r")
        (length,) = struct.unpack("<Q", data[:8].tobytes())
        header = json.loads(data[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        body = np.asarray(data[8 + length :])
        tensors: dict[str, NDArray[Any]] = {}
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            first, last = entry["data_offsets"]
            tensors[name] = body[first:last].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise BlobError(f"cannot read the tensors in {path}: {error!r}") from error
    return tensors


def open_state(blobs: BlobStore, digest: str | None) -> dict[str, NDArray[Any]]:
    """Map what a strategy carries from round to round.

    Args:
        blobs: where it is kept.
        digest: of the state of a version; None if it has none.

    Raises:
        BlobError: it cannot be read.
    """
    return {} if digest is None else open_tensors(blobs.path(digest))
