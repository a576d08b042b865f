"""WHALE-FL on the server: what is offered, what is honoured, and how long rounds take."""

from __future__ import annotations

import pytest

from broker_server.strategies.whalefl import device_seconds, honoured, offered, round_seconds
from fleet_protocol.errors import ConfigError, PlanError, RefusalReason, RefusedError
from models import Tier

TIERS = [Tier(width, depth) for width in (0.25, 1.0, 0.5, 0.125) for depth in (1, 2)]


def test_a_device_is_offered_what_it_can_train_widest_first():
    """Its maximum caps every choice it can make (equation 7)."""
    assert offered(TIERS, Tier(0.5, 2)) == (Tier(0.5, 2), Tier(0.25, 2), Tier(0.125, 2))
    assert offered(TIERS, Tier(0.3, 1)) == (Tier(0.25, 1), Tier(0.125, 1))
    with pytest.raises(PlanError, match=r"w0\.06-d1"):
        offered(TIERS, Tier(0.06, 1))


def test_a_choice_among_the_offers_is_honoured_and_any_other_refused():
    """A tier above the maximum was never offered."""
    choices = offered(TIERS, Tier(0.5, 2))
    for choice in choices:
        assert honoured(choice, choices) is choice
    with pytest.raises(RefusedError, match=r"w1\.00-d2") as caught:
        honoured(Tier(1.0, 2), choices)
    assert caught.value.reason is RefusalReason.UNSUPPORTED


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
