"""What a benchmark found: a figure, and the budget that it has to keep."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        value: the figure; None where it cannot be measured here, with the reason as its unit.
        budget: what it may be at most; None for a figure that stands for itself.
        at_least: the budget is what it has to be at least.
    """

    name: str
    value: float | None
    unit: str
    budget: float | None = None
    at_least: bool = False

    @property
    def ok(self) -> bool:
        """Whether the budget is kept."""
        if self.budget is None:
            return True
        return self.value is not None and (self.value >= self.budget if self.at_least else self.value <= self.budget)
