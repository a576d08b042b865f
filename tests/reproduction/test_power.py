"""How many seeds decide a claim: by the formula, and by repeating the whole table."""

import numpy as np
import pytest
from scipy import stats

from reproduction.experiment import Claim
from reproduction.power import REACH_SECONDS, RequiredSeeds, required_seeds


def claim(how="minus", at_least=None, at_most=None) -> Claim:
    return Claim("says", "left", "right", "global", how, at_least, at_most)


ABOVE = claim(at_least=0.0)


def test_the_number_is_the_smallest_that_keeps_its_promise():
    """Of 4,000 tables with as many seeds four in five are decided, with one seed less fewer."""
    values = [1.0, 3.0, 2.0, 4.0, 0.0]
    need = required_seeds(ABOVE, values, 2.0, 60.0)
    assert need is not None
    assert need.seconds == need.seeds * 60.0
    draw = np.random.default_rng(1)

    def decided(seeds: int) -> float:
        tables = draw.normal(2.0, np.std(values, ddof=1), (4_000, seeds))
        half = stats.t.ppf(0.975, seeds - 1) * tables.std(axis=1, ddof=1) / seeds**0.5
        return float((tables.mean(axis=1) - half > 0).mean())

    assert decided(need.seeds) >= 0.78
    assert decided(need.seeds - 2) < 0.78


def test_a_small_difference_needs_many_seeds():
    """A tenth of the difference needs a hundred times as many; one of none is not to be decided."""
    values = [1.0, 3.0, 2.0]
    large = required_seeds(ABOVE, values, 0.5, 1.0)
    small = required_seeds(ABOVE, values, 0.05, 1.0)
    assert small.seeds == pytest.approx(100 * large.seeds, rel=0.1)
    assert required_seeds(ABOVE, values, 1e-6, 1.0).seeds is None
    assert required_seeds(ABOVE, values, 1e-6, 1.0).out_of_reach
    assert required_seeds(ABOVE, values, -0.5, 1.0) is None


def test_ratios_count_by_their_logarithms():
    """0.64 is as far below 0.8 as 0.8 is below 1."""
    values = [0.9, 1.1, 1.0]
    below = claim("over", at_most=1.0)
    further = claim("over", at_most=0.8)
    assert required_seeds(below, values, 0.8, 1.0) == required_seeds(further, values, 0.64, 1.0)
    assert required_seeds(below, values, 1.2, 1.0) is None


def test_what_is_unknown_is_not_computed():
    """Without a published figure, a bound, or a spread."""
    assert required_seeds(ABOVE, [1.0, 2.0], None, 1.0) is None
    assert required_seeds(ABOVE, [1.0], 1.0, 1.0) is None
    assert required_seeds(claim(), [1.0, 2.0], 1.0, 1.0) is None


def test_eight_hours_are_the_reach():
    """Of all seeds together."""
    assert not RequiredSeeds(4, REACH_SECONDS).out_of_reach
    assert RequiredSeeds(4, REACH_SECONDS + 1).out_of_reach
