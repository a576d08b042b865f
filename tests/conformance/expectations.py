"""What random draws lead one to expect: closed forms of the papers that worked examples ask for,
and no run needs.
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

from fleet_protocol.errors import ConfigError, PlanError

__all__ = [
    "expected_rounds_to_cover",
    "mean_over_shares",
    "probability_untouched",
    "single_label_probability",
]


def expected_rounds_to_cover(size: int, kept: int) -> float:
    """Mean number of rounds until random draws have kept every unit of an axis at least once.

    With T the round of full coverage, P(T > t) is the probability that some unit was missed t
    times. By inclusion and exclusion, and summing over t, ``E[T] = sum_i (-1)^(i+1) C(K, i) / (1 -
    C(K-i, n) / C(K, n))``. The terms alternate and are large, so they are added as fractions.

    Args:
        size: units of the axis, K.
        kept: units of a draw, n, in 1..K.

    Returns:
        The mean, in rounds. A window that rolls by 1 needs exactly ``K - n + 1``.

    Raises:
        PlanError: the numbers are out of range.
    """
    _require_kept(size, kept)
    draws = math.comb(size, kept)
    terms = (
        Fraction(
            (-1) ** (missed + 1) * math.comb(size, missed) * draws,
            draws - math.comb(size - missed, kept),
        )
        for missed in range(1, size + 1)
    )
    return float(sum(terms, Fraction(0)))


def probability_untouched(size: int, kept: int, rounds: int) -> float:
    """Probability that random draws have not kept a given unit in so many rounds.

    Args:
        size: units of the axis, K.
        kept: units of a draw, n, in 1..K.
        rounds: R.

    Returns:
        ``(1 - n / K) ** R``.

    Raises:
        PlanError: the numbers are out of range.
    """
    _require_kept(size, kept)
    return (1 - kept / size) ** rounds


def _require_kept(size: int, kept: int) -> None:
    if not 1 <= kept <= size:
        raise PlanError(f"{kept} of {size} units cannot be drawn")


def mean_over_shares(
    shares: Mapping[float, float], values: Mapping[float, float] | None = None
) -> float:
    """The mean of something over a distribution of rates, such as the parameters of a fleet's
    average device.

    Args:
        shares: share of the devices at each rate; they add up to 1.
        values: the value at each rate; the rates themselves if omitted.

    Returns:
        The mean.

    Raises:
        ConfigError: the shares do not add up to 1, or a value is missing.
    """
    if not math.isclose(sum(shares.values()), 1.0, abs_tol=1e-6):
        raise ConfigError(f"the shares of the levels add up to {sum(shares.values())}, not 1")
    given = values if values is not None else {rate: rate for rate in shares}
    missing = shares.keys() - given.keys()
    if missing:
        raise ConfigError(f"no value is given for the rate {min(missing)}")
    return math.fsum(share * given[rate] for rate, share in shares.items())


def single_label_probability(counts: Sequence[int], per_device: int) -> float:
    """Probability that all shards dealt to a device carry the same label.

    Args:
        counts: shards of each class, all of which are shuffled and dealt.
        per_device: shards dealt to a device, at least 1.

    Returns:
        The probability: 19/199 for 10 classes of 20 shards and 2 shards per device.

    Raises:
        ConfigError: a device cannot be dealt so many shards.
    """
    total = sum(counts)
    if not 1 <= per_device <= total:
        raise ConfigError(f"{per_device} of {total} shards cannot be dealt to a device")
    ways = sum(_ordered(count, per_device) for count in counts)
    return float(Fraction(ways, _ordered(total, per_device)))


def _ordered(shards: int, drawn: int) -> int:
    """Number of ways to draw so many shards one after another."""
    return math.prod(shards - taken for taken in range(drawn))
