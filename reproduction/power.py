"""How many seeds a claim needs to be decided, by the spread of those that were run.

The test is the one that judges claims: Student's 95 % interval over paired seeds must be beyond the
claim's bound. With n seeds it does so in 80 % of repetitions of the whole table if the difference
is as large as published and n is at least

    (t(0.975, n - 1) + t(0.8, n - 1))^2 * (deviation / effect)^2

where the effect is the distance of the published difference from the bound. Ratios are counted by
their logarithms.
"""

import math
import statistics
from collections.abc import Collection
from dataclasses import dataclass

from scipy import stats

from reproduction.experiment import Claim

UPPER_TAIL = 0.975
"""Quantile of Student's distribution at the upper end of a two-sided interval of 95 %."""
REACH_SECONDS = 8 * 3600.0
"""Time on one machine that the runs of a claim may take."""
_POWER = 0.8
MOST_SEEDS = 10_000
"""Largest number of seeds that is considered."""


@dataclass(frozen=True)
class RequiredSeeds:
    """The seeds and the time that decide a claim.

    Attributes:
        seeds: the number; None if even `MOST_SEEDS` would not suffice.
        seconds: real time of all of them on the machine that ran the stored ones.
    """

    seeds: int | None
    seconds: float

    @property
    def out_of_reach(self) -> bool:
        """Whether that takes longer than `REACH_SECONDS`."""
        return self.seeds is None or self.seconds > REACH_SECONDS


def required_seeds(
    claim: Claim, values: Collection[float], published: float | None, seconds: float
) -> RequiredSeeds | None:
    """Return the seeds and the time that decide a claim at its published size.

    Args:
        claim: the claim.
        values: differences or ratios that were measured, one a seed.
        published: the same of the published figures.
        seconds: real time of one seed of all arms of the claim.

    Returns:
        None if there is no published figure, if the claim does not hold for the published figures,
        or if fewer than two seeds were run.
    """
    if published is None or len(values) < 2:
        return None
    is_ratio = claim.how == "over"
    effect = _effect(claim, published, is_ratio=is_ratio)
    if effect is None or effect <= 0:
        return None
    scaled = [math.log(value) for value in values] if is_ratio else list(values)
    seeds = _seeds(statistics.stdev(scaled) / effect)
    return RequiredSeeds(seeds, seconds * (seeds or MOST_SEEDS))


def _effect(claim: Claim, published: float, *, is_ratio: bool) -> float | None:
    """Return how far a published figure is beyond the nearer bound; None without a bound."""
    if is_ratio and published <= 0:
        return None

    def scaled(value: float) -> float:
        return math.log(value) if is_ratio else value

    distances = []
    if claim.at_least is not None and (claim.at_least > 0 or not is_ratio):
        distances.append(scaled(published) - scaled(claim.at_least))
    if claim.at_most is not None and (claim.at_most > 0 or not is_ratio):
        distances.append(scaled(claim.at_most) - scaled(published))
    # If a claim has two bounds, the nearer one is harder to stay away from.
    return min(distances, default=None)


def _seeds(deviation: float) -> int | None:
    """Return the number of seeds for a deviation in units of the effect, at least two."""
    # The number grows with the deviation and is at least that of the normal distribution.
    normal = stats.norm.ppf(UPPER_TAIL) + stats.norm.ppf(_POWER)
    # One seed has no spread, so two are the least.
    count = max(2, math.floor((normal * deviation) ** 2))
    while count <= MOST_SEEDS:
        quantiles = stats.t.ppf(UPPER_TAIL, count - 1) + stats.t.ppf(_POWER, count - 1)
        if count >= (float(quantiles) * deviation) ** 2:
            return int(count)
        count += 1
    return None
