"""The coordinate-wise median: numpy's where everyone holds everything, robust where some lie, sound
for sub-models.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_server.strategies.strategy import Contribution
from fleet_protocol.errors import PlanError
from fleet_protocol.messages import TaskMetrics
from tests.broker_server.methods import built, merged
from tests.broker_server.test_merge import layout_of, plan_of
from tests.broker_server.test_refused_runs import prepare
from tests.models.layouts import scatter

LAYOUT = layout_of(
    {"w": ("hidden", "inputs"), "out": ("classes", "hidden")},
    {"hidden": 8, "inputs": 3, "classes": 4},
)
OLD = {"w": np.full((8, 3), 9, np.float32), "out": np.full((4, 8), 9, np.float32)}


def update(
    device: str, width: float, seed: int, labels=(0, 1, 2, 3), kind="static", **settings
) -> Contribution:
    plan = plan_of(LAYOUT, width, kind, **settings)
    draw = np.random.default_rng(seed)
    weights = {
        name: draw.normal(size=tensor.local_shape).astype(np.float32)
        for name, tensor in plan.tensors.items()
    }
    metrics = TaskMetrics(
        examples=10, batches=1, labels=labels, fetch_seconds=0, train_seconds=0, resident_bytes=0
    )
    return Contribution(device, LAYOUT.tier(width), f"{width}", plan, weights, metrics)


def merge(updates: list[Contribution], **config) -> dict[str, np.ndarray]:
    return merged(built({"name": "fedmedian", **config}, LAYOUT), updates, OLD)


@given(count=st.integers(1, 7))
def test_full_models_give_numpys_median(count):
    """With everyone at full width it is the median of all, for odd and even numbers."""
    updates = [update(f"d{i}", 1.0, i) for i in range(count)]
    found = merge(updates)
    for name in OLD:
        expected = np.median(
            np.stack([item.weights[name] for item in updates]).astype(np.float64), axis=0
        )
        np.testing.assert_allclose(found[name], expected, rtol=1e-6, atol=1e-7)


@given(liars=st.integers(0, 3), size=st.floats(10, 1e30))
def test_a_minority_of_liars_cannot_leave_the_range_of_the_honest(liars, size):
    """Three of seven may send anything: every entry stays between the honest ones; a mean would
    not.
    """
    honest = [update(f"d{i}", 1.0, i) for i in range(7 - liars)]
    lies = [update(f"z{i}", 1.0, 50 + i) for i in range(liars)]
    for item in lies:
        for name in item.weights:
            item.weights[name][...] = size
    found = merge([*honest, *lies])
    for name in OLD:
        values = np.stack([item.weights[name] for item in honest])
        assert (found[name] >= values.min(axis=0)).all()
        assert (found[name] <= values.max(axis=0)).all()


@pytest.mark.parametrize("kind", ["static", "rolling"])
def test_entries_are_decided_by_their_holders(kind):
    """Of three widths each entry is the median of those that hold it; what nobody holds stays."""
    updates = [
        update(f"d{i}", width, i, kind=kind, round_index=3)
        for i, width in enumerate((0.5, 0.5, 0.25, 0.25, 0.25))
    ]
    found = merge(updates)
    empty = {name: np.full_like(old, np.nan) for name, old in OLD.items()}
    values = [scatter(LAYOUT, item.plan, item.weights, empty) for item in updates]
    for name, old in OLD.items():
        stack = np.stack([value[name] for value in values])
        held = ~np.isnan(stack).all(axis=0)
        assert held.any()
        assert not held.all()
        np.testing.assert_array_equal(found[name][~held], old[~held])
        np.testing.assert_allclose(
            found[name][held], np.nanmedian(stack[:, held], axis=0), rtol=1e-6
        )


def test_rows_of_labels_count_only_from_those_that_hold_them():
    """A row of the output layer comes from the devices with the label; one that nobody has
    stays.
    """
    one = update("a", 1.0, 1, labels=(0, 1))
    two = update("b", 1.0, 2, labels=(1, 2))
    found = merge([one, two])["out"]
    np.testing.assert_array_equal(found[0], one.weights["out"][0])
    np.testing.assert_array_equal(found[2], two.weights["out"][2])
    np.testing.assert_allclose(
        found[1], (one.weights["out"][1] + two.weights["out"][1]) / 2, rtol=1e-6
    )
    np.testing.assert_array_equal(found[3], OLD["out"][3])
    everyone = merge([one, two], label_rule=False)["out"]
    np.testing.assert_allclose(
        everyone[3], (one.weights["out"][3] + two.weights["out"][3]) / 2, rtol=1e-6
    )


def test_arrival_order_does_not_matter():
    """Any order gives the same bits."""
    updates = [update(f"d{i}", width, i) for i, width in enumerate((1.0, 0.5, 0.5, 0.25))]
    first = merge(updates)
    second = merge(updates[::-1])
    for name in OLD:
        np.testing.assert_array_equal(first[name], second[name])


def test_weights_by_samples_are_refused(config):
    """A median of weighted devices is another method."""
    strategy = {"name": "fedmedian", "weighting": "samples"}
    with pytest.raises(
        PlanError, match="strategy fedmedian requires that every update has the same weight"
    ):
        prepare(config, strategy=strategy)
