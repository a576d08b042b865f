"""What a benchmark found: a figure, and the budget that it has to keep."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        name: the same in every run, by which the history is read.
        value: the figure; None where it cannot be measured here, with the reason as its unit.
        budget: what it may be at most; None for a figure that stands for itself.
        at_least: the budget is what it has to be at least.
        low: the lower quartile of what was measured; None for a figure that was taken once.
        high: the upper one.
        note: what it is made of.
    """

    name: str
    value: float | None
    unit: str
    budget: float | None = None
    at_least: bool = False
    low: float | None = None
    high: float | None = None
    note: str = ""

    @classmethod
    def of(cls, name: str, values: Sequence[float], unit: str, budget: float | None = None, **rest: Any) -> "Row":
        """The median of values that were taken in turns, with their quartiles."""
        low, middle, high = quantiles(values, n=4)
        return cls(name, middle, unit, budget, low=low, high=high, **rest)

    @property
    def ok(self) -> bool:
        """Whether the budget is kept."""
        if self.budget is None:
            return True
        return self.value is not None and (self.value >= self.budget if self.at_least else self.value <= self.budget)
