"""Judges the claims of a table by its stored figures, over all seeds.

A claim is tested as its table states. The figure is the mean of the last evaluations, or a time or
round that does not belong to a single evaluation. It is compared with the other arm of the same
seed, by the difference or the logarithm of the ratio, with Student's interval of 95 % over the
seeds. The claim holds if the whole interval is beyond its bound, and does not hold if the whole
interval is on the other side.
"""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from scipy import stats

from reproduction.by_seed import present
from reproduction.experiment import Arm, Claim, Experiment, Scale
from reproduction.plain_measures import ROUNDS_TO_BEST
from reproduction.power import UPPER_TAIL, RequiredSeeds, required_seeds
from reproduction.published import Published
from reproduction.readings import Measure, Reading
from reproduction.stored import Row

OUT_OF_REACH = "out of reach here"
"""The verdict on a claim whose runs would take too long (`reproduction.power`)."""
VERDICTS = ("holds", "does not hold", "undecided", OUT_OF_REACH, "not run")

_HOUR = 3600.0

ValuesBySeed = dict[int, float | None]
"""A figure or a comparison for each seed; None if a target was never reached."""
BySeed = Mapping[int, float | None]
"""The same, read-only."""
_FigureKey = tuple[str, str]
"""Names of an arm and of a measure."""
_Which = Literal["best", "last", "deciding"]
"""One of the values of a reading."""


@dataclass(frozen=True)
class Figure:
    """One figure of one arm, by seed.

    Attributes:
        hours: simulated time of all rounds.
        seconds: real time of all rounds.
        rounds: how many there are.
    """

    arm: Arm
    measure: Measure
    readings: Mapping[int, Reading]
    hours: Mapping[int, float]
    seconds: Mapping[int, float]
    rounds: Mapping[int, int]

    def is_censored(self, seed: int) -> bool:
        """Return whether the run of a seed ended at its best round, so that a later may be best."""
        reading = self.readings[seed]
        return self.measure is ROUNDS_TO_BEST and reading.best_round == self.rounds[seed]

    @property
    def published(self) -> Published | None:
        """The figure in the paper, if any."""
        return self.arm.published.get(self.measure.name)

    @property
    def last_alone(self) -> bool:
        """Return whether the last evaluation decides, because a run lacks the mean of several."""
        for reading in self.readings.values():
            if reading.decides is None and reading.last is not None:
                return True
        return False

    def by_seed(self, name: _Which) -> ValuesBySeed:
        """Return an attribute of the readings, by seed."""
        # All seeds then use the last evaluation: a mean over seeds must not mix two kinds of
        # figures.
        if name == "deciding" and self.last_alone:
            name = "last"
        values: ValuesBySeed = {}
        for seed, reading in self.readings.items():
            values[seed] = getattr(reading, name)
        return values


