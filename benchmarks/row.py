"""What a benchmark found: a figure, and the budget that it has to keep."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any


@dataclass(frozen=True)
class Row:
    """One figure."""

    name: str  # the same in every run, by which the history is read
    value: (
        float | None
    )  # the figure; None where it cannot be measured here, with the reason as its unit
    unit: str
    budget: float | None = None  # what it may be at most; None for a figure that stands for itself
    at_least: bool = False  # the budget is what it has to be at least
    low: float | None = (
        None  # the lower quartile of what was measured; None for a figure that was taken once
    )
    high: float | None = None  # the upper one
    note: str = ""  # what it is made of

    @classmethod
    def of(
        cls,
        name: str,
        values: Sequence[float],
        unit: str,
        budget: float | None = None,
        **rest: Any,
    ) -> "Row":
        """The median of values that were taken in turns, with their quartiles."""
        low, middle, high = quantiles(values, n=4)
        return cls(name, middle, unit, budget, low=low, high=high, **rest)

    @property
    def ok(self) -> bool:
        """Whether the budget is kept."""
        if self.budget is None:
            return True
        return self.value is not None and (
            self.value >= self.budget if self.at_least else self.value <= self.budget
        )
