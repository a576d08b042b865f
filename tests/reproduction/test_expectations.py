"""Closed forms of the papers against counting them out."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_protocol.errors import ConfigError, PlanError
from tests.conformance.expectations import (
    expected_rounds_to_cover,
    mean_over_shares,
    probability_untouched,
    single_label_probability,
)


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


def test_expected_rounds_are_those_of_the_coupon_collector():
    """One unit at a time: K (1 + 1/2 + ... + 1/K). All units at once: one round."""
    for size in (1, 2, 7, 30):
        harmonic = size * sum(1 / k for k in range(1, size + 1))
        assert expected_rounds_to_cover(size, 1) == pytest.approx(harmonic, rel=1e-12)
        assert expected_rounds_to_cover(size, size) == 1
    assert math.isfinite(expected_rounds_to_cover(512, 32))
    assert probability_untouched(8, 8, 1) == 0
    for size, kept in ((4, 0), (4, 5)):
        with pytest.raises(PlanError):
            expected_rounds_to_cover(size, kept)


def test_means_over_a_distribution():
    """Of widths, or of anything known for each width."""
    assert mean_over_shares({1.0: 0.5, 0.5: 0.5}) == 0.75
    assert mean_over_shares({1.0: 0.25, 0.5: 0.75}, {1.0: 100, 0.5: 20}) == 40
    for shares, values in (({1.0: 0.4}, None), ({1.0: 1.0}, {0.5: 3.0})):
        with pytest.raises(ConfigError):
            mean_over_shares(shares, values)
