"""FedRolex: balance of windows, refusal of windows with gaps, weightings, and expectations of
random draws.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker_server.strategies import accumulator as merge
from broker_server.strategies.fedrolex import check_coverage, plan_window
from broker_server.strategies.strategy import Contribution, PlanRequest
from broker_server.strategies.width_merge import layer_factor
from fleet_protocol.errors import PlanError
from fleet_protocol.messages import TaskMetrics
from models import Axis, AxisKind, Dim, Tier, Window, compile_plan
from tests.broker_server.methods import built, merged
from tests.models.layouts import make_layout, noise

LAYOUT = make_layout(
    [
        Axis("k", 6),
        Axis("heads", 8, groups=2),
        Axis("in", 3, AxisKind.FIXED),
        Axis("classes", 2, AxisKind.FIXED),
    ],
    {
        "first": (Dim("k"), Dim("in")),
        "query": (Dim("heads"), Dim("k")),
        "table": (Dim("in"), Dim("k")),
        "bias": (Dim("k"),),
        "head": (Dim("classes"), Dim("k")),
    },
    label_axes=("classes",),
)


METRICS = TaskMetrics(
    examples=1, batches=1, labels=(0, 1), fetch_seconds=0, train_seconds=0, resident_bytes=0
)


def plan(width, version, window, device="d", layout=LAYOUT):
    return plan_window(layout, PlanRequest(Tier(width), device, version, 0), window).plan


@given(
    st.integers(2, 20), st.floats(0.05, 1.0), st.integers(1, 25), st.sampled_from(["up", "down"])
)
@settings(max_examples=60)
def test_a_window_is_accepted_exactly_if_it_reaches_every_unit(size, width, step, direction):
    """Within K rounds an accepted window covers the axis; a refused one never does."""
    layout = make_layout([Axis("k", size)], {"w": (Dim("k"),)})
    window = Window(step=step, direction=direction)
    static = Window(kind="static")
    kept = len(plan(width, 0, static, layout=layout).indices["k"])
    seen = {
        ((step * j if direction == "up" else -step * j) + offset) % size
        for j in range(size)
        for offset in range(kept)
    }
    if len(seen) < size:
        with pytest.raises(PlanError, match="never reaches"):
            check_coverage(layout, width, window)
        return
    planned = {
        int(unit)
        for j in range(size)
        for unit in plan(width, j, window, layout=layout).indices["k"]
    }
    assert planned == set(range(size))


@given(st.floats(0.1, 1.0), st.integers(0, 30))
@settings(max_examples=30)
def test_counts_are_equal_after_as_many_rounds_as_units(width, start):
    """Balance, wherever one starts to count, and alike in each attention head."""
    counts = {"k": np.zeros(6, int), "heads": np.zeros(8, int)}
    for j in range(start, start + 12):  # a common multiple of 6 units and 4 per head
        for axis, units in plan(width, j, Window()).indices.items():
            counts[axis][units] += 1
    for count in counts.values():
        assert len(set(count)) == 1


def test_devices_of_a_tier_share_a_window_but_not_a_random_draw():
    """The key of a plan tells which devices can share a blob of weights."""
    requests = [PlanRequest(Tier(0.5), device, 4, 7) for device in ("a", "b")]
    one, two = (plan_window(LAYOUT, request, Window()) for request in requests)
    assert one.key == two.key
    np.testing.assert_array_equal(one.plan.indices["k"], two.plan.indices["k"])
    drawn = [
        plan_window(LAYOUT, request, Window(kind="random", draw="per_layer"))
        for request in requests
    ]
    assert drawn[0].key != drawn[1].key
    assert drawn[0].plan.overrides
    again = plan_window(LAYOUT, requests[0], Window(kind="random", draw="per_layer")).plan
    for key, units in drawn[0].plan.overrides.items():
        np.testing.assert_array_equal(units, again.overrides[key])


def test_as_a_strategy_it_plans_windows_and_merges_as_heterofl():
    """All exported tiers may be used, the full one or not; a window with gaps is refused before any
    training.
    """
    tiers = (Tier(0.5), Tier(0.25))

    def made(**keys):
        return built({"name": "fedrolex", "fedrolex": keys}, LAYOUT, tiers)

    assert made().tiers == tiers
    request = PlanRequest(Tier(0.5), "d", 5, 0)
    assert list(made().plan(request).plan.indices["k"]) == [5, 0, 1]
    assert list(made(direction="down").plan(request).plan.indices["k"]) == [1, 2, 3]
    compiled = compile_plan(LAYOUT, made().plan(request).plan)
    old = noise(LAYOUT)
    update = Contribution(
        "d", request.tier, "k", compiled, compiled.slice(noise(LAYOUT, 7)), METRICS
    )
    same = merged(built({}, LAYOUT), [update], old)
    for name, value in merged(made(), [update], old).items():
        np.testing.assert_array_equal(value, same[name])
    with pytest.raises(PlanError, match="never reaches"):
        made(step=4)
    assert built({"name": "federated_dropout"}, LAYOUT).plan(request).key.endswith("/d")
    with pytest.raises(PlanError, match="remove plan"):
        built({"name": "fedrolex", "plan": "random"}, LAYOUT)


def contributions(window):
    rng = np.random.default_rng(3)
    made = []
    for device, width, labels in (
        ("a", 1.0, [0, 1]),
        ("b", 0.5, [0]),
        ("c", 0.5, None),
        ("d", 0.3, [1]),
    ):
        compiled = compile_plan(LAYOUT, plan(width, 5, window, device))
        update = {
            name: rng.standard_normal(tensor.local_shape).astype(np.float32)
            for name, tensor in compiled.tensors.items()
        }
        made.append((device, compiled, update, labels))
    return made


@pytest.mark.parametrize("window", [Window(), Window(kind="random", draw="per_layer")])
@pytest.mark.parametrize("weighting", ["avg", "updates"])
def test_counting_updates_cancels_to_the_plain_average(window, weighting):
    """Both are what the streaming merge computes, label rule included; uncovered entries keep their
    bits.
    """
    old = noise(LAYOUT)
    state = merge.start(LAYOUT, layer_factor(LAYOUT, weighting))
    plain = merge.start(LAYOUT)
    for device, compiled, update, labels in contributions(window):
        merge.fold(state, device, compiled, update, labels=labels)
        merge.fold(plain, device, compiled, update, labels=labels)
    for (name, value), other in zip(
        merge.finish(state, old).items(), merge.finish(plain, old).values(), strict=True
    ):
        np.testing.assert_allclose(value, other, atol=1e-6, err_msg=name)


def test_weighting_by_width_counts_the_rows_of_each_layer():
    """A layer of 6 rows counts twice a layer of 3; an embedding table counts its columns, a
    classifier its rows.
    """
    old = noise(LAYOUT)
    state = merge.start(LAYOUT, layer_factor(LAYOUT, "width"))
    for width, value in ((1.0, 1.0), (0.5, 4.0)):
        compiled = compile_plan(LAYOUT, plan(width, 0, Window(kind="static")))
        filled = {
            name: np.full(t.local_shape, value, np.float32) for name, t in compiled.tensors.items()
        }
        merge.fold(state, str(width), compiled, filled)
    new = merge.finish(state, old)
    for name, entry in (
        ("first", new["first"][0, 0]),
        ("bias", new["bias"][0]),
        ("table", new["table"][0, 0]),
    ):
        assert entry == pytest.approx((6 * 1 + 3 * 4) / 9), name
    assert new["query"][0, 0] == pytest.approx((8 * 1 + 4 * 4) / 12)
    assert new["head"][0, 0] == pytest.approx(2.5)
    assert new["bias"][5] == 1.0


def test_entries_nobody_holds_keep_their_bits():
    """As in the merge of every strategy."""
    old = noise(LAYOUT, 9)
    state = merge.start(LAYOUT, layer_factor(LAYOUT, "updates_width"))
    compiled = compile_plan(LAYOUT, plan(0.5, 2, Window()))
    blank = {
        name: np.zeros(tensor.local_shape, np.float32) for name, tensor in compiled.tensors.items()
    }
    merge.fold(state, "d", compiled, blank, labels=[0])
    new = merge.finish(state, old)
    held = set(plan(0.5, 2, Window()).indices["k"].tolist())
    for unit in range(6):
        assert (new["bias"][unit] == 0) == (unit in held)
        assert (new["head"][0, unit] == 0) == (unit in held)
        assert new["head"][1, unit] == old["head"][1, unit]


def test_a_window_that_stands_still_is_refused():
    """It would train the same units for ever."""
    with pytest.raises(PlanError, match="step >= 1"):
        Window(step=0)
