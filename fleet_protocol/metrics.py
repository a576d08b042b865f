"""Metrics as sums over samples, which add up over batches and devices, and the rules that make
numbers of them.

A rule takes the sums that a metric names, in their order, float64 arrays. Boards and servers have
the same rules, so an evaluation is a set of sums wherever it comes from, and sums of many devices
are judged as if one had all samples.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.messages.values import Evaluation, Measured
from fleet_protocol.recipe_spec import RecipeSpec

Sums = Mapping[str, NDArray[np.float64]]
EXAMPLES = "examples"
"""The sum that no graph needs to return: the samples, or labels that count."""


def _ratio(total: NDArray[np.float64], count: NDArray[np.float64]) -> float:
    return float(total) / float(count) if count else 0.0


def _root(total: NDArray[np.float64], count: NDArray[np.float64]) -> float:
    return math.sqrt(_ratio(total, count))


def _exponential(total: NDArray[np.float64], count: NDArray[np.float64]) -> float:
    return math.exp(
        min(_ratio(total, count), 60.0)
    )  # beyond it a perplexity says nothing, and would overflow


def _f1(
    hits: NDArray[np.float64],
    predicted: NDArray[np.float64],
    present: NDArray[np.float64],
) -> float:
    """The mean over the classes that occur or are predicted."""
    seen = predicted + present > 0
    return float((2 * hits[seen] / (predicted + present)[seen]).mean()) if seen.any() else 0.0


def _iou(
    hits: NDArray[np.float64],
    predicted: NDArray[np.float64],
    present: NDArray[np.float64],
) -> float:
    """Intersection over union, the mean over the classes that occur or are predicted."""
    seen = predicted + present > 0
    return float((hits[seen] / (predicted + present - hits)[seen]).mean()) if seen.any() else 0.0


def _matthews(
    hits: NDArray[np.float64],
    predicted: NDArray[np.float64],
    present: NDArray[np.float64],
) -> float:
    """Gorodkin's correlation for any number of classes; of two it is that of Matthews."""
    total = float(present.sum())
    spread = (total**2 - float(predicted @ predicted)) * (total**2 - float(present @ present))
    return (
        (float(hits.sum()) * total - float(predicted @ present)) / math.sqrt(spread)
        if spread > 0
        else 0.0
    )


RULES: Mapping[str, Callable[..., float]] = MappingProxyType(
    {
        "ratio": _ratio,
        "root": _root,
        "exponential": _exponential,
        "f1": _f1,
        "iou": _iou,
        "matthews": _matthews,
    }
)


_OF_CLASSES = frozenset(
    {"f1", "iou", "matthews"}
)  # of their sums the first are hits, the last what is present


def summed_outputs(recipe: RecipeSpec) -> tuple[str, ...]:
    """What an eval graph returns that was exported with a recipe."""
    own = [name for metric in recipe.metrics for name in metric.sums if name != EXAMPLES]
    return tuple(dict.fromkeys((*recipe.loss.metrics, *own)))


def evaluation_of(sums: Sums, examples: int, recipe: RecipeSpec) -> Evaluation:
    """Loss and metrics from everything of :func:`summed_outputs`, of at least one sample, or label
    that counts.
    """
    known = {**sums, EXAMPLES: np.asarray(float(examples))}
    return Evaluation(
        examples=examples,
        loss=float(sums["loss_sum"]) / examples,
        accuracy=float(sums["correct"]) / examples if "correct" in sums else None,
        metrics=tuple(
            _measured(metric.name, metric.rule, [known[name] for name in metric.sums])
            for metric in recipe.metrics
        ),
    )


def _measured(name: str, rule: str, sums: Sequence[NDArray[np.float64]]) -> Measured:
    parts = tuple(tuple(np.atleast_1d(part).tolist()) for part in sums)
    return Measured(name=name, rule=rule, value=RULES[rule](*sums), sums=parts)


def label_accuracies(found: Evaluation) -> tuple[float | None, ...]:
    """The share of each label's samples that were taken for it (recall), None where there are none
    of it.

    There are no shares where no metric counts classes.
    """
    counted = next((metric.sums for metric in found.metrics if metric.rule in _OF_CLASSES), None)
    if counted is None:
        return ()
    return tuple(
        hit / there if there else None for hit, there in zip(counted[0], counted[2], strict=True)
    )


def joined(evaluations: Iterable[Evaluation]) -> dict[str, float]:
    """Each metric over the samples of several evaluations together.

    Without what not all have, or no rule can take.
    """
    found = list(evaluations)
    names = [metric.name for metric in found[0].metrics] if found else []
    values: dict[str, float] = {}
    for name in names:
        own: list[Any] = [next((m for m in item.metrics if m.name == name), None) for item in found]
        shapes = {tuple(map(len, metric.sums)) if metric else () for metric in own}
        if len(shapes) == 1 and own[0].rule in RULES:
            sums = [
                np.sum([metric.sums[i] for metric in own], axis=0) for i in range(len(own[0].sums))
            ]
            # Devices say what they like; numpy's errors of floats are ArithmeticErrors when raised.
            with (
                suppress(TypeError, ValueError, IndexError, ArithmeticError),
                np.errstate(all="raise"),
            ):
                value = RULES[own[0].rule](
                    *(part.reshape(()) if part.size == 1 else part for part in sums)
                )
                values |= {name: value} if math.isfinite(value) else {}
    return values
