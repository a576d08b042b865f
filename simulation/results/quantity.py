"""What a round was judged by: which column of the history it is, and how an axis shows it."""

from collections.abc import Callable
from dataclasses import dataclass

from simulation.results.history import RoundRow


@dataclass(frozen=True)
class Quantity:
    """What a plot shows on its vertical axis, and a measure is read from.

    Attributes:
        name: part of a file's name.
        label: of the axis.
        value: finds it in a round; None where it was not evaluated.
        share: whether it is a share, in [0, 1], to be shown in %.
    """

    name: str
    label: str
    value: Callable[[RoundRow], float | None]
    share: bool = False


def _accuracy(row: RoundRow) -> float | None:
    return row.accuracy


ACCURACY = Quantity("accuracy", "test accuracy", _accuracy, share=True)
"""Of the merged model on the whole test set."""
