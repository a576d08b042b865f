"""A few entries at an edge of a ReLU do not refuse a right graph; the entries of a fault do."""

import numpy as np
import pytest

from fleet_protocol.errors import ExportError
from fleet_protocol.manifest import CheckSpec
from trainer_export.check import WorstDeviation, repeated


def deviating(places_of):
    """Return a run whose tensor of 400 entries is off at some places of each attempt."""
    attempts = []

    def run(_batches, exact: bool) -> CheckSpec:
        expected = np.ones(400, np.float32)
        found = expected.copy()
        for place, off in places_of(len(attempts)):
            found[place] += off
        attempts.append(exact)
        worst = WorstDeviation(sizes=[3])
        worst.compare({"w": found}, {"w": expected}, {"w": expected})
        return worst.report("train", 1)

    return run


class Batches:
    """Batches whose numbers do not matter."""

    def again(self, attempt):
        return self


def test_entries_that_deviate_once_are_edges_and_are_counted():
    """Other ones with each batch, few and not far off."""
    spec = repeated(deviating(lambda attempt: [(attempt, 0.02), (attempt + 50, 0.01)]), Batches())
    assert spec.worst_relative < 1e-4
    assert spec.worst_tensor == "w but 2 at an edge"


@pytest.mark.parametrize(
    "places_of",
    [
        lambda attempt: [(7, 0.02), (attempt + 50, 0.01)],  # one is always the same
        lambda attempt: [(place + attempt, 0.01) for place in range(0, 400, 40)],  # too many
        lambda attempt: [(attempt, 0.5)],  # too far off
        lambda attempt: [(attempt, np.nan)],
    ],
    ids=["same", "many", "far", "nan"],
)
def test_entries_of_a_fault_refuse_the_graph(places_of):
    with pytest.raises(ExportError, match="bug in a lowering"):
        repeated(deviating(places_of), Batches())


def deviations_at(entries):
    """Return the deviations of a step in which some entries of 400 are off."""
    expected = np.ones(400, np.float32)
    found = expected.copy()
    for place, off in entries:
        found[place] += off
    worst = WorstDeviation(sizes=[3])
    worst.compare({"w": found}, {"w": expected}, {"w": expected})
    return worst


def test_a_run_ends_with_the_step_that_refuses_it():
    """A few entries refuse a run in float32 only, since float64 may find them to be an edge."""
    right = deviations_at([])
    edge = deviations_at([(7, 0.02)])
    fault = deviations_at([(place, 0.02) for place in range(0, 400, 4)])
    assert not right.is_refused(exact=False)
    assert edge.is_refused(exact=False)
    assert not edge.is_refused(exact=True)
    assert fault.is_refused(exact=True)
