"""A board that trains adapters of a model of 135 million parameters needs little more than the mapped base."""

import math

import pytest

from benchmarks.base_memory import LIMIT_MB, SETTINGS, measured


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_decoder_of_smollms_size_trains_within_its_limit_with_its_base_on_disk_once():
    """Three steps on stock onnxruntime: no copy of the base in memory, none more on disk, and the loss falls."""
    found = measured(SETTINGS)
    assert found["peak_mb"] < LIMIT_MB
    assert found["peak_mb"] < 1.9 * found["base_mb"]
    assert found["disk_mb"] < 1.05 * found["base_mb"]
    assert found["trained"] < 500_000
    assert all(map(math.isfinite, found["losses"]))
    assert found["losses"][-1] < found["losses"][0]
