"""Read the figures that the tables print from the rounds of a run: the best one and the last.

HeteroFL and FedRolex publish the checkpoint that is best on the test set (specification 1.2 and
2.7), which flatters: so the mean of the last evaluations decides, and the last evaluated round
stands beside it everywhere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from types import MappingProxyType

from fleet_protocol.errors import ConfigError
from simulation.results.history import ACCURACY, Quantity, RoundRow, first_reaching

Value = Callable[[RoundRow], float | None]


@dataclass(frozen=True)
class Reading:
    """A figure of one run.

    Attributes:
        best: at the best evaluated round; None where a target was never reached.
        best_round: which round that was; None likewise.
        last: at the last evaluated round; None for figures that belong to no single round, such as
            a time.
        decides: mean of the last evaluations; None where these were not kept.
    """

    best: float | None
    best_round: int | None
    last: float | None
    decides: float | None = None

    @property
    def deciding(self) -> float | None:
        """The figure that is compared.

        It is the mean of the last evaluations, else the last alone, else what belongs to no round.
        """
        for value in (self.decides, self.last, self.best):
            if value is not None:
                return value
        return None


_NOT_REACHED = Reading(None, None, None)
"""The figure of a run that diverged, or ended before its target."""

Read = Callable[[Sequence[RoundRow], int], Reading | None]
"""Reads a figure from the rounds of a run and the number of last evaluations that decide."""


@dataclass(frozen=True)
class Measure:
    """A kind of figure.

    Attributes:
        name: its key in files, such as ``global``.
        title: for people.
        unit: ``%``, ``h`` or nothing.
        read: returns it from the rounds of a run, with the mean of so many last evaluations; None
            if no round was evaluated for it.
        quantity: that it is taken from, to be plotted; None where that is another measure's.
        target: of that quantity, to be marked.
        over: ``time`` or ``bytes`` where the accuracy is to be plotted over what was spent of it.
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
    """A round that was evaluated: a figure, and the score by which the best round is chosen."""

    round: int
    figure: float
    score: float


def _at_best(
    of: Quantity,
    judged_by: Quantity,
    sign: float = 1.0,
) -> Read:
    """Read a figure at the round that another, or the same, finds best; the first of equal ones.

    Args:
        of: the quantity of the figure; shares become %.
        judged_by: the quantity that is best.
        sign: -1 where the lowest value is best.
    """

    def read(rows: Sequence[RoundRow], last: int) -> Reading | None:
        evaluations = _evaluations(rows, of, judged_by, sign)
        if not evaluations:
            return None
        last_figures = [evaluation.figure for evaluation in evaluations[-last:]]
        mean = fmean(last_figures)
        # It diverged: no mean of other rounds stands for its end, nor does its best round.
        if not isfinite(mean):
            return _NOT_REACHED
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
    # Devices judge models of their own in every round: beside a global one, where that is judged.
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


def _rounds_to_best(rows: Sequence[RoundRow], last: int) -> Reading | None:
    reading = MATTHEWS.read(rows, last) or GLOBAL.read(rows, last)
    if reading is None:
        return None
    return Reading(float(reading.best_round or 0), reading.best_round, None)


_OWN_DATA = Quantity(
    "own",
    "accuracy on the devices' own data",
    lambda row: row.local_accuracy,
    share=True,
)
_PERPLEXITY = Quantity("perplexity", "perplexity", lambda row: row.perplexity)
_MATTHEWS = Quantity(
    "matthews",
    "Matthews correlation x 100",
    lambda row: None if row.matthews is None else 100.0 * row.matthews,
)

GLOBAL = Measure("global", "global accuracy", "%", _at_best(ACCURACY, ACCURACY), ACCURACY)
"""Accuracy of the global model on the whole test set."""

LOCAL = Measure("local", "local accuracy", "%", _at_best(_OWN_DATA, ACCURACY), _OWN_DATA)
"""Accuracy over all samples of the devices' own parts of the test set.

It is read at the round whose global accuracy is best.
"""

OWN = Measure(
    "own",
    "accuracy on the devices' own data",
    "%",
    _at_best(_OWN_DATA, _OWN_DATA),
    _OWN_DATA,
)
"""The same at the round where it is best itself, for models that are judged by it."""

