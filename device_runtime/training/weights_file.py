"""Weights from a file straight into the buffers they are trained in: no second copy, however large
the model.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.blobs import storage_error
from fleet_protocol.encodings import open_weights
from fleet_protocol.errors import BlobError, RefusalReason, RefusedError
from fleet_protocol.manifest import Manifest

_ENCODED = {"F16": "float32", "U16": "float32", "I8": "float32"}
_DTYPES = {"F32": "float32", "I64": "int64", **_ENCODED}


def read_weights(
    path: Path, manifest: Manifest, into: Mapping[str, NDArray[Any]] | None = None
) -> dict[str, NDArray[Any]]:
    """Read a safetensors file, verified by its digest before, parameter by parameter, in the order
    of the manifest.

    Each is read `into` a contiguous array of its shape and type, by default a new one.

    Raises:
        BlobError: the file has no readable header, or ends early.
        RefusedError: a parameter is missing or has another shape or type than the manifest says.
        StorageError: the file cannot be read.
    """
    result: dict[str, NDArray[Any]] = {}
    try:
        with path.open("rb") as file:
            header, start = _header(file.read(8), file.read, path)
            decoded: Mapping[str, NDArray[Any]] = {}
            for spec in manifest.parameters:
                entry = header.get(spec.name)
                found = "nothing"
                if isinstance(entry, dict):
                    found = f"{_DTYPES.get(str(entry.get('dtype')), entry.get('dtype'))} {entry.get('shape')}"
                if not isinstance(entry, dict) or found != f"{spec.dtype} {list(spec.shape)}":
                    raise RefusedError(
                        RefusalReason.BAD_SHAPE,
                        f"parameter {spec.name} of {manifest.tier} is {found} in the weights, "
                        f"{spec.dtype} {list(spec.shape)} in the manifest",
                    )
                array = into[spec.name] if into is not None else np.empty(spec.shape, spec.dtype)
                file.seek(start + int(entry["data_offsets"][0]))
                if entry["dtype"] in _ENCODED:
                    decoded = decoded or open_weights(path)
                    array[...] = decoded[spec.name]
                elif file.readinto(array.reshape(-1).view(np.uint8).data) != array.nbytes:
                    raise BlobError(
                        f"the weights {path.name[:12]} end before parameter {spec.name}"
                    )
                result[spec.name] = array
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise BlobError(f"the weights {path.name[:12]} have a damaged header: {error}") from error
    except OSError as error:
        raise storage_error("read", path, error) from error
    return result


def _header(prefix: bytes, read: Any, path: Path) -> tuple[dict[str, Any], int]:
    """The tensors a file announces, and where its data starts."""
    size = path.stat().st_size
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
    if length > size - 8:
        raise BlobError(f"the weights {path.name[:12]} are not a safetensors file of {size} bytes")
    header = json.loads(read(length))
    if not isinstance(header, dict):
        raise BlobError(f"the weights {path.name[:12]} have no header")
    return header, 8 + length
