"""Weights that PyTorch saved."""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from fleet_protocol.errors import BlobError
from fleet_protocol.mapped_tensors import open_tensors


def test_a_file_of_torch_is_refused_with_the_command_that_converts_it(tmp_path):
    """And the command works: what it writes is read."""
    path = tmp_path / "weights.pt"
    torch.save({"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(2)}, path)
    with pytest.raises(BlobError, match=r"torch\.save.*weights_only=True") as caught:
        open_tensors(path)
    command = re.search(r'python -c "(.*)"', str(caught.value))[1]
    subprocess.run([sys.executable, "-c", command], check=True, timeout=60)
    found = open_tensors(path.with_suffix(".safetensors"))
    np.testing.assert_array_equal(found["a"], np.arange(6.0).reshape(2, 3))
