"""A board that trains adapters of a large model needs little more than the mapped base."""

import math

import pytest

from benchmarks.base_memory import measured

# Two blocks of nearly three times the width of SmolLM's: almost all of 216 MB is theirs.
TWO_WIDE_BLOCKS = {
    "input_shape": (16,),
    "classes": 4096,
    "embed": 1536,
    "heads": 24,
    "shared_heads": 8,
    "ffn": 4096,
    "blocks": 2,
    "rank": 4,
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_wide_decoder_trains_with_its_base_in_memory_and_on_disk_once():
    """Steps on stock onnxruntime: no copy of the base in memory, none more on disk, and the loss falls below chance.

    On 23 November 2026 the peak was 1.4 times the base; a copy would make it 2.4.
    """
    found = measured(TWO_WIDE_BLOCKS)
    assert found["peak_mb"] < 1.9 * found["base_mb"]
    assert found["disk_mb"] < 1.05 * found["base_mb"]
    assert found["trained"] < 500_000
    assert found["loss"] < math.log(TWO_WIDE_BLOCKS["classes"])
