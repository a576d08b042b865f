"""Writes weights as one safetensors blob, with tensors in the manifest's parameter order.

The safetensors library sorts tensors by name. Here the caller's order is kept, which the format
allows, so that the manifest's offsets hold and a reader can read one parameter in the middle of a
blob. `fleet_protocol.mapped_tensors` reads them.
"""

import json
import struct
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import BlobError
from fleet_protocol.mapped_tensors import DTYPES

BESIDE_PARAMETERS = "/"
"""The first character of the names of tensors that come with parameters in one blob."""

MASKED = "masked"  # the only tensor of an update that goes into a secure sum

# Asking numpy for the name of a type takes longer than everything else here.
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def encode_weights(
    weights: Mapping[str, NDArray[np.generic]],
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """Return tensors as one safetensors blob, in the order of the mapping.

    The same input gives the same bytes. The header carries the metadata.

    Raises:
        BlobError: an array has a type that the format of Shoal does not support.
    """
    return b"".join(weights_parts(weights, metadata))


def weights_parts(
    weights: Mapping[str, NDArray[np.generic]],
    metadata: Mapping[str, str] | None = None,
) -> list[bytes | memoryview]:
    """Return the blob of `encode_weights` in parts, header and tensors.

    So it can be hashed and written without a copy. The errors are the same.
    """
    header: dict[str, object] = {}
    if metadata:
        header["__metadata__"] = dict(sorted(metadata.items()))
    contents: list[bytes | memoryview] = []
    offset = 0
    for name, value in weights.items():
        if value.dtype not in _NAMES:
            raise BlobError(
                f"tensor {name} has type {value.dtype}, but a blob supports only "
                f"{', '.join(map(str, _NAMES))}"
            )
        array = np.ascontiguousarray(value)
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(value.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        contents.append(array.reshape(-1).view(np.uint8).data)
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data section to 8 bytes
    return [struct.pack("<Q", len(text)), text, *contents]
