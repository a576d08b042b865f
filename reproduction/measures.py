"""Figures that the tables print, read from the rounds of a run: the best one, as the papers report,
and the last.

HeteroFL and FedRolex publish the checkpoint that is best on the test set (specification 1.2 and
2.7), which flatters: so the mean of the last evaluations decides, and the last evaluated round
stands beside it everywhere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite
from statistics import fmean
from types import MappingProxyType

from fleet_protocol.errors import ConfigError
from simulation.results.history import ACCURACY, Quantity, RoundRow, first_reaching

Value = Callable[[RoundRow], float | None]


@dataclass(frozen=True)
class Reading:
    """A figure of one run.

    Attributes:
        best: at the best evaluated round; None where a target was never reached.
        best_round: which round that was; None likewise.
        last: at the last evaluated round; None for figures that belong to no single round, such as
            a time.
        decides: mean of the last evaluations; None where these were not kept.
    """

    best: float | None
    best_round: int | None
    last: float | None
    decides: float | None = None

    @property
    def deciding(self) -> float | None:
        """What is compared: the mean of the last evaluations, else the last alone, else what
        belongs to no round.
        """
        return next(
            (value for value in (self.decides, self.last, self.best) if value is not None),
            None,
        )


@dataclass(frozen=True)
class Measure:
    """A kind of figure.

    Attributes:
        name: its key in files, such as ``global``.
        title: for people.
        unit: ``%``, ``h`` or nothing.
        read: finds it in the rounds of a run, with the mean of so many last evaluations; None if no
            round was evaluated for it.
        quantity: that it is taken from, to be plotted; None where that is another measure's.
        target: of that quantity, to be marked.
        over: ``time`` or ``bytes`` where the accuracy is to be plotted over what was spent of it.
    """

    name: str
    title: str
    unit: str
    read: Callable[[Sequence[RoundRow], int], Reading | None]
    quantity: Quantity | None
    target: float | None = None
    over: str = ""


def _at_best(
    of: Quantity, judged_by: Quantity, sign: float = 1.0
) -> Callable[[Sequence[RoundRow], int], Reading | None]:
    """Read a figure at the round that another, or the same, finds best; the first of equal ones.

    Shares become %.
    """
    factor = 100.0 if of.share else 1.0

    def read(rows: Sequence[RoundRow], last: int) -> Reading | None:
        # Devices judge models of their own in every round: beside a global one, where that is
        # judged.
        rows = [row for row in rows if row.accuracy is not None] or rows
        found = [
            (sign * judge, factor * figure, row.round)
            for row in rows
            if (judge := judged_by.value(row)) is not None and (figure := of.value(row)) is not None
        ]
        if not found:
            return None
        mean = fmean(figure for _, figure, _ in found[-last:])
        if not isfinite(
            mean
        ):  # it diverged: no mean of others stands for its end, nor its best round
            return Reading(None, None, None)
        finite = [item for item in found if isfinite(item[0]) and isfinite(item[1])]
        _, best, number = max(finite, key=lambda item: item[0])
        return Reading(best, number, found[-1][1], mean)

    return read


def _rounds_to_best(rows: Sequence[RoundRow], last: int) -> Reading | None:
    found = MATTHEWS.read(rows, last) or GLOBAL.read(rows, last)
    return None if found is None else Reading(float(found.best_round or 0), found.best_round, None)


_OWN_DATA = Quantity(
    "own",
    "accuracy on the devices' own data",
    lambda row: row.local_accuracy,
    share=True,
)
_PERPLEXITY = Quantity("perplexity", "perplexity", lambda row: row.perplexity)
_MATTHEWS = Quantity(
    "matthews",
    "Matthews correlation x 100",
    lambda row: None if row.matthews is None else 100.0 * row.matthews,
)

GLOBAL = Measure("global", "global accuracy", "%", _at_best(ACCURACY, ACCURACY), ACCURACY)
"""Accuracy of the global model on the whole test set."""

LOCAL = Measure("local", "local accuracy", "%", _at_best(_OWN_DATA, ACCURACY), _OWN_DATA)
"""Accuracy on the devices' own parts of the test set, over samples, at the round whose global
accuracy is best.
"""

OWN = Measure(
    "own",
    "accuracy on the devices' own data",
    "%",
    _at_best(_OWN_DATA, _OWN_DATA),
    _OWN_DATA,
)
"""The same at the round where it is best itself, for models that are judged by it."""

PERPLEXITY = Measure(
    "perplexity",
    "perplexity",
    "",
    _at_best(_PERPLEXITY, _PERPLEXITY, -1.0),
    _PERPLEXITY,
)
"""Mean over chunks of the test text of exp(mean cross entropy of the chunk), at the round where it
is lowest.
"""

MATTHEWS = Measure(
    "matthews",
    "Matthews correlation x 100",
    "",
    _at_best(_MATTHEWS, _MATTHEWS),
    _MATTHEWS,
)
"""Correlation of the predictions with two labels, at the round where it is best, in hundredths as
GLUE prints it.
"""

ROUNDS_TO_BEST = Measure("rounds", "rounds to the best value", "", _rounds_to_best, None)
"""The round of the best correlation where there is one, else of the best global accuracy."""

_NAMED = {
    measure.name: measure for measure in (GLOBAL, LOCAL, OWN, PERPLEXITY, MATTHEWS, ROUNDS_TO_BEST)
}


def measure_named(name: str) -> Measure:
    """A measure by its name.

    Args:
        name: of those above; ``hours-90`` for the simulated time until the global accuracy has
            reached 90 %; ``global-by-10`` for the best global accuracy until round 10;
            ``global-mb-4`` and ``global-seconds-600`` for the global accuracy when so many
            megabytes of payload or simulated seconds are spent. Each is None where the run ended
            before.

    Raises:
        ConfigError: there is none.
    """
    kind, _, number = name.rpartition("-")
    try:
        if kind == "hours":
            return _hours_to(float(number), name)
        if kind == "global-by":
            return _accuracy_by(int(number), name)
        return _accuracy_for(float(number), name, *_SPENT[kind]) if kind in _SPENT else _NAMED[name]
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"no measure {name!r}; there are {', '.join(_NAMED)}, hours-90, global-by-10,"
            " global-mb-4, global-seconds-600"
        ) from error


def _hours_to(target: float, name: str) -> Measure:
    def read(rows: Sequence[RoundRow], _last: int) -> Reading | None:
        if all(row.accuracy is None for row in rows):
            return None
        reached = first_reaching(rows, target / 100.0)
        return (
            Reading(reached.simulated_total / 3600.0, reached.round, None)
            if reached
            else Reading(None, None, None)
        )

    return Measure(
        name,
        f"simulated hours to {target:g} %",
        "h",
        read,
        ACCURACY,
        target / 100.0,
        over="time",
    )


def _accuracy_by(last_round: int, name: str) -> Measure:
    def read(rows: Sequence[RoundRow], _last: int) -> Reading | None:
        found = GLOBAL.read([row for row in rows if row.round <= last_round], 1)
        whole = bool(rows) and rows[-1].round >= last_round
        return found and (
            Reading(found.best, found.best_round, None) if whole else Reading(None, None, None)
        )

    return Measure(name, f"best global accuracy by round {last_round}", "%", read, None)


def _accuracy_for(
    budget: float, name: str, unit: str, over: str, spent: Callable[[RoundRow], float]
) -> Measure:
    def read(rows: Sequence[RoundRow], last: int) -> Reading | None:
        totals = list(accumulate(map(spent, rows)))
        found = GLOBAL.read(
            [row for row, total in zip(rows, totals, strict=True) if total <= budget],
            last,
        )
        return found if totals and totals[-1] >= budget else Reading(None, None, None)

    return Measure(name, f"global accuracy for {budget:g} {unit}", "%", read, None, over=over)


_SPENT: Mapping[str, tuple[str, str, Callable[[RoundRow], float]]] = MappingProxyType(
    {
        "global-mb": ("MB", "bytes", lambda row: row.payload_bytes / 1e6),
        "global-seconds": (
            "simulated seconds",
            "time",
            lambda row: row.simulated_seconds,
        ),
    }
)