PERPLEXITY = Measure(
    "perplexity",
    "perplexity",
    "",
    _at_best(_PERPLEXITY, _PERPLEXITY, -1.0),
    _PERPLEXITY,
)
"""Mean over chunks of the test text of exp(mean cross entropy of the chunk).

It is read at the round where it is lowest.
"""

MATTHEWS = Measure(
    "matthews",
    "Matthews correlation x 100",
    "",
    _at_best(_MATTHEWS, _MATTHEWS),
    _MATTHEWS,
)
"""Correlation of the predictions with two labels, in hundredths as GLUE prints it.

It is read at the round where it is best.
"""

ROUNDS_TO_BEST = Measure("rounds", "rounds to the best value", "", _rounds_to_best, None)
"""The round of the best correlation where there is one, else of the best global accuracy."""

_NAMED: Mapping[str, Measure] = MappingProxyType(
    {
        "global": GLOBAL,
        "local": LOCAL,
        "own": OWN,
        "perplexity": PERPLEXITY,
        "matthews": MATTHEWS,
        "rounds": ROUNDS_TO_BEST,
    }
)


def measure_named(name: str) -> Measure:
    """Return a measure by its name.

    Args:
        name: of those above; ``hours-90`` for the simulated time until the global accuracy has
            reached 90 %; ``global-by-10`` for the best global accuracy until round 10;
            ``global-mb-4`` and ``global-seconds-600`` for the global accuracy when so many
            megabytes of payload or simulated seconds are spent. Each is None where the run ended
            before.

    Raises:
        ConfigError: there is none.
    """
    kind, _, number = name.rpartition("-")
    try:
        if kind == "hours":
            return _hours_to(float(number), name)
        if kind == "global-by":
            return _accuracy_by(int(number), name)
        if kind in _BUDGETS:
            return _accuracy_for(float(number), name, _BUDGETS[kind])
        return _NAMED[name]
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"no measure {name!r}; there are {', '.join(_NAMED)}, hours-90, global-by-10,"
            " global-mb-4, global-seconds-600"
        ) from error


def _hours_to(target: float, name: str) -> Measure:
    def read(rows: Sequence[RoundRow], _last: int) -> Reading | None:
        if all(row.accuracy is None for row in rows):
            return None
        reached = first_reaching(rows, target / 100.0)
        if reached is None:
            return _NOT_REACHED
        hours = reached.simulated_total / 3600.0
        return Reading(hours, reached.round, None)

    return Measure(
        name,
        f"simulated hours to {target:g} %",
        "h",
        read,
        ACCURACY,
        target / 100.0,
        over="time",
    )


def _accuracy_by(last_round: int, name: str) -> Measure:
    def read(rows: Sequence[RoundRow], _last: int) -> Reading | None:
        counted = []
        for row in rows:
            if row.round <= last_round:
                counted.append(row)
        reading = GLOBAL.read(counted, 1)
        if reading is None:
            return None
        if rows[-1].round < last_round:
            return _NOT_REACHED
        return Reading(reading.best, reading.best_round, None)

    return Measure(name, f"best global accuracy by round {last_round}", "%", read, None)


@dataclass(frozen=True)
class _Budget:
    """What a run may spend before its accuracy is read.

    Attributes:
        over: the plot of what was spent.
        spent: of it in one round.
    """

    unit: str
    over: str
    spent: Callable[[RoundRow], float]


_BUDGETS: Mapping[str, _Budget] = MappingProxyType(
    {
        "global-mb": _Budget("MB", "bytes", lambda row: row.payload_bytes / 1e6),
        "global-seconds": _Budget("simulated seconds", "time", lambda row: row.simulated_seconds),
    }
)


def _accuracy_for(
    limit: float,
    name: str,
    budget: _Budget,
) -> Measure:
    def read(rows: Sequence[RoundRow], last: int) -> Reading | None:
        affordable: list[RoundRow] = []
        total = 0.0
        for row in rows:
            total += budget.spent(row)
            if total <= limit:
                affordable.append(row)
        # The run ended with some of the budget left.
        if not rows or total < limit:
            return _NOT_REACHED
        return GLOBAL.read(affordable, last)

    title = f"global accuracy for {limit:g} {budget.unit}"
    return Measure(name, title, "%", read, None, over=budget.over)
