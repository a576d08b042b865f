"""How often the released shard split leaves a device with one label."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_protocol.errors import ConfigError
from simulation.data.shard_odds import single_label_probability


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 3))
@settings(max_examples=30)
def test_it_is_the_share_of_all_deals(counts, per_device):
    """Counted out for every order in which a few shards can be dealt."""
    shards = [label for label, count in enumerate(counts) for _ in range(count)]
    if per_device > len(shards):
        with pytest.raises(ConfigError):
            single_label_probability(counts, per_device)
        return
    hands = list(itertools.permutations(shards, per_device))
    alike = sum(len(set(hand)) == 1 for hand in hands)
    assert single_label_probability(counts, per_device) == pytest.approx(alike / len(hands))


def test_the_published_setting():
    """CIFAR-10 among 100 devices: 19 of 199."""
    assert single_label_probability([20] * 10, 2) == 19 / 199
