"""Slicing and merging move exactly the entries a plan keeps, and nothing else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_protocol.errors import PlanError
from models import Axis, AxisKind, Dim, Statistic, Window, compile_plan, make_plan, slice_weights
from models.slicing import MAX_BOXES, compile_tensor, tensor_regions
from tests.models.layouts import entries, make_layout, noise, regions, scatter, scatter_add, zeros

KINDS = st.sampled_from(["static", "rolling", "random"])


@st.composite
def layouts(draw):
    """A model of a few tensors over grouped, plain and fixed axes, flattened dimensions among
    them.
    """
    groups = draw(st.integers(1, 3))
    axes = [
        Axis("in", draw(st.integers(1, 4)), AxisKind.FIXED),
        Axis("a", draw(st.integers(1, 9))),
        Axis("heads", groups * draw(st.integers(1, 5)), groups=groups),
        Axis("labels", draw(st.integers(1, 5)), AxisKind.FIXED),
    ]
    inner = draw(st.integers(1, 3))
    outer = draw(st.integers(1, 3))
    joined = (Dim("heads", inner, outer), Dim("in"), Dim("a", outer=2))
    tensors = {
        "first.weight": (Dim("a"), Dim("in"), Dim("in")),
        "first.bias": (Dim("a"),),
        "heads.weight": (Dim("heads"), Dim("a", inner)),
        "back.weight": (Dim("a"), Dim("heads")),
        "head.weight": (Dim("labels"), Dim("a")),
        "head.bias": (Dim("labels"),),
        "temperature": (),
        "gates": (Dim("a", inner, outer), Dim("heads", inner, outer, shared=True)),
        "per_group": (Dim("heads"), Dim("heads", outer=outer, shared=True)),
        "joined": (Dim("a", outer=outer, more=joined), Dim("in")),
    }
    return make_layout(axes, tensors, label_axes=("labels",))


@st.composite
def planned(draw):
    """A layout and a plan of one of its tiers."""
    layout = draw(layouts())
    plan = make_plan(
        layout,
        layout.tier(draw(st.floats(0.01, 1.0))),
        Window(draw(KINDS), draw=draw(st.sampled_from(["tied", "per_layer"]))),
        round_index=draw(st.integers(0, 30)),
        seed=draw(st.integers(0, 99)),
    )
    return layout, plan


@given(planned())
def test_a_slice_is_the_outer_product_of_the_kept_lists(case):
    """Every sub-model tensor is W[lists of its dimensions], a contiguous copy of the same dtype."""
    layout, plan = case
    weights = noise(layout)
    cut = slice_weights(layout, plan, weights)
    assert {name: value.shape for name, value in cut.items()} == layout.shapes(plan.tier)
    assert [*cut] == [parameter.name for parameter in layout.kept(plan.tier)]
    for parameter in layout.parameters:
        np.testing.assert_array_equal(
            cut[parameter.name], weights[parameter.name][entries(layout, plan, parameter)]
        )
        assert cut[parameter.name].dtype == np.float32
        assert cut[parameter.name].flags.c_contiguous
        assert not np.shares_memory(cut[parameter.name], weights[parameter.name])


@given(planned())
def test_what_nobody_may_write_to_is_not_copied_where_it_is_one_piece(case):
    """A mapped version is handed on as it lies, and as safe from writing; the entries are those of
    a copy.
    """
    layout, plan = case
    weights = noise(layout)
    copied = slice_weights(layout, plan, weights)
    for value in weights.values():
        value.flags.writeable = False
    for name, value in slice_weights(layout, plan, weights).items():
        np.testing.assert_array_equal(value, copied[name])
        assert type(value) is np.ndarray
        assert value.flags.c_contiguous
        assert value.flags.writeable != np.shares_memory(value, weights[name])
        if value.shape == weights[name].shape and plan.kind == "static":
            assert np.shares_memory(value, weights[name])


@given(planned())
def test_scatter_undoes_slice(case):
    """What was cut out and written back elsewhere is cut out again unchanged, and the rest
    stays.
    """
    layout, plan = case
    weights = noise(layout)
    base = noise(layout, seed=1)
    cut = slice_weights(layout, plan, weights)
    merged = scatter(layout, plan, cut, base)
    for name, value in slice_weights(layout, plan, merged).items():
        np.testing.assert_array_equal(value, cut[name])
    for parameter in layout.parameters:
        expected = base[parameter.name].copy()
        mesh = entries(layout, plan, parameter)
        expected[mesh] = weights[parameter.name][mesh]
        np.testing.assert_array_equal(merged[parameter.name], expected)
        np.testing.assert_array_equal(base[parameter.name], noise(layout, seed=1)[parameter.name])


@given(planned(), st.data())
def test_adding_ones_counts_the_coverage(case, data):
    """Sums of ones and the definition agree, with and without a label rule."""
    layout, plan = case
    labels = layout.axes["labels"].size
    rows = data.draw(st.none() | st.lists(st.integers(0, labels - 1)).map(np.array))
    rule = None if rows is None else {"labels": rows}
    update_of_ones = {
        name: np.ones(shape, np.float32) for name, shape in layout.shapes(plan.tier).items()
    }
    sums = zeros(layout, np.float32)
    compiled = compile_plan(layout, plan)
    for _ in range(2):
        scatter_add(layout, compiled, sums, update_of_ones, rule)
    for parameter in layout.parameters:
        expected = np.zeros(parameter.shape)
        expected[entries(layout, plan, parameter)] = 2
        if rows is not None and parameter.name.startswith("head."):
            expected[np.setdiff1d(np.arange(labels), rows)] = 0
        np.testing.assert_array_equal(sums[parameter.name], expected)


@given(planned())
def test_a_sum_of_updates_adds_every_entry_once(case):
    """Adding box by box is W[mesh] += update."""
    layout, plan = case
    update = slice_weights(layout, plan, noise(layout))
    sums = noise(layout, seed=1)
    scatter_add(layout, plan, sums, update)
    for parameter in layout.parameters:
        expected = noise(layout, seed=1)[parameter.name]
        expected[entries(layout, plan, parameter)] += update[parameter.name]
        np.testing.assert_array_equal(sums[parameter.name], expected)


def test_boxes_are_boxes_up_to_their_limit():
    """As many runs as there may be boxes are boxes still; one more is a mesh."""
    size = 2 * MAX_BOXES + 2
    layout = make_layout([Axis("a", size)], {"w": (Dim("a"),)})
    for count in (MAX_BOXES, MAX_BOXES + 1):
        tensor = compile_tensor(layout, "w", (Dim("a"),), [{"a": np.arange(0, 2 * count, 2)}])
        assert len(tensor.regions) == (count if count == MAX_BOXES else 1)
        assert isinstance(tensor.regions[0].whole[0], slice) == (count == MAX_BOXES)


def test_a_label_rule_holds_on_any_dimension():
    """A table with a column for each label keeps the columns of the given ones; a mesh of scattered
    units as well.
    """
    axes = [Axis("a", 640), Axis("labels", 3, AxisKind.FIXED)]
    layout = make_layout(axes, {"table": (Dim("a"), Dim("labels"))}, label_axes=("labels",))
    for kind in ("static", "random"):
        plan = make_plan(layout, layout.tier(0.5), kind, seed=2)
        sums = zeros(layout)
        update = {"table": np.ones((320, 3), np.float32)}
        scatter_add(layout, plan, sums, update, {"labels": np.array([2, 0])})
        expected = np.zeros((640, 3))
        expected[np.ix_(plan.indices["a"], [0, 2])] = 1
        np.testing.assert_array_equal(sums["table"], expected)


@pytest.mark.parametrize("kind", ["static", "rolling", "random"])
def test_regions_meet_each_entry_once(kind):
    """Static plans need one box, rolling ones four at most, scattered ones a mesh; the entries are
    the same.
    """
    layout = make_layout(
        [Axis("o", 64), Axis("i", 48), Axis("k", 3, AxisKind.FIXED)],
        {"w": (Dim("o"), Dim("i"), Dim("k"))},
    )
    plan = make_plan(layout, layout.tier(0.5), kind, round_index=40, seed=3)
    met_regions = regions(layout, plan, layout.parameters[0])
    assert len(met_regions) == {"static": 1, "rolling": 4, "random": 1}[kind]
    seen = np.zeros((64, 48, 3), int)
    for whole, sub_region in met_regions:
        assert seen[whole].shape == np.empty((32, 24, 3))[sub_region].shape
        seen[whole] += 1
    assert seen.max() == 1
    assert seen.sum() == 32 * 24 * 3


def test_a_mesh_leaves_trailing_whole_dimensions_together():
    """Kernels of a scattered convolution are copied as blocks: the mesh spans the channels
    alone.
    """
    layout = make_layout(
        [Axis("o", 64), Axis("i", 64), Axis("k", 3, AxisKind.FIXED)],
        {"w": (Dim("o"), Dim("i"), Dim("k"), Dim("k"))},
    )
    plan = make_plan(layout, layout.tier(0.5), "random", seed=1)
    (region,) = regions(layout, plan, layout.parameters[0])
    assert MAX_BOXES < 16 * 16  # about 16 runs on each side
    assert [places.size for places in region.whole] == [32, 32]


def test_statistics_travel_with_the_parameters_when_given():
    """The statistics of a static batch norm are cut and merged by its axis; they may also be
    absent.
    """
    layout = make_layout(
        [Axis("a", 4)],
        {"norm.weight": (Dim("a"),)},
        statistics=(Statistic("norm", (Dim("a"),), "head"),),
    )
    plan = make_plan(layout, layout.tier(0.5), "rolling", round_index=3)
    weights = {"norm.weight": np.arange(4.0), "stat.norm.mean": np.arange(4.0) + 10}
    cut = slice_weights(layout, plan, weights)
    assert {name: list(value) for name, value in cut.items()} == {
        "norm.weight": [3, 0],
        "stat.norm.mean": [13, 10],
    }


def _small():
    layout = make_layout(
        [Axis("a", 4), Axis("labels", 3, AxisKind.FIXED)],
        {"w": (Dim("a"), Dim("a")), "head": (Dim("labels"), Dim("a"))},
        label_axes=("labels",),
    )
    return layout, make_plan(layout, layout.tier(0.5))


@pytest.mark.parametrize("rows", [[-1], [0, 3]])
def test_rows_outside_the_label_axis_are_refused(rows):
    """A label that the model does not have is named with the labels it has."""
    layout, plan = _small()
    with pytest.raises(PlanError, match=r"rows .* of labels are outside 0 to 2$"):
        tensor_regions(compile_plan(layout, plan).tensors["head"], {"labels": np.array(rows)})


def test_global_weights_of_another_shape_are_refused():
    """Slicing checks what it cuts from."""
    layout, plan = _small()
    with pytest.raises(
        PlanError, match=r"tensor w of the global weights should be \(4, 4\) but is \(2, 2\)"
    ):
        slice_weights(layout, plan, {**noise(layout), "w": np.ones((2, 2))})


def test_global_weights_that_lack_a_tensor_are_refused():
    """The message names the model, the tier and the tensor."""
    layout, plan = _small()
    with pytest.raises(
        PlanError, match=r"by_hand w0.50-d1: tensor head is missing \(1 missing in all\)"
    ):
        slice_weights(layout, plan, {"w": noise(layout)["w"]})
