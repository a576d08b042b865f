"""WHALE-FL on the server: the tiers that it offers, and what it tells devices to choose by."""

import pytest
from pydantic import ValidationError

from broker_server.strategies.whalefl import WhaleflSettings, theta_of, tiers_within
from fleet_protocol.errors import PlanError
from fleet_protocol.messages import Instructions, TrainSettings
from fleet_protocol.sizing import Sizing
from models import Axis, AxisKind, Dim, Tier
from tests.broker_server.methods import built
from tests.models.layouts import make_layout

TIERS = [Tier(width, depth) for width in (0.25, 1.0, 0.5, 0.125) for depth in (1, 2)]
LAYOUT = make_layout(
    [Axis("k", 8), Axis("in", 3, AxisKind.FIXED), Axis("classes", 2, AxisKind.FIXED)],
    {"first": (Dim("k"), Dim("in")), "head": (Dim("classes"), Dim("k"))},
    label_axes=("classes",),
)
WIDTHS = tuple(LAYOUT.tier(width) for width in (1.0, 0.5, 0.25))
FULL_BYTES = 4 * 8 * (3 + 2)
SMALLEST_BYTES = FULL_BYTES // 4


def sizing(efficiencies: tuple[float, ...] = (), **table: object) -> Sizing:
    """What devices are told to choose by, after some have reported these efficiencies."""
    strategy = built({"name": "whalefl", "whalefl": table}, LAYOUT, WIDTHS)
    plain = Instructions(train=TrainSettings(learning_rate=0.1, epochs=1, batch_size=1, seed=0))
    instructions = strategy.instruct(plain, 0)
    if strategy.adapt is not None:
        instructions = strategy.adapt(instructions, efficiencies)
    assert instructions.chooser is not None
    return Sizing.model_validate(instructions.chooser.settings)


def test_a_device_is_offered_what_it_can_train_widest_first():
    """Its maximum caps every choice it can make (equation 7)."""
    assert tiers_within(TIERS, Tier(0.5, 2)) == (Tier(0.5, 2), Tier(0.25, 2), Tier(0.125, 2))
    assert tiers_within(TIERS, Tier(0.3, 1)) == (Tier(0.25, 1), Tier(0.125, 1))
    with pytest.raises(PlanError, match=r"w0\.06-d1"):
        tiers_within(TIERS, Tier(0.06, 1))


def test_the_smallest_tier_is_sent_in_the_time_that_counts():
    """So says the paper; the released Theta belongs to the whole model's time, so a number means
    that one unless the other is asked for.
    """
    assert sizing().transmitted_bytes == SMALLEST_BYTES
    assert sizing(theta=9.0).transmitted_bytes == FULL_BYTES
    assert sizing(theta=9.0, transmission="smallest").transmitted_bytes == SMALLEST_BYTES
    assert sizing(transmission="full").transmitted_bytes == FULL_BYTES


def test_theta_follows_from_what_devices_measure():
    """Before, no device can reach it; then the median device is at 0.6 of it, half the width."""
    assert sizing().constants.theta > 1e100
    assert sizing((1.0, 6.0, 90.0)).constants.theta == theta_of((1.0, 6.0, 90.0)) == 10.0
    assert sizing((1.0, 6.0, 90.0), theta=9.0).constants.theta == 9.0


def test_older_boards_read_what_they_are_told():
    """The size has the name in messages that it always had."""
    strategy = built({"name": "whalefl"}, LAYOUT, WIDTHS)
    plain = Instructions(train=TrainSettings(learning_rate=0.1, epochs=1, batch_size=1, seed=0))
    chooser = strategy.instruct(plain, 0).chooser
    assert chooser is not None
    assert chooser.settings.keys() == {"constants", "full_bytes"}
    assert "transmission" not in chooser.settings["constants"]


def test_a_theta_that_none_could_reach_or_miss_is_refused():
    """Before a run."""
    for theta in (0, -1.0, "median"):
        with pytest.raises(ValidationError, match="theta"):
            WhaleflSettings(theta=theta)
