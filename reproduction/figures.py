"""From stored figures to those of a table: every seed, mean and spread, and a verdict for each
claim.

A claim is tested as its table states: the mean of the last evaluations, or the time or round that
belongs to no single one; the difference to the other arm with the same seed, or the logarithm of
the ratio; and Student's interval of 95 % over the seeds. The claim holds where all of the interval
is beyond its bound, and does not where all of it is on the other side.
"""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from scipy import stats

from reproduction.experiment import Arm, Claim, Experiment, Scale
from reproduction.measures import Measure, Reading
from reproduction.published import Published
from reproduction.stored import Row

VERDICTS = ("holds", "does not hold", "undecided", "not run")

UPPER_TAIL = 0.975
"""Quantile of Student's distribution at the upper end of a two-sided interval of 95 %."""
_HOUR = 3600.0


@dataclass(frozen=True)
class Figure:
    """One figure of one arm, by seed; `hours` is the simulated time of all rounds."""

    arm: Arm
    measure: Measure
    readings: Mapping[int, Reading]
    hours: Mapping[int, float]

    @property
    def published(self) -> Published | None:
        """As printed in the paper, if it is."""
        return self.arm.published.get(self.measure.name)

    @property
    def last_alone(self) -> bool:
        """Whether the last evaluation decides, as some of its runs have no mean of the last ones."""
        return any(
            reading.decides is None and reading.last is not None
            for reading in self.readings.values()
        )

    def by_seed(self, name: Literal["best", "last", "deciding"]) -> dict[int, float | None]:
        """An attribute of the readings."""
        name = "last" if name == "deciding" and self.last_alone else name
        return {seed: getattr(reading, name) for seed, reading in self.readings.items()}


