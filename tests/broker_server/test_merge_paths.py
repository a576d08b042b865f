"""The ways through the merge that small models do not take: scattered units, and updates larger
than the scratch.
"""

import numpy as np
import pytest

from broker_server.strategies.accumulator import coverage, fold, start
from tests.broker_server.merging import CLASSES, LAYOUT, layout_of, merged, oracle, plan_of

WIDE = layout_of(
    {"conv": ("a", "inputs", "kernel"), "deep": ("b", "a"), "head": ("classes", "a")},
    {"a": 640, "b": 24, "inputs": 2, "kernel": 3, "classes": CLASSES},
)


def wide_updates():
    """Random units so scattered that they are moved by meshes: of plain layers, of kernels, of
    labelled rows.
    """
    rng = np.random.default_rng(11)
    updates_of_devices = []
    for key, weight, labels in (
        ("a", 1.0, {0, 2}),
        ("b", 2.0, {1, 2}),
        ("c", 0.5, None),
        ("c", 7.5, {0}),
    ):
        plan = plan_of(WIDE, 0.5, "random", seed=ord(key))
        tensors = {
            name: rng.standard_normal(tensor.local_shape, np.float32)
            for name, tensor in plan.tensors.items()
        }
        updates_of_devices.append((key, plan, tensors, weight, labels))
    return updates_of_devices, {
        tensor.name: rng.standard_normal(tensor.shape, np.float32) for tensor in WIDE.parameters
    }


def test_scattered_units_are_merged_as_any_others():
    """Meshes instead of boxes: the sums, the counts and what nobody holds are those of the
    definition.
    """
    updates_of_devices, old = wide_updates()
    for _, plan, *_ in updates_of_devices:
        for tensor in plan.tensors.values():
            assert not isinstance(tensor.regions[0].whole[0], slice), tensor.name
    after = merged(updates_of_devices, old, WIDE)
    for name, (expected, count) in oracle(updates_of_devices, old, WIDE).items():
        np.testing.assert_allclose(after[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(after[name][count == 0], old[name][count == 0])
        assert (count == 0).any(), name


@pytest.mark.parametrize("values", [1, 2, 5, 18, 36, 1000])
def test_a_weighted_update_is_added_in_pieces_of_any_size(values):
    """However few products fit beside the sums, each entry is multiplied and added once."""
    rng = np.random.default_rng(0)
    plan = plan_of(LAYOUT, 1.0)
    update = {
        name: rng.standard_normal(tensor.local_shape, np.float32)
        for name, tensor in plan.tensors.items()
    }
    state = start(LAYOUT)
    state.scratch = np.empty(values, np.float32)
    fold(state, "k", plan, update, weight=3.0)
    for name, total in state.sums.items():
        np.testing.assert_array_equal(total, update[name] * np.float32(3))


def test_counts_are_the_smallest_arrays_that_tell():
    """Float32, one number along whatever every plan keeps whole, and so for a parameter that nobody
    holds.
    """
    state = start(LAYOUT)
    assert coverage(state, "conv").shape == (1, 1, 1, 1)
    plan = plan_of(LAYOUT, 0.5, depth=1)
    update = {
        name: np.ones(tensor.local_shape, np.float32) for name, tensor in plan.tensors.items()
    }
    fold(state, plan.title, plan, update, weight=0.5)
    fold(state, plan.title, plan, update)
    assert state.updates == 2
    np.testing.assert_array_equal(coverage(state, "bias"), [1.5, 1.5, 1.5, 0, 0, 0])
    assert coverage(state, "deep").shape == (1, 1)
    assert coverage(state, "deep") == 0
    assert {coverage(state, tensor.name).dtype for tensor in LAYOUT.parameters} == {
        np.dtype(np.float32)
    }


def test_counts_are_added_in_single_precision_one_plan_after_another():
    """With labels as without: the division sees the same bits wherever devices hold the same."""
    state = start(LAYOUT)
    expected = np.float32(0)
    for number, weight in enumerate((0.1, 0.3, 0.2, 0.7)):
        plan = plan_of(LAYOUT, 1.0)
        update_of_ones = {
            name: np.ones(tensor.local_shape, np.float32) for name, tensor in plan.tensors.items()
        }
        fold(state, str(number), plan, update_of_ones, weight=weight, labels=range(CLASSES))
        expected += np.float32(weight)
    assert coverage(state, "bias") == expected
    np.testing.assert_array_equal(coverage(state, "out"), np.full(CLASSES, expected))


def test_the_result_is_float32_in_the_order_of_the_layout():
    """Whatever order the update has."""
    plan = plan_of(LAYOUT, 1.0)
    update = {
        name: np.ones(tensor.local_shape, np.float32)
        for name, tensor in reversed(plan.tensors.items())
    }
    after = merged([("k", plan, update, 2.0, None)], update)
    assert [*after] == [tensor.name for tensor in LAYOUT.parameters]
    assert {value.dtype for value in after.values()} == {np.dtype(np.float32)}
