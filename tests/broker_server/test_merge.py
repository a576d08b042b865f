"""The selective average: the worked examples of the specification, and its properties for any mix
of sub-models.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker_server.rounds.norm_statistics import combine_statistics
from broker_server.strategies.accumulator import coverage, finish, fold, start
from fleet_protocol.errors import PlanError
from models.draws import Window
from tests.broker_server.merging import CLASSES, LAYOUT, f32, layout_of, merged, oracle, plan_of

VECTORS = Path(__file__).parents[3] / "shared" / "vectors" / "vectors.json"


def vector(name):
    if not VECTORS.is_file():
        pytest.skip("the worked examples are not beside this checkout")
    return next(
        entry for entry in json.loads(VECTORS.read_text())["vectors"] if entry["id"] == name
    )


# The worked examples of the specification, appendix A.


def test_h2_nested_widths_overlap():
    """Each ring of a hidden weight is averaged over the devices that hold it."""
    case = vector("H2-overlap")
    layout = layout_of({"w": ("a", "b")}, {"a": 4, "b": 4, "classes": CLASSES})
    state = start(layout)
    for name, client in case["inputs"]["clients"].items():
        fold(state, name, plan_of(layout, client["s"]), {"w": f32(client["returned"])})
    np.testing.assert_array_equal(coverage(state, "w"), case["expected"]["count"])
    after = finish(state, {"w": f32(case["inputs"]["W_global"])})
    np.testing.assert_allclose(after["w"], case["expected"]["W_new"], rtol=1e-6)


def test_h3_rows_of_absent_labels_are_left_out():
    """A row of the output layer is taken only from devices that hold its label."""
    case = vector("H3-classifier")
    layout = layout_of({"w": ("classes", "b"), "bias": ("classes",)}, {"b": 4, "classes": 4})
    state = start(layout)
    for client in case["inputs"]["clients"]:
        update = {"w": f32(client["returned_W"]), "bias": f32(client["returned_b"])}
        fold(state, client["name"], plan_of(layout, client["s"]), update, labels=client["labels"])
    np.testing.assert_array_equal(coverage(state, "w"), case["expected"]["W_count"])
    np.testing.assert_array_equal(coverage(state, "bias"), case["expected"]["b_count"])
    after = finish(
        state, {"w": f32(case["inputs"]["W_global"]), "bias": f32(case["inputs"]["b_global"])}
    )
    np.testing.assert_allclose(after["w"], case["expected"]["W_new"], rtol=1e-6)
    np.testing.assert_allclose(after["bias"], case["expected"]["b_new"], rtol=1e-6)


def test_h4_a_whole_net():
    """Slice, add a constant, merge: every tensor of a small net with a norm."""
    case = vector("H4-tiny-net")
    shapes = {
        "W1": ("h", "inputs"),
        "b1": ("h",),
        "gamma": ("h",),
        "beta": ("h",),
        "W2": ("classes", "h"),
        "b2": ("classes",),
    }
    layout = layout_of(shapes, {"h": 4, "inputs": 3, "classes": 3}, classes=3)
    old = {name: f32(value) for name, value in case["inputs"]["global_"].items()}
    state = start(layout)
    for client in case["inputs"]["clients"]:
        plan = plan_of(layout, client["s"])
        update = {
            name: value + np.float32(client["delta"]) for name, value in plan.slice(old).items()
        }
        fold(state, plan.title, plan, update, labels=client["labels"])
    for name, count in case["expected"]["count"].items():
        np.testing.assert_array_equal(
            np.broadcast_to(coverage(state, name), old[name].shape), count
        )
    for name, value in finish(state, old).items():
        np.testing.assert_allclose(value, case["expected"]["new"][name], rtol=1e-6)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_r6_rolling_windows(direction):
    """Windows that wrap around are merged where they lie; rows and columns nobody holds stay."""
    case = vector("R6-aggregate")
    expected = case["expected"]["paper" if direction == "up" else "code"]
    layout = layout_of({"w": ("a", "b")}, {"a": 4, "b": 4, "classes": CLASSES})
    state = start(layout)
    for client in expected["clients"]:
        plan = plan_of(
            layout, client["s"], Window(direction=direction), round_index=case["inputs"]["j"]
        )
        size = len(client["out_idx"])
        fold(state, plan.title, plan, {"w": np.full((size, size), client["delta"], np.float32)})
    np.testing.assert_array_equal(coverage(state, "w"), expected["count"])
    after = finish(state, {"w": f32(case["inputs"]["W_global"])})
    np.testing.assert_allclose(after["w"], expected["W_new"], rtol=1e-6)


def test_h8_statistics_of_one_device_and_of_two():
    """The running mean over batches is kept; pooling adds what separates the devices' means."""
    case = vector("H8-sbn")
    batches = [np.asarray(batch) for batch in case["inputs"]["batches"]]
    mean = np.mean([batch.mean() for batch in batches])
    variance = np.mean([batch.var(ddof=1) for batch in batches])
    only_device = [(len(batches), {"stat.n.mean": f32([mean]), "stat.n.var": f32([variance])})]
    for rule in ("pooled", "per_client"):
        statistics = combine_statistics(only_device, ["n"], rule)
        np.testing.assert_allclose(
            statistics["stat.n.mean"], case["expected"]["running_mean"], rtol=1e-6
        )
        np.testing.assert_allclose(
            statistics["stat.n.var"], case["expected"]["running_var"], rtol=1e-6
        )
    # One batch on a first device, two on a second: means 2 and 8, within-batch variances 2 and 6
    # (all unbiased).
    two = [
        (1, {"stat.n.mean": f32([2]), "stat.n.var": f32([2])}),
        (2, {"stat.n.mean": f32([8]), "stat.n.var": f32([6])}),
    ]
    assert combine_statistics(two, ["n"], "per_client")["stat.n.mean"] == pytest.approx(6)
    assert combine_statistics(two, ["n"], "per_client")["stat.n.var"] == pytest.approx(
        (2 + 2 * 6) / 3
    )
    between = (1 * 2**2 + 2 * 8**2) / 3 - 6**2
    assert combine_statistics(two, ["n"], "pooled")["stat.n.var"] == pytest.approx(
        (2 + 2 * 6) / 3 + between
    )


