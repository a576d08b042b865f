"""A few light devices through everything that `tests.fleet.chaos` does to fifty."""

import pytest

from tests.fleet.chaos import chaos


@pytest.mark.slow
def test_rounds_close_whatever_the_network_does(tmp_path):
    """Messages lost, repeated and swapped, connections cut and left open, the broker killed,
    devices away and back.
    """
    found = chaos(tmp_path, devices=8, rounds=2, payload_bytes=50_000, seed="a")
    assert (found.status, len(found.closed), found.abandoned, found.twice) == ("finished", 2, [], 0)
    assert all(merged >= asked / 2 for merged, asked in zip(found.merged, found.asked, strict=True))
    assert found.kills > 0
    assert min(found.faults.get(kind, 0) for kind in ("lost", "twice", "swapped")) > 0
