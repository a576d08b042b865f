"""Reads weights from a file straight into the buffers that train them.

So no second copy of them is made, however large the model.
"""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.disk import storage_error
from fleet_protocol.encodings import open_weights
from fleet_protocol.errors import BlobError, RefusalReason, RefusedError
from fleet_protocol.manifest import Manifest, ParameterSpec

Array = NDArray[Any]
Entry = dict[str, Any]  # of a header: type, shape and place of a tensor

_PREFIX_BYTES = 8  # of a safetensors file: the length of the header
_ENCODED = {"F16": "float32", "U16": "float32", "I8": "float32"}
_DTYPES = {"F32": "float32", "I64": "int64", **_ENCODED}


def read_weights(
    path: Path, manifest: Manifest, into: Mapping[str, Array] | None = None
) -> dict[str, Array]:
    """Read a safetensors file, parameter by parameter, in the order of the manifest.

    Args:
        path: the file, verified by its digest before.
        manifest: lists the parameters.
        into: contiguous arrays of their shapes and types to read into; None for new ones.

    Raises:
        BlobError: the file has no readable header, or ends early.
        RefusedError: a parameter is missing, or differs from the manifest in shape or type.
        StorageError: the file cannot be read.
    """
    weights: dict[str, Array] = {}
    decoded: Mapping[str, Array] = {}
    try:
        with path.open("rb") as file:
            header, start = _read_header(file.read, path)
            for spec in manifest.parameters:
                entry = _entry(header, spec, manifest.tier)
                array = np.empty(spec.shape, spec.dtype) if into is None else into[spec.name]
                file.seek(start + int(entry["data_offsets"][0]))
                if entry["dtype"] in _ENCODED:
                    # Its scale is a separate tensor, so the file is opened as a whole.
                    decoded = decoded or open_weights(path)
                    array[...] = decoded[spec.name]
                else:
                    buffer = array.reshape(-1).view(np.uint8).data
                    if file.readinto(buffer) != array.nbytes:
                        raise BlobError(
                            f"the weights {path.name[:12]} end before parameter {spec.name}"
                        )
                weights[spec.name] = array
    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise BlobError(f"the weights {path.name[:12]} have a damaged header: {error}") from error
    except OSError as error:
        raise storage_error("read", path, error) from error
    return weights


def _entry(header: Mapping[str, Any], spec: ParameterSpec, tier: str) -> Entry:
    """Return a header's entry for a parameter; raise RefusedError if the manifest differs."""
    entry = header.get(spec.name)
    shape = "nothing"
    if isinstance(entry, dict):
        dtype = _DTYPES.get(str(entry.get("dtype")), entry.get("dtype"))
        shape = f"{dtype} {entry.get('shape')}"
    expected = f"{spec.dtype} {list(spec.shape)}"
    if not isinstance(entry, dict) or shape != expected:
        raise RefusedError(
            RefusalReason.BAD_SHAPE,
            f"parameter {spec.name} of {tier} is {shape} in the weights, but {expected} in "
            "the manifest",
        )
    return entry


def _read_header(read: Callable[[int], bytes], path: Path) -> tuple[dict[str, Any], int]:
    """Read the tensors that a file lists, and return them with the offset of its data."""
    prefix = read(_PREFIX_BYTES)
    size = path.stat().st_size
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == _PREFIX_BYTES else size
    if length > size - _PREFIX_BYTES:
        raise BlobError(f"the weights {path.name[:12]} are not a safetensors file of {size} bytes")
    header = json.loads(read(length))
    if not isinstance(header, dict):
        raise BlobError(f"the weights {path.name[:12]} have no header")
    return header, _PREFIX_BYTES + length
