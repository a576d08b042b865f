"""Repeats a comparison with PyTorch on other batches, until one agrees or all deviate.

A rounding difference may flip a ReLU or the choice between two nearly equal maxima, and no limit on
a single run can distinguish that from a small bug.
"""

import contextlib
from collections.abc import Callable, Sequence

import numpy as np

from fleet_protocol.errors import ExportError
from fleet_protocol.manifest import CheckSpec
from trainer_export.batches import SizedBatches
from trainer_export.check import DeviationError, WorstDeviation

__all__ = ["repeated"]

Run = Callable[[SizedBatches, bool], CheckSpec]
"""Compares on some batches; the second argument tells whether PyTorch in float64 decides."""

DoubleRun = Callable[[], Run]
"""Returns a comparison of the graph in float64 (`trainer_export.double_graph`)."""

_TRIES = 5
_TRIES_ON_FEW = 10


def repeated(run: Run, batches: SizedBatches, in_float64: DoubleRun | None = None) -> CheckSpec:
    """Return the report of the first run within the limit; each run has different batches.

    A run that deviates is repeated with other random batches. If all runs deviate, they are
    repeated and float64 decides. If all of these deviate, too, the graph is right in three cases:

    - A few entries deviate in each run, and none in all: a bug is in the same entries each time.
      The figures then say how many there were.
    - Entries deviate by little, and two steps on few samples agree. A large batch has a ReLU at its
      edge in almost every step, and before a batch norm each moves a whole channel.
    - Entries deviate by little in one of the runs, and the graph in float64 agrees with PyTorch in
      float64. A variance over few entries may be so small that it is mostly rounding. Winograd's
      algorithm rounds so much that a net of many layers has a ReLU at its edge in every step.

    A run ends with the first step that refuses it (`WorstDeviation.is_refused`), so that the
    refusal of a large model takes a few steps instead of many.

    Args:
        run: the comparison.
        batches: batches of the first run.
        in_float64: the same comparison of the graph in float64; None if there is none.

    Raises:
        ExportError: every run deviates, as it does for a bug.
    """
    for attempt in range(_TRIES):
        with contextlib.suppress(ExportError):
            return run(batches.again(attempt), False)
    errors: list[ExportError] = []
    for attempt in range(_TRIES):
        try:
            return run(batches.again(attempt), True)
        except ExportError as error:
            errors.append(error)
    deviations = [error for error in errors if isinstance(error, DeviationError)]
    if len(deviations) < len(errors):
        raise errors[-1]
    runs = [error.worst for error in deviations]
    if _are_edges(runs):
        last = deviations[-1]
        return last.worst.report_others(last.graph, last.steps)
    report = _report_of_rounding(run, runs, batches.few(), in_float64)
    if report is not None:
        return report
    raise errors[-1]


def _are_edges(runs: Sequence[WorstDeviation]) -> bool:
    """Return whether few entries deviate in each of some runs, and none in all of them."""
    if not all(run.has_few_beyond for run in runs):
        return False
    for tensor, mask in runs[0].beyond.items():
        always = mask
        for run in runs[1:]:
            always = always & run.beyond.get(tensor, np.zeros_like(mask))
        if always.any():
            return False
    return True


def _report_of_rounding(
    run: Run,
    runs: Sequence[WorstDeviation],
    few: SizedBatches,
    in_float64: DoubleRun | None,
) -> CheckSpec | None:
    """Return the report of a run that shows that deviations are rounding; None if none does."""
    report: CheckSpec | None = None
    if all(deviating.is_small for deviating in runs):
        report = _first_report(run, few)
    is_small_once = any(deviating.is_small for deviating in runs)
    if report is None and in_float64 is not None and is_small_once:
        report = _report_in_float64(in_float64, few)
    return report


def _first_report(run: Run, batches: SizedBatches) -> CheckSpec | None:
    """Return the report of the first run that float64 confirms; None if none is."""
    for attempt in range(_TRIES_ON_FEW):
        with contextlib.suppress(DeviationError):
            return run(batches.again(attempt), True)
    return None


def _report_in_float64(make_run: DoubleRun, batches: SizedBatches) -> CheckSpec | None:
    """Return the report of a graph in float64; None if it deviates, or cannot be run so."""
    with contextlib.suppress(Exception):  # the evaluator lacks operators, and raises anything
        return make_run()(batches, True)
    return None
