"""Weights that PyTorch saved."""

import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from fleet_protocol.errors import BlobError
from fleet_protocol.mapped_tensors import open_tensors


@pytest.mark.parametrize("of_today", [True, False])
def test_a_file_of_torch_is_refused_with_the_command_that_converts_it(tmp_path, of_today):
    """And the command works: what it writes is read."""
    path = tmp_path / "weights.pt"
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(2)}
    torch.save(tensors, path, _use_new_zipfile_serialization=of_today)
    with pytest.raises(BlobError, match=r"torch\.save.*weights_only=True") as caught:
        open_tensors(path)
    command = shlex.split(re.search("python -c .*", str(caught.value))[0])
    subprocess.run([sys.executable, *command[1:]], check=True, timeout=600)
    found = open_tensors(path.with_suffix(".safetensors"))
    np.testing.assert_array_equal(found["a"], np.arange(6.0).reshape(2, 3))


def test_every_length_of_a_header_is_read(tmp_path):
    """One of 640 bytes begins with 80 02, as an old file of torch.save does."""
    path = tmp_path / "weights.safetensors"
    begun = set()
    for letters in range(400, 700):
        data = save({"a" * letters: np.ones(2, np.float32)})
        begun.add(data[:2])
        path.write_bytes(data)
        np.testing.assert_array_equal(open_tensors(path)["a" * letters], np.ones(2, np.float32))
    assert b"\x80\x02" in begun
