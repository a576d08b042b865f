"""Trained shares: what a tier trains of the blocks that it has, and in which order tiers come."""

from dataclasses import replace

import pytest

from fleet_protocol.errors import PlanError
from models import Axis, AxisKind, Dim, Tier, make_plan
from models.block_names import STEM
from models.shares import (
    counted_blocks,
    frozen_parameters,
    largest_first,
    tiers_of_window,
    trained_count,
)
from models.tier import HEAD_SHARE
from models.tier_grid import tier_grid
from tests.models.layouts import make_layout

MODULES = {
    "conv1.weight": STEM,
    "conv1.bias": STEM,
    "layer1.0.conv.weight": STEM,
    "layer1.0.conv.bias": STEM,
    "layer1.1.conv.weight": STEM,
    "scale": STEM,
    "head.weight": "head",
}
STACK = {
    "embed": STEM,
    "block.0.weight": "block1",
    "block.1.weight": "block2",
    "block.2.weight": "block3",
    "block.2.bias": "block3",
    "norm": "head",
    "head": "head",
}


def layout_of(blocks, depth=1):
    """A layout of vectors along one axis of eight units."""
    tensors = {name: (Dim("hidden"),) for name in blocks}
    return make_layout([Axis("hidden", 8)], tensors, blocks=blocks, depth=depth)


def test_a_model_with_a_depth_counts_the_blocks_of_the_tier():
    """The stem counts for no block and trains only with everything; the head always trains."""
    layout = layout_of(STACK, depth=3)
    assert counted_blocks(layout, layout.tier(1.0)) == ("block1", "block2", "block3")
    assert frozen_parameters(layout, layout.tier(1.0)) == ()
    below_two = ("embed", "block.0.weight")
    assert frozen_parameters(layout, Tier(1.0, 3, 0.5)) == below_two
    assert frozen_parameters(layout, Tier(1.0, 2, 0.5)) == below_two
    assert frozen_parameters(layout, Tier(1.0, 3, 0.01)) == (*below_two, "block.1.weight")
    assert frozen_parameters(layout, Tier(1.0, 3, 0.99)) == ("embed",)
    assert len(frozen_parameters(layout, Tier(1.0, 3, HEAD_SHARE))) == 5


def test_a_model_without_a_depth_counts_its_modules():
    """Members of lists and layers beside them, from the last one before the head."""
    layout = layout_of(MODULES)
    blocks = ("conv1", "layer1.0", "layer1.1", "scale")
    assert counted_blocks(layout, layout.tier(1.0)) == blocks
    half = frozen_parameters(layout, Tier(1.0, 1, 0.5))
    assert half == ("conv1.weight", "conv1.bias", "layer1.0.conv.weight", "layer1.0.conv.bias")
    assert frozen_parameters(layout, Tier(1.0, 1, HEAD_SHARE)) == tuple(MODULES)[:-1]


def test_a_share_that_trains_everything_is_refused():
    """It would be the same tier under another name."""
    layout = layout_of(MODULES)
    with pytest.raises(PlanError, match="trains all of the 4 blocks that a share counts"):
        frozen_parameters(layout, Tier(1.0, 1, 0.95))
    with pytest.raises(PlanError, match="trains all of the 0 blocks"):
        frozen_parameters(layout_of({"head": "head"}), Tier(1.0, 1, HEAD_SHARE))


def test_a_share_that_is_everything_at_one_depth_is_omitted_there():
    """The other combinations exist, so they are not refused with it."""
    layout = layout_of({"one": "block1", "two": "block2", "head": "head"}, depth=2)
    grid = tier_grid(layout, [1.0], [1, 2], [1.0, 0.5])
    assert [tier.id for tier in grid.tiers] == ["w1.00-d1", "w1.00-d2", "w1.00-d2-t0.50"]
    assert grid.omissions == (
        "w1.00-d1-t0.50 was omitted: at this depth, its share is everything, as in w1.00-d1",
    )
    grid = tier_grid(layout, [1.0], [1, 2], [0.5], windows=True)
    assert [tier.id for tier in grid.tiers] == ["w1.00-d2-t0.50", "w1.00-d2-t0.50-p1"]
    assert grid.omissions == (
        (
            "w1.00-d1-t0.50 was omitted: at this depth, its share is everything; add the share 1 to"
            " export w1.00-d1"
        ),
    )