@dataclass(frozen=True)
class Judged:
    """A claim, and what was found.

    Attributes:
        claim: what is claimed.
        by_seed: differences, ratios or figures that decide; None where one of the two never reached
            its target.
        best: the same of the best round, as the papers have it.
        published: the same of the published figures, if there are.
        same_data: whether it is of the data set that the claim is about.
        bounds: where one of the two never reached its target, what is known of the ratio of times,
            such as ``> 2.65``.
        lacking: stated seeds that were not run of both.
    """

    claim: Claim
    by_seed: Mapping[int, float | None]
    best: Mapping[int, float | None]
    published: float | None
    same_data: bool
    bounds: Mapping[int, str] = field(default_factory=dict)
    lacking: tuple[int, ...] = ()

    @property
    def interval(self) -> tuple[float, float, float] | None:
        """Mean over the seeds, geometric of ratios, and the ends of its interval.

        None for fewer than two seeds.
        """
        values = [value for value in self.by_seed.values() if value is not None]
        if len(values) < max(2, len(self.by_seed)):
            return None
        ratio = self.claim.how == "over"
        scale = [math.log(value) for value in values] if ratio else values
        mean = statistics.fmean(scale)
        quantile = float(stats.t.ppf(UPPER_TAIL, len(scale) - 1))
        half = quantile * statistics.stdev(scale) / math.sqrt(len(scale))
        low, middle, high = (math.exp(v) if ratio else v for v in (mean - half, mean, mean + half))
        return middle, low, high

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`; empty where nothing is claimed."""
        least = self.claim.at_least
        most = self.claim.at_most
        if not self.claim.says:
            return ""
        if not self.by_seed:
            return "not run"
        if self.interval is None or self.lacking or not self.same_data:
            return "undecided"  # whoever stops at the seed that suits him decides nothing
        _, low, high = self.interval
        if (least is None or low > least) and (most is None or high < most):
            return "holds"
        below = least is not None and high < least
        above = most is not None and low > most
        return "does not hold" if below or above else "undecided"


def figures(experiment: Experiment, rows: Sequence[Row]) -> tuple[Figure, ...]:
    """The figures of a table's stored rows, in the order of its arms.

    Those of arms it has no more are left out.
    """
    found = []
    for arm in experiment.arms:
        for measure in arm.measures:
            mine = sorted(
                (r for r in rows if (r.arm, r.figure) == (arm.name, measure.name)),
                key=lambda row: row.seed,
            )
            if mine:
                hours = {row.seed: row.simulated_seconds / _HOUR for row in mine}
                found.append(Figure(arm, measure, {row.seed: row.reading for row in mine}, hours))
    return tuple(found)


def judged(experiment: Experiment, rows: Sequence[Row]) -> tuple[Judged, ...]:
    """Every claim and comparison of a table, whether or not it was run, on the stated seeds that
    its arms share.
    """
    stated = experiment.seeds[rows[0].scale] if rows else ()
    rows = [row for row in rows if row.seed in stated]
    known = {(figure.arm.name, figure.measure.name): figure for figure in figures(experiment, rows)}
    same_data = not stand_ins(experiment, arms_of(rows))
    return tuple(
        _judged(experiment, claim, known, stated, same_data=same_data)
        for claim in experiment.claims
    )


def stand_ins(experiment: Experiment, runs: Collection[tuple[str, Scale]]) -> list[tuple[str, str]]:
    """Data sets of the paper, and those of arms at a scale instead.

    No published figure and no claim is about these.
    """
    names = {
        tuple(experiment.arm(arm).settings(at)["data"]["name"] for at in ("paper", scale))
        for arm, scale in runs
    }
    return sorted((published, here) for published, here in names if published != here)


def arms_of(rows: Sequence[Row]) -> set[tuple[str, Scale]]:
    """The arms of stored figures, each with their scale."""
    return {(row.arm, row.scale) for row in rows}


def _judged(
    experiment: Experiment,
    claim: Claim,
    known: Mapping[tuple[str, str], Figure],
    stated: Sequence[int],
    *,
    same_data: bool,
) -> Judged:
    names = [name for name in (claim.left, claim.right) if name]
    published = _compared(
        claim,
        [
            p.value if (p := experiment.arm(name).published.get(claim.measure)) else None
            for name in names
        ],
    )
    sides = [known.get((name, claim.measure)) for name in names]
    there = [side for side in sides if side is not None]
    if len(there) < len(names):
        return Judged(claim, {}, {}, published, same_data)
    seeds = [seed for seed in there[0].readings if all(seed in side.readings for side in there)]
    deciding: Literal["last", "deciding"] = (
        "last" if any(side.last_alone for side in there) else "deciding"
    )
    decided, best = (
        {seed: _compared(claim, [side.by_seed(name)[seed] for side in there]) for seed in seeds}
        for name in (deciding, "best")
    )
    bounds = {
        seed: bound
        for seed in seeds
        if decided[seed] is None and (bound := _bound(claim, there, seed))
    }
    lacking = tuple(seed for seed in stated if seed not in seeds)
    return Judged(claim, decided, best, published, same_data, bounds, lacking)


def _bound(claim: Claim, sides: Sequence[Figure], seed: int) -> str:
    """What is known of a ratio of times of which one was never reached, as its run ended before.

    Empty if nothing.
    """
    times = [side.by_seed("deciding")[seed] for side in sides]
    if claim.how != "over" or any(side.measure.unit != "h" for side in sides) or len(times) < 2:
        return ""
    (left, right), (left_ran, right_ran) = times, (side.hours[seed] for side in sides)
    return (
        f"> {left_ran / right:.2f}"
        if right
        else f"< {left / right_ran:.2f}"
        if left
        else "neither reached"
    )


def _compared(claim: Claim, values: Sequence[float | None]) -> float | None:
    """None where a figure is missing, or where there is no ratio because one is 0."""
    there = [value for value in values if value is not None]
    if len(there) < len(values) or (claim.how == "over" and min(there) <= 0):
        return None
    return claim.value(there[0], there[1]) if len(there) > 1 else there[0]


def mean_and_spread(
    values: Sequence[float | None], how: str = "minus"
) -> tuple[float | None, float | None]:
    """Mean of the seeds, geometric of ratios, None if one or all are missing.

    Deviation, None for fewer than two.
    """
    there = [value for value in values if value is not None]
    if not there or len(there) != len(values):
        return None, None
    mean = statistics.geometric_mean if how == "over" else statistics.fmean
    return mean(there), statistics.stdev(there) if len(there) > 1 else None


def plain(experiment: Experiment, rows: Sequence[Row]) -> dict[str, Any]:
    """The table of some stored rows as values for JSON."""
    found = figures(experiment, rows)
    other = stand_ins(experiment, arms_of(rows))
    return {
        "other_data": [{"published": published, "here": here} for published, here in other],
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
                "bounds": item.bounds,
                "seeds_not_run": item.lacking,
                "best": item.best,
                "verdict": item.verdict,
            }
            for item in judged(experiment, rows)
            if item.claim.says or item.by_seed
        ],
    }
