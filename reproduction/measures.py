"""Reads the figures of tables from the rounds of a run: the best one and the last.

HeteroFL and FedRolex publish the checkpoint that is best on the test set (specification 1.2 and
2.7), which is optimistic. So the mean of the last evaluations decides, and the last evaluated round
is always reported beside the best.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from types import MappingProxyType

from fleet_protocol.errors import ConfigError
from simulation.results.quantities import ACCURACY, Judged, Quantity
from simulation.results.rounds import RoundRow, first_reaching

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


_NOT_REACHED = Reading(None, None, None)
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


def _at_best(
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


def _rounds_to_best(rows: Sequence[RoundRow], last: int) -> Reading | None:
    reading = MATTHEWS.read(rows, last) or GLOBAL.read(rows, last)
    if reading is None:
        return None
    # A run that diverged has no best round; 0 rounds would be the best figure of all.
    if reading.best_round is None:
        return _NOT_REACHED
    return Reading(float(reading.best_round), reading.best_round, None)


_OWN_DATA = Quantity(
    "own",
    "accuracy on the devices' own data",
    lambda row: row.local_accuracy,
    share=True,
)
_WORST_TENTH = Quantity(
    "own-worst",
    "accuracy of the worst tenth of the devices on their own data",
    lambda row: row.local_worst_tenth,
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

It is read at the round with the best global accuracy.
"""

OWN = Measure(
    "own",
    "accuracy on the devices' own data",
    "%",
    _at_best(_OWN_DATA, _OWN_DATA),
    _OWN_DATA,
)
"""The same at its own best round, for models that are evaluated by it."""

OWN_WORST = Measure(
    "own-worst",
    "accuracy of the worst tenth of the devices on their own data",
    "%",
    _at_best(_WORST_TENTH, _OWN_DATA),
    _WORST_TENTH,
)
"""The mean of the tenth of the devices with the lowest accuracies, at the best round of `OWN`."""

PERPLEXITY = Measure(
    "perplexity",
    "perplexity",
    "",
    _at_best(_PERPLEXITY, _PERPLEXITY, -1.0),
    _PERPLEXITY,
)
"""Mean over chunks of the test text of exp(mean cross entropy of the chunk).

It is read at the round with the lowest value.
"""

MATTHEWS = Measure(
    "matthews",
    "Matthews correlation x 100",
    "",
    _at_best(_MATTHEWS, _MATTHEWS),
    _MATTHEWS,
)
"""Correlation of the predictions with two labels, times 100 as in GLUE.

It is read at the round with the best value.
"""

ROUNDS_TO_BEST = Measure("rounds", "rounds to the best value", "", _rounds_to_best, None)
"""The round of the best correlation if there is one, otherwise of the best global accuracy."""

_FALLING = frozenset({"loss", "mae", "rmse", "perplexity"})
"""Metrics whose lowest value is best; the others are shares or correlations, shown times 100."""

_AT = "-at-"
_METRIC = "metric-"

_NAMED: Mapping[str, Measure] = MappingProxyType(
    {
        "global": GLOBAL,
        "local": LOCAL,
        "own": OWN,
        "own-worst": OWN_WORST,
        "perplexity": PERPLEXITY,
        "matthews": MATTHEWS,
        "rounds": ROUNDS_TO_BEST,
    }
)


def measure_named(name: str) -> Measure:
    """Return a measure by its name.

    Args:
        name: name of those above; ``hours-90`` for the simulated time until the global accuracy has
            reached 90 %; ``global-by-10`` for the best global accuracy until round 10;
            ``global-mb-4`` and ``global-seconds-600`` for the global accuracy after this many
            megabytes of payload or simulated seconds. Each is None if the run ended before.
            ``metric-pearson`` for a metric of the recipe. ``global-at-w1.00-d2`` and
            ``metric-matthews-at-w1.00-d2`` for a tier of ``evaluation.tiers``.

    Raises:
        ConfigError: there is no such measure.
    """
    # The id of a tier contains hyphens, so it is removed before a number is looked for behind the
    # last one.
    quantity, _, tier = name.partition(_AT)
    if quantity == GLOBAL.name and tier:
        return _of_metric("accuracy", tier, name)
    if quantity.startswith(_METRIC):
        return _of_metric(quantity.removeprefix(_METRIC), tier, name)
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
            f"unknown measure {name!r}; choose from {', '.join(_NAMED)}, hours-90, global-by-10,"
            " global-mb-4, global-seconds-600, metric-f1, global-at-w1.00-d2, metric-f1-at-w1.00-d2"
        ) from error


def _of_metric(metric: str, tier: str, name: str) -> Measure:
    """Return the measure of a metric, of a further tier or of the whole model."""
    falls = metric in _FALLING
    factor = 1.0 if falls else 100.0
    key = f"{tier} {metric}" if tier else metric

    def value(row: Judged) -> float | None:
        metrics: Mapping[str, float] | None = None
        # Points of stored curves have no metrics of the recipe.
        if isinstance(row, RoundRow):
            metrics = row.tier_metrics if tier else row.metrics
        if metrics is None or key not in metrics:
            return None
        return factor * metrics[key]

    title = metric if falls else f"{metric} x 100"
    if tier:
        title = f"{title} of {tier}"
    # Stored curves do not have it, so it is not plotted.
    quantity = Quantity(name, title, value)
    sign = -1.0 if falls else 1.0
    return Measure(name, title, "", _at_best(quantity, quantity, sign), None)


def _hours_to(target: float, name: str) -> Measure:
    def read(rows: Sequence[RoundRow], _last: int) -> Reading | None:
        # An arm that was never evaluated has no figure; one that was evaluated but too low has the
        # figure "not reached".
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
        # Only the best value is used, so it does not matter how many evaluations decide.
        reading = GLOBAL.read(counted, 1)
        if reading is None:
            return None
        # A longer run could still have become better before that round.
        if rows[-1].round < last_round:
            return _NOT_REACHED
        return Reading(reading.best, reading.best_round, None)

    return Measure(name, f"best global accuracy by round {last_round}", "%", read, None)


@dataclass(frozen=True)
class _Budget:
    """The budget of a run before its accuracy is read.

    Attributes:
        over: the kind of plot.
        spent: cost of one round.
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
            # A round that exceeds the budget does not count: its model is finished too late.
            if total <= limit:
                affordable.append(row)
        # The run ended before it spent the budget.
        if not rows or total < limit:
            return _NOT_REACHED
        return GLOBAL.read(affordable, last)

    title = f"global accuracy for {limit:g} {budget.unit}"
    return Measure(name, title, "%", read, None, over=budget.over)