def test_a_share_that_is_everything_at_every_depth_stays_to_be_refused():
    """Nothing would be left of what somebody asked for."""
    layout = layout_of({"one": "block1", "two": "block2", "head": "head"}, depth=2)
    grid = tier_grid(layout, [1.0], [1, 2], [1.0, 0.9])
    assert not grid.omitted
    with pytest.raises(PlanError, match=r"w1\.00-d1-t0\.90 trains all"):
        frozen_parameters(layout, grid.tiers[1])


def test_the_head_of_a_model_with_exits_is_refused():
    """Its exits belong to blocks, so a share without a block would train nothing."""
    layout = layout_of({"stem": "stem", "one": "block1", "two": "block2"}, depth=2)
    with pytest.raises(PlanError, match=r"w1\.00-d2-head trains nothing.*such as 0\.50"):
        frozen_parameters(layout, Tier(1.0, 2, HEAD_SHARE))


def test_a_window_lies_at_a_place_below_the_top():
    """Blocks above it are not trained either, and the head always is."""
    layout = layout_of(STACK, depth=3)
    third = Tier(1.0, 3, 1 / 3)
    places = tiers_of_window(layout, third)
    assert [tier.place for tier in places] == [0, 1, 2]
    trained = []
    for tier in places:
        trained.append(STACK.keys() - set(frozen_parameters(layout, tier)) - {"norm", "head"})
    assert trained == [{"block.2.weight", "block.2.bias"}, {"block.1.weight"}, {"block.0.weight"}]
    with pytest.raises(PlanError, match="its share has the places 0 to 2 among 3 blocks"):
        frozen_parameters(layout, Tier(1.0, 3, 1 / 3, 3))
    whole = layout.tier(1.0)
    head = Tier(1.0, 3, HEAD_SHARE)
    assert tiers_of_window(layout, whole) == (whole,)
    assert tiers_of_window(layout, head) == (head,)


def test_a_plan_names_what_is_not_trained():
    """It holds these parameters, and slices them for the device."""
    layout = layout_of(STACK, depth=3)
    plan = make_plan(layout, Tier(0.5, 3, 0.5))
    assert plan.frozen == {"embed", "block.0.weight"}
    assert make_plan(layout, Tier(0.5, 3)).frozen == frozenset()


def test_tiers_are_ordered_by_what_they_train():
    """Half of the width trains more than the head of the whole model; ids order equal tiers."""
    layout = layout_of(STACK, depth=3)
    tiers = [Tier(1.0, 3, HEAD_SHARE), Tier(0.5, 3), Tier(1.0, 3, 0.5), Tier(1.0, 3), Tier(1.0, 2)]
    assert [trained_count(layout, tier) for tier in tiers] == [16, 28, 40, 56, 40]
    ids = [tier.id for tier in largest_first(layout, tiers)]
    assert ids == ["w1.00-d3", "w1.00-d3-t0.50", "w1.00-d2", "w0.50-d3", "w1.00-d3-head"]


def test_a_separate_head_needs_a_tier_that_trains_everything():
    """A trained share cannot have labels of its own."""
    axes = [Axis("hidden", 8), Axis("classes", 3, AxisKind.FIXED)]
    tensors = {"a": (Dim("hidden"),), "b": (Dim("hidden"),), "out": (Dim("classes"), Dim("hidden"))}
    blocks = {"a": "block1", "b": "block2"}
    layout = make_layout(axes, tensors, blocks=blocks, depth=2, label_axes=("classes",))
    replace(layout, heads={"w1.00-d1": 2})
    with pytest.raises(PlanError, match=r"w1\.00-d1-head cannot have its own head"):
        replace(layout, heads={"w1.00-d1-head": 2})