# Properties.


@st.composite
def updates(draw, *, full=False):
    """A list of (plan key, plan, tensors, weight, labels), and the old weights."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    number = draw(st.integers(0, 20))
    drawn_updates = []
    for index in range(draw(st.integers(1, 6))):
        width = 1.0 if full else draw(st.sampled_from([1.0, 0.5, 0.34, 0.2]))
        depth = 2 if full else draw(st.sampled_from([1, 2]))
        kind = "static" if full else draw(st.sampled_from(["static", "rolling", "random"]))
        plan = plan_of(LAYOUT, width, kind, depth, round_index=number, seed=index)
        key = f"{kind}-{width}-{depth}" + (f"-{index}" if kind == "random" else "")
        tensors = {
            name: rng.standard_normal(tensor.local_shape, np.float32)
            for name, tensor in plan.tensors.items()
        }
        weight = draw(st.sampled_from([1.0, 2.0, 7.5]))
        labels = None if full else draw(st.none() | st.sets(st.integers(0, CLASSES - 1)))
        drawn_updates.append((key, plan, tensors, weight, labels))
    return drawn_updates, {
        tensor.name: rng.standard_normal(tensor.shape, np.float32) for tensor in LAYOUT.parameters
    }


@given(updates())
@settings(max_examples=60, deadline=None)
def test_every_entry_is_the_weighted_mean_of_those_that_hold_it(case):
    """Any mix of widths, depths, plans, weights and labels agrees with the definition, entry by
    entry.
    """
    case_updates, old = case
    after = merged(case_updates, old)
    for name, (expected, _) in oracle(case_updates, old).items():
        np.testing.assert_allclose(after[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


@given(updates())
@settings(max_examples=40, deadline=None)
def test_entries_that_nobody_holds_keep_their_bits(case):
    """What no update covers is the old value, exactly."""
    case_updates, old = case
    after = merged(case_updates, old)
    for name, (_, count) in oracle(case_updates, old).items():
        np.testing.assert_array_equal(after[name][count == 0], old[name][count == 0])


@given(updates())
@settings(max_examples=40, deadline=None)
def test_weights_of_an_entry_sum_to_one(case):
    """Updates that all say 1 merge to 1 wherever anyone holds the entry."""
    case_updates, old = case
    updates_of_ones = [
        (key, plan, {n: np.ones_like(t) for n, t in tensors.items()}, w, c)
        for key, plan, tensors, w, c in case_updates
    ]
    after = merged(updates_of_ones, old)
    for name, (_, count) in oracle(case_updates, old).items():
        np.testing.assert_allclose(after[name][count > 0], 1, rtol=1e-6)


@given(updates(full=True))
@settings(max_examples=30, deadline=None)
def test_full_tiers_are_federated_averaging(case):
    """When every device holds everything the result is the weighted mean of whole models."""
    case_updates, old = case
    after = merged(case_updates, old)
    total = sum(weight for *_, weight, _ in case_updates)
    for name, value in after.items():
        mean = (
            sum(np.float64(weight) * tensors[name] for _, _, tensors, weight, _ in case_updates)
            / total
        )
        np.testing.assert_allclose(value, mean, rtol=1e-5, atol=1e-6)


def test_an_update_that_does_not_fit_its_plan_adds_nothing():
    """A missing tensor, a wrong shape or type is an error that names the tensor, and the sums stay
    as they were.
    """
    plan = plan_of(LAYOUT, 0.5)
    good = {name: np.ones(tensor.local_shape, np.float32) for name, tensor in plan.tensors.items()}
    for bad, problem in (
        ({name: value for name, value in good.items() if name != "deep"}, "missing"),
        (good | {"deep": good["deep"][:1]}, r"float32 \(1, 3\)"),
        (good | {"deep": good["deep"].astype(np.float64)}, r"float64 \(3, 3\)"),
    ):
        state = start(LAYOUT)
        with pytest.raises(
            PlanError,
            match=rf"tensor deep of an update should be float32 \(3, 3\) but is {problem}$",
        ):
            fold(state, "k", plan, bad)
        assert not any(value.any() for value in state.sums.values())
    with pytest.raises(PlanError, match="weight"):
        fold(start(LAYOUT), "k", plan, good, weight=0.0)


def test_updates_that_are_no_numbers_are_judged_afterwards():
    """Overflow and infinities of both signs pass through the sums without a warning."""
    plan = plan_of(LAYOUT, 1.0)
    state = start(LAYOUT)
    for value in (3e38, 3e38, -np.inf):
        update = {
            name: np.full(tensor.local_shape, value, np.float32)
            for name, tensor in plan.tensors.items()
        }
        fold(state, "k", plan, update, weight=2.0)
    assert np.isnan(state.sums["bias"]).all()


def test_a_finished_accumulator_is_spent():
    """Its sums belong to the result, so it takes no more."""
    plan = plan_of(LAYOUT, 1.0)
    good = {name: np.ones(tensor.local_shape, np.float32) for name, tensor in plan.tensors.items()}
    state = start(LAYOUT)
    fold(state, "k", plan, good)
    finish(state, good)
    with pytest.raises(
        PlanError, match=r"^this accumulator was finished; start another for the next merge$"
    ):
        fold(state, "k", plan, good)
    with pytest.raises(PlanError, match=r"^this accumulator was finished already$"):
        finish(state, good)


def test_kernel_positions_share_a_count():
    """Dimensions that no plan cuts do not appear in the counts, so a kernel costs one number, not
    nine.
    """
    state = start(LAYOUT)
    for width in (1.0, 0.5):
        plan = plan_of(LAYOUT, width)
        fold(
            state,
            plan.title,
            plan,
            {n: np.ones(t.local_shape, np.float32) for n, t in plan.tensors.items()},
        )
    assert coverage(state, "conv").shape == (6, 1, 1, 1)
    assert coverage(state, "out").shape == (CLASSES,)


def test_memory_does_not_grow_with_the_number_of_updates():
    """Peak resident memory of merging 4 and 40 updates differs by less than a tenth of the
    model.
    """
    script = (
        "import sys; from benchmarks.merge import _memory; "
        "print(_memory(int(sys.argv[1]))['models'])"
    )
    peaks = [
        float(
            subprocess.run(
                [sys.executable, "-c", script, str(count)],
                capture_output=True,
                check=True,
                timeout=120,
                cwd=Path(__file__).parents[2],
            ).stdout
        )
        for count in (4, 40)
    ]
    assert 1.0 <= peaks[0] <= 3.0
    assert abs(peaks[1] - peaks[0]) < 0.1
