"""Metrics as sums over samples, and the rules that compute numbers from the sums.

Sums add up over batches and devices. A rule takes the sums that a metric names, in their order, as
float64 arrays. Boards and servers use the same rules, so the sums of many devices give the metrics
that one device with all samples would have.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.messages.values import Evaluation, Measured
from fleet_protocol.recipe_spec import RecipeSpec

Array = NDArray[np.float64]
Sums = Mapping[str, Array]

EXAMPLES = "examples"
"""The sum that no graph needs to return: the samples, or labels that count."""

_LARGEST_EXPONENT = 60.0  # a larger perplexity means nothing, and would overflow


def _ratio(total: Array, count: Array) -> float:
    return float(total) / float(count) if count else 0.0


def _root(total: Array, count: Array) -> float:
    return math.sqrt(_ratio(total, count))


def _exponential(total: Array, count: Array) -> float:
    return math.exp(min(_ratio(total, count), _LARGEST_EXPONENT))


def _f1(
    hits: Array,
    predicted: Array,
    present: Array,
) -> float:
    """Return the mean over the classes that occur or are predicted."""
    seen = predicted + present > 0
    if not seen.any():
        return 0.0
    return float((2 * hits[seen] / (predicted + present)[seen]).mean())


def _iou(
    hits: Array,
    predicted: Array,
    present: Array,
) -> float:
    """Return intersection over union, the mean over the classes that occur or are predicted."""
    seen = predicted + present > 0
    if not seen.any():
        return 0.0
    return float((hits[seen] / (predicted + present - hits)[seen]).mean())


def _matthews(
    hits: Array,
    predicted: Array,
    present: Array,
) -> float:
    """Return Gorodkin's correlation for any number of classes; for two it is that of Matthews."""
    total = float(present.sum())
    predicted_spread = total**2 - float(predicted @ predicted)
    present_spread = total**2 - float(present @ present)
    spread = predicted_spread * present_spread
    if not spread > 0:  # also if it is NaN
        return 0.0
    return (float(hits.sum()) * total - float(predicted @ present)) / math.sqrt(spread)


def _micro_f1(
    hits: Array,
    predicted: Array,
    present: Array,
) -> float:
    """Return the F1 over all classes together."""
    total = float(predicted.sum() + present.sum())
    return 2.0 * float(hits.sum()) / total if total else 0.0


def _pearson(  # noqa: PLR0913  (the sums of a correlation)
    outputs: Array,
    targets: Array,
    squared_outputs: Array,
    squared_targets: Array,
    products: Array,
    count: Array,
) -> float:
    """Return the mean correlation of the outputs; 0 for one whose outputs or targets are equal."""
    spread = (count * squared_outputs - outputs**2) * (count * squared_targets - targets**2)
    together = count * products - outputs * targets
    is_spread = spread > 0
    correlations = np.zeros(np.shape(spread))
    np.divide(together, np.sqrt(np.where(is_spread, spread, 1.0)), correlations, where=is_spread)
    return float(np.clip(correlations, -1.0, 1.0).mean())


RULES: Mapping[str, Callable[..., float]] = MappingProxyType(
    {
        "ratio": _ratio,
        "root": _root,
        "exponential": _exponential,
        "f1": _f1,
        "iou": _iou,
        "matthews": _matthews,
        "micro-f1": _micro_f1,
        "pearson": _pearson,
    }
)

_CLASS_RULES = frozenset({"f1", "iou", "matthews"})
"""Rules of three sums by class: hits, predictions, and samples."""


def summed_outputs(recipe: RecipeSpec) -> tuple[str, ...]:
    """Return the outputs of an eval graph that was exported with a recipe."""
    # In order and without repetition, because graphs name their outputs by these.
    outputs = list(recipe.loss.metrics)
    for metric in recipe.reported:
        outputs += [name for name in metric.sums if name != EXAMPLES]
    return tuple(dict.fromkeys(outputs))


def evaluation_of(
    sums: Sums,
    examples: int,
    recipe: RecipeSpec,
) -> Evaluation:
    """Return loss and metrics.

    Args:
        sums: all of :func:`summed_outputs`.
        examples: samples, or labels that count; at least one.
        recipe: recipe of the model.
    """
    # A metric may name the number of samples as one of its sums.
    known_sums = {**sums, EXAMPLES: np.asarray(float(examples))}
    metrics = []
    for metric in recipe.reported:
        # A rule of a later version than this one.
        if metric.rule not in RULES:
            continue
        own_sums = [known_sums[name] for name in metric.sums]
        metrics.append(_measure(metric.name, metric.rule, own_sums))
    accuracy = float(sums["correct"]) / examples if "correct" in sums else None
    return Evaluation(
        examples=examples,
        loss=float(sums["loss_sum"]) / examples,
        accuracy=accuracy,
        metrics=tuple(metrics),
    )


def _measure(
    name: str,
    rule: str,
    sums: Sequence[Array],
) -> Measured:
    numbers = tuple(tuple(np.atleast_1d(array).tolist()) for array in sums)
    return Measured(name=name, rule=rule, value=RULES[rule](*sums), sums=numbers)


def label_accuracies(evaluation: Evaluation) -> tuple[float | None, ...]:
    """Return the share of each label's samples that were recognised (recall).

    A label without samples has None. There are no shares if no metric counts classes.
    """
    for metric in evaluation.metrics:
        if metric.rule in _CLASS_RULES:
            hits, _, present = metric.sums
            pairs = zip(hits, present, strict=True)
            return tuple(hit / count if count else None for hit, count in pairs)
    return ()


def join_metrics(evaluations: Iterable[Evaluation]) -> dict[str, float]:
    """Return each metric over the samples of the evaluations that have it.

    Shallow sub-models have fewer exits than deep ones. The order is that of the evaluation with the
    most metrics. Metrics that no rule can compute are left out.
    """
    by_name: dict[str, list[Measured]] = {}
    for evaluation in sorted(evaluations, key=lambda listed: -len(listed.metrics)):
        # A device that repeats a name counts once.
        once: dict[str, Measured] = {}
        for metric in evaluation.metrics:
            once.setdefault(metric.name, metric)
        for name, metric in once.items():
            by_name.setdefault(name, []).append(metric)
    values: dict[str, float] = {}
    for name, metrics in by_name.items():
        value = _join(metrics)
        if value is not None:
            values[name] = value
    return values


def _join(metrics: Sequence[Measured]) -> float | None:
    """Return one metric over the samples of several evaluations; None if no rule can compute it."""
    first = metrics[0]
    shapes = {tuple(map(len, metric.sums)) for metric in metrics}
    if len(shapes) != 1 or first.rule not in RULES:
        return None
    totals = []
    for place in range(len(first.sums)):
        total = np.sum([metric.sums[place] for metric in metrics], axis=0)
        totals.append(total.reshape(()) if total.size == 1 else total)
    # The sums of a device may be any numbers; numpy raises its floating-point errors as
    # ArithmeticErrors.
    try:
        with np.errstate(all="raise"):
            value = RULES[first.rule](*totals)
    except (TypeError, ValueError, IndexError, ArithmeticError):
        return None
    return value if math.isfinite(value) else None
