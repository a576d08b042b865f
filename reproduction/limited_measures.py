"""Measures with a limit: the time to a target, and the accuracy by a round or for a cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from reproduction.plain_measures import GLOBAL
from reproduction.readings import NOT_REACHED, Measure, Reading
from simulation.results.quantities import ACCURACY
from simulation.results.rounds import RoundRow, first_reaching


def hours_to(target: float, name: str) -> Measure:
    """Return the measure of the simulated hours until a global accuracy in %."""

    def read(rows: Sequence[RoundRow], _last: int) -> Reading | None:
        # An arm that was never evaluated has no figure; one that was evaluated but too low has the
        # figure "not reached".
        if all(row.accuracy is None for row in rows):
            return None
        reached = first_reaching(rows, target / 100.0)
        if reached is None:
            return NOT_REACHED
        hours = reached.simulated_total / 3600.0
        return Reading(hours, reached.round, None)

    return Measure(
        name,
        f"simulated hours to {target:g} %",
        "h",
        read,
        ACCURACY,
        target / 100.0,
        over="time",
    )


def accuracy_by(last_round: int, name: str) -> Measure:
    """Return the measure of the best global accuracy until a round."""

    def read(rows: Sequence[RoundRow], _last: int) -> Reading | None:
        counted = []
        for row in rows:
            if row.round <= last_round:
                counted.append(row)
        # Only the best value is used, so it does not matter how many evaluations decide.
        reading = GLOBAL.read(counted, 1)
        if reading is None:
            return None
        # A longer run could still have become better before that round.
        if rows[-1].round < last_round:
            return NOT_REACHED
        return Reading(reading.best, reading.best_round, None)

    return Measure(name, f"best global accuracy by round {last_round}", "%", read, None)


@dataclass(frozen=True)
class Budget:
    """The budget of a run before its accuracy is read.

    Attributes:
        over: the kind of plot.
        spent: cost of one round.
    """

    unit: str
    over: str
    spent: Callable[[RoundRow], float]


BUDGETS: Mapping[str, Budget] = MappingProxyType(
    {
        "global-mb": Budget("MB", "bytes", lambda row: row.payload_bytes / 1e6),
        "global-seconds": Budget("simulated seconds", "time", lambda row: row.simulated_seconds),
    }
)


def accuracy_for(
    limit: float,
    name: str,
    budget: Budget,
) -> Measure:
    """Return the measure of the global accuracy that a run reaches within a budget.

    Args:
        limit: the budget, in its unit.
        name: name of the measure.
        budget: what is limited.
    """

    def read(rows: Sequence[RoundRow], last: int) -> Reading | None:
        affordable: list[RoundRow] = []
        total = 0.0
        for row in rows:
            total += budget.spent(row)
            # A round that exceeds the budget does not count: its model is finished too late.
            if total <= limit:
                affordable.append(row)
        # The run ended before it spent the budget.
        if not rows or total < limit:
            return NOT_REACHED
        return GLOBAL.read(affordable, last)

    title = f"global accuracy for {limit:g} {budget.unit}"
    return Measure(name, title, "%", read, None, over=budget.over)
