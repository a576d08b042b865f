"""What the format of ONNX cannot hold is an error that says so."""

import pytest
from google.protobuf.message import EncodeError

from fleet_protocol.errors import ExportError
from trainer_export.formats.model_bytes import model_bytes


class _Large:
    """A model as protobuf treats one of more than 2 GB, which no test should allocate."""

    def SerializeToString(self, *, deterministic):
        raise EncodeError("Failed to serialize proto")


def test_a_model_of_more_than_2_gb_is_refused():
    with pytest.raises(ExportError, match=r"larger than 2 GB.*smaller tier.*safetensors"):
        model_bytes(_Large())
