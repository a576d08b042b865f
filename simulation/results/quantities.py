"""Quantities of a round: the vertical axis of a plot, and the source of a measure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from simulation.results.rounds import RoundRow


class Judged(Protocol):
    """Values of rounds for a plot; ``payload_bytes`` counts from the previous row."""

    @property
    def round(self) -> int: ...  # noqa: D102
    @property
    def accuracy(self) -> float | None: ...  # noqa: D102
    @property
    def local_accuracy(self) -> float | None: ...  # noqa: D102
    @property
    def local_worst_tenth(self) -> float | None: ...  # noqa: D102
    @property
    def matthews(self) -> float | None: ...  # noqa: D102
    @property
    def perplexity(self) -> float | None: ...  # noqa: D102
    @property
    def simulated_total(self) -> float: ...  # noqa: D102
    @property
    def payload_bytes(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class Quantity:
    """A quantity of a round: the vertical axis of a plot, and the source of a measure."""

    name: str  # part of a file's name
    label: str
    value: Callable[[Judged], float | None]  # reads it from a round; None if it was not evaluated
    share: bool = False  # whether it is a share in [0, 1], shown in %


ACCURACY = Quantity("accuracy", "test accuracy", lambda row: row.accuracy, share=True)
"""The accuracy of the merged model on the whole test set."""


def shown_quantities(rows: Sequence[RoundRow]) -> tuple[Quantity, ...]:
    """Return what the plots of a simulation show: the score of its versions, and each metric.

    The score is the accuracy, or the loss if there is none, for example when the targets are
    numbers. Without an evaluated round, the result is empty.
    """
    quantities = []
    if any(row.accuracy is not None for row in rows):
        quantities.append(ACCURACY)
    elif any(row.loss is not None for row in rows):
        quantities.append(Quantity("loss", "test loss", _loss_of))
    names: set[str] = set()
    for row in rows:
        names.update(row.metrics or ())
    for name in sorted(names):
        quantities.append(Quantity(name, f"test {name}", partial(_metric_of, name)))
    return tuple(quantities)


def _loss_of(row: Judged) -> float | None:
    return row.loss if isinstance(row, RoundRow) else None


def _metric_of(name: str, row: Judged) -> float | None:
    if not isinstance(row, RoundRow) or row.metrics is None:
        return None
    return row.metrics.get(name)
