"""How many seeds decide a claim: by the formula, and by repeating the whole table."""

import numpy as np
import pytest
from scipy import stats

from reproduction.experiment import Claim
from reproduction.power import (
    REACH_SECONDS,
    RequiredSeeds,
    least_seeds,
    required_seeds,
    seeds_at_measured_size,
)


def claim(how="minus", at_least=None, at_most=None) -> Claim:
    return Claim("says", "left", "right", "global", how, at_least, at_most)


ABOVE = claim(at_least=0.0)


def decided(seeds: int, difference: float, deviation: float) -> float:
    """The share of 20,000 tables whose interval is above 0."""
    tables = np.random.default_rng(1).normal(difference, deviation, (20_000, seeds))
    half = stats.t.ppf(0.975, seeds - 1) * tables.std(axis=1, ddof=1) / seeds**0.5
    return float((tables.mean(axis=1) - half > 0).mean())


def test_the_number_is_the_smallest_that_decides_four_tables_in_five():
    """With the upper deviation of five seeds, 1.5576 times theirs; with one seed less it does not."""
    values = [1.0, 3.0, 2.0, 4.0, 0.0]
    need = required_seeds(ABOVE, values, 1.0, 60.0)
    assert need is not None
    assert need.seconds == need.seeds * 60.0
    upper = 1.5576 * np.std(values, ddof=1)
    assert decided(need.seeds, 1.0, upper) == pytest.approx(0.805, abs=0.01)
    assert decided(need.seeds - 1, 1.0, upper) < 0.8


def test_two_seeds_are_planned_with_the_exact_distribution():
    """An approximation by Student's quantiles would be content with two, whose power is 0.73."""
    need = least_seeds(ABOVE, [0.5, 0.1], 1.0, 60.0)
    assert (need.seeds, need.is_least) == (3, True)
    assert decided(2, 1.0, 0.1) == pytest.approx(0.733, abs=0.01)


@pytest.mark.parametrize("deviation", [0.5, 2.0])
def test_tables_planned_from_three_seeds_have_enough_power(deviation):
    """Four of five: those whose three seeds lie close by chance are the fifth."""
    draw = np.random.default_rng(7)
    enough = 0
    for values in draw.normal(1.0, deviation, (300, 3)):
        seeds = required_seeds(ABOVE, values.tolist(), 1.0, 1.0).seeds
        quantile = stats.t.ppf(0.975, seeds - 1)
        enough += stats.nct.sf(quantile, seeds - 1, seeds**0.5 / deviation) >= 0.8
    assert enough / 300 == pytest.approx(0.8, abs=0.06)


def test_a_claim_without_a_deviation_takes_the_smallest_of_others():
    """It is the least that is needed; without others nothing is known."""
    assert least_seeds(ABOVE, [2.0, 1.0], 1.0, 60.0) == RequiredSeeds(10, 600.0, is_least=True)
    assert least_seeds(ABOVE, [], 1.0, 60.0) is None
    assert least_seeds(ABOVE, [1.0], None, 60.0) is None


def test_a_small_difference_needs_many_seeds():
    """A tenth of the difference needs a hundred times as many; one of none is not to be decided."""
    values = [1.0, 3.0, 2.0]
    large = required_seeds(ABOVE, values, 1.0, 1.0)
    small = required_seeds(ABOVE, values, 0.1, 1.0)
    assert small.seeds == pytest.approx(100 * large.seeds, rel=0.1)
    assert required_seeds(ABOVE, values, 1e-6, 1.0).seeds is None
    assert required_seeds(ABOVE, values, 1e-6, 1.0).out_of_reach
    assert required_seeds(ABOVE, values, -0.5, 1.0) is None


@pytest.mark.parametrize("values", [[1.0, 3.0, 2.0], [-1.0, -3.0, -2.0]])
def test_a_measured_size_decides_on_either_side_of_the_bound(values):
    """Its seeds are those of a published difference of 2; at the bound itself none suffice."""
    need = seeds_at_measured_size(ABOVE, values, 60.0)
    published = required_seeds(ABOVE, [1.0, 3.0, 2.0], 2.0, 60.0)
    assert (need.seeds, need.seconds) == (published.seeds, published.seconds)
    assert (need.is_measured, published.is_measured) == (True, False)
    assert seeds_at_measured_size(ABOVE, [1.0], 60.0) is None
    at_the_bound = seeds_at_measured_size(ABOVE, [-1.0, 1.0], 60.0)
    assert at_the_bound.seeds is None


def test_a_measured_size_puts_no_claim_out_of_reach():
    """The seeds that left it open may be wrong about its size."""
    need = seeds_at_measured_size(ABOVE, [0.001, -0.002, 0.003], REACH_SECONDS)
    assert need.seconds > REACH_SECONDS
    assert not need.out_of_reach


def test_the_measured_size_of_ratios_is_their_geometric_mean():
    """0.4 and 1.6 have the mean 0.8, which is as far below 1 as 1.25 is above it."""
    below = claim("over", at_most=1.0)
    need = seeds_at_measured_size(below, [0.4, 1.6], 1.0)
    assert need.seeds == required_seeds(below, [0.4, 1.6], 0.8, 1.0).seeds
    assert need.seeds == seeds_at_measured_size(below, [0.625, 2.5], 1.0).seeds


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
