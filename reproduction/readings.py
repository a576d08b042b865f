"""Reads figures from the rounds of a run: the best one and the last.

HeteroFL and FedRolex publish the checkpoint that is best on the test set (specification 1.2 and
2.7), which is optimistic. So the mean of the last evaluations decides, and the last evaluated round
is always reported beside the best.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean

from simulation.results.quantities import Quantity
from simulation.results.rounds import RoundRow

Value = Callable[[RoundRow], float | None]


@dataclass(frozen=True)
class Reading:
    """A figure of one run.

    Attributes:
        best: value at the best evaluated round; None if a target was never reached.
        best_round: number of that round; None in the same case.
        last: value at the last evaluated round; None for figures without a single round, such as a
            time.
        decides: mean of the last evaluations; None if these were not stored.
    """

    best: float | None
    best_round: int | None
    last: float | None
    decides: float | None = None

    @property
    def deciding(self) -> float | None:
        """Return the compared figure.

        It is the mean of the last evaluations, or else the last one, or else the value without a
        round.
        """
        for value in (self.decides, self.last, self.best):
            if value is not None:
                return value
        return None


NOT_REACHED = Reading(None, None, None)
"""The figure of a run that diverged, or ended before its target."""

Read = Callable[[Sequence[RoundRow], int], Reading | None]
"""Reads a figure from the rounds of a run and the number of last evaluations that decide."""


@dataclass(frozen=True)
class Measure:
    """A kind of figure.

    Attributes:
        name: its key in files, such as ``global``.
        title: displayed title.
        unit: ``%``, ``h`` or nothing.
        read: returns it from the rounds of a run, with the mean of this many last evaluations; None
            if no round was evaluated for it.
        quantity: its quantity for a plot; None if another measure plots it.
        target: target of that quantity, marked in the plot.
        over: ``time`` or ``bytes`` to plot the accuracy over this cost.
    """

    name: str
    title: str
    unit: str
    read: Read
    quantity: Quantity | None
    target: float | None = None
    over: str = ""


@dataclass(frozen=True)
class _Evaluation:
    """An evaluated round: a figure, and the score that selects the best round."""

    round: int
    figure: float
    score: float


def at_best(
    of: Quantity,
    judged_by: Quantity,
    sign: float = 1.0,
) -> Read:
    """Read a figure at the best round by this or another quantity; the first among equals.

    Args:
        of: the quantity of the figure; shares become %.
        judged_by: the quantity that selects the best round.
        sign: -1 if the lowest value is best.
    """

    def read(rows: Sequence[RoundRow], last: int) -> Reading | None:
        evaluations = _evaluations(rows, of, judged_by, sign)
        if not evaluations:
            return None
        # A run with fewer evaluations than these is decided by all that it has.
        last_figures = [evaluation.figure for evaluation in evaluations[-last:]]
        mean = fmean(last_figures)
        # The run diverged: neither a mean of other rounds nor its best round represents its end.
        if not isfinite(mean):
            return NOT_REACHED
        finite: list[_Evaluation] = []
        for evaluation in evaluations:
            if isfinite(evaluation.score) and isfinite(evaluation.figure):
                finite.append(evaluation)
        best = max(finite, key=lambda evaluation: evaluation.score)
        return Reading(best.figure, best.round, evaluations[-1].figure, mean)

    return read


def _evaluations(
    rows: Sequence[RoundRow],
    of: Quantity,
    judged_by: Quantity,
    sign: float,
) -> list[_Evaluation]:
    """Return the rounds that have both quantities."""
    factor = 100.0 if of.share else 1.0
    # Devices evaluate personal models in every round; use rounds in which the global model was
    # evaluated, if any.
    has_global = any(row.accuracy is not None for row in rows)
    evaluations: list[_Evaluation] = []
    for row in rows:
        if has_global and row.accuracy is None:
            continue
        score = judged_by.value(row)
        figure = of.value(row)
        if score is not None and figure is not None:
            evaluations.append(_Evaluation(row.round, factor * figure, sign * score))
    return evaluations
