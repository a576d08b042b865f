"""How many seeds a claim needs to be decided, by the spread of those that were run.

The test is the one that judges claims: Student's 95 % interval over paired seeds must be beyond the
claim's bound. The number of seeds is the smallest with which it does so in 80 % of repetitions of
the whole table. The power is exact, by the noncentral t distribution, for a difference as large as
published. Where the paper gives no figures, the difference is as large as measured.
Ratios are counted by their logarithms.

A deviation of three seeds is uncertain: with the number of seeds that follows from it, only two of
five such tables would have a power of 80 %. So the deviation is the upper end of its one-sided
confidence interval of 80 %, s * sqrt((n - 1) / q) with the quantile q of 0.2 of the chi-squared
distribution, after Browne, On the use of a pilot sample for sample size determination, Statistics
in Medicine 14 (1995). For three seeds it is 2.12 s. Then four of five tables have that power.
"""

import math
import statistics
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from scipy import stats

from reproduction.experiment import Claim

UPPER_TAIL = 0.975
"""Quantile of Student's distribution at the upper end of a two-sided interval of 95 %."""
REACH_SECONDS = 8 * 3600.0
"""Time on one machine that the runs of a claim may take."""
_POWER = 0.8
_CONFIDENCE = 0.8
"""Probability that the true deviation is below the one that is assumed."""
MOST_SEEDS = 10_000
"""Largest number of seeds that is considered."""


@dataclass(frozen=True)
class RequiredSeeds:
    """The seeds and the time that decide a claim.

    Attributes:
        seeds: the number; None if even `MOST_SEEDS` would not suffice.
        seconds: real time of all of them on a machine with two cores.
        is_least: whether the deviation is that of other claims, so that more seeds may be needed.
        is_measured: whether the difference is as large as measured, because none was published.
    """

    seeds: int | None
    seconds: float
    is_least: bool = False
    is_measured: bool = False

    @property
    def out_of_reach(self) -> bool:
        """Whether that takes longer than `REACH_SECONDS`, for a difference as large as published.

        The seeds that left a claim open also give its measured difference, which is therefore no
        reason to give it up: six further seeds decided two claims that it called out of reach.
        """
        if self.is_measured:
            return False
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
    measured = deviation(claim, values)
    if measured is None:
        return None
    if published is None:
        return None
    return _required(_upper(measured, len(values)), _effect(claim, published), seconds)


def seeds_at_measured_size(
    claim: Claim, values: Collection[float], seconds: float
) -> RequiredSeeds | None:
    """Return the seeds and the time that decide a claim if the measured difference is the true one.

    The claim is decided on either side of its bound.

    Args:
        claim: the claim.
        values: as in `required_seeds`.
        seconds: as in `required_seeds`.

    Returns:
        None as in `required_seeds`, but without published figures.
    """
    measured = deviation(claim, values)
    if measured is None:
        return None
    effect = _effect(claim, _centre(claim, values))
    if effect is None:
        return None
    need = _required(_upper(measured, len(values)), abs(effect), seconds)
    if need is None:
        # A difference at the bound itself is not decided by any number of seeds.
        need = RequiredSeeds(None, seconds * MOST_SEEDS)
    return replace(need, is_measured=True)


def least_seeds(
    claim: Claim, deviations: Iterable[float], published: float | None, seconds: float
) -> RequiredSeeds | None:
    """Return the fewest seeds and the least time for a claim whose deviation was not measured.

    Args:
        claim: the claim.
        deviations: those of comparable claims. The smallest counts, as it was measured, so that
            the number is rather too low.
        published: as in `required_seeds`.
        seconds: as in `required_seeds`.

    Returns:
        None as in `required_seeds`, and if there is no comparable claim.
    """
    smallest = min(deviations, default=None)
    if smallest is None:
        return None
    if published is None:
        return None
    need = _required(smallest, _effect(claim, published), seconds)
    return None if need is None else replace(need, is_least=True)


def deviation(claim: Claim, values: Collection[float]) -> float | None:
    """Return the standard deviation of differences, or of the logarithms of ratios.

    None for fewer than two values.
    """
    if len(values) < 2:
        return None
    if claim.how == "over":
        return statistics.stdev(map(math.log, values))
    return statistics.stdev(values)


def _upper(measured: float, count: int) -> float:
    """Return the upper end of the confidence interval of a deviation of some seeds."""
    freedom = count - 1
    quantile = float(stats.chi2.ppf(1 - _CONFIDENCE, freedom))
    return measured * math.sqrt(freedom / quantile)


def _centre(claim: Claim, values: Collection[float]) -> float:
    """Return the mean of differences, or the geometric mean of ratios."""
    if claim.how == "over":
        return statistics.geometric_mean(values)
    return statistics.fmean(values)


def _required(assumed: float, effect: float | None, seconds: float) -> RequiredSeeds | None:
    """Return the seeds and the time for a deviation and a distance from the bound."""
    if effect is None or effect <= 0:
        return None
    seeds = _seeds(assumed / effect)
    return RequiredSeeds(seeds, seconds * (seeds or MOST_SEEDS))


def _effect(claim: Claim, figure: float) -> float | None:
    """Return how far a figure is beyond the nearer bound; None without a bound."""
    is_ratio = claim.how == "over"
    if is_ratio and figure <= 0:
        return None

    def scaled(value: float) -> float:
        return math.log(value) if is_ratio else value

    distances = []
    if claim.at_least is not None and (claim.at_least > 0 or not is_ratio):
        distances.append(scaled(figure) - scaled(claim.at_least))
    if claim.at_most is not None and (claim.at_most > 0 or not is_ratio):
        distances.append(scaled(claim.at_most) - scaled(figure))
    # If a claim has two bounds, the nearer one is harder to stay away from.
    return min(distances, default=None)


def _seeds(relative: float) -> int | None:
    """Return the number of seeds for a deviation in units of the effect, at least two."""
    # Seeds that do not differ at all need no computation.
    if relative == 0:
        return 2
    # The number grows with the deviation and is at least that of the normal distribution.
    normal = stats.norm.ppf(UPPER_TAIL) + stats.norm.ppf(_POWER)
    # One seed has no spread, so two are the least.
    count = max(2, math.floor((normal * relative) ** 2))
    while count <= MOST_SEEDS:
        if _power(count, relative) >= _POWER:
            return int(count)
        count += 1
    return None


def _power(count: int, relative: float) -> float:
    """Return the probability that the interval of so many seeds is beyond the bound."""
    quantile = stats.t.ppf(UPPER_TAIL, count - 1)
    shift = math.sqrt(count) / relative
    return float(stats.nct.sf(quantile, count - 1, shift))
