"""A claim with the results of the runs for it, and its verdict."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from scipy import stats

from reproduction.by_seed import present
from reproduction.experiment import Claim
from reproduction.power import (
    UPPER_TAIL,
    RequiredSeeds,
    deviation,
    least_seeds,
    required_seeds,
    seeds_at_measured_size,
)

OUT_OF_REACH = "out of reach here"
"""The verdict on a claim whose runs would take too long (`reproduction.power`)."""
REPEATED = "repeated"
"""The verdict on an undecided claim that another table states with other or further seeds."""
VERDICTS = ("holds", "does not hold", "undecided", OUT_OF_REACH, REPEATED, "not run")

BySeed = Mapping[int, float | None]
"""A figure or a comparison for each seed; None if a target was never reached."""


@dataclass(frozen=True)
class ClaimResult:
    """A claim, and the results of the runs for it.

    Attributes:
        claim: the claim.
        by_seed: deciding differences, ratios or figures; None if one of the arms never reached its
            target.
        best: the same of the best round, which the papers print.
        published: the same of the published figures, if there are any.
        same_data: whether the runs are of the data set that the claim is about.
        bounds: bound of the ratio of times for seeds whose arm never reached its target, such as
            ``> 2.65``.
        lacking: stated seeds that were not run of all arms of the claim.
        censored: seeds for which an arm's best round is its last, so that its number is not
            conclusive.
        seconds: real time of one seed of all arms of the claim on two cores; None if unknown.
        comparable: deviations of the table's other claims of the same kind, of the same arms if
            there are any.
        repeated_in: the table that states the claim with other or further seeds; empty for none.
    """

    claim: Claim
    by_seed: BySeed
    best: BySeed
    published: float | None
    same_data: bool
    bounds: Mapping[int, str] = field(default_factory=dict)
    lacking: tuple[int, ...] = ()
    censored: tuple[int, ...] = ()
    seconds: float | None = None
    comparable: tuple[float, ...] = ()
    repeated_in: str = ""

    @property
    def need(self) -> RequiredSeeds | None:
        """The cost of deciding the claim at its published size; None if that is unknown.

        The measured size counts for an open claim without a published size. The cost of a claim
        that was not run is that of the stated seeds.
        """
        if self.seconds is None or not self.same_data:
            return None
        if not self.by_seed:
            seeds = len(self.lacking)
            return RequiredSeeds(seeds, seeds * self.seconds) if seeds else None
        own = self.deviation
        if own is None:
            return least_seeds(self.claim, self.comparable, self.published, self.seconds)
        values = present(self.by_seed.values())
        if self.published is None:
            # A decided claim needs no further seeds.
            if self._decision:
                return None
            return seeds_at_measured_size(self.claim, values, self.seconds)
        return required_seeds(self.claim, values, self.published, self.seconds)

    @property
    def deviation(self) -> float | None:
        """The deviation over the seeds; None where they do not show it."""
        values = present(self.by_seed.values())
        # Without the missing values the deviation would look smaller than it is.
        if self.is_too_short or len(values) < len(self.by_seed):
            return None
        return deviation(self.claim, values)

    @property
    def is_too_short(self) -> bool:
        """Whether runs ended too early, so that no number of seeds decides the claim."""
        return bool(self.censored) or None in self.by_seed.values()

    @property
    def interval(self) -> tuple[float, float, float] | None:
        """Return the mean over the seeds (geometric for ratios) and the ends of its interval.

        None for fewer than two seeds.
        """
        values = present(self.by_seed.values())
        is_complete = len(values) == len(self.by_seed)
        if not is_complete or len(values) < 2:
            return None
        is_ratio = self.claim.how == "over"
        if is_ratio:
            # Ratios are normally distributed on a logarithmic scale, if at all.
            values = list(map(math.log, values))
        count = len(values)
        mean = statistics.fmean(values)
        spread = statistics.stdev(values)
        quantile = float(stats.t.ppf(UPPER_TAIL, count - 1))
        half = quantile * spread / math.sqrt(count)
        low = mean - half
        high = mean + half
        if not is_ratio:
            return mean, low, high
        return math.exp(mean), math.exp(low), math.exp(high)

    @property
    def verdict(self) -> str:
        """Return one of `VERDICTS`; empty without a claim."""
        if not self.claim.says:
            return ""
        if self._decision:
            return self._decision
        # More seeds in this table would let the first ones decide when to stop.
        if self.repeated_in and self.by_seed and self.same_data:
            return REPEATED
        need = self.need
        if need is not None and need.out_of_reach:
            return OUT_OF_REACH
        return "undecided" if self.by_seed else "not run"

    @property
    def _decision(self) -> str:
        """The verdict that the runs give by themselves; empty if they do not decide the claim."""
        if self.interval is None or not self._is_complete:
            return ""
        _, low, high = self.interval
        # Every figure meets a bound that is not set.
        least = -math.inf if self.claim.at_least is None else self.claim.at_least
        most = math.inf if self.claim.at_most is None else self.claim.at_most
        if low > least and high < most:
            return "holds"
        if high < least or low > most:
            return "does not hold"
        return ""

    @property
    def _is_complete(self) -> bool:
        """Whether the runs may decide the claim.

        All stated seeds are needed: stopping at a convenient one would decide nothing.
        """
        return bool(self.by_seed) and self.same_data and not (self.lacking or self.censored)
