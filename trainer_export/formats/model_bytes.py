"""Writes ONNX models as bytes, which the format bounds."""

import onnx
from google.protobuf.message import EncodeError

from fleet_protocol.errors import ExportError


def model_bytes(model: onnx.ModelProto) -> bytes:
    """Return a model as the bytes of its file, the same for the same model.

    Raises:
        ExportError: it has more than 2 GB, the most that one file of the format holds.
    """
    try:
        data: bytes = model.SerializeToString(deterministic=True)
    except (EncodeError, ValueError) as error:
        raise ExportError(
            "an ONNX file holds at most 2 GB, and this model has more; take a smaller tier, or"
            " another format (`shoal export-weights --format safetensors`)"
        ) from error
    return data
