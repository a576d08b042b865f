"""Judge the claims of a table by its stored figures, over all seeds.

A claim is tested as its table states: the mean of the last evaluations, or the time or round that
belongs to no single one; the difference to the other arm with the same seed, or the logarithm of
the ratio; and Student's interval of 95 % over the seeds. The claim holds where all of the interval
is beyond its bound, and does not where all of it is on the other side.
"""

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
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
        """The figure that the paper prints, if it does."""
        return self.arm.published.get(self.measure.name)

    @property
    def last_alone(self) -> bool:
        """Whether the last evaluation decides, as some run has no mean of the last ones."""
        readings = self.readings.values()
        return any(reading.decides is None and reading.last is not None for reading in readings)

    def by_seed(self, name: Literal["best", "last", "deciding"]) -> dict[int, float | None]:
        """Return an attribute of the readings, by seed."""
        if name == "deciding" and self.last_alone:
            name = "last"
        return {seed: getattr(reading, name) for seed, reading in self.readings.items()}


@dataclass(frozen=True)
class ClaimResult:
    """A claim, and what the runs say of it.

    Attributes:
        claim: what is claimed.
        by_seed: differences, ratios or figures that decide; None where one of the arms never
            reached its target.
        best: the same of the best round, which the papers print.
        published: the same of the published figures, if there are any.
        same_data: whether the runs are of the data set that the claim is about.
        bounds: where one of the arms never reached its target, the bound of the ratio of times,
            such as ``> 2.65``.
        lacking: stated seeds that were not run of all arms of the claim.
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
        values = _present(self.by_seed.values())
        if len(values) < max(2, len(self.by_seed)):
            return None
        is_ratio = self.claim.how == "over"
        if is_ratio:
            values = [math.log(value) for value in values]
        mean = statistics.fmean(values)
        quantile = float(stats.t.ppf(UPPER_TAIL, len(values) - 1))
        half = quantile * statistics.stdev(values) / math.sqrt(len(values))
        low = mean - half
        high = mean + half
        if is_ratio:
            return math.exp(mean), math.exp(low), math.exp(high)
        return mean, low, high

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
            # All stated seeds are needed: stopping at a convenient one would decide nothing.
            return "undecided"
        _, low, high = self.interval
        if (least is None or low > least) and (most is None or high < most):
            return "holds"
        below = least is not None and high < least
        above = most is not None and low > most
        return "does not hold" if below or above else "undecided"


def figures(experiment: Experiment, rows: Sequence[Row]) -> tuple[Figure, ...]:
    """Return the figures of a table's stored rows, in the order of its arms.

    Rows of arms that the table does not have any more are left out.
    """
    rows_by_figure: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.seed):
        rows_by_figure.setdefault((row.arm, row.figure), []).append(row)
    ordered: list[Figure] = []
    for arm in experiment.arms:
        for measure in arm.measures:
            runs = rows_by_figure.get((arm.name, measure.name))
            if runs:
                ordered.append(_figure(arm, measure, runs))
    return tuple(ordered)


def _figure(arm: Arm, measure: Measure, runs: Sequence[Row]) -> Figure:
    """Return the figure of an arm from its rows, one for each seed."""
    readings: dict[int, Reading] = {}
    hours: dict[int, float] = {}
    for row in runs:
        readings[row.seed] = row.reading
        hours[row.seed] = row.simulated_seconds / _HOUR
    return Figure(arm, measure, readings, hours)


def judge(experiment: Experiment, rows: Sequence[Row]) -> tuple[ClaimResult, ...]:
    """Judge every claim and comparison of a table, whether or not it was run.

    Only the stated seeds that all arms of a claim have count.
    """
    stated = experiment.seeds[rows[0].scale] if rows else ()
    counted = [row for row in rows if row.seed in stated]
    same_data = not stand_ins(experiment, arms_of(counted))
    judge = _Judge(experiment, figures(experiment, counted), stated, same_data=same_data)
    return tuple(judge.result(claim) for claim in experiment.claims)


def stand_ins(experiment: Experiment, runs: Collection[tuple[str, Scale]]) -> list[tuple[str, str]]:
    """Return data sets of the paper, each with the one that runs use instead.

    Published figures and claims are not about these.
    """
    names: set[tuple[str, str]] = set()
    for name, scale in runs:
        arm = experiment.arm(name)
        published = arm.settings("paper")["data"]["name"]
        here = arm.settings(scale)["data"]["name"]
        if published != here:
            names.add((published, here))
    return sorted(names)


def arms_of(rows: Sequence[Row]) -> set[tuple[str, Scale]]:
    """Return the arms of stored figures, each with its scale."""
    return {(row.arm, row.scale) for row in rows}


@dataclass(frozen=True)
class _Judge:
    """Judges claims by the figures of a table."""

    experiment: Experiment
    figures: Sequence[Figure]
    stated: Sequence[int]  # seeds
    same_data: bool

    def result(self, claim: Claim) -> ClaimResult:
        """Compare the arms of a claim, seed by seed."""
        names = [claim.left, claim.right] if claim.right else [claim.left]
        published: list[float | None] = []
        sides: list[Figure] = []
        for name in names:
            published.append(self._published(name, claim.measure))
            figure = self._figure_of(name, claim.measure)
            if figure is not None:
                sides.append(figure)
        published_value = _compare(claim, published)
        if len(sides) < len(names):
            return ClaimResult(claim, {}, {}, published_value, self.same_data)
        seeds = _shared_seeds(sides)
        last_alone = any(side.last_alone for side in sides)
        decided = _compare_by_seed(claim, sides, seeds, "last" if last_alone else "deciding")
        lacking: list[int] = []
        for seed in self.stated:
            if seed not in seeds:
                lacking.append(seed)
        return ClaimResult(
            claim=claim,
            by_seed=decided,
            best=_compare_by_seed(claim, sides, seeds, "best"),
            published=published_value,
            same_data=self.same_data,
            bounds=_bounds(claim, sides, decided),
            lacking=tuple(lacking),
        )

    def _published(self, arm: str, measure: str) -> float | None:
        published = self.experiment.arm(arm).published.get(measure)
        return None if published is None else published.value

    def _figure_of(self, arm: str, measure: str) -> Figure | None:
        """Return the figure of an arm, if it was run."""
        for figure in self.figures:
            if figure.arm.name == arm and figure.measure.name == measure:
                return figure
        return None


def _shared_seeds(sides: Sequence[Figure]) -> list[int]:
    """Return the seeds that all arms of a claim have, in the order of the first arm."""
    first, *further = sides
    seeds: list[int] = []
    for seed in first.readings:
        if all(seed in side.readings for side in further):
            seeds.append(seed)
    return seeds


def _compare_by_seed(
    claim: Claim,
    sides: Sequence[Figure],
    seeds: Sequence[int],
    name: Literal["best", "last", "deciding"],
) -> dict[int, float | None]:
    """Compare an attribute of the readings of the arms of a claim."""
    values = [side.by_seed(name) for side in sides]
    compared: dict[int, float | None] = {}
    for seed in seeds:
        compared[seed] = _compare(claim, [by_seed[seed] for by_seed in values])
    return compared


def _bounds(
    claim: Claim, sides: Sequence[Figure], decided: Mapping[int, float | None]
) -> dict[int, str]:
    """Bound the ratio of times for seeds whose run ended before a time was reached."""
    is_ratio_of_times = claim.how == "over" and all(side.measure.unit == "h" for side in sides)
    if not is_ratio_of_times or len(sides) < 2:
        return {}
    bounds: dict[int, str] = {}
    for seed, ratio in decided.items():
        if ratio is None:
            bounds[seed] = _bound(sides, seed)
    return bounds


def _bound(sides: Sequence[Figure], seed: int) -> str:
    """Bound the ratio of two arms for a seed by the time that the other arm ran."""
    first, second = sides
    left = first.by_seed("deciding")[seed]
    right = second.by_seed("deciding")[seed]
    if right:
        return f"> {first.hours[seed] / right:.2f}"
    if left:
        return f"< {left / second.hours[seed]:.2f}"
    return "neither reached"


def _compare(claim: Claim, values: Sequence[float | None]) -> float | None:
    """Compare figures; None where one is missing, or where there is no ratio because one is 0."""
    present = _present(values)
    if len(present) < len(values):
        return None
    if claim.how == "over" and min(present) <= 0:
        return None
    if len(present) == 1:
        return present[0]
    return claim.value(present[0], present[1])


def _present(values: Iterable[float | None]) -> list[float]:
    """Return the values that are not missing."""
    return [value for value in values if value is not None]


def mean_and_spread(
    values: Sequence[float | None], how: str = "minus"
) -> tuple[float | None, float | None]:
    """Return mean and standard deviation over the seeds.

    Args:
        values: figures by seed.
        how: as of `Claim`; the mean of ratios is geometric.

    Returns:
        Both are None if one value or all are missing, the deviation also for fewer than two.
    """
    present = _present(values)
    if not present or len(present) != len(values):
        return None, None
    mean = statistics.geometric_mean if how == "over" else statistics.fmean
    spread = statistics.stdev(present) if len(present) > 1 else None
    return mean(present), spread


def to_json(experiment: Experiment, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the table of some stored rows as values for JSON."""
    other_data: list[dict[str, str]] = []
    for published, here in stand_ins(experiment, arms_of(rows)):
        other_data.append({"published": published, "here": here})
    claims: list[dict[str, Any]] = []
    for result in judge(experiment, rows):
        if result.claim.says or result.by_seed:
            claims.append(_result_to_json(result))
    return {
        "other_data": other_data,
        "figures": [_figure_to_json(figure) for figure in figures(experiment, rows)],
        "claims": claims,
    }


def _figure_to_json(figure: Figure) -> dict[str, Any]:
    deciding = figure.by_seed("deciding")
    return {
        "arm": figure.arm.name,
        "figure": figure.measure.name,
        "unit": figure.measure.unit,
        "published": figure.published and figure.published.value,
        "mean": mean_and_spread(list(deciding.values()))[0],
        "deciding": deciding,
        "best": figure.by_seed("best"),
        "last": figure.by_seed("last"),
    }


def _result_to_json(result: ClaimResult) -> dict[str, Any]:
    claim = result.claim
    return {
        "claim": claim.says,
        "left": claim.left,
        "right": claim.right,
        "figure": claim.measure,
        "how": claim.how,
        "published": result.published,
        "interval": result.interval,
        "by_seed": result.by_seed,
        "bounds": result.bounds,
        "seeds_not_run": result.lacking,
        "best": result.best,
        "verdict": result.verdict,
    }
