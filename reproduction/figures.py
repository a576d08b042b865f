"""From complete runs to the figures of a table: every seed, mean and spread, comparisons and milestones."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reproduction.experiment import Arm, Comparison, Experiment, Milestone, Scale
from reproduction.measures import Measure, Reading
from reproduction.running import ArmResult
from reproduction.tables.published import Published

__all__ = ["Compared", "Figure", "Reached", "compared", "figures", "mean_and_spread", "reached", "timed"]


@dataclass(frozen=True)
class Figure:
    """One figure of one arm.

    Attributes:
        arm: the arm.
        measure: which figure.
        published: as printed in the paper, if it is.
        readings: by seed.
    """

    arm: Arm
    measure: Measure
    published: Published | None
    readings: Mapping[int, Reading]

    @property
    def best(self) -> dict[int, float | None]:
        """The best round's figure, by seed."""
        return {seed: reading.best for seed, reading in self.readings.items()}

    @property
    def last(self) -> dict[int, float | None]:
        """The last evaluated round's, by seed."""
        return {seed: reading.last for seed, reading in self.readings.items()}


@dataclass(frozen=True)
class Compared:
    """One arm against another, on the seeds that both have.

    Attributes:
        comparison: what is compared.
        measure: of which figure.
        published: the same of the published figures, if both are.
        by_seed: the differences or ratios; None where one of the two never reached its target.
    """

    comparison: Comparison
    measure: Measure
    published: float | None
    by_seed: Mapping[int, float | None]

    @property
    def mean(self) -> float | None:
        """Over the seeds, None if one is missing."""
        return mean_and_spread(list(self.by_seed.values()))[0]

    @property
    def holds(self) -> bool | None:
        """Whether the mean is within the bounds; None where there are no bounds, or no mean."""
        low, high, mean = self.comparison.at_least, self.comparison.at_most, self.mean
        if mean is None or (low is None and high is None):
            return None
        return (low is None or mean >= low) and (high is None or mean <= high)


@dataclass(frozen=True)
class Reached:
    """A milestone, and what was reached.

    Attributes:
        milestone: arm, round and accuracy.
        by_seed: best global accuracy up to that round, in %; None if no round was evaluated by then.
    """

    milestone: Milestone
    by_seed: Mapping[int, float | None]

    @property
    def holds(self) -> bool:
        """Whether the mean over the seeds reaches it."""
        mean = mean_and_spread(list(self.by_seed.values()))[0]
        return mean is not None and mean >= self.milestone.at_least


def figures(results: Sequence[ArmResult]) -> tuple[Figure, ...]:
    """The figures of some runs.

    Args:
        results: complete runs, those of an arm together.

    Returns:
        One for each arm and measure that was evaluated, in the order of the results.
    """
    found = []
    for arm in dict.fromkeys(result.arm for result in results):
        runs = [result for result in results if result.arm is arm]
        for measure in arm.measures:
            readings = {run.seed: reading for run in runs if (reading := measure.read(run.rows)) is not None}
            if readings:
                found.append(Figure(arm, measure, arm.published.get(measure.name), readings))
    return tuple(found)


def compared(experiment: Experiment, found: Sequence[Figure]) -> tuple[Compared, ...]:
    """The comparisons whose two arms were run on a common seed.

    Args:
        experiment: the table.
        found: its figures.
    """
    known = {(figure.arm.name, figure.measure.name): figure for figure in found}
    result = []
    for item in experiment.comparisons:
        left, right = known.get((item.left, item.measure)), known.get((item.right, item.measure))
        if left is None or right is None:
            continue
        by_seed = {
            seed: None if None in (a := left.best[seed], b := right.best[seed]) else item.value(a or 0.0, b or 0.0)
            for seed in left.best
            if seed in right.best
        }
        if not by_seed:
            continue
        published = None
        if left.published is not None and right.published is not None:
            published = item.value(left.published.value, right.published.value)
        result.append(Compared(item, left.measure, published, by_seed))
    return tuple(result)


def reached(experiment: Experiment, scale: Scale, results: Sequence[ArmResult]) -> tuple[Reached, ...]:
    """The milestones of the arms that were run.

    Args:
        experiment: the table.
        scale: at which scale.
        results: complete runs.
    """
    found = []
    for milestone in experiment.milestones.get(scale, ()):
        by_seed = {
            run.seed: max(
                (
                    100.0 * row.accuracy
                    for row in run.rows
                    if row.accuracy is not None and row.round <= milestone.by_round
                ),
                default=None,
            )
            for run in results
            if run.arm.name == milestone.arm
        }
        if by_seed:
            found.append(Reached(milestone, by_seed))
    return tuple(found)


def mean_and_spread(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and standard deviation of the seeds.

    Args:
        values: one per seed.

    Returns:
        The mean, None if there is no value or one is missing; the standard deviation of the sample, None for fewer
        than two.
    """
    there = [value for value in values if value is not None]
    if not there or len(there) != len(values):
        return None, None
    return statistics.fmean(there), statistics.stdev(there) if len(there) > 1 else None


def timed(results: Sequence[ArmResult]) -> bool:
    """Whether a table is about simulated time.

    Args:
        results: its complete runs.
    """
    return any(measure.unit == "h" for result in results for measure in result.arm.measures)
