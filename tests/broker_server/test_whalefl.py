"""WHALE-FL on the server: what is tiers_within, and what is honoured."""

import pytest

from broker_server.strategies.whalefl import tiers_within
from fleet_protocol.errors import PlanError
from models import Tier

TIERS = [Tier(width, depth) for width in (0.25, 1.0, 0.5, 0.125) for depth in (1, 2)]


def test_a_device_is_offered_what_it_can_train_widest_first():
    """Its maximum caps every choice it can make (equation 7)."""
    assert tiers_within(TIERS, Tier(0.5, 2)) == (Tier(0.5, 2), Tier(0.25, 2), Tier(0.125, 2))
    assert tiers_within(TIERS, Tier(0.3, 1)) == (Tier(0.25, 1), Tier(0.125, 1))
    with pytest.raises(PlanError, match=r"w0\.06-d1"):
        tiers_within(TIERS, Tier(0.06, 1))
