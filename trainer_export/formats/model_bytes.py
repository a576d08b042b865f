"""Serializes ONNX models, whose size the format limits."""

import onnx
from google.protobuf.message import EncodeError

from fleet_protocol.errors import ExportError


def model_bytes(model: onnx.ModelProto) -> bytes:
    """Serialize a model deterministically.

    Raises:
        ExportError: the model has more than 2 GB, the limit of one file of the format.
    """
    try:
        data: bytes = model.SerializeToString(deterministic=True)
    except (EncodeError, ValueError) as error:
        raise ExportError(
            "the model is larger than 2 GB, the limit of an ONNX file; use a smaller tier or"
            " another format (`shoal export-weights --format safetensors`)"
        ) from error
    return data
