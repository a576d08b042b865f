"""Judges the claims of a table by its stored figures, over all seeds.

A claim is tested as its table states. The figure is the mean of the last evaluations, or a time or
round that does not belong to a single evaluation. It is compared with the other arm of the same
seed, by the difference or the logarithm of the ratio, with Student's interval of 95 % over the
seeds. The claim holds if the whole interval is beyond its bound, and does not hold if the whole
interval is on the other side.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from reproduction.by_seed import present
from reproduction.claim_result import BySeed, ClaimResult
from reproduction.experiment import Arm, Claim, Experiment, Scale
from reproduction.measures import measure_named
from reproduction.plain_measures import ROUNDS_TO_BEST
from reproduction.published import Published
from reproduction.readings import Measure, Reading
from reproduction.run_costs import Seconds, seconds_on_two_cores
from reproduction.stored import Row

_HOUR = 3600.0

ValuesBySeed = dict[int, float | None]
"""A figure or a comparison for each seed; None if a target was never reached."""
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
    # A table without runs is planned at the scale whose costs are known.
    scale: Scale = rows[0].scale if rows else "small"
    stated = experiment.seeds[scale]
    counted = []
    for row in rows:
        # Further seeds do not count: otherwise one could add seeds until a claim holds.
        if row.seed in stated:
            counted.append(row)
    same_data = not stand_ins(experiment, arms_of(counted))
    seconds = seconds_on_two_cores(experiment, scale)
    judge = _Judge(experiment, figures(experiment, counted), stated, seconds, same_data=same_data)
    results = tuple(map(judge.result, experiment.claims))
    return tuple(_with_comparable(result, results) for result in results)


def _with_comparable(result: ClaimResult, results: Sequence[ClaimResult]) -> ClaimResult:
    """Return a result with the deviations of the other claims that compare the same kind.

    If there are some of the same arms, such as for another target, only these count.
    """
    of_kind: list[float] = []
    of_arms: list[float] = []
    for other in results:
        if other is result or _kind(other.claim) != _kind(result.claim):
            continue
        own = other.deviation
        # Seeds that agree in all digits, such as rounds, show no deviation to plan with.
        if own:
            of_kind.append(own)
            if _arms(other.claim) == _arms(result.claim):
                of_arms.append(own)
    return replace(result, comparable=tuple(of_arms or of_kind))


def _arms(claim: Claim) -> tuple[str, str]:
    return claim.left, claim.right


def _kind(claim: Claim) -> tuple[str, str]:
    """Return how a claim compares, and the unit of what it compares."""
    return claim.how, measure_named(claim.measure).unit


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
    costs: Seconds  # of a run of an arm, as far as they were not run
    same_data: bool

    def result(self, claim: Claim) -> ClaimResult:
        """Compare the arms of a claim, seed by seed."""
        names = [claim.left]
        if claim.right:
            names.append(claim.right)
        published = self._published(claim, names)
        figures_of_arms = [self._figure_of(name, claim.measure) for name in names]
        sides = [figure for figure in figures_of_arms if figure is not None]
        if len(sides) < len(names):
            return ClaimResult(
                claim,
                {},
                {},
                published,
                self.same_data,
                lacking=tuple(self.stated),
                seconds=self._cost(names),
                repeated_in=self.experiment.repeated.get(claim.says, ""),
            )
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
            published=published,
            same_data=self.same_data,
            bounds=_bounds(claim, sides, decided),
            lacking=tuple(lacking),
            censored=tuple(censored),
            seconds=sum(map(_quickest, sides)),
            repeated_in=self.experiment.repeated.get(claim.says, ""),
        )

    def _cost(self, names: Sequence[str]) -> float | None:
        """Return the time of one seed of all arms of a claim; None if one is unknown."""
        total = 0.0
        for name in names:
            figures_of_arm = [figure for figure in self.figures if figure.arm.name == name]
            if figures_of_arm:
                total += _quickest(figures_of_arm[0])
            elif name in self.costs:
                total += self.costs[name]
            else:
                return None
        return total

    def _published(self, claim: Claim, names: Sequence[str]) -> float | None:
        """Compare the published figures of the arms of a claim; None where one is missing."""
        cells = [self.experiment.arm(name).published.get(claim.measure) for name in names]
        # Where the paper states one number for both arms, it states no difference. Two cells with
        # equal values are two objects, so they are compared.
        if len(cells) > 1 and cells[0] is cells[1]:
            return None
        return _compare(claim, [None if cell is None else cell.value for cell in cells])

    def _figure_of(self, arm: str, measure: str) -> Figure | None:
        """Return the figure of an arm, if it was run."""
        for figure in self.figures:
            if figure.arm.name == arm and figure.measure.name == measure:
                return figure
        return None


def _quickest(figure: Figure) -> float:
    """Return the real time of the quickest run of an arm.

    Other work on the machine can only make a run slower, in one case sixteen times.
    """
    return min(figure.seconds.values())


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
