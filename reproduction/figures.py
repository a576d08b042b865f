"""From stored figures to those of a table: every seed, mean and spread, and a verdict for each claim.

A claim is tested as its table states: the mean of the last evaluations, or the time or round that belongs to no single
one; the difference to the other arm with the same seed, or the logarithm of the ratio; and Student's interval of 95 %
over the seeds. The claim holds where all of the interval is beyond its bound, and does not where all of it is on the
other side.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from reproduction.experiment import Arm, Claim, Experiment
from reproduction.measures import Measure, Reading
from reproduction.published import Published
from reproduction.stored import Row

VERDICTS = ("holds", "does not hold", "undecided", "not run")

# Quantiles of Student's distribution for 0.975, by degrees of freedom from 1; beyond them that of the last is too wide.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True)
class Figure:
    """One figure of one arm, by seed."""

    arm: Arm
    measure: Measure
    readings: Mapping[int, Reading]

    @property
    def published(self) -> Published | None:
        """As printed in the paper, if it is."""
        return self.arm.published.get(self.measure.name)

    def by_seed(self, name: Literal["best", "last", "deciding"]) -> dict[int, float | None]:
        """An attribute of the readings."""
        return {seed: getattr(reading, name) for seed, reading in self.readings.items()}


@dataclass(frozen=True)
class Judged:
    """A claim, and what was found.

    Attributes:
        claim: what is claimed.
        by_seed: differences, ratios or figures that decide; None where one of the two never reached its target.
        best: the same of the best round, as the papers have it.
        published: the same of the published figures, if there are.
        same_data: whether it is of the data set that the claim is about.
    """

    claim: Claim
    by_seed: Mapping[int, float | None]
    best: Mapping[int, float | None]
    published: float | None
    same_data: bool

    @property
    def interval(self) -> tuple[float, float, float] | None:
        """Mean over the seeds, geometric of ratios, and the ends of its interval; None for fewer than two seeds."""
        values = [value for value in self.by_seed.values() if value is not None]
        if len(values) < max(2, len(self.by_seed)):
            return None
        ratio = self.claim.how == "over"
        scale = [math.log(value) for value in values] if ratio else values
        mean = statistics.fmean(scale)
        half = _STUDENT[min(len(scale) - 1, len(_STUDENT)) - 1] * statistics.stdev(scale) / math.sqrt(len(scale))
        low, middle, high = (math.exp(v) if ratio else v for v in (mean - half, mean, mean + half))
        return middle, low, high

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`; empty where nothing is claimed."""
        least, most = self.claim.at_least, self.claim.at_most
        if not self.claim.says:
            return ""
        if not self.by_seed:
            return "not run"
        if self.interval is None or not self.same_data:
            return "undecided"
        _, low, high = self.interval
        if (least is None or low > least) and (most is None or high < most):
            return "holds"
        below, above = least is not None and high < least, most is not None and low > most
        return "does not hold" if below or above else "undecided"


def figures(experiment: Experiment, rows: Sequence[Row]) -> tuple[Figure, ...]:
    """The figures of a table's stored rows, in the order of its arms; those of arms it has no more are left out."""
    found = []
    for arm in experiment.arms:
        for measure in arm.measures:
            readings = {row.seed: row.reading for row in rows if (row.arm, row.figure) == (arm.name, measure.name)}
            if readings:
                found.append(Figure(arm, measure, dict(sorted(readings.items()))))
    return tuple(found)


def judged(experiment: Experiment, rows: Sequence[Row]) -> tuple[Judged, ...]:
    """Every claim and comparison of a table, whether or not it was run, on the stated seeds that its arms share."""
    rows = [row for row in rows if row.seed in experiment.seeds[row.scale]]
    known = {(figure.arm.name, figure.measure.name): figure for figure in figures(experiment, rows)}
    same_data = not stand_ins(experiment, rows)
    return tuple(_judged(experiment, claim, known, same_data=same_data) for claim in experiment.claims)


def stand_ins(experiment: Experiment, rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Data sets of the paper, and those that rows are of instead; no published figure and no claim is about these."""
    pairs = {(row.arm, row.scale) for row in rows}
    names = {tuple(experiment.arm(arm).settings(at)["data"]["name"] for at in ("paper", scale)) for arm, scale in pairs}
    return sorted((published, here) for published, here in names if published != here)


def _judged(
    experiment: Experiment, claim: Claim, known: Mapping[tuple[str, str], Figure], *, same_data: bool
) -> Judged:
    names = [name for name in (claim.left, claim.right) if name]
    published = _compared(
        claim, [p.value if (p := experiment.arm(name).published.get(claim.measure)) else None for name in names]
    )
    sides = [known.get((name, claim.measure)) for name in names]
    there = [side for side in sides if side is not None]
    if len(there) < len(names):
        return Judged(claim, {}, {}, published, same_data)
    seeds = [seed for seed in there[0].readings if all(seed in side.readings for side in there)]
    decided, best = (
        {seed: _compared(claim, [side.by_seed(name)[seed] for side in there]) for seed in seeds}
        for name in ("deciding", "best")
    )
    return Judged(claim, decided, best, published, same_data)


def _compared(claim: Claim, values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    if len(there) < len(values):
        return None
    return claim.value(there[0], there[1]) if len(there) > 1 else there[0]


def mean_and_spread(values: Sequence[float | None], how: str = "minus") -> tuple[float | None, float | None]:
    """Mean of the seeds, geometric of ratios, None if one or all are missing; deviation, None for fewer than two."""
    there = [value for value in values if value is not None]
    if not there or len(there) != len(values):
        return None, None
    mean = statistics.geometric_mean if how == "over" else statistics.fmean
    return mean(there), statistics.stdev(there) if len(there) > 1 else None


def plain(experiment: Experiment, rows: Sequence[Row]) -> dict[str, Any]:
    """The table of some stored rows as values for JSON."""
    found = figures(experiment, rows)
    return {
        "figures": [
            {
                "arm": figure.arm.name,
                "figure": figure.measure.name,
                "unit": figure.measure.unit,
                "published": figure.published and figure.published.value,
                "mean": mean_and_spread([*figure.by_seed("deciding").values()])[0],
                **{name: figure.by_seed(name) for name in ("deciding", "best", "last")},
            }
            for figure in found
        ],
        "claims": [
            {
                "claim": item.claim.says,
                "left": item.claim.left,
                "right": item.claim.right,
                "figure": item.claim.measure,
                "how": item.claim.how,
                "published": item.published,
                "interval": item.interval,
                "by_seed": item.by_seed,
                "best": item.best,
                "verdict": item.verdict,
            }
            for item in judged(experiment, rows)
            if item.claim.says or item.by_seed
        ],
    }
