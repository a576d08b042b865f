"""Sizes that a width leaves, and the names of tiers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_protocol.errors import PlanError
from models import Axis, AxisKind, Tier
from models.tier import HEAD_SHARE


@pytest.mark.parametrize(
    ("size", "width", "kept"),
    [(64, 0.5, 32), (5, 0.5, 3), (3, 0.0625, 1), (100, 0.07, 7), (10, 1.0, 10)],
)
def test_a_width_keeps_the_ceiling_of_its_share(size, width, kept):
    """Sizes round up, never below one, and not up because of the last bit of a product."""
    assert Axis("a", size).kept(width) == kept


def test_heads_become_thinner_but_never_fewer():
    """A grouped axis rounds inside each group."""
    axis = Axis("attention", 256, groups=8)
    assert [axis.kept(width) for width in (1.0, 0.5, 0.0625, 0.01)] == [256, 128, 16, 8]


def test_a_fixed_axis_is_never_cut():
    """Classes and kernels keep their size at every width."""
    assert Axis("classes", 10, AxisKind.FIXED).kept(0.0625) == 10


@pytest.mark.parametrize(("size", "groups"), [(0, 1), (10, 3), (4, 0)])
def test_an_axis_that_does_not_split_into_its_groups_is_refused(size, groups):
    """The message names the axis and both numbers."""
    with pytest.raises(PlanError, match=rf"axis a: {size} units .* {groups} equal groups"):
        Axis("a", size, groups=groups)


@pytest.mark.parametrize(
    ("tier", "text"),
    [
        (Tier(1.0, 4), "w1.00-d4"),
        (Tier(0.5, 4), "w0.50-d4"),
        (Tier(0.0625, 1), "w0.0625-d1"),
        (Tier(1e-5, 12), "w0.00001-d12"),
        (Tier(1, 1), "w1.00-d1"),
        (Tier(1.0, 4, 0.5), "w1.00-d4-t0.50"),
        (Tier(0.5, 3, 1 / 3), "w0.50-d3-t0.3333333333333333"),
        (Tier(1.0, 4, HEAD_SHARE), "w1.00-d4-head"),
        (Tier(1.0, 12, 0.25, 3), "w1.00-d12-t0.25-p3"),
    ],
)
def test_a_tier_has_a_readable_id(tier, text):
    """Two decimals, or as many as the width needs; never an exponent."""
    assert tier.id == text
    assert Tier.parse(text) == tier


@given(st.floats(0, 1, exclude_min=True), st.integers(1, 99), st.floats(0, 1))
def test_every_tier_survives_its_id(width, depth, trained):
    """An id loses nothing of width and share."""
    assert Tier.parse(Tier(width, depth, trained).id) == Tier(width, depth, trained)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "w0.5-d4",
        "w0.500-d4",
        "w0.50",
        "w0.50-d0",
        "w0.00-d1",
        "w1.50-d1",
        "w0.50-d4/..",
        "w0.50-d٤",
        "w0.50-d4-t1.00",
        "w0.50-d4-t0.00",
        "w0.50-d4-t0.5",
        "w0.50-d4-thead",
        "w0.50-d4-t0.50-p0",
        "w0.50-d4-p1",
    ],
)
def test_only_the_written_form_of_an_id_is_read(text):
    """One tier has one id, so that an id can be a folder and a key."""
    with pytest.raises(PlanError):
        Tier.parse(text)


@pytest.mark.parametrize("width", [0, 0.0, -0.5, 1.01, float("nan")])
def test_a_width_outside_zero_to_one_is_refused(width):
    """The message says which widths there are."""
    with pytest.raises(PlanError, match=r"not in \(0, 1\]"):
        Tier(width, 1)


@pytest.mark.parametrize("trained", [-0.1, 1.01, float("nan")])
def test_a_trained_share_outside_zero_to_one_is_refused(trained):
    """The message says what the bounds mean."""
    with pytest.raises(PlanError, match=r"trained share .* is not in \[0, 1\]"):
        Tier(1.0, 1, trained)


@pytest.mark.parametrize(("trained", "place"), [(1.0, 1), (HEAD_SHARE, 1), (0.5, -1)])
def test_only_a_share_has_places(trained, place):
    """Everything, and the head, are where they are."""
    with pytest.raises(PlanError, match=f"place {place} of trained share"):
        Tier(1.0, 4, trained, place)


def test_a_depth_below_one_is_refused():
    """A model without blocks is no model."""
    with pytest.raises(PlanError, match="depth 0"):
        Tier(0.5, 0)


def test_tiers_order_by_width_then_depth():
    """The largest tier a device can hold is a maximum."""
    assert max(Tier(0.5, 4), Tier(1.0, 2), Tier(1.0, 1)) == Tier(1.0, 2)
