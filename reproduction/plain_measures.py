"""Measures without a number: of the global model, of the devices' own data, and of texts."""

from collections.abc import Sequence

from reproduction.readings import NOT_REACHED, Measure, Reading, at_best
from simulation.results.quantities import ACCURACY, Quantity
from simulation.results.rounds import RoundRow


def _rounds_to_best(rows: Sequence[RoundRow], last: int) -> Reading | None:
    reading = MATTHEWS.read(rows, last) or GLOBAL.read(rows, last)
    if reading is None:
        return None
    # A run that diverged has no best round; 0 rounds would be the best figure of all.
    if reading.best_round is None:
        return NOT_REACHED
    return Reading(float(reading.best_round), reading.best_round, None)


_OWN_DATA = Quantity(
    "own",
    "accuracy on the devices' own data",
    lambda row: row.local_accuracy,
    share=True,
)
_WORST_TENTH = Quantity(
    "own-worst",
    "accuracy of the worst tenth of the devices on their own data",
    lambda row: row.local_worst_tenth,
    share=True,
)
_PERPLEXITY = Quantity("perplexity", "perplexity", lambda row: row.perplexity)
_MATTHEWS = Quantity(
    "matthews",
    "Matthews correlation x 100",
    lambda row: None if row.matthews is None else 100.0 * row.matthews,
)

GLOBAL = Measure("global", "global accuracy", "%", at_best(ACCURACY, ACCURACY), ACCURACY)
"""Accuracy of the global model on the whole test set."""

LOCAL = Measure("local", "local accuracy", "%", at_best(_OWN_DATA, ACCURACY), _OWN_DATA)
"""Accuracy over all samples of the devices' own parts of the test set.

It is read at the round with the best global accuracy.
"""

OWN = Measure(
    "own",
    "accuracy on the devices' own data",
    "%",
    at_best(_OWN_DATA, _OWN_DATA),
    _OWN_DATA,
)
"""The same at its own best round, for models that are evaluated by it."""

OWN_WORST = Measure(
    "own-worst",
    "accuracy of the worst tenth of the devices on their own data",
    "%",
    at_best(_WORST_TENTH, _OWN_DATA),
    _WORST_TENTH,
)
"""The mean of the tenth of the devices with the lowest accuracies, at the best round of `OWN`."""

PERPLEXITY = Measure(
    "perplexity",
    "perplexity",
    "",
    at_best(_PERPLEXITY, _PERPLEXITY, -1.0),
    _PERPLEXITY,
)
"""Mean over chunks of the test text of exp(mean cross entropy of the chunk).

It is read at the round with the lowest value.
"""

MATTHEWS = Measure(
    "matthews",
    "Matthews correlation x 100",
    "",
    at_best(_MATTHEWS, _MATTHEWS),
    _MATTHEWS,
)
"""Correlation of the predictions with two labels, times 100 as in GLUE.

It is read at the round with the best value.
"""

ROUNDS_TO_BEST = Measure("rounds", "rounds to the best value", "", _rounds_to_best, None)
"""The round of the best correlation if there is one, otherwise of the best global accuracy."""
