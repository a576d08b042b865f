"""Compares figures of a board's samples with the fleet's, group by group."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.data.inspection import list_columns
from fleet_protocol.data.summary import DataSummary

_SPREAD = 0.1  # deviation as a share of the range; below it, nearly all values are the same
_ALIKE = 1.0  # most deviations between the means of a column on both sides
_ALIKE_TIMES = 3.0  # most times that their deviations differ


@dataclass(frozen=True)
class Figures:
    """Figures of each group, float64 arrays of one length."""

    lowest: NDArray[np.float64]
    highest: NDArray[np.float64]
    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]

    @classmethod
    def from_summary(cls, summary: DataSummary) -> "Figures":
        """Convert the figures of a summary to arrays."""
        figures = (summary.lowest, summary.highest, summary.mean, summary.deviation)
        return cls(*(np.array(figure) for figure in figures))

    @property
    def range(self) -> NDArray[np.float64]:
        """The range, highest minus lowest."""
        return self.highest - self.lowest

    @property
    def dense(self) -> NDArray[np.bool_]:
        """Whether values are spread over their range, instead of nearly all the same."""
        return (self.range > 0) & (self.deviation >= _SPREAD * self.range)


@dataclass(frozen=True)
class Pair:
    """Figures of a board and of the fleet.

    Attributes:
        own: the board's figures.
        fleet: the fleet's figures.
        noun: word for a group in messages; empty if the figures cover all values.
        names: names of the groups.
    """

    own: Figures
    fleet: Figures
    noun: str
    names: tuple[str, ...]

    @classmethod
    def from_summaries(
        cls,
        own: DataSummary,
        fleet: DataSummary,
        columns: Sequence[str],
    ) -> "Pair":
        """Pair two summaries with the same groups."""
        nouns = {"columns": "column", "channels": "channel", "all": ""}
        # Names by group exist only if every column is a group.
        names = tuple(columns) if len(columns) == len(own.mean) else ()
        return cls(
            Figures.from_summary(own),
            Figures.from_summary(fleet),
            nouns[own.groups],
            names,
        )

    @property
    def vary(self) -> NDArray[np.bool_]:
        """Groups with more than one value on both sides."""
        # A constant group has no deviation to compare.
        return (self.own.range > 0) & (self.fleet.range > 0)

    @property
    def deviations(self) -> NDArray[np.float64]:
        """The board's deviations in units of the fleet's; 1 if either has no deviation."""
        return _quotient(self.own.deviation, self.fleet.deviation, self.vary)

    @property
    def ranges(self) -> NDArray[np.float64]:
        """The same for the ranges."""
        return _quotient(self.own.range, self.fleet.range, self.vary)

    @property
    def distances(self) -> NDArray[np.float64]:
        """Distances between the board's means and the fleet's, in units of the larger deviation."""
        apart = np.abs(self.own.mean[:, None] - self.fleet.mean)
        # The larger one, so that a group with few values does not seem far away.
        largest = np.maximum(self.own.deviation[:, None], self.fleet.deviation)
        return _quotient(
            apart,
            largest,
            largest > 0,
            otherwise=0.0,
        )

    @property
    def alike(self) -> NDArray[np.bool_]:
        """Whether each of the board's groups may match each of the fleet's."""
        least = np.minimum(self.own.deviation[:, None], self.fleet.deviation)
        most = np.maximum(self.own.deviation[:, None], self.fleet.deviation)
        times = _quotient(
            most,
            least,
            least > 0,
            otherwise=np.inf,
        )
        return (self.distances <= _ALIKE) & (times <= _ALIKE_TIMES)

    def name(self, *groups: int) -> str:
        """List groups for messages."""
        return list_columns(groups, self.names, self.noun)

    def describe(self, group: int) -> str:
        """Return range and deviation of a group on both sides."""
        own = self.own
        fleet = self.fleet
        return (
            f"from {own.lowest[group]:g} to {own.highest[group]:g}, the fleet's from "
            f"{fleet.lowest[group]:g} to {fleet.highest[group]:g} "
            f"(deviation {own.deviation[group]:.3g} for {fleet.deviation[group]:.3g})"
        )


def _quotient(
    above: NDArray[np.float64],
    below: NDArray[np.float64],
    where: NDArray[np.bool_],
    *,
    otherwise: float = 1.0,
) -> NDArray[np.float64]:
    return np.divide(
        above,
        below,
        out=np.full_like(above, otherwise),
        where=where,
    )