Figures = Sequence[Figure]
Rows = Sequence[Row]
ArmAtScale = tuple[str, Scale]
StandIn = tuple[str, str]
"""A data set of a paper, and the one that runs use instead."""


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
        seconds: real time of one seed of all arms of the claim.
    """

    claim: Claim
    by_seed: BySeed
    best: BySeed
    published: float | None
    same_data: bool
    bounds: Mapping[int, str] = field(default_factory=dict)
    lacking: tuple[int, ...] = ()
    censored: tuple[int, ...] = ()
    seconds: float = 0.0

    @property
    def need(self) -> RequiredSeeds | None:
        """The cost of deciding the claim at its published size; None if that is unknown."""
        values = present(self.by_seed.values())
        # Without these values the spread would look smaller than it is.
        if len(values) < len(self.by_seed) or self.censored or not self.same_data:
            return None
        return required_seeds(self.claim, values, self.published, self.seconds)

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
        deviation = statistics.stdev(values)
        quantile = float(stats.t.ppf(UPPER_TAIL, count - 1))
        half = quantile * deviation / math.sqrt(count)
        low = mean - half
        high = mean + half
        if not is_ratio:
            return mean, low, high
        return math.exp(mean), math.exp(low), math.exp(high)

    @property
    def verdict(self) -> str:
        """Return one of `VERDICTS`; empty without a claim."""
        least = self.claim.at_least
        most = self.claim.at_most
        if not self.claim.says:
            return ""
        if not self.by_seed:
            return "not run"
        need = self.need
        open_verdict = OUT_OF_REACH if need is not None and need.out_of_reach else "undecided"
        if self.interval is None or self.lacking or self.censored or not self.same_data:
            # All stated seeds are needed: stopping at a convenient one would decide nothing.
            return open_verdict
        _, low, high = self.interval
        # Every figure meets a bound that is not set.
        least = -math.inf if least is None else least
        most = math.inf if most is None else most
        if low > least and high < most:
            return "holds"
        if high < least or low > most:
            return "does not hold"
        return open_verdict


def figures(experiment: Experiment, rows: Rows) -> tuple[Figure, ...]:
    """Return the figures of a table's stored rows, in the order of its arms.

    Rows of arms that the table no longer has are dropped.
    """
    by_seed = sorted(rows, key=lambda row: row.seed)
    rows_by_figure: dict[_FigureKey, list[Row]] = {}
    for row in by_seed:
        key = (row.arm, row.figure)
        rows_by_figure.setdefault(key, []).append(row)
    ordered: list[Figure] = []
    for arm in experiment.arms:
        for measure in arm.measures:
            key = (arm.name, measure.name)
            if key in rows_by_figure:
                ordered.append(_figure(arm, measure, rows_by_figure[key]))
    return tuple(ordered)


def _figure(
    arm: Arm,
    measure: Measure,
    runs: Rows,
) -> Figure:
    """Return the figure of an arm from its rows, one for each seed."""
    readings: dict[int, Reading] = {}
    hours: dict[int, float] = {}
    seconds: dict[int, float] = {}
    rounds: dict[int, int] = {}
    for row in runs:
        readings[row.seed] = row.reading
        hours[row.seed] = row.simulated_seconds / _HOUR
        seconds[row.seed] = row.seconds
        rounds[row.seed] = row.rounds
    return Figure(arm, measure, readings, hours, seconds, rounds)


def judge(experiment: Experiment, rows: Rows) -> tuple[ClaimResult, ...]:
    """Judge every claim and comparison of a table, whether or not it was run.

    Only stated seeds that all arms of a claim have are used.
    """
    stated = experiment.seeds[rows[0].scale] if rows else ()
    counted = []
    for row in rows:
        # Further seeds do not count: otherwise one could add seeds until a claim holds.
        if row.seed in stated:
            counted.append(row)
    same_data = not stand_ins(experiment, arms_of(counted))
    judge = _Judge(experiment, figures(experiment, counted), stated, same_data=same_data)
    return tuple(map(judge.result, experiment.claims))


def stand_ins(experiment: Experiment, runs: Collection[ArmAtScale]) -> list[StandIn]:
    """Return data sets of the paper, each with the one that runs use instead.

    Published figures and claims do not apply to these.
    """
    names: set[StandIn] = set()
    for name, scale in runs:
        arm = experiment.arm(name)
        # The paper's data set may be unavailable, or too large for this scale.
        published = arm.settings("paper")["data"]
        here = arm.settings(scale)["data"]
        if published["name"] != here["name"]:
            names.add((published["name"], here["name"]))
    return sorted(names)


def arms_of(rows: Rows) -> set[ArmAtScale]:
    """Return the arms of stored figures, each with its scale."""
    return {(row.arm, row.scale) for row in rows}


@dataclass(frozen=True)
class _Judge:
    """Judges claims by the figures of a table."""

    experiment: Experiment
    figures: Figures
    stated: Sequence[int]  # seeds
    same_data: bool

    def result(self, claim: Claim) -> ClaimResult:
        """Compare the arms of a claim, seed by seed."""
        names = [claim.left]
        if claim.right:
            names.append(claim.right)
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
        # Both arms must use the same deciding figure.
        deciding: _Which = "deciding"
        if any(side.last_alone for side in sides):
            deciding = "last"
        decided = _compare_by_seed(claim, sides, seeds, deciding)
        lacking: list[int] = []
        for seed in self.stated:
            if seed not in seeds:
                lacking.append(seed)
        censored: list[int] = []
        for seed in seeds:
            if any(side.is_censored(seed) for side in sides):
                censored.append(seed)
        return ClaimResult(
            claim=claim,
            by_seed=decided,
            best=_compare_by_seed(claim, sides, seeds, "best"),
            published=published_value,
            same_data=self.same_data,
            bounds=_bounds(claim, sides, decided),
            lacking=tuple(lacking),
            censored=tuple(censored),
            seconds=sum(statistics.fmean(side.seconds.values()) for side in sides),
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


def _shared_seeds(sides: Figures) -> list[int]:
    """Return the seeds that all arms of a claim have, in the order of the first arm."""
    first, *further = sides
    seeds: list[int] = []
    for seed in first.readings:
        if all(seed in side.readings for side in further):
            seeds.append(seed)
    return seeds


def _compare_by_seed(
    claim: Claim,
    sides: Figures,
    seeds: Sequence[int],
    name: _Which,
) -> ValuesBySeed:
    """Compare an attribute of the readings of the arms of a claim."""
    compared: ValuesBySeed = {}
    for seed in seeds:
        values = [side.by_seed(name)[seed] for side in sides]
        compared[seed] = _compare(claim, values)
    return compared


def _bounds(
    claim: Claim,
    sides: Figures,
    decided: BySeed,
) -> dict[int, str]:
    """Bound the ratio of times for seeds whose run ended before a time was reached."""
    # An unreached time is at least the length of the run; other figures have no such bound.
    units = {side.measure.unit for side in sides}
    is_ratio_of_times = claim.how == "over" and units == {"h"}
    if not is_ratio_of_times or len(sides) < 2:
        return {}
    bounds: dict[int, str] = {}
    for seed, ratio in decided.items():
        if ratio is None:
            bounds[seed] = _bound(sides, seed)
    return bounds


def _bound(sides: Figures, seed: int) -> str:
    """Bound the ratio of two arms for a seed by the time that the other arm ran."""
    first, second = sides
    left = first.by_seed("deciding")[seed]
    right = second.by_seed("deciding")[seed]
    # The arm that did not reach the target would have needed longer than it ran.
    if right:
        least = first.hours[seed] / right
        return f"> {least:.2f}"
    if left:
        most = left / second.hours[seed]
        return f"< {most:.2f}"
    return "neither reached"


def _compare(claim: Claim, values: Sequence[float | None]) -> float | None:
    """Compare figures; None where one is missing, or where there is no ratio because one is 0."""
    there = present(values)
    if len(there) < len(values):
        return None
    # A ratio needs a logarithm later, which 0 does not have.
    if claim.how == "over" and min(there) <= 0:
        return None
    if len(there) == 1:
        return there[0]
    return claim.value(there[0], there[1])
