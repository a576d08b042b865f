"""Finds the measures of tables by their names."""

from collections.abc import Mapping
from types import MappingProxyType

from fleet_protocol.errors import ConfigError
from reproduction.limited_measures import BUDGETS, accuracy_by, accuracy_for, hours_to
from reproduction.plain_measures import (
    GLOBAL,
    LOCAL,
    MATTHEWS,
    OWN,
    OWN_WORST,
    PERPLEXITY,
    ROUNDS_TO_BEST,
)
from reproduction.readings import Measure, at_best
from simulation.results.quantities import Judged, Quantity
from simulation.results.rounds import RoundRow

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
            return hours_to(float(number), name)
        if kind == "global-by":
            return accuracy_by(int(number), name)
        if kind in BUDGETS:
            return accuracy_for(float(number), name, BUDGETS[kind])
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
    return Measure(name, title, "", at_best(quantity, quantity, sign), None)
