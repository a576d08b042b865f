"""WHALE-FL on the server: what is offered, what is honoured, and how long rounds take."""

from __future__ import annotations

import pytest

from broker_server.strategies.whalefl import device_seconds, offered, round_seconds
from fleet_protocol.errors import ConfigError, PlanError
from models import Tier

TIERS = [Tier(width, depth) for width in (0.25, 1.0, 0.5, 0.125) for depth in (1, 2)]


def test_a_device_is_offered_what_it_can_train_widest_first():
    """Its maximum caps every choice it can make (equation 7)."""
    assert offered(TIERS, Tier(0.5, 2)) == (Tier(0.5, 2), Tier(0.25, 2), Tier(0.125, 2))
    assert offered(TIERS, Tier(0.3, 1)) == (Tier(0.25, 1), Tier(0.125, 1))
    with pytest.raises(PlanError, match=r"w0\.06-d1"):
        offered(TIERS, Tier(0.06, 1))


def test_a_round_lasts_as_long_as_its_slowest_device():
    """Computing goes with the width's step time, sending with the square of the width."""
    slow, fast = {1.0: 0.1, 0.5: 0.04}, {1.0: 0.01}
    times = [
        device_seconds(slow, 8.0, 0.5, batch_size=2, steps=5),
        device_seconds(fast, 1.0, 1.0, batch_size=2, steps=5),
    ]
    assert times == pytest.approx([0.4 + 2.0, 0.1 + 1.0])
    assert round_seconds(times) == pytest.approx(2.4)
    with pytest.raises(ConfigError, match=r"0\.25"):
        device_seconds(slow, 8.0, 0.25, batch_size=2, steps=5)
