"""Figures of several seeds: those that are there, their mean and their spread."""

import statistics
from collections.abc import Collection, Iterable


def present(values: Iterable[float | None]) -> list[float]:
    """Return the values that are not missing."""
    return [value for value in values if value is not None]


def mean_and_spread(
    values: Collection[float | None], how: str = "minus"
) -> tuple[float | None, float | None]:
    """Return mean and standard deviation over the seeds.

    Args:
        values: figures by seed.
        how: how figures are compared, as in `Claim`; the mean of ratios is geometric.

    Returns:
        Both are None if one value or all are missing, the deviation also for fewer than two.
    """
    there = present(values)
    # The seed without a figure is usually the worst one, so a mean of the others would be too good.
    if not there or len(there) != len(values):
        return None, None
    mean = statistics.fmean
    if how == "over":
        # Then it does not matter which arm is the denominator.
        mean = statistics.geometric_mean
    spread = None
    if len(there) > 1:
        # That of a sample, with n - 1: the seeds stand for all seeds.
        spread = statistics.stdev(there)
    return mean(there), spread
