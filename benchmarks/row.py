"""The result of a benchmark: a figure, and its budget."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any


@dataclass(frozen=True)
class Row:
    """One figure."""

    name: str  # the same in every run, because the history is read by it
    value: (
        float | None
    )  # the figure; None if it cannot be measured here, with the reason as its unit
    unit: str
    budget: float | None = None  # largest allowed value; None for a figure without a budget
    at_least: bool = False  # whether the budget is the smallest allowed value
    low: float | None = (
        None  # the lower quartile of the measurements; None for a figure that was taken once
    )
    high: float | None = None  # the upper one
    note: str = ""  # the numbers that it is computed from

    @classmethod
    def from_values(
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
