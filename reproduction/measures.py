"""Figures that the tables print, read from the rounds of a run: the best one, as the papers report, and the last.

HeteroFL and FedRolex publish the checkpoint that is best on the test set (specification 1.2 and 2.7), which flatters:
so the last evaluated round stands beside it everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simulation.results.history import RoundRow, rounds_to_accuracy, time_to_accuracy
from simulation.results.quantity import ACCURACY, Quantity

__all__ = [
    "GLOBAL",
    "LOCAL",
    "MATTHEWS",
    "OWN",
    "PERPLEXITY",
    "ROUNDS_TO_BEST",
    "Measure",
    "Reading",
    "hours_to",
]

_SECONDS_PER_HOUR = 3600.0
_PER_CENT = 100.0
Value = Callable[[RoundRow], float | None]


@dataclass(frozen=True)
class Reading:
    """A figure of one run.

    Attributes:
        best: at the best evaluated round; None where a target was never reached.
        best_round: which round that was; None likewise.
        last: at the last evaluated round; None for figures that belong to no single round, such as a time.
    """

    best: float | None
    best_round: int | None
    last: float | None


@dataclass(frozen=True)
class Measure:
    """A kind of figure.

    Attributes:
        name: its key in files, such as ``global``.
        title: for people.
        unit: ``%``, ``h`` or nothing.
        larger_is_better: which of two figures is the better one.
        read: finds it in the rounds of a run; None if no round was evaluated for it.
        quantity: that it is taken from, to be plotted; None where that is another measure's.
    """

    name: str
    title: str
    unit: str
    larger_is_better: bool
    read: Callable[[Sequence[RoundRow]], Reading | None]
    quantity: Quantity | None


def _scaled(value: Value, factor: float) -> Value:
    def scaled(row: RoundRow) -> float | None:
        found = value(row)
        return None if found is None else factor * found

    return scaled


def _at_best(of: Value, judged_by: Value, *, larger_is_better: bool) -> Callable[[Sequence[RoundRow]], Reading | None]:
    """Read a figure at the round that another figure, or the same, finds best; the first of equal ones."""

    def read(rows: Sequence[RoundRow]) -> Reading | None:
        found = [(judge, figure, row) for row in rows if None not in (judge := judged_by(row), figure := of(row))]
        if not found:
            return None
        sign = 1.0 if larger_is_better else -1.0
        _, best, row = max(found, key=lambda item: sign * (item[0] or 0.0))
        return Reading(best, row.round, found[-1][1])

    return read


def _local(row: RoundRow) -> float | None:
    return row.local_accuracy


def _matthews(row: RoundRow) -> float | None:
    return row.matthews


def _perplexity(row: RoundRow) -> float | None:
    return row.perplexity


def _rounds_to_best(rows: Sequence[RoundRow]) -> Reading | None:
    found = MATTHEWS.read(rows) or GLOBAL.read(rows)
    return (
        None if found is None or found.best_round is None else Reading(float(found.best_round), found.best_round, None)
    )


_OWN_DATA = Quantity("own", "accuracy on the devices' own data", _local, share=True)

GLOBAL = Measure(
    "global",
    "global accuracy",
    "%",
    True,
    _at_best(_scaled(ACCURACY.value, _PER_CENT), ACCURACY.value, larger_is_better=True),
    ACCURACY,
)
"""Accuracy of the global model on the whole test set."""

LOCAL = Measure(
    "local",
    "local accuracy",
    "%",
    True,
    _at_best(_scaled(_local, _PER_CENT), ACCURACY.value, larger_is_better=True),
    _OWN_DATA,
)
"""Accuracy on the devices' own parts of the test set, over samples, at the round whose global accuracy is best."""

OWN = Measure(
    "own",
    "accuracy on the devices' own data",
    "%",
    True,
    _at_best(_scaled(_local, _PER_CENT), _local, larger_is_better=True),
    _OWN_DATA,
)
"""The same at the round where it is best itself, for models that are judged by it."""

PERPLEXITY = Measure(
    "perplexity",
    "perplexity",
    "",
    False,
    _at_best(_perplexity, _perplexity, larger_is_better=False),
    Quantity("perplexity", "perplexity", _perplexity),
)
"""Mean over chunks of the test text of exp(mean cross entropy of the chunk), at the round where it is lowest."""

MATTHEWS = Measure(
    "matthews",
    "Matthews correlation x 100",
    "",
    True,
    _at_best(_scaled(_matthews, _PER_CENT), _matthews, larger_is_better=True),
    Quantity("matthews", "Matthews correlation x 100", _scaled(_matthews, _PER_CENT)),
)
"""Correlation of the predictions with two labels, at the round where it is best, in hundredths as GLUE prints it."""

ROUNDS_TO_BEST = Measure("rounds", "rounds to the best value", "", False, _rounds_to_best, None)
"""The round of the best correlation where there is one, else of the best global accuracy."""


def hours_to(target: float) -> Measure:
    """Simulated time until the global accuracy has reached a target.

    Args:
        target: accuracy, in %.

    Returns:
        The measure; its figure is None where the run ended before.
    """

    def read(rows: Sequence[RoundRow]) -> Reading | None:
        if all(row.accuracy is None for row in rows):
            return None
        seconds, number = time_to_accuracy(rows, target / _PER_CENT), rounds_to_accuracy(rows, target / _PER_CENT)
        return Reading(None if seconds is None else seconds / _SECONDS_PER_HOUR, number, None)

    return Measure(f"hours-{target:g}", f"simulated hours to {target:g} %", "h", False, read, ACCURACY)
