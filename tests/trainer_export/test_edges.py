"""A few entries at an edge of a ReLU do not refuse a right graph; the entries of a fault do."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from fleet_protocol.errors import ExportError
from fleet_protocol.manifest import CheckSpec
from trainer_export.check import WorstDeviation
from trainer_export.repeated_check import repeated


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


@dataclass(frozen=True)
class Batches:
    """Batches whose numbers do not matter."""

    sizes: tuple[int, ...] = (8, 3)

    def again(self, attempt):
        return self

    def few(self):
        return replace(self, sizes=(3, 2))


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


def far_off(places):
    """Return places of 400 entries that deviate by more than an edge in some attempts."""

    def places_of(attempt):
        off = 0.02 if attempt % 5 in places else 0.5
        return [(place, off) for place in range(attempt, 400, 20)]

    return places_of


def test_the_graph_in_float64_decides_where_one_run_deviates_by_little():
    """Edges in every run, most of them before a batch norm, whose channels they move far."""
    run = deviating(far_off({2}))
    right = deviating(lambda _attempt: [])
    assert repeated(run, Batches(), lambda: right).worst_tensor == "w"


@pytest.mark.parametrize(
    ("near", "off"), [({2}, 0.001), (set(), 0.0)], ids=["fault in float64", "all far off"]
)
def test_a_graph_that_deviates_in_float64_or_far_in_each_run_is_refused(near, off):
    """The runs in float32 have to be near at least once, as a board computes in float32."""
    in_float64 = deviating(lambda _attempt: [(place, off) for place in range(0, 400, 2)])
    with pytest.raises(ExportError, match="train differs from PyTorch: w deviates"):
        repeated(deviating(far_off(near)), Batches(), lambda: in_float64)


def channels_that_deviate(right_sizes):
    """Return a run in which a tenth of the entries is off in batches of other sizes."""
    attempts = []

    def run(batches, exact):
        found = np.ones(400, np.float32)
        if not right_sizes.issuperset(batches.sizes):
            first = 40 * (len(attempts) % 10)
            found[first : first + 40] += 0.02
        attempts.append(exact)
        worst = WorstDeviation(sizes=list(batches.sizes))
        expected = {"w": np.ones(400, np.float32)}
        worst.compare({"w": found}, expected, expected)
        return worst.report("train", len(batches.sizes))

    return run


def test_a_right_graph_whose_every_large_batch_has_an_edge_agrees_on_few_samples():
    """An edge before a batch norm moves a whole channel, which are more than a few entries."""
    spec = repeated(channels_that_deviate({3, 2}), Batches())
    assert spec.worst_relative < 1e-4
    assert spec.batch_sizes == (3, 2)


@pytest.mark.parametrize("right_sizes", [{3}, {2}, set()])
def test_a_fault_of_some_batch_size_is_refused(right_sizes):
    with pytest.raises(ExportError, match="bug in a lowering"):
        repeated(channels_that_deviate(right_sizes), Batches())


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
